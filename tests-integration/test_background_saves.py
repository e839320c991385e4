"""Checkpoints written while a job trains: nothing bends, and what fails is told. (Jobs killed meanwhile: chaos.)"""

import errno

import pytest
from jobs import job, train, values

from kforge_ckpt import files
from kforge_testing import run_ranks

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
    assert set(values(tmp_path, "background", "checkpoint").values()) == {True}  # not told of as saved before it is
    assert run_ranks(train, world, job(tokens, tmp_path, train__steps=last + 1), init=False) == [0] * world


def steps_there(rank, world, config):
    """Train; the steps that are there when each save begins."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    seen = []
    with build(config) as parts:
        save = parts.checkpointer.save

        def noted(*arguments, **more):
            parts.checkpointer.wait()
            seen.append(parts.checkpointer.steps())
            return save(*arguments, **more)

        parts.checkpointer.save = noted
        code = Trainer(parts).run()
        parts.checkpointer.wait()
        return code, [*seen, parts.checkpointer.steps()]


@pytest.mark.parametrize("world", [1, 2])
def test_of_saves_by_the_clock_the_last_one_is_kept_until_there_is_a_later_one(tokens, tmp_path, world):
    clock = {"ckpt__every_minutes": 1e-9, "ckpt__every_steps": 3, "ckpt__keep_last": 2, "train__steps": 7}
    ranks = run_ranks(steps_there, world, job(tokens, tmp_path, **clock), init=False)
    assert [code for code, _ in ranks] == [0] * world
    assert ranks[0][1] == [[], [2], [3], [3, 4], [3, 5], [3, 6], [6, 7]]  # of the rank that deletes
