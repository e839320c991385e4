"""One process, no process group: what a user of the package alone sees."""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import Box
from torch import nn

from kforge_ckpt import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    PerRank,
    RngState,
    StateMismatchError,
    UnsupportedStateError,
)


def model(width: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_run_equals_one_never_stopped(tmp_path: Path, fused: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    train(net, optimizer, 5)
    scheduler.step()
    saved = {"model": net, "optim": optimizer, "schedule": scheduler, "rng": RngState()}
    assert Checkpointer(tmp_path).save(5, saved) is True
    expected = train(net, optimizer, 5)

    again = model(seed=1)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.5, fused=fused)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    fresh = {"model": again, "optim": optimizer, "schedule": scheduler, "rng": RngState()}
    assert Checkpointer(tmp_path).restore(fresh) == 5
    assert optimizer.param_groups[0]["lr"] < 0.01 and scheduler.last_epoch == 1
    assert train(again, optimizer, 5) == expected
    for a, b in zip(net.state_dict().values(), again.state_dict().values(), strict=True):
        assert a.equal(b)


def test_an_empty_folder_restores_nothing(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "not there yet")
    box = Box(a=1)
    assert ckpt.restore({"box": box}) is None
    assert (ckpt.latest(), ckpt.steps(), box.values) == (None, [], {"a": 1})
    with pytest.raises(CheckpointError, match=r"no committed checkpoint of step 3 .* there is none at all"):
        ckpt.restore({"box": box}, step=3)
    assert not (tmp_path / "not there yet").exists()


def test_values_come_back_as_they_were_and_tensors_in_place(tmp_path: Path) -> None:
    values = {"n": 3, "x": [1.5, None, ("a", True)], "by": {0: "zero", "1": float("inf")}, "raw": b"\0\xff"}
    tensors = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, 2).bfloat16(),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False]),
    }
    Checkpointer(tmp_path).save(1, {"box": Box(**values, **{k: v.clone() for k, v in tensors.items()})})
    live = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    box = Box(n=0, other="gone", **live)
    Checkpointer(tmp_path).restore({"box": box})
    assert {key: box.values[key] for key in values} == values
    assert "other" not in box.values
    for key, tensor in tensors.items():
        assert box.values[key] is live[key]
        assert live[key].view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.dim() else live[key].equal(tensor)


def test_per_rank_values_come_back_as_a_list(tmp_path: Path) -> None:
    box = Box(mine=PerRank({"n": 3, "t": torch.arange(3), "p": (1, 2)}), none=PerRank(None))
    Checkpointer(tmp_path).save(1, {"box": box})
    Checkpointer(tmp_path).restore({"box": box})
    (mine,) = box.values["mine"]
    assert mine["n"] == 3 and mine["p"] == (1, 2) and mine["t"].equal(torch.arange(3))
    assert box.values["none"] == [None]


def test_a_step_below_a_later_one_is_saved_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt, net = Checkpointer(tmp_path, keep_last=2), nn.Linear(2, 2)
    for step in (10, 20, 30):
        ckpt.save(step, {"model": net})
    assert "a restore takes" not in caplog.text
    ckpt.restore({"model": net}, step=20)
    ckpt.save(21, {"model": net})
    assert "step 21 is saved, but a restore takes step 30" in caplog.text
    assert ckpt.steps() == [21, 30]


def test_a_committed_step_is_never_rewritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = Checkpointer(tmp_path)
    assert ckpt.save(1, {"box": Box(n=1)}) is True
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with caplog.at_level(logging.INFO, "kforge_ckpt"):
        assert ckpt.save(1, {"box": Box(n=2)}) is False
    assert "committed already" in caplog.text
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}


def test_explicit_step_meta_and_partial_names(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=9)
    for step in (1, 2, 3):
        ckpt.save(step, {"a": Box(n=step), "b": Box(t=torch.full((2,), float(step)))}, meta={"tokens": step, "x": (1,)})
    a = Box()
    assert ckpt.restore({"a": a}, step=2) == 2 and a.values == {"n": 2}
    assert ckpt.meta(2) == {"tokens": 2, "x": (1,)}
    assert ckpt.steps() == [1, 2, 3] and ckpt.latest() == 3
    with pytest.raises(CheckpointError, match=r"no committed checkpoint of step 7 .* there are 1, 2, 3"):
        ckpt.meta(7)
    with pytest.raises(StateMismatchError, match="'c'; there are 'a', 'b'"):
        ckpt.restore({"c": Box()})


def test_a_mismatch_is_named_and_nothing_changes(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"first": Box(n=1, t=torch.ones(2)), "model": model()})
    first = Box(n=0, t=torch.zeros(2))
    wider = model(width=16)
    wider.register_buffer("extra", torch.zeros(1))
    wider[3] = nn.Linear(16, 2, bias=False, dtype=torch.float64)
    with pytest.raises(StateMismatchError) as error:
        Checkpointer(tmp_path).restore({"first": first, "model": wider})
    for text in (
        "1 not in the checkpoint: model.extra",
        "1 only in the checkpoint: model.3.bias",
        "model.3.weight (saved F32, here F64)",
        "model.0.weight (saved (8, 4), here (16, 4))",
    ):
        assert text in str(error.value)
    assert first.values["n"] == 0 and first.values["t"].equal(torch.zeros(2))


