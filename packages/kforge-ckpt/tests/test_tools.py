"""Checkpoints looked at, compared, copied, deleted and averaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import Box
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kforge_ckpt import Checkpointer, CheckpointError, DamagedCheckpointError, PerRank, StateMismatchError, tools
from kforge_ckpt.cli import main
from kforge_testing import run_ranks

KINDS = {"i": torch.int64, "u": torch.uint64}


def save(root: Path, step: int, **values: Any) -> None:
    ckpt = Checkpointer(root, keep_last=99)
    ckpt.save(step, {"model": Box(**values), "other": Box(n=step, r=PerRank(step))}, meta={"tokens": step * 10})
    ckpt.close()


def test_a_place_is_a_folder_a_step_or_the_newest(tmp_path: Path) -> None:
    for step in (5, 30, 200):
        save(tmp_path, step, t=torch.zeros(1))
    assert tools.open_checkpoint(tmp_path).contents.step == 200
    assert tools.open_checkpoint(f"{tmp_path}@30").contents.step == 30
    assert tools.open_checkpoint(tmp_path / "step_00000005").contents.step == 5
    for folder in ("me@host/run", "run@2"):
        save(tmp_path / folder, 1, t=torch.zeros(1))
        assert tools.open_checkpoint(tmp_path / folder).contents.step == 1
        assert tools.open_checkpoint(f"{tmp_path / folder}@1").contents.step == 1
    for place, words in (
        (f"{tmp_path}@7", "no committed checkpoint of step 7; there are 5, 30, 200"),
        (f"{tmp_path}@new", "what follows @ must be a step"),
        (tmp_path / "nowhere", "holds no committed checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            tools.open_checkpoint(place)


def test_a_listing_tells_what_is_there_and_what_is_wrong(tmp_path: Path) -> None:
    save(tmp_path, 1, t=torch.zeros(1000))
    save(tmp_path, 2, t=torch.zeros(1000))
    Checkpointer(tmp_path).score(1, loss=2.5)
    path = tmp_path / "step_00000002" / "tensors-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    one, two = tools.listing(tmp_path)
    assert (one.step, one.world, one.scores, one.fault) == (1, 1, {"loss": 2.5}, None) and one.nbytes > 4000
    assert two.step == 2 and two.fault is not None and "4,0" not in two.fault and str(path) in two.fault
    assert tools.listing(tmp_path / "none") == []


def sharded(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    t, u = (distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(dim)]) for dim in (0, 1))
    Checkpointer(folder).save(1, {"model": Box(t=t, u=u, s=torch.tensor(2.5), e=torch.zeros(0, 3))})


def test_a_tensor_is_put_together_from_the_shards_of_ranks(tmp_path: Path) -> None:
    run_ranks(sharded, 3, str(tmp_path))
    saved = tools.open_checkpoint(tmp_path)
    assert len(saved.index["model.t"].chunks) == 3
    for name in ("t", "u"):
        assert tools.read_tensor(saved, f"model.{name}").equal(torch.arange(35.0).view(7, 5))
    assert tools.read_tensor(saved, "model.s").item() == 2.5
    assert tools.read_tensor(saved, "model.e").shape == (0, 3)


def test_differences_are_named_and_measured(tmp_path: Path) -> None:
    nan = torch.tensor([math.nan, 1.0])
    save(
        tmp_path,
        1,
        same=nan,
        a=torch.tensor([1.0, -4.0]),
        shape=torch.zeros(2),
        gone=torch.zeros(1),
        i=torch.tensor([1]),
    )
    save(
        tmp_path,
        2,
        same=nan,
        a=torch.tensor([1.5, -4.0]),
        shape=torch.zeros(3),
        new=torch.zeros(1),
        i=torch.tensor([4]),
    )
    one, two = (tools.open_checkpoint(f"{tmp_path}@{step}") for step in (1, 2))
    found = {difference.name: difference for difference in tools.differences(one, two)}
    assert {name: difference.text for name, difference in found.items()} == {
        "model.a": "by up to 0.5, 0.125 of the greatest",
        "model.gone": "only in the first",
        "model.i": "by up to 3, 0.75 of the greatest",
        "model.new": "only in the second",
        "model.shape": "F32 [2] and F32 [3]",
        "other.n": "1 and 2",
        "other.r": "differs on rank 0",
    }
    assert (found["model.a"].absolute, found["model.a"].relative) == (0.5, 0.125)
    assert list(tools.differences(one, tools.open_checkpoint(f"{tmp_path}@1"))) == []


def test_differences_that_float64_does_not_see_and_those_of_ranks(tmp_path: Path) -> None:
    for step in (0, 1):
        values = {name: torch.tensor([2**62, 2**62 + 3 * step]).to(kind) for name, kind in KINDS.items()}
        save(tmp_path, step, **values)
        ckpt = Checkpointer(tmp_path / "ranks")
        ckpt.save(step, {"box": Box(same=PerRank({"t": torch.tensor(math.nan)}), t=PerRank([torch.tensor(step)]))})
        ckpt.close()
    one, two = (tools.open_checkpoint(f"{tmp_path}@{step}") for step in (0, 1))
    found = {difference.name: difference.absolute for difference in tools.differences(one, two)}
    assert found == {"model.i": 3.0, "model.u": 3.0, "other.n": None, "other.r": None}
    one, two = (tools.open_checkpoint(f"{tmp_path / 'ranks'}@{step}") for step in (0, 1))
    assert [(one.name, one.text) for one in tools.differences(one, two)] == [("box.t", "differs on rank 0")]


def test_a_difference_of_layout_is_none(tmp_path: Path) -> None:
    run_ranks(sharded, 2, str(tmp_path / "two"))
    run_ranks(sharded, 3, str(tmp_path / "three"))
    saved = [tools.open_checkpoint(tmp_path / name) for name in ("two", "three")]
    assert list(tools.differences(*saved)) == []


def test_a_copy_is_whole_or_is_not_there(tmp_path: Path) -> None:
    save(tmp_path / "a", 3, t=torch.arange(5))
    folder = tools.copy(tmp_path / "a", tmp_path / "b")
    assert folder == tmp_path / "b" / "step_00000003"
    box = Box(t=torch.zeros(5, dtype=torch.int64))
    assert Checkpointer(tmp_path / "b").restore({"model": box}, verify="full") == 3
    assert box.values["t"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="holds a checkpoint of step 3 already"):
        tools.copy(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "a" / "step_00000003" / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000\.safetensors is damaged"):
        tools.copy(tmp_path / "a", tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []


def test_removal_does_not_take_the_last_one_unasked(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, t=torch.zeros(1))
    tools.remove(tmp_path, [3])
    assert Checkpointer(tmp_path).steps() == [1, 2]
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    with pytest.raises(CheckpointError, match="no committed checkpoint of step 3; there are 1, 2"):
        tools.remove(tmp_path, [1, 3])
    with pytest.raises(CheckpointError, match="say --all"):
        tools.remove(tmp_path, [1, 2])
    assert Checkpointer(tmp_path).steps() == [1, 2]
    tools.remove(tmp_path, [1, 2], all_of_them=True)
    assert list(tmp_path.iterdir()) == []


def test_an_average_is_that_of_float64(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(50).to(torch.bfloat16) for _ in range(3)]
    for step, tensor in enumerate(tensors):
        save(tmp_path / "run", step, t=tensor, count=torch.tensor(step), n=step)
    places = [f"{tmp_path / 'run'}@{step}" for step in range(3)]
    assert tools.average(places, tmp_path / "mean") == tmp_path / "mean" / "step_00000002"
    assert tools.average(places, tmp_path / "weighted", weights=[1, 0, 3]).is_dir()
    assert (tmp_path / "mean" / "latest").read_text() == "step_00000002\n"
    box = Box(t=torch.zeros(50, dtype=torch.bfloat16), count=torch.tensor(9), n=9)
    for name, weights in (("mean", (1 / 3, 1 / 3, 1 / 3)), ("weighted", (0.25, 0.0, 0.75))):
        Checkpointer(tmp_path / name).restore({"model": box}, verify="full")
        expected = sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True))
        assert box.values["t"].equal(torch.as_tensor(expected).bfloat16())
        assert box.values["count"].item() == 2 and box.values["n"] == 2
    assert Checkpointer(tmp_path / "mean").meta(2)["weights"] == [1.0, 1.0, 1.0]


def test_averages_that_cannot_be(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, t=torch.zeros(2))
    save(tmp_path / "run", 2, t=torch.zeros(3))
    one, two = (f"{tmp_path / 'run'}@{step}" for step in (1, 2))
    for arguments, more, error, words in (
        ([one], {}, CheckpointError, "two checkpoints at least"),
        ([one, one], {"weights": [1.0]}, CheckpointError, "want as many weights"),
        ([one, one], {"weights": [1.0, -1.0]}, CheckpointError, "a sum that is not 0"),
        ([one, two], {}, StateMismatchError, r"model\.t is F32 \[2\] in .*, F32 \[3\] in the last"),
        ([one, one], {"names": ["optim"]}, StateMismatchError, "no state 'optim'; there are model, other"),
        ([one, one], {"names": ["other"]}, StateMismatchError, r"other\.r differs by rank"),
    ):
        with pytest.raises(error, match=words):
            tools.average(arguments, tmp_path / "out", **more)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_listing_tells_of_scores_that_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(tmp_path).save(1, {"box": Box()})
    (tmp_path / "scores.json").write_text("{")
    (row,) = tools.listing(tmp_path)
    assert row.scores == {} and "scores.json does not hold scores" in caplog.text
    (tmp_path / "scores.json").write_text('{"1": null}')
    assert tools.listing(tmp_path)[0].scores is None
    assert main(["ls", str(tmp_path)]) == 0 and "score lost" in capsys.readouterr().out
