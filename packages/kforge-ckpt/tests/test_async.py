"""Saves in the background: what is saved is what was, errors come to light, memory is bounded, C26."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stateful import Box
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, commit, files, staging
from kforge_testing import run_ranks

WRITERS: list[dict[str, Any]] = [
    {},
    {"staging_bytes": 1},
    {"writer": "process"},
    {"writer": "process", "staging_bytes": 1},
    {"threads": 3},
    {"threads": 3, "staging_bytes": 1},
    {"threads": 2, "writer": "process", "staging_bytes": 1},
]


@pytest.mark.parametrize("options", WRITERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_holds_what_was_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], overlap: bool
) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    ckpt = Checkpointer(tmp_path, mode="async", overlap=overlap, **options)
    box = Box(t=torch.zeros(5000), turned=torch.zeros(3, 700).T, n=0, r=PerRank(torch.zeros(3)), l=[0])
    for step in range(1, 6):
        for tensor in (box.values["t"], box.values["turned"], box.values["r"].value):
            tensor.fill_(step)
        box.values["n"] = box.values["l"][0] = step
        assert ckpt.save(step, {"box": box})
        if overlap:
            ckpt.staged()
        for tensor in (box.values["t"], box.values["turned"], box.values["r"].value):
            tensor.fill_(-1)
        box.values["n"] = box.values["l"][0] = -1
    ckpt.close()
    assert ckpt.steps() == [3, 4, 5]
    for step in ckpt.steps():
        back = Box(t=torch.zeros(5000), turned=torch.zeros(3, 700).T, n=0, r=None, l=[0])
        ckpt.restore({"box": back}, step, verify="full")
        assert back.values["t"].eq(step).all() and back.values["turned"].eq(step).all()
        assert back.values["n"] == step and back.values["l"] == [step] and back.values["r"][0].eq(step).all()


def test_the_files_are_those_of_a_synchronous_save(tmp_path: Path) -> None:
    box = Box(a=torch.randn(100, 3), b=torch.arange(7), c=torch.tensor(2.5, dtype=torch.bfloat16))
    for name, options in (("sync", {}), ("thread", {"mode": "async"}), ("process", {"mode": "async", **WRITERS[2]})):
        with_close = Checkpointer(tmp_path / name, **options)  # type: ignore[arg-type]
        with_close.save(1, {"box": box})
        with_close.close()
    contents = [
        (tmp_path / name / "step_00000001" / "tensors-00000.safetensors").read_bytes()
        for name in ("sync", "thread", "process")
    ]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "async"}, {"mode": "async", "staging_bytes": 1}, {"mode": "async", "writer": "process"}],
    ids=["sync", "thread", "little memory", "process"],
)
def test_several_files_at_once_hold_the_same_bytes_and_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    box = Box(**{f"w{i}": torch.randn(500 * i, 2) for i in range(6)}, n=1)
    for name, threads in (("one", 1), ("three", 3)):
        ckpt = Checkpointer(tmp_path / name, threads=threads, **options)
        ckpt.save(1, {"box": box})
        ckpt.close()
        assert ckpt._memory is None or len(ckpt._memory.blocks) <= (2 if "staging_bytes" in options else 16)
    one, three = (tmp_path / name / "step_00000001" for name in ("one", "three"))
    assert sorted(path.name for path in three.glob("tensors-*")) == [
        "tensors-00000-1.safetensors", "tensors-00000-2.safetensors", "tensors-00000.safetensors",
    ]  # fmt: skip
    tensors = [tensor for path in sorted(three.glob("tensors-*")) for tensor in load_file(path).items()]
    expected = load_file(one / "tensors-00000.safetensors")
    assert len(tensors) == 6 and all(expected[name].equal(tensor) for name, tensor in tensors)
    back = Box(**{f"w{i}": torch.zeros(500 * i, 2) for i in range(6)}, n=0)
    Checkpointer(tmp_path / "three", threads=3).restore({"box": back}, verify="full")
    assert all(back.values[name].equal(value) for name, value in box.values.items() if name != "n")


@pytest.mark.parametrize("memory", [1, None])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_of_several_files_that_cannot_be_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, memory: int | None
) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    write = files.write_block

    def full_for_one(file: Any, block: Any) -> None:
        if file.name.endswith("-1.safetensors"):
            full()
        write(file, block)

    ckpt = Checkpointer(tmp_path, mode=mode, threads=3, **({"staging_bytes": memory} if mode == "async" else {}))
    box = Box(**{f"w{i}": torch.ones(20_000) for i in range(6)})
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_block", full_for_one)
        with pytest.raises(CheckpointError, match=r"OSError: \[Errno 28\] No space left on device$"):
            ckpt.save(1, {"box": box})
            ckpt.wait()
    assert list(tmp_path.iterdir()) == []
    assert ckpt.save(1, {"box": box})
    ckpt.close()
    assert ckpt.steps() == [1]


def test_c26_at_each_point_the_latest_is_whole_and_the_one_before_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, go, seen = threading.Event(), threading.Semaphore(0), []

    def stop(point: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append(point)
            at.set()
            go.acquire()

    ckpt = Checkpointer(tmp_path, mode="async", keep_last=1)
    ckpt.save(1, {"box": Box(t=torch.full((100,), 1.0))})
    ckpt.wait()
    monkeypatch.setattr(commit, "reached", stop)
    ckpt.save(2, {"box": Box(t=torch.full((100,), 2.0))})
    while True:
        assert at.wait(30)
        at.clear()
        latest = (tmp_path / "latest").read_text().strip()
        newest = ckpt.latest()
        assert (tmp_path / latest / "COMMITTED").is_file()
        committed = commit.POINTS.index(seen[-1]) >= commit.POINTS.index("renamed")
        assert newest == (2 if committed else 1)
        box = Box(t=torch.zeros(100))
        assert Checkpointer(tmp_path).restore({"box": box}, verify="full") == newest
        assert box.values["t"].eq(newest).all()
        go.release()
        if seen[-1] == "pruned":
            break
    ckpt.wait()
    assert seen == list(commit.POINTS[1:])
    assert ckpt.steps() == [2]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_is_told_at_the_next_chance_and_the_run_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    ckpt = Checkpointer(tmp_path, mode="async", staging_bytes=1)
    box = Box(t=torch.ones(10_000))
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_block", full)
        ckpt.save(1, {"box": box})
        ckpt.staged()
        while not ckpt.failed:
            pass
    words = r"step 1 in .* was not saved: OSError: \[Errno 28\] No space left on device"
    with pytest.raises(CheckpointError, match=words):
        ckpt.save(2, {"box": box})
    assert not ckpt.failed and list(tmp_path.iterdir()) == []
    assert ckpt.save(2, {"box": box})
    ckpt.close()
    assert ckpt.steps() == [2]


def failing(rank: int, world: int, folder: str) -> tuple[str, list[int]]:
    mesh = init_device_mesh("cpu", (world,))
    ckpt = Checkpointer(folder, mode="async", overlap=True)
    box = Box(t=distribute_tensor(torch.arange(12.0), mesh, [Shard(0)]))
    ckpt.save(1, {"box": box})
    ckpt.wait()
    if rank == 1:
        files.write_block = full
    ckpt.save(2, {"box": box})
    with pytest.raises(CheckpointError) as error:
        ckpt.wait()
    return str(error.value), ckpt.steps()


def test_one_rank_s_background_error_is_that_of_all(tmp_path: Path) -> None:
    one, other = run_ranks(failing, 2, str(tmp_path))
    assert one == other and "rank 1: OSError: [Errno 28] No space left on device" in one[0] and one[1] == [1]


def saving(rank: int, world: int, folder: str, writer: str) -> list[float]:
    mesh = init_device_mesh("cpu", (world,))
    ckpt = Checkpointer(folder, mode="async", overlap=True, writer=writer)  # type: ignore[arg-type]
    tensor = distribute_tensor(torch.arange(24.0).view(8, 3), mesh, [Shard(0)])
    for step in range(1, 4):
        ckpt.save(step, {"box": Box(t=tensor, r=PerRank(rank * 10 + step))})
        ckpt.staged()
        tensor.to_local().add_(100)
    ckpt.close()
    back = Box(t=torch.zeros(8, 3), r=None)
    ckpt.restore({"box": back}, 2, verify="full")
    assert back.values["r"] == [rank * 10 + 2 for rank in range(world)]
    return back.values["t"].flatten().tolist()


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_shards_of_several_ranks(tmp_path: Path, writer: str) -> None:
    for values in run_ranks(saving, 3, str(tmp_path), writer):
        assert values == (torch.arange(24.0) + 100).tolist()


def test_memory_is_taken_once(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, mode="async")
    box = Box(t=torch.zeros(staging.BLOCK_BYTES // 2))
    ckpt.save(1, {"box": box})
    ckpt.wait()
    assert ckpt._memory is not None
    before = [block.memory.data_ptr() for block in ckpt._memory.blocks]
    for step in (2, 3):
        ckpt.save(step, {"box": box})
    ckpt.wait()
    assert [block.memory.data_ptr() for block in ckpt._memory.blocks] == before and len(before) == 2


def test_the_process_that_writes_does_not_import_the_caller_s_script(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, mode="async", writer="process")
    ckpt.save(1, {"box": Box(t=torch.zeros(3))})
    ckpt.wait()
    if sys.platform == "linux":
        maps = Path(f"/proc/{ckpt._processes[0].pid}/maps").read_text()
        assert "libtorch" not in maps
    pid = ckpt._processes[0].pid
    ckpt.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    ckpt.save(2, {"box": Box(t=torch.zeros(3))})  # a new one is started
    ckpt.close()
    assert ckpt.steps() == [1, 2]


@pytest.mark.parametrize("options", WRITERS)
def test_a_prepared_save_finds_its_plan_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    box = Box(t=torch.arange(9000.0), n=3)
    ckpt = Checkpointer(tmp_path, mode="async", **options)
    ckpt.prepare({"box": box})
    assert not ckpt.steps() and ckpt._memory is not None
    plan, memory = ckpt._agreement._layout, ckpt._memory
    ckpt.save(1, {"box": box})
    ckpt.close()
    assert ckpt._agreement._layout is plan and ckpt._memory is memory
    assert len(memory.blocks) == (2 if "staging_bytes" in options else -(-36000 // 4096))
    back = Box(t=torch.zeros(9000), n=0)
    ckpt.restore({"box": back})
    assert torch.equal(back.values["t"], torch.arange(9000.0)) and back.values["n"] == 3


def test_preparing_synchronous_saves_takes_nothing(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.prepare({"box": Box(t=torch.zeros(3))})
    assert ckpt._memory is None


def test_a_restore_waits_for_the_copy_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    box = Box(t=torch.ones(100_000))
    ckpt = Checkpointer(tmp_path, mode="async", overlap=True, staging_bytes=1)
    ckpt.save(1, {"box": box})
    ckpt.wait()
    box.values["t"].fill_(2.0)
    may_write = threading.Event()
    write_block = files.write_block

    def slowly(file: Any, block: Any) -> None:
        may_write.wait()
        write_block(file, block)

    monkeypatch.setattr(files, "write_block", slowly)
    ckpt.save(2, {"box": box})
    staged = ckpt.staged
    monkeypatch.setattr(ckpt, "staged", lambda: (may_write.set(), staged()))
    ckpt.restore({"box": box}, step=1)
    may_write.set()
    ckpt.close()
    assert box.values["t"].eq(1.0).all()
    ckpt.restore({"box": box}, step=2)
    assert box.values["t"].eq(2.0).all()


def test_another_checkpointer_of_the_process_leaves_a_save_under_way_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write_block = files.write_block

    def slowly(file: Any, block: Any) -> None:
        if threading.current_thread().name.startswith("ckpt-save"):
            may_write.wait()
        write_block(file, block)

    monkeypatch.setattr(files, "write_block", slowly)
    one, two = Checkpointer(tmp_path, mode="async"), Checkpointer(tmp_path)
    one.save(1, {"box": Box(t=torch.ones(3))})
    two.save(2, {"box": Box(t=torch.ones(3))})
    two.close()
    may_write.set()
    one.close()
    assert one.steps() == [1, 2] and sorted(path.name for path in tmp_path.glob("*.tmp*")) == []
