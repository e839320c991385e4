"""What happens to a job's checkpoints when something fails: a row a fault, each with its outcome, in real processes.

In every row the job that is started again ends with the losses of one that nothing happened to, bit for bit.
"""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from jobs import job, train, values

from kforge_ckpt import Checkpointer, CheckpointError, commit, files
from kforge_testing import RankFailure, run_ranks
from kforge_testing.permissions import obey_permissions
from kforge_testing.s3 import served

# A constant rate: the losses do not depend on how long the job was meant to be.
COMMON = {"ckpt__every_steps": 2, "optim__schedule": "constant", "train__eval_rows": 0}


@pytest.fixture(scope="module")
def losses(tokens, tmp_path_factory):
    """Losses of so many steps on a number of processes, undisturbed."""
    known = {}

    def of(world, steps):
        if world not in known:
            folder = tmp_path_factory.mktemp(f"whole-{world}")
            config = job(tokens, folder, **{**COMMON, "ckpt__every_steps": 0, "train__steps": 30})
            assert run_ranks(train, world, config, init=False) == [0] * world
            known[world] = values(folder, "loss")
        return {step: loss for step, loss in known[world].items() if step <= steps}

    return of


def steps_in(run_dir):
    return Checkpointer(Path(run_dir) / "checkpoints").steps()


def check_whole(run_dir):
    """Nothing half done is left, and `latest` names the newest."""
    folder = Path(run_dir) / "checkpoints"
    assert not [name for name in os.listdir(folder) if ".tmp" in name]
    assert (folder / "latest").read_text() == f"{commit.folder_name(steps_in(run_dir)[-1])}\n"


# ------------------------------------------------------------------------------------------------ the process dies


def killed_at(rank, world, config, victim, point):
    """Train, but `victim` is killed at this point of the first save."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        if rank == victim:
            commit.reached = lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == point else None
        return Trainer(parts).run()


@pytest.mark.parametrize(
    ("world", "victim", "writer"), [(1, 0, "thread"), (1, 0, "process"), (2, 0, "thread"), (2, 1, "process")]
)
def test_killed_at_each_point_of_a_save(tokens, tmp_path, losses, world, victim, writer):
    """Outcome: the newest checkpoint is that of before, or, from its renaming on, the one that was being saved."""
    config = job(tokens, tmp_path, ckpt__writer=writer, ckpt__keep_last=1, **COMMON, train__steps=14)
    expected = 0
    for point in commit.POINTS if victim == 0 else ("tensors written", "rank written"):
        with pytest.raises(RankFailure):
            run_ranks(killed_at, world, config, victim, point, init=False)
        expected += 2 if commit.POINTS.index(point) >= commit.POINTS.index("renamed") else 0
        assert max(steps_in(tmp_path), default=0) == expected, point
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path, "loss") == losses(world, 14)
    check_whole(tmp_path)


def asked_to_stop(rank, world, config, victim, whom):
    """Train; while step 4 is being saved, `victim`, or `whom` says the process that writes, too, gets SIGTERM."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        checkpointer = parts.checkpointer

        def stop(at):
            if at == "tensors written" and checkpointer.latest() == 2:
                for process in checkpointer._processes.values() if "writer" in whom else ():
                    os.kill(process.pid, signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        if rank == victim:
            commit.reached = stop
        trainer = Trainer(parts)
        return trainer.run(), trainer.next_step


@pytest.mark.parametrize(
    ("world", "victim", "writer", "whom"),
    [(1, 0, "thread", "trainer"), (1, 0, "process", "trainer and writer"), (2, 1, "thread", "trainer")],
)
def test_sigterm_during_a_save(tokens, tmp_path, losses, world, victim, writer, whom):
    """Outcome: the save goes on to its end, the step then done is saved, too, and the exit code says "start me again";
    also where a scheduler asks all processes of the job."""
    config = job(tokens, tmp_path, ckpt__writer=writer, **COMMON, train__steps=30)
    ((code, last), *others) = run_ranks(asked_to_stop, world, config, victim, whom, init=False)
    assert code == 75 and all(other == (75, last) for other in others)
    assert 4 <= last < 30 and {2, 4, last} <= {*steps_in(tmp_path), 2}
    check_whole(tmp_path)
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path, "loss") == losses(world, 30)


# --------------------------------------------------------------------------------------------- nothing can be written