@pytest.mark.parametrize("verify", ["fast", "full"])
@pytest.mark.parametrize("how", ["cut", "longer", "gone"])
def test_a_damaged_file_is_named(tmp_path: Path, how: str, verify: Any) -> None:
    ckpt = Checkpointer(tmp_path)
    box = Box(n=1, t=torch.ones(50), r=PerRank({"t": torch.ones(3)}))
    ckpt.save(1, {"box": box})
    folder = tmp_path / "step_00000001"
    names = sorted(path.name for path in folder.iterdir() if path.name != "COMMITTED")
    assert len(names) == 7
    for name in names:
        content = (folder / name).read_bytes()
        if how == "gone":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content[:-1] if how == "cut" else content + b"\n")
        live = Box(n=0, t=torch.zeros(50), r=PerRank(None))
        with pytest.raises(DamagedCheckpointError, match=name):
            ckpt.restore({"box": live}, verify=verify)
        assert live.values["n"] == 0 and live.values["t"].equal(torch.zeros(50))
        (folder / name).write_bytes(content)
    assert ckpt.restore({"box": live}, verify=verify) == 1


def test_a_flipped_bit_in_the_data_is_found_by_full(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"box": Box(t=torch.ones(50))})
    path = tmp_path / "step_00000001" / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    live = Box(t=torch.zeros(50))
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000\.safetensors is damaged: its checksum"):
        ckpt.restore({"box": live}, verify="full")
    assert live.values["t"].equal(torch.zeros(50))


def test_retention_and_events(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    ckpt = Checkpointer(
        tmp_path, keep_last=2, keep_every=4, on_event=lambda kind, values: events.append((kind, values))
    )
    (tmp_path / "step_abc").mkdir()
    for step in range(1, 8):
        ckpt.save(step, {"box": Box(n=step)})
    assert ckpt.steps() == [4, 6, 7]
    ckpt.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        *(f"step_{step:08d}" for step in (4, 6, 7)),
        "step_abc",
    ]
    assert [values["step"] for kind, values in events if kind == "checkpoint_saved"] == [1, 2, 3, 4, 5, 6, 7]
    assert [values["step"] for kind, values in events if kind == "checkpoint_deleted"] == [1, 2, 3, 5]
    saved = events[0][1]
    assert saved["bytes"] > 0 and saved["seconds"] > 0 and saved["path"].endswith("step_00000001")
    ckpt.restore({"box": Box()})
    assert events[-1][0] == "checkpoint_restored" and events[-1][1]["step"] == 7


def test_c27_resume_and_prune_go_by_number(tmp_path: Path) -> None:
    for step in (500, 1000, 2500):
        Checkpointer(tmp_path, keep_last=9).save(step, {"box": Box(n=step)})
        (tmp_path / f"step_{step:08d}").rename(tmp_path / f"step_{step}")
    (tmp_path / "latest").unlink()
    odd = ["step_2500.tmp", "step_abc", "step_3000"]
    for name in odd:
        (tmp_path / name).mkdir()
    (tmp_path / "step_9999").write_text("a file")
    box = Box()
    ckpt = Checkpointer(tmp_path, keep_last=2)
    assert ckpt.restore({"box": box}) == 2500 and box.values == {"n": 2500}
    ckpt.save(2600, {"box": box})
    assert ckpt.steps() == [2500, 2600]
    assert all((tmp_path / name).exists() for name in [*odd, "step_9999"])


def test_the_step_just_saved_is_kept_even_below_others(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=1)
    ckpt.save(100, {"box": Box(n=1)})
    ckpt.save(60, {"box": Box(n=2)})
    assert ckpt.steps() == [60, 100] and (tmp_path / "latest").read_text() == "step_00000100\n"


