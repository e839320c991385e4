"""Two runs and one folder in an object store."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import uuid
from typing import Any

import pytest
import torch

from kforge_ckpt import Checkpointer, CheckpointError, commit, lease
from kforge_ckpt.files import entries, place
from kforge_ckpt.remote import RemotePath

OTHER = """
import sys
from kforge_ckpt import lease
from kforge_ckpt.remote import RemotePath
lease.BEAT = 0.02
held = lease.hold(RemotePath(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    monkeypatch.setattr(lease, "BEAT", 0.02)
    return RemotePath(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def states() -> dict[str, Any]:
    return {"model": torch.nn.Linear(2, 2)}


def elsewhere(root: RemotePath, beat: int = 0) -> None:
    """The lease as a process of another host would have written it."""
    about = {"id": "theirs", "beat": beat, "host": "node7", "pid": 5, "space": "another"}
    (root / lease.NAME).write_bytes(json.dumps(about).encode())


def test_one_that_is_alive_refuses_a_second_and_a_dead_one_is_replaced(
    s3: Any, monkeypatch: pytest.MonkeyPatch, states: dict[str, Any]
) -> None:
    """Outcome: refused while the first lives; at once in its place when it was killed."""
    url = f"s3://{s3.bucket}/run"
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    monkeypatch.setattr(lease, "BEAT", 0.2)
    with pytest.raises(CheckpointError, match=rf"process {process.pid} on \S+ saves into {url}; wait for it, stop it"):
        Checkpointer(url).save(1, states)
    assert Checkpointer(url).steps() == []  # who only reads is not refused
    process.kill()
    process.wait()
    monkeypatch.setattr(lease, "BEATS", 10**6)
    ckpt = Checkpointer(url)
    ckpt.save(1, states)
    ckpt.close()
    assert ckpt.steps() == [1] and lease.NAME not in entries(place(url))


def test_one_of_another_host_that_is_not_renewed_is_replaced(root: RemotePath, states: dict[str, Any]) -> None:
    elsewhere(root)
    ckpt = Checkpointer(str(root))
    ckpt.save(1, states)
    assert json.loads((root / lease.NAME).read_bytes())["id"] != "theirs"
    ckpt.close()
    assert ckpt.steps() == [1]


def test_one_of_another_host_that_is_renewed_refuses(root: RemotePath, states: dict[str, Any]) -> None:
    elsewhere(root)
    stop = threading.Event()

    def renew() -> None:
        beat = 0
        while not stop.wait(0.005):
            beat += 1
            elsewhere(root, beat)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 5 on node7 saves into memory://"):
            Checkpointer(str(root)).save(1, states)
    finally:
        stop.set()
        thread.join()


def test_one_that_was_replaced_does_not_commit_any_more(root: RemotePath, states: dict[str, Any]) -> None:
    """Outcome: an error at its next save, nothing of it is left, and the other's lease stays."""
    ckpt = Checkpointer(str(root))
    ckpt.save(1, states)
    elsewhere(root)
    with pytest.raises(CheckpointError, match=r"process 5 on node7 has taken over memory://.*does not save there any"):
        ckpt.save(2, states)
    assert [name for name in entries(root) if name.startswith("step_00000002")] == []
    ckpt.close()
    assert json.loads((root / lease.NAME).read_bytes())["id"] == "theirs" and ckpt.steps() == [1]


def test_it_is_renewed_and_shared_within_a_process(root: RemotePath) -> None:
    first, second = lease.hold(root), lease.hold(root)
    assert first is second

    def beat() -> int:
        return int(json.loads((root / lease.NAME).read_bytes())["beat"])

    before = beat()
    while beat() < before + 2:  # a lease that is not renewed hangs here, and the time-out of the test ends it
        pass
    first.release()
    assert lease.NAME in entries(root)
    second.release()
    second.release()
    assert lease.NAME not in entries(root)


def test_one_that_nobody_closed_is_let_go_of_wherever_the_garbage_is_collected(
    root: RemotePath, states: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcome: no wait, though it comes while the module holds its lock; released when somebody may wait."""
    other = RemotePath(f"memory://{uuid.uuid4().hex}/run")
    abandoned: list[Any] = [Checkpointer(str(root))]
    abandoned[0].save(1, states)
    acquire = lease.Lease._acquire

    def collected(self: lease.Lease) -> None:
        abandoned.clear()
        gc.collect()
        acquire(self)

    monkeypatch.setattr(lease.Lease, "_acquire", collected)
    held = lease.hold(other)
    assert not abandoned and lease.NAME in entries(other)
    while lease.NAME in entries(root):  # its own thread, at its next beat; a time-out ends this
        pass
    assert root not in lease._held and lease._held[other] == (held, 1)
    held.release()
    assert lease.NAME not in entries(other)


def test_closing_twice_lets_go_of_no_other(root: RemotePath, states: dict[str, Any]) -> None:
    one, two = Checkpointer(str(root)), Checkpointer(str(root))
    one.save(1, states)
    two.save(2, states)
    one.close()
    one.close()
    del one
    gc.collect()
    lease._release_dropped()
    assert lease.NAME in entries(root)
    two.close()
    assert lease.NAME not in entries(root)


def test_two_that_save_the_same_step_at_once_do_not_mix(root: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome, were there no lease: two whole checkpoints, and every reader takes the same one."""
    monkeypatch.setattr(lease.Lease, "check", lambda self: None)
    barrier, points = threading.Barrier(2), ("staged", "all ranks written")
    monkeypatch.setattr(commit, "reached", lambda point: barrier.wait(10) if point in points else None)

    def save(value: float) -> None:
        net = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(net.weight, value)
        Checkpointer(str(root)).save(4, {"model": net})

    threads = [threading.Thread(target=save, args=(float(value),)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = sorted(name for name in entries(root) if re.fullmatch(r"step_00000004-[0-9a-f]{8}", name))
    assert len(whole) == 2
    for name in whole:
        commit.Contents(root / name).check(full=True)
    assert commit.committed(root) == {4: root / whole[0]}
    net = torch.nn.Linear(2, 2)
    assert Checkpointer(str(root)).restore({"model": net}, verify="full") == 4
    assert len(set(net.weight.flatten().tolist())) == 1