def refused(rank, world, config, read_only_at=None):
    """Train; the error that ends it. From one step's save on the folder is read-only."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Struck(Trainer):
        def save(self, **how):
            self.job.checkpointer.wait()
            if self.next_step == read_only_at and rank == 0:
                obey_permissions()
                os.chmod(self.job.checkpointer.dir, 0o555)
            super().save(**how)

    with build(config) as parts, pytest.raises(CheckpointError) as error:
        Struck(parts).run()
    return str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="permissions of root are Linux's")
@pytest.mark.parametrize(("world", "writer"), [(1, "process"), (2, "thread")])
def test_a_folder_that_becomes_read_only(tokens, tmp_path, losses, world, writer):
    """Outcome: the save that cannot be begun ends the run, on all ranks alike; the one before is whole."""
    config = job(tokens, tmp_path, ckpt__writer=writer, **COMMON, train__steps=30)
    try:
        (error, *others) = run_ranks(refused, world, config, 4, init=False)
    finally:
        (tmp_path / "checkpoints").chmod(0o755)
    assert re.search(r"step 4 in .* was not saved: .*PermissionError: \[Errno 13\] Permission denied", error)
    assert others == [error] * (world - 1)
    assert steps_in(tmp_path) == [2]
    check_whole(tmp_path)
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path, "loss") == losses(world, 30)
    check_whole(tmp_path)


FULL_DISK = """
import errno, sys
if "kforge_ckpt.writer" in sys.orig_argv:
    from kforge_ckpt import files
    write = files.write_block
    def write_block(file, block):
        if "step_00000004" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, block)
    files.write_block = write_block
"""


def full_once(rank, world, config, victim):
    """On rank `victim` the disk is full while step 4 is saved, for this process or for the one that writes for it."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    write = files.write_block

    def write_block(file, block):
        if "step_00000004" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, block)

    if rank != victim:
        os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
    elif config.ckpt.writer == "thread":
        files.write_block = write_block
    errors = []
    with build(config) as parts:
        trainer = Trainer(parts)
        settle = parts.checkpointer.wait

        def wait():
            try:
                settle()
            except Exception as error:
                errors.append(str(error))
                raise

        parts.checkpointer.wait = wait
        return trainer.run(), trainer.next_step, errors


@pytest.mark.parametrize(
    ("world", "victim", "writer"), [(1, 0, "thread"), (1, 0, "process"), (2, 1, "thread"), (2, 1, "process")]
)
def test_a_disk_that_is_full_for_one_rank(tokens, tmp_path, losses, world, victim, writer):
    """Outcome: all ranks are told the same error, nothing of that save stays, the run saves once more and ends with
    code 1."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FULL_DISK)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = job(tokens, tmp_path, ckpt__writer=writer, **COMMON, train__steps=30)
    ranks = run_ranks(full_once, world, config, victim, init=False, env={"PYTHONPATH": path})
    code, last, errors = ranks[0]
    assert code == 1 and ranks == [ranks[0]] * world
    assert len(errors) == 1 and f"rank {victim}: " * (world > 1) + "OSError: [Errno 28] No space left" in errors[0]
    assert {2, last} <= set(steps_in(tmp_path)) <= {2, 6, 8, last} and 4 <= last < 9
    check_whole(tmp_path)
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path, "loss") == losses(world, 30)


# ------------------------------------------------------------------------------------------ what was saved is damaged


def cut_short(folder):
    path = folder / "step_00000006" / "tensors-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(name, at):
    def flip(folder):
        path = folder / "step_00000006" / name
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return flip


DAMAGES = {
    "a file cut short": (cut_short, {}, 4),
    "a file that is gone": (lambda folder: (folder / "step_00000006" / "rank-00000.json").unlink(), {}, 4),
    "a bit of a tensor, looked for": (flip_a_bit("tensors-00000.safetensors", -9), {"ckpt__verify": "full"}, 4),
    "a bit of the manifest": (flip_a_bit("manifest.json", 30), {}, 4),
    "a bit of the states": (flip_a_bit("state.json", 30), {}, 4),
    "the marker is gone": (lambda folder: (folder / "step_00000006" / "COMMITTED").unlink(), {}, 4),
    "the folder is empty": (
        lambda folder: [path.unlink() for path in (folder / "step_00000006").iterdir()], {}, 4,
    ),
    "latest names nothing": (lambda folder: (folder / "latest").write_text("step_00000099"), {}, 6),
    "latest is gone": (lambda folder: (folder / "latest").unlink(), {}, 6),
    "names that only look like it": (
        lambda folder: [(folder / name).mkdir() for name in ("step_00000008.tmp-0123abcd", "step_abc", "step_9")],
        {}, 6,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def six_steps(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("six")
    assert run_ranks(train, 1, job(tokens, folder, **COMMON, train__steps=6)) == [0]
    assert steps_in(folder) == [2, 4, 6]
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_saved_is_damaged(tokens, tmp_path, losses, six_steps, damage):
    """Outcome: the newest whole one is taken, and the step of the damaged one saved anew."""
    shutil.copytree(six_steps, tmp_path, dirs_exist_ok=True)
    spoil, more, taken = DAMAGES[damage]
    spoil(tmp_path / "checkpoints")
    assert run_ranks(train, 1, job(tokens, tmp_path, **COMMON, train__steps=8, **more)) == [0]
    assert list(values(tmp_path, "checkpoint", "resume")) == [taken]
    assert values(tmp_path, "loss") == losses(1, 8)
    assert steps_in(tmp_path) == [4, 6, 8]
    check_whole(tmp_path)
    for step in (6, 8):
        commit.Contents(tmp_path / "checkpoints" / commit.folder_name(step)).check(full=True)


# ------------------------------------------------------------------------------------------------- two at the same time


def holding(rank, world, config, told):
    """Train; once a checkpoint is there, tell this process's number and wait to be killed."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        trainer.restore()
        while trainer.next_step < 2:
            trainer.step()
        trainer.save()
        parts.checkpointer.wait()
        Path(told).write_text(str(os.getpid()))
        signal.pause()


