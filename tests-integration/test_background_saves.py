"""Checkpoints written while a job trains: nothing bends, what fails is told, a job killed meanwhile goes on."""

import errno
import os
import signal

import pytest
from jobs import job, train, values

from kforge_ckpt import Checkpointer, commit, files
from kforge_testing import RankFailure, run_ranks

OFTEN = {"ckpt__every_steps": 1, "train__steps": 6}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["thread", "process", "little memory"])
def test_saving_at_each_step_changes_no_loss_and_no_checkpoint(tokens, tmp_path, world, mode):
    options = {"ckpt__writer": "process"} if mode == "process" else {}
    if mode == "little memory":
        options["ckpt__staging_gib"] = 1e-9
    for name, more in (("background", options), ("sync", {"ckpt__mode": "sync"})):
        config = job(tokens, tmp_path / name, ckpt__keep_last=6, **OFTEN, **more)
        assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path / "background", "loss") == values(tmp_path / "sync", "loss")
    for step in range(1, 7):
        folders = [tmp_path / name / "checkpoints" / f"step_{step:08d}" for name in ("background", "sync")]
        tensors = [{path.name: path.read_bytes() for path in folder.glob("*.safetensors")} for folder in folders]
        assert len(tensors[0]) >= world and tensors[0] == tensors[1]


def failing_once(rank, world, config, victim, fails_at):
    """On rank `victim` the disk is full while step `fails_at` is saved."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    write = files.write_block

    def full(file, block):
        if f"step_{fails_at:08d}" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, block)

    if rank == victim:
        files.write_block = full
    with build(config) as parts:
        trainer = Trainer(parts)
        return trainer.run(), trainer.next_step, parts.checkpointer.steps()


@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 1)])
def test_a_save_that_fails_ends_the_run_after_another_try(tokens, tmp_path, world, victim, caplog):
    config = job(tokens, tmp_path, train__steps=200, ckpt__every_steps=3)
    (first, *others) = run_ranks(failing_once, world, config, victim, 6, init=False)
    code, last, steps = first
    assert code == 1 and all(other == first for other in others)
    assert 6 <= last < 12, "the run goes on no further than the next save"
    assert steps == ([3, last] if last > 6 else [3, 6])  # not step 6 where another could be written
    assert run_ranks(train, world, job(tokens, tmp_path, train__steps=last + 1), init=False) == [0] * world


def killed_while_saving(rank, world, config, victim, step, point):
    def die(at):
        if at == point and checkpointer.busy_with == step:
            os.kill(os.getpid(), signal.SIGKILL)

    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Watched(Trainer):
        def save(self, **how):
            checkpointer.wait()  # for the one before, which is not the one to die in
            checkpointer.busy_with = self.next_step
            super().save(**how)

    with build(config) as parts:
        checkpointer = parts.checkpointer
        checkpointer.busy_with = 0
        if rank == victim:
            commit.reached = die
        return Watched(parts).run()


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize(
    ("world", "victim", "point"),
    [(1, 0, "tensors written"), (1, 0, "marker written"), (1, 0, "renamed"), (2, 1, "rank written")],
)
def test_a_job_killed_while_it_saves_goes_on_as_if_nothing_was(tokens, tmp_path, writer, world, victim, point):
    common = {"train__steps": 8, "ckpt__every_steps": 2, "ckpt__writer": writer}
    run_ranks(train, world, job(tokens, tmp_path / "whole", **common), init=False)
    config = job(tokens, tmp_path / "killed", **common)
    with pytest.raises(RankFailure):
        run_ranks(killed_while_saving, world, config, victim, 4, point, init=False)
    newest = Checkpointer(tmp_path / "killed" / "checkpoints").latest()
    assert newest == (4 if point == "renamed" else 2)
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path / "killed", "loss") == values(tmp_path / "whole", "loss")
