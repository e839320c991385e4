"""Two processes do not save into one folder; a dead one holds nothing."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kforge_ckpt import Checkpointer, CheckpointError
from kforge_ckpt.lock import FolderLock

OTHER = """
import sys
from pathlib import Path
from kforge_ckpt.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def other(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    states = {"model": torch.nn.Linear(2, 2)}
    process = other(tmp_path)
    with pytest.raises(CheckpointError, match=f"another process saves into {tmp_path}; wait for it"):
        Checkpointer(tmp_path).save(1, states)
    assert list(tmp_path.iterdir()) == []
    process.kill()  # outright: it lets go of nothing by itself
    process.communicate()
    ckpt = Checkpointer(tmp_path)
    assert ckpt.save(1, states)
    assert Checkpointer(tmp_path).save(2, states)  # the same process may
    with pytest.raises(CheckpointError, match="another process saves"):
        _in_another(tmp_path)
    ckpt.close()
    process = other(tmp_path)
    with pytest.raises(CheckpointError, match="another process saves"):
        ckpt.save(3, states)
    process.communicate("")
    assert ckpt.save(3, states) and ckpt.steps() == [1, 2, 3]


def _in_another(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER, str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    raise CheckpointError(done.stderr)


def test_locks_of_one_process_are_counted(tmp_path: Path) -> None:
    one, two = FolderLock(tmp_path), FolderLock(tmp_path)
    one.release()
    one.release()
    with pytest.raises(CheckpointError, match="another process saves"):
        _in_another(tmp_path)
    two.release()
    process = other(tmp_path)
    process.communicate("")
    assert process.returncode == 0


def test_a_folder_that_knows_no_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(handle: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("kforge_ckpt.lock._lock", none)
    FolderLock(tmp_path).release()
    assert f"{tmp_path} cannot be locked" in caplog.text