def test_two_runs_in_one_folder(tokens, tmp_path, losses):
    """Outcome: the second is refused while the first lives, and not once that was killed."""
    shared = {"ckpt__dir": str(tmp_path / "shared"), "train__steps": 8, **COMMON}
    told, failures = tmp_path / "told", []
    os.mkfifo(told)

    def first():
        try:
            run_ranks(holding, 1, job(tokens, tmp_path / "first", **shared), str(told), init=False)
        except RankFailure as failure:
            failures.append(failure)

    beside = threading.Thread(target=first)
    beside.start()
    process = int(told.read_text())
    second = job(tokens, tmp_path / "second", **shared)
    (error,) = run_ranks(refused, 1, second, init=False)
    assert re.search("another process saves into .*shared; wait for it, stop it, or choose another folder", error)
    assert Checkpointer(tmp_path / "shared").steps() == [2]
    os.kill(process, signal.SIGKILL)
    beside.join()
    assert "died without a word" in str(failures[0])
    assert run_ranks(train, 1, second, init=False) == [0]
    assert values(tmp_path / "second", "loss") == {s: loss for s, loss in losses(1, 8).items() if s > 2}
    assert Checkpointer(tmp_path / "shared").steps() == [4, 6, 8]


# ---------------------------------------------------------------------------------------------- the object store fails


@pytest.fixture(scope="module")
def s3():
    with served() as server:
        yield server


def train_without_pauses(rank, world, config, timeout):
    """Train; what fails is asked for again at once, and given up after so many seconds."""
    from kforge_ckpt import retrying
    from kforge_train import run

    retrying.pause = lambda seconds: None
    retrying.PATIENCE = retrying.Patience(timeout=timeout)
    return run(config)


def late(server, never):
    """Done, but the answer does not come in time."""

    def answer(environ, start):
        list(server.pass_on(environ))
        never.wait(60)
        return server.error(500, "InternalError")(environ, start)

    return answer


def half(server):
    return server.moto(lambda headers, body: [body[: len(body) // 2]])


STORE_FAULTS = {
    "500": lambda server, never, request: server.error(500, "InternalError"),
    "503": lambda server, never, request: server.error(503, "SlowDown"),
    "late": lambda server, never, request: late(server, never),
    "cut short": lambda server, never, request: half(server) if request.method == "GET" else None,
}


@pytest.mark.parametrize("kind", STORE_FAULTS)
def test_a_store_that_fails_now_and_then(tokens, tmp_path, losses, s3, kind):
    """Outcome: none; what failed is asked for again."""
    config = {"ckpt__dir": f"s3://{s3.new_bucket()}/run", **COMMON}
    planted, never, number = [], threading.Event(), itertools.count()

    def fault(request):
        if next(number) % (23 if kind == "late" else 3) == 2:
            planted.append(request)
            return STORE_FAULTS[kind](s3, never, request)
        return None

    s3.fault = fault
    try:
        for steps in (4, 8):
            this = job(tokens, tmp_path, **config, train__steps=steps)
            codes = run_ranks(
                train_without_pauses, 1, this, 1.0 if kind == "late" else 60.0, init=False, env=s3.environment
            )
            assert codes == [0]
    finally:
        never.set()
        s3.clear()
    assert len(planted) > 3
    assert list(values(tmp_path, "checkpoint", "resume")) == [4]
    assert values(tmp_path, "loss") == losses(1, 8)


def test_a_store_that_is_gone_from_a_save_on(tokens, tmp_path, losses, s3, monkeypatch):
    """Outcome: the run tries once more and ends with code 1; started when the store is back, it goes on."""
    url = f"s3://{s3.new_bucket()}/run"
    config = job(tokens, tmp_path, ckpt__dir=url, **COMMON, train__steps=30)
    gone = []

    def fault(request):
        if "step_00000004" in request.path:
            gone.append(request)
        return s3.error(503, "SlowDown") if gone else None

    s3.fault = fault
    assert run_ranks(train_without_pauses, 1, config, 60.0, init=False, env=s3.environment) == [1]
    s3.clear()
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    assert Checkpointer(url).steps() == [2]
    assert run_ranks(train_without_pauses, 1, config, 60.0, init=False, env=s3.environment) == [0]
    assert values(tmp_path, "loss") == losses(1, 30)
