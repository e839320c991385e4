"""kill -9 at each named point of a save, and at any moment of it; a rank whose write fails; a `latest` that lies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import Box
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, commit, files, staging
from kforge_testing import RankFailure, run_ranks

COMMITS_AT = commit.POINTS.index("renamed")


def box_of(step: int, world: int) -> Box:
    """Everything in it says which step it is."""
    tensors = {name: torch.full((64, 8), float(step)) for name in ("t", "u")}
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    return Box(**tensors, n=step, r=PerRank({"step": step, "t": torch.full((4,), float(step))}))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(rank: int, world: int, folder: str, point: str, victim: int, options: dict[str, Any]) -> None:
    ckpt = Checkpointer(folder, keep_last=1, **options)
    ckpt.save(1, {"box": box_of(1, world)})
    ckpt.wait()
    if rank == victim:
        if point == "tensor bytes":  # in the middle of a file
            files.write_block = die  # type: ignore[method-assign, assignment]
        else:
            commit.reached = lambda at: die() if at == point else None  # type: ignore[assignment]
    ckpt.save(2, {"box": box_of(2, world)})
    ckpt.close()


def resume(rank: int, world: int, folder: str) -> tuple[int | None, list[int], list[str]]:
    ckpt = Checkpointer(folder, keep_last=1)
    box = box_of(0, world)
    step = ckpt.restore({"box": box}, verify="full")
    assert step is not None and box.values["n"] == step
    for tensor in (box.values["t"], box.values["u"]):
        assert (tensor.full_tensor() if world > 1 else tensor).equal(torch.full((64, 8), float(step)))
    assert [one["step"] for one in box.values["r"]] == [step] * len(box.values["r"])
    steps = ckpt.steps()
    latest = Path(folder, "latest").read_text().strip()
    assert (Path(folder) / latest / "COMMITTED").is_file()
    ckpt.save(3, {"box": box_of(3, world)})
    ckpt.close()
    return step, steps, sorted(os.listdir(folder))


THREAD = {"mode": "async", "overlap": True}
PROCESS = {"mode": "async", "writer": "process"}
SEVERAL = {"mode": "async", "overlap": True, "threads": 2}
CASES = [
    *((1, 0, point, {}) for point in (*commit.POINTS, "tensor bytes")),
    *((1, 0, point, THREAD) for point in (*commit.POINTS, "tensor bytes")),
    *((1, 0, point, PROCESS) for point in commit.POINTS),
    *((1, 0, point, SEVERAL) for point in ("tensor bytes", "tensors written", "marker written", "renamed")),
    *((1, 0, point, {**PROCESS, "threads": 2}) for point in ("tensors written", "renamed")),
    *((2, 0, point, {}) for point in ("staged", "all ranks written", "marker written", "renamed", "prune renamed")),
    *((2, 0, point, THREAD) for point in ("staged", "all ranks written", "renamed")),
    *((2, 1, point, {}) for point in ("tensor bytes", "tensors written", "rank written")),
    *((2, 1, point, THREAD) for point in ("tensor bytes", "rank written")),
    *((2, 1, point, PROCESS) for point in ("tensors written",)),
    *((2, 1, point, SEVERAL) for point in ("tensor bytes",)),
]


@pytest.mark.parametrize(("world", "victim", "point", "options"), CASES)
def test_kill_9_leaves_a_loadable_checkpoint(
    tmp_path: Path, world: int, victim: int, point: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RankFailure):
        run_ranks(save_and_die, world, str(tmp_path), point, victim, options)
    committed = point in commit.POINTS and commit.POINTS.index(point) >= COMMITS_AT
    pruned = point in ("prune renamed", "pruned")
    # After two ranks died, one process goes on: what is left must not depend on who comes next.
    step, steps, names = resume(0, 1, str(tmp_path))
    assert step == (2 if committed else 1)
    assert steps == ([2] if pruned else [1, 2] if committed else [1])
    assert names == ["latest", "step_00000003"]


def save_slowly_and_die(rank: int, world: int, folder: str, seconds: float, options: dict[str, Any]) -> None:
    """One quick save, where there is none yet, and a slow one; killed so long after that has begun."""
    staging.BLOCK_BYTES = 4096
    write = files.write_block

    def write_slowly(file: Any, block: Any) -> None:
        time.sleep(0.01)  # 40 blocks
        write(file, block)

    ckpt = Checkpointer(folder, keep_last=1, **options)
    box = Box(t=torch.zeros(40_000), n=0)
    first = (ckpt.restore({"box": box}) or 0) + 1
    if first == 1:
        ckpt.save(1, {"box": Box(t=torch.full((40_000,), 1.0), n=1)})
        ckpt.wait()
        first = 2
    files.write_block = write_slowly  # type: ignore[assignment]
    threading.Timer(seconds, die).start()
    ckpt.save(first, {"box": Box(t=torch.full((40_000,), float(first)), n=first)})
    ckpt.wait()
    threading.Event().wait()


def test_c26_killed_each_tenth_of_a_second_of_a_slow_save(tmp_path: Path) -> None:
    """Keep 1, slow storage: `latest` names a whole checkpoint at any moment, and a resume always works."""
    newest, tenths, committed = 1, 0, False
    while not committed:  # the first kill that comes after the commit is the last one
        tenths += 1
        with pytest.raises(RankFailure):
            run_ranks(save_slowly_and_die, 1, str(tmp_path), tenths / 10, THREAD)
        box = Box(t=torch.zeros(40_000), n=0)
        step = Checkpointer(tmp_path).restore({"box": box}, verify="full")
        committed = step == newest + 1
        assert step == newest + committed
        assert box.values["n"] == step and box.values["t"].eq(step).all()
        assert (tmp_path / (tmp_path / "latest").read_text().strip() / "COMMITTED").is_file()
    assert tenths > 2, "kills came before the commit, too"
    ckpt = Checkpointer(tmp_path, keep_last=1)
    ckpt.save(99, {"box": Box(t=torch.zeros(1))})
    ckpt.close()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000099"]


def failing_rank(rank: int, world: int, folder: str, victim: int, point: str, options: dict[str, Any]) -> str:
    ckpt = Checkpointer(folder, **options)
    ckpt.save(1, {"box": box_of(1, world)})
    ckpt.wait()

    def full(at: str) -> None:
        if at == point:
            raise OSError(28, "No space left on device")

    if rank == victim:
        if point == "tensor bytes":
            files.write_block = lambda *_: full(point)  # type: ignore[method-assign, assignment]
        else:
            commit.reached = full  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as error:
        ckpt.save(2, {"box": box_of(2, world)})
        ckpt.wait()
    assert sorted(os.listdir(folder)) == ["latest", "step_00000001"] or rank != 0  # rank 0 sweeps before it raises
    return str(error.value)


@pytest.mark.parametrize(
    ("victim", "point", "options"),
    [
        (victim, point, options)
        for options in ({}, THREAD, PROCESS, SEVERAL)
        for victim, point in (
            (1, "tensor bytes"),
            (1, "rank written"),
            (0, "all ranks written"),
            (0, "manifest written"),
            (0, "marker written"),
        )
        if (point, options) != ("tensor bytes", PROCESS)  # written elsewhere: test_writer.py
        and (options is not SEVERAL or point == "tensor bytes")
    ],
)
def test_one_rank_that_cannot_write_fails_all_and_leaves_nothing(
    tmp_path: Path, victim: int, point: str, options: dict[str, Any]
) -> None:
    errors = run_ranks(failing_rank, 2, str(tmp_path), victim, point, options)
    assert errors[0] == errors[1]
    assert f"rank {victim}: OSError: [Errno 28] No space left on device" in errors[0]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]
    assert resume(0, 1, str(tmp_path))[0] == 1


def test_a_latest_that_dangles_or_lies_costs_nothing(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"box": box_of(1, 1)})
    for text in ("step_00000009\n", "", "../elsewhere"):
        (tmp_path / "latest").write_text(text)
        box = box_of(0, 1)
        assert ckpt.restore({"box": box}) == 1 and box.values["n"] == 1
    ckpt.save(2, {"box": box_of(2, 1)})
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


def test_tidying_that_fails_does_not_undo_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    ckpt = Checkpointer(tmp_path, keep_last=1)
    ckpt.save(1, {"box": box_of(1, 1)})
    monkeypatch.setattr(commit, "put_aside", fail)
    assert ckpt.save(2, {"box": box_of(2, 1)}) is True
    assert ckpt.latest() == 2 and "tidying up" in caplog.text
