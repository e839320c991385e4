"""Checkpoints laid onto tensors of other names, shapes, dtypes, whole or in shards; damaged ones passed over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kforge_ckpt import Checkpointer, DamagedCheckpointError, Fit, PerRank, StateMismatchError, load_tensors
from kforge_ckpt.export import SafetensorsFolder
from kforge_ckpt.safetensors import Spec
from kforge_testing import run_ranks


class Box:
    def __init__(self, **values: Any) -> None:
        self.values = values
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
        self.loaded += 1


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def test_excluded_tensors_stay_and_are_not_missed(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"box": Box(a=numbers(3), head=numbers(4), n=7, r=PerRank(1))})
    box = Box(a=torch.zeros(3), head=torch.zeros(9), extra=torch.zeros(2), n=0, r=PerRank(2))
    assert Checkpointer(tmp_path).restore({"box": box}, fit=Fit(exclude=(r"\.head$", "extra"))) == 1
    assert box.values["a"].equal(numbers(3))
    assert not box.values["head"].any() and not box.values["extra"].any()
    assert box.values["n"] == 0 and box.loaded == 0  # tensors alone


def test_saved_names_are_replaced_in_turn(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"model": Box(**{"h.0.w": numbers(2), "h.1.w": numbers(3)})})
    box = Box(**{"layers.0.weight": torch.zeros(2), "layers.1.weight": torch.zeros(3)})
    fit = Fit(rename=((r"\.h\.(\d+)\.", r".layers.\1."), (r"\.w$", ".weight")))
    Checkpointer(tmp_path).restore({"model": box}, fit=fit)
    assert box.values["layers.0.weight"].equal(numbers(2)) and box.values["layers.1.weight"].equal(numbers(3))
    with pytest.raises(StateMismatchError, match=r"rename makes model\.same of both model\.h\.0\.w and model\.h\.1\.w"):
        Checkpointer(tmp_path).restore({"model": box}, fit=Fit(rename=((r"h\..\.w", "same"),)))
    with pytest.raises(ValueError, match="'\\(' is no regular expression"):
        Fit(exclude=("(",))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=3))
def test_the_common_corner_is_filled(tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("corner")
    saved, here = numbers(*(a for a, _ in sizes)), torch.full([b for _, b in sizes], -1.0)
    Checkpointer(folder).save(1, {"box": Box(t=saved)})
    expected = here.clone()
    corner = tuple(slice(0, min(a, b)) for a, b in sizes)
    expected[corner] = saved[corner]
    Checkpointer(folder).restore({"box": Box(t=here)}, fit=Fit(partial=True))
    assert here.equal(expected)


def test_a_tensor_with_one_dimension_more_is_filled_with_copies(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"box": Box(w=numbers(4, 3), s=torch.tensor(5.0))})
    box = Box(w=torch.zeros(6, 4, 3), s=torch.zeros(2))
    Checkpointer(tmp_path).restore({"box": box}, fit=Fit(partial=True))
    assert all(expert.equal(numbers(4, 3)) for expert in box.values["w"]) and box.values["s"].tolist() == [5.0, 5.0]
    for shape in ((6, 3, 4), (2, 2, 4, 3), (12,)):
        with pytest.raises(StateMismatchError, match="of another shape"):
            Checkpointer(tmp_path).restore({"box": Box(w=torch.zeros(shape))}, fit=Fit(partial=True))


def test_dtypes_differ_only_where_asked(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"box": Box(t=numbers(7) / 3)})
    here = Box(t=torch.zeros(7, dtype=torch.bfloat16))
    with pytest.raises(StateMismatchError, match="of another dtype"):
        Checkpointer(tmp_path).restore({"box": here}, fit=Fit(partial=True))
    Checkpointer(tmp_path).restore({"box": here}, fit=Fit(cast=True))
    assert here.values["t"].equal((numbers(7) / 3).bfloat16())


def test_what_was_done_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Checkpointer(tmp_path).save(1, {"m": Box(a=numbers(2, 3), b=numbers(2), gone=numbers(1), same=numbers(1))})
    with caplog.at_level(logging.INFO, "kforge_ckpt"):
        box = Box(a=torch.zeros(4, 3), b=torch.zeros(5, 2), new=torch.zeros(2), same=torch.zeros(1))
        Checkpointer(tmp_path).restore({"m": box}, fit=Fit(partial=True))
    assert [record.message for record in caplog.records if record.message.startswith("m.")] == [
        "m.a [4, 3]: the common corner of [2, 3]",
        "m.b [5, 2]: copies of [2]",
        "m.new [2]: not in the checkpoint, stays as it is",
        "m.gone: only in the checkpoint, left there",
    ]


def test_a_smaller_model_into_a_bigger_one(tmp_path: Path) -> None:
    small = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    Checkpointer(tmp_path).save(1, {"model": small})
    big = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    before = {name: value.clone() for name, value in big.state_dict().items()}
    with pytest.raises(StateMismatchError, match="2 not in the checkpoint"):
        Checkpointer(tmp_path).restore({"model": big})
    Checkpointer(tmp_path).restore({"model": big}, fit=Fit(partial=True))
    for name, value in big.state_dict().items():
        expected = before[name]
        if name in small.state_dict():
            expected[tuple(slice(size) for size in small.state_dict()[name].shape)] = small.state_dict()[name]
        assert value.equal(expected), name


def in_shards(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (world,))
    grown = distribute_tensor(torch.full((9, 6), -1.0), mesh, [Shard(0)])
    experts = distribute_tensor(torch.zeros(4, 7, 4), mesh, [Shard(1)])
    Checkpointer(folder).restore({"box": Box(t=grown, e=experts)}, fit=Fit(partial=True))
    assert isinstance(grown, DTensor)
    return grown.full_tensor().flatten().tolist(), experts.full_tensor().flatten().tolist()


def saved_in_shards(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    t, e = (distribute_tensor(numbers(7, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    Checkpointer(folder).save(1, {"box": Box(t=t, e=e)})


@pytest.mark.parametrize(("before", "now"), [(1, 3), (2, 1), (2, 3)])
def test_shards_fit_as_the_whole_does(tmp_path: Path, before: int, now: int) -> None:
    run_ranks(saved_in_shards, before, str(tmp_path))
    expected = torch.full((9, 6), -1.0)
    expected[:7, :4] = numbers(7, 4)
    for grown, experts in run_ranks(in_shards, now, str(tmp_path)):
        assert grown == expected.flatten().tolist()
        assert experts == numbers(7, 4).expand(4, 7, 4).flatten().tolist()


# Tensors that lie in no checkpoint.


def from_a_folder(rank: int, world: int, folder: str) -> tuple[list[float], list[float], list[str]]:
    mesh = init_device_mesh("cpu", (world,))
    grown = distribute_tensor(torch.full((9, 6), -1.0), mesh, [Shard(0)])
    experts = distribute_tensor(torch.zeros(3, 7, 4, dtype=torch.bfloat16), mesh, [Shard(2)])
    fit = Fit(partial=True, cast=True, rename=((r"\.feed\.", ".e."),))
    box = Box(t=grown, **{"e.w": experts})
    told = load_tensors({"box": box}, {"box": SafetensorsFolder(Path(folder))}, fit)
    assert isinstance(grown, DTensor) and isinstance(experts, DTensor)
    return grown.full_tensor().flatten().tolist(), experts.full_tensor().float().flatten().tolist(), told


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_folder_of_safetensors_files_fills_tensors_of_any_layout(tmp_path: Path, world: int) -> None:
    save_file({"t": numbers(7, 4)}, tmp_path / "a.safetensors")
    save_file({"feed.w": numbers(7, 4), "more": numbers(2)}, tmp_path / "b.safetensors")
    expected = torch.full((9, 6), -1.0)
    expected[:7, :4] = numbers(7, 4)
    for grown, experts, told in run_ranks(from_a_folder, world, str(tmp_path)):
        assert grown == expected.flatten().tolist()
        assert experts == numbers(7, 4).bfloat16().float().expand(3, 7, 4).flatten().tolist()
        assert told[0].startswith("box.t [9, 6]: the common corner of [7, 4]") and len(told) == 3


def test_each_tensor_of_a_source_is_asked_for_once_and_a_misfit_changes_nothing() -> None:
    class Source(dict[str, torch.Tensor]):
        asked: ClassVar[list[str]] = []

        @property
        def specs(self) -> dict[str, Spec]:
            return {key: Spec(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in self.items()}

        def __getitem__(self, key: str) -> torch.Tensor:
            self.asked.append(key)
            return super().__getitem__(key)

    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    load_tensors({"net": net}, {"net": Source(other.state_dict())})
    assert net.weight.equal(other.weight) and net.bias.equal(other.bias)
    assert sorted(Source.asked) == ["bias", "weight"]
    before = other.weight.clone()
    for state, words in (
        ({"weight": torch.zeros(2, 3)}, "1 not in the checkpoint: net.bias"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, "1 of another shape: net.bias"),
        ({"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(2)}, "1 of another dtype: net.weight"),
        ({**other.state_dict(), "more": torch.zeros(1)}, "1 only in the checkpoint: net.more"),
    ):
        with pytest.raises(StateMismatchError, match=words):
            load_tensors({"net": other}, {"net": Source(state)})
    assert other.weight.equal(before)
    with pytest.raises(StateMismatchError, match="no state was saved under the name 'net'"):
        load_tensors({"net": other}, {})


# Damaged ones.


def spoil(folder: Path) -> None:
    path = folder / "tensors-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_newest_one_is_passed_over_loudly_and_put_by_when_its_step_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        ckpt.save(step, {"box": Box(t=torch.full((4,), float(step)), n=step)})
    for step in (2, 3):
        spoil(tmp_path / f"step_{step:08d}")
    box = Box(t=torch.zeros(4), n=0)
    with pytest.raises(DamagedCheckpointError, match="step_00000003"):
        ckpt.restore({"box": box}, 3)  # asked for by name: no other will do
    again = Checkpointer(tmp_path)
    with caplog.at_level(logging.ERROR, "kforge_ckpt"):
        assert again.restore({"box": box}) == 1
    assert [record.message.count("trying the one before it") for record in caplog.records] == [1, 1]
    assert box.values["n"] == 1 and box.values["t"].eq(1).all()
    assert again.save(2, {"box": Box(t=torch.full((4,), 20.0), n=2)})  # not "committed already"
    assert again.save(3, {"box": Box(t=torch.full((4,), 30.0), n=3)})
    assert not again.save(3, {"box": box})
    again.wait()
    assert again.restore({"box": box}, verify="full") == 3 and box.values["t"].eq(30).all()
    assert sum(".damaged-" in path.name for path in tmp_path.iterdir()) == 2


def test_where_all_are_damaged_the_error_is_that_of_the_oldest(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    for step in (1, 2):
        ckpt.save(step, {"box": Box(t=numbers(4))})
        spoil(tmp_path / f"step_{step:08d}")
    with pytest.raises(DamagedCheckpointError, match="step_00000001"):
        ckpt.restore({"box": Box(t=torch.zeros(4))})