def test_rollback_to_before_the_first_optimizer_step(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    ckpt = Checkpointer(tmp_path)
    ckpt.save(0, {"model": net, "optim": optimizer, "rng": RngState()})
    first = train(net, optimizer, 3)
    assert ckpt.restore({"model": net, "optim": optimizer, "rng": RngState()}) == 0
    assert not optimizer.state
    assert train(net, optimizer, 3) == first


def test_a_state_without_pickle_only(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    with pytest.raises(UnsupportedStateError, match=r"box\.f is a"):
        ckpt.save(1, {"box": Box(f=lambda: 0)})
    with pytest.raises(UnsupportedStateError, match=r"two values are both called 'a.b.c'"):
        ckpt.save(1, {"a": Box(**{"b.c": torch.ones(1)}), "a.b": Box(c=torch.ones(1))})
    with pytest.raises(ValueError, match="net is a int"):
        ckpt.save(1, {"net": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="step = -1"):
        ckpt.save(-1, {})
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_exist_is_said() -> None:
    with pytest.raises(ValueError, match="mode = 'asynch' does not exist; there are 'sync' and 'async'"):
        Checkpointer("x", mode="asynch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writer = 'fork' does not exist; there are 'thread' and 'process'"):
        Checkpointer("x", mode="async", writer="fork")  # type: ignore[arg-type]
    for options in ({"overlap": True}, {"writer": "process"}, {"staging_bytes": 1}):
        with pytest.raises(ValueError, match="overlap, writer and staging_bytes are of mode 'async'"):
            Checkpointer("x", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="staging_bytes = 0 must be some bytes, or None"):
        Checkpointer("x", mode="async", staging_bytes=0)
    with pytest.raises(ValueError, match="keep_last = 0"):
        Checkpointer("x", keep_last=0)
    with pytest.raises(ValueError, match="verify = 'no' does not exist"):
        Checkpointer("x").restore({}, verify="no")  # type: ignore[arg-type]


def test_a_disk_that_takes_no_more_is_an_ordinary_error(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk; torch's own exception here is no Exception at all."""
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"box": Box(n=1)})
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 .* was not saved: OSError: .*File too large") as error:
            ckpt.save(2, {"box": Box(t=torch.zeros(1_000_000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(error.value, Exception) and isinstance(error.value.__cause__, OSError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
    assert ckpt.restore({"box": Box()}) == 1


def test_the_layout_on_disk(tmp_path: Path) -> None:
    """The format is a promise: these names and this JSON are what other tools may read."""
    Checkpointer(tmp_path).save(7, {"m": Box(w=torch.ones(2, 3), lr=0.5, r=PerRank(4))}, meta={"run": "x"})
    folder = tmp_path / "step_00000007"
    content = {path.name: json.loads(path.read_text()) for path in folder.iterdir() if path.suffix != ".safetensors"}
    assert content["tensors.json"] == {
        "m.w": {
            "dtype": "F32",
            "shape": [2, 3],
            "chunks": [{"offset": [0, 0], "shape": [2, 3], "file": "tensors-00000.safetensors", "key": "m.w"}],
        }
    }
    assert content["state.json"] == {"m": {"w": {"$tensor": "m.w"}, "lr": 0.5, "r": {"$per_rank": "m.r"}}}
    assert content["rank-00000.json"] == {"m.r": 4}
    assert content["meta.json"]["meta"] == {"run": "x"} and content["meta.json"]["world_size"] == 1
    assert content["manifest.json"]["format"] == content["COMMITTED"]["format"] == 1
    assert set(content["manifest.json"]["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json", "COMMITTED"}


def test_a_module_keeps_its_version_metadata(tmp_path: Path) -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"m": Versioned(2, 2)})
    ckpt.restore({"m": Versioned(2, 2)})
    assert seen == [3]


def test_restoring_draws_no_random_numbers(tmp_path: Path) -> None:
    class Greedy(Box):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(1)
            random.random()

    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"rng": RngState(), "greedy": Greedy(n=1)})
    expected = torch.rand(2), random.random()
    ckpt.restore({"rng": RngState(), "greedy": Greedy(n=1)})
    assert torch.rand(2).equal(expected[0]) and random.random() == expected[1]


class Averaged:
    """Keeps the average of a weight; a checkpoint has the average in the weight's place, and the weight with it."""

    def __init__(self, net: nn.Linear) -> None:
        self.net = net
        self.held = torch.zeros_like(net.weight)
        self.inside = 0

    @contextmanager
    def checkpoint_form(self) -> Iterator[None]:
        self.inside += 1
        with torch.no_grad():
            self.held.copy_(self.net.weight)
            self.net.weight.fill_(7.0)
            try:
                yield
            finally:
                self.net.weight.copy_(self.held)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["held"] is self.held


def test_states_are_saved_and_restored_in_the_form_that_an_object_asks_for(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    averaged = Averaged(net)
    weight = net.weight.detach().clone()
    ckpt = Checkpointer(tmp_path)
    states = {"model": net, "average": averaged}  # the model comes first, and is in that form all the same
    assert ckpt.save(1, states)
    assert torch.equal(net.weight, weight) and averaged.inside == 1
    with pytest.raises(UnsupportedStateError):
        ckpt.save(2, {**states, "bad": Box(value=object())})
    assert torch.equal(net.weight, weight) and averaged.inside == 2

    reader = nn.Linear(3, 2)
    ckpt.restore({"model": reader})
    assert torch.equal(reader.weight, torch.full((2, 3), 7.0))
    fresh = nn.Linear(3, 2)
    ckpt.restore({"model": fresh, "average": Averaged(fresh)})
    assert torch.equal(fresh.weight, weight)
    before = fresh.weight.detach().clone()
    with pytest.raises(StateMismatchError):
        ckpt.restore({"model": nn.Linear(3, 3), "average": Averaged(fresh)})
    assert torch.equal(fresh.weight, before)
