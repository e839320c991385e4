"""What the package does, used alone, on SIGTERM during a save and in a folder that cannot be written to; and that it
deletes beside the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import Box

from kforge_ckpt import Checkpointer, CheckpointError, commit
from kforge_ckpt.cli import main
from kforge_testing import RankFailure, run_ranks
from kforge_testing.permissions import obey_permissions

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "thread": {"mode": "async", "overlap": True},
    "process": {"mode": "async", "writer": "process"},
}


def box(step: int) -> Box:
    return Box(t=torch.full((64,), float(step)), n=step)


def restored(folder: Path) -> int | None:
    found = box(0)
    step = Checkpointer(folder).restore({"box": found}, verify="full")
    assert found.values["n"] == step and found.values["t"].eq(float(step or 0)).all()
    return step


# SIGTERM. (In a job, which goes on to save what is done: tests-integration/chaos.)


def asked_to_stop(rank: int, world: int, folder: str, handled: bool, options: dict[str, Any]) -> list[int]:
    """During the save of step 2 this process, and the one that writes, get SIGTERM."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, (lambda number, frame: seen.append(number)) if handled else signal.SIG_DFL)
    ckpt = Checkpointer(folder, **options)
    ckpt.save(1, {"box": box(1)})
    ckpt.wait()

    def stop(point: str) -> None:
        if point == "tensors written":
            for process in ckpt._processes.values():
                os.kill(process.pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    commit.reached = stop
    ckpt.save(2, {"box": box(2)})
    ckpt.close()
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_handles_sigterm_ends_its_save(tmp_path: Path, mode: str) -> None:
    assert run_ranks(asked_to_stop, 1, str(tmp_path), True, MODES[mode], init=False) == [[signal.SIGTERM]]
    assert restored(tmp_path) == 2 and sorted(os.listdir(tmp_path)) == ["latest", "step_00000001", "step_00000002"]


@pytest.mark.parametrize("mode", MODES)
def test_one_that_does_not_is_as_killed(tmp_path: Path, mode: str) -> None:
    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(asked_to_stop, 1, str(tmp_path), False, MODES[mode], init=False)
    assert restored(tmp_path) == 1
    Checkpointer(tmp_path).save(3, {"box": box(3)})
    assert restored(tmp_path) == 3


EXITS = """
import os, signal, sys, torch
from kforge_ckpt import Checkpointer, commit
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
ckpt = Checkpointer(sys.argv[1], mode="async")
commit.reached = lambda point: point == "tensors written" and os.kill(os.getpid(), signal.SIGTERM)
ckpt.save(1, {"net": torch.nn.Linear(2, 2)})
while True:
    signal.pause()
"""


def test_one_that_exits_for_it_does_not_end_before_its_save_does(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXITS, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001"]
    commit.Contents(tmp_path / "step_00000001").check(full=True)


# Folders that cannot be written to.


def in_a_read_only_folder(rank: int, world: int, folder: str, options: dict[str, Any]) -> tuple[str, int]:
    """The error of a save, and the exit code of `rm`; a score ends nothing, and what was saved can be restored."""
    obey_permissions()
    ckpt, found = Checkpointer(folder, **options), box(0)
    with pytest.raises(CheckpointError) as error:
        ckpt.save(2, {"box": found})
        ckpt.wait()
    assert not ckpt.failed
    ckpt.close()
    ckpt.score(1, loss=1.0)
    assert ckpt.restore({"box": found}, verify="full") == 1 and found.values["n"] == 1
    return str(error.value), main(["rm", folder, "1", "--all"]) if rank == 0 else 2


@pytest.mark.skipif(sys.platform != "linux", reason="permissions of root are Linux's")
@pytest.mark.parametrize("mode", MODES)
def test_a_read_only_folder_can_be_read_and_each_write_is_an_error(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run"
    Checkpointer(folder).save(1, {"box": box(1)})
    folder.chmod(0o555)
    try:
        ranks = run_ranks(in_a_read_only_folder, 2, str(folder), MODES[mode])
    finally:
        folder.chmod(0o755)
    (error, code), other = ranks
    assert f"step 2 in {folder} was not saved" in error and "[Errno 13] Permission denied" in error
    assert other[0] == error and code == 2
    assert sorted(os.listdir(folder)) == ["latest", "step_00000001"]


# Deletion.


@pytest.mark.parametrize("mode", MODES)
def test_a_save_does_not_wait_for_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Neither of old checkpoints nor of what a killed save left; `wait` does."""
    may_delete, deleted = threading.Event(), []
    remove_tree = commit.remove_tree

    def slowly(folder: Path) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_delete.wait(60)
        remove_tree(folder)
        deleted.append(folder.name[:13])

    monkeypatch.setattr(commit, "remove_tree", slowly)
    (tmp_path / "step_00000009.tmp-01234567").mkdir()
    ckpt = Checkpointer(tmp_path, keep_last=1, **MODES[mode])
    for step in (1, 2):
        ckpt.save(step, {"box": box(step)})
        assert not deleted
        ckpt._saving.wait()
        assert ckpt.steps() == [step] and not deleted, "no reader sees the old one any more, but its files are there"
        may_delete.set()
        ckpt.wait()
        may_delete.clear()
        assert deleted.pop() == ("step_00000009" if step == 1 else "step_00000001") and not deleted
