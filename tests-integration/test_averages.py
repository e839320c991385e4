"""A run that averages its weights evaluates, saves and generates from the average, and trains on from the others."""

import pytest
import torch
from jobs import job, train, values

from kforge_optim import split_float32
from kforge_parallel.fsdp import full
from kforge_testing import run_ranks


def looked_at(rank, world, config):
    """Everything that reads a checkpoint of a run, or the model of a running one."""
    from kforge_ckpt import Checkpointer
    from kforge_train.build import build, checkpoint_dir
    from kforge_train.evaluate import evaluate_run
    from kforge_train.saved import save_config
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        if rank == 0:
            save_config(config)
        trainer = Trainer(parts)
        for _ in range(4):
            trainer.step()
        trained = {name: full(parts.optimizer.full_weight(name)) for name, _ in parts.model.named_parameters()}
        trainer.save()
        trainer.evaluate()
        with parts.optimizer.evaluation_weights():
            trainer.saved_step = None
            assert not parts.checkpointer.save(4, trainer.state)  # again, and within: there is one already
            assert parts.checkpointer.save(5, trainer.state)
            parts.checkpointer.wait()
            averages = {name: full(parts.optimizer.full_weight(name)) for name, _ in parts.model.named_parameters()}
        after = {name: full(parts.optimizer.full_weight(name)) for name, _ in parts.model.named_parameters()}
        read = {}
        for step in (4, 5):
            model = {name: torch.empty_like(weight) for name, weight in parts.model.state_dict().items()}
            Checkpointer(checkpoint_dir(config)).restore({"model": Weights(model)}, step=step)
            read[step] = {name: full(weight) for name, weight in model.items()}
    return trained, averages, after, read, evaluate_run(config.train.run_dir, 4)["loss"]


class Weights:
    """What reads the model's part of a checkpoint and knows of nothing else."""

    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        assert state.keys() == self.tensors.keys()


@pytest.mark.parametrize("storage", ["fp32", "split"])
@pytest.mark.parametrize("world", [1, 2])
def test_c21_evaluation_and_checkpoints_have_the_average(tokens, tmp_path, storage, world):
    changes = {"optim__name": "schedule_free", "optim__schedule": "constant", "train__eval_rows": 0}
    changes |= {"parallel__precision": "bf16", "parallel__storage": storage}
    config = job(tokens, tmp_path, **changes)
    for trained, averages, after, read, loss in run_ranks(looked_at, world, config, init=False):
        assert any((trained[name] - averages[name]).abs().max() > 1e-3 for name in trained)
        for name, average in averages.items():
            assert torch.equal(after[name], trained[name]), name
            for step in (4, 5):
                upper = split_float32(average)[0] if storage == "split" else average
                assert torch.equal(read[step][name], upper), name
        assert loss == pytest.approx(values(tmp_path, "loss", "eval")[4], rel=1e-6)


@pytest.mark.parametrize(("world", "storage"), [(1, "fp32"), (2, "fp32"), (2, "split")])
def test_a_moving_average_is_what_is_evaluated(tokens, tmp_path, world, storage):
    changes = {"optim__ema_decay": 0.9, "parallel__precision": "bf16", "parallel__storage": storage}
    config = job(tokens, tmp_path / "average", **changes, train__eval_rows=0)
    assert run_ranks(train, world, config, init=False) == [0] * world
    plain = job(tokens, tmp_path / "plain", **{**changes, "optim__ema_decay": 0.0}, train__eval_rows=0)
    assert run_ranks(train, world, plain, init=False) == [0] * world
    assert values(tmp_path / "average", "loss") == values(tmp_path / "plain", "loss")  # training knows nothing of it
    averaged, trained = (values(tmp_path / name, "loss", "eval")[6] for name in ("average", "plain"))
    assert averaged != pytest.approx(trained, rel=1e-3)
    assert run_ranks(evaluated, 1, str(tmp_path / "average"), init=False)[0] == pytest.approx(averaged, rel=1e-4)


def saved_and_evaluated(rank, world, config):
    """A job whose save has copied nothing yet when its evaluation begins, unless it is waited for. Returns the weights
    in training then, and those of its checkpoint."""
    import threading

    from kforge_ckpt import Checkpointer
    from kforge_ckpt.staging import Staging
    from kforge_train import trainer
    from kforge_train.build import build, checkpoint_dir

    may_copy, copy, evaluate = threading.Event(), Staging._copy, trainer.evaluate

    def slowly(self, stream):
        may_copy.wait()
        copy(self, stream)

    def late(*args, **options):
        may_copy.set()
        parts.checkpointer.wait()
        return evaluate(*args, **options)

    def before_a_change():
        if parts.checkpointer._staging is not None:
            may_copy.set()
        staged()

    Staging._copy, trainer.evaluate = slowly, late
    with build(config) as parts:
        staged = parts.checkpointer.staged
        parts.checkpointer.staged = before_a_change
        run = trainer.Trainer(parts)
        for _ in range(3):
            run.step()
        trained = {name: full(weight).clone() for name, weight in parts.model.state_dict().items()}
        may_copy.clear()
        run.save()
        assert run.evaluate()
        parts.checkpointer.wait()
        model = {name: torch.empty_like(weight) for name, weight in parts.model.state_dict().items()}
        Checkpointer(checkpoint_dir(config)).restore({"model": Weights(model)}, step=3)
        return trained, {name: full(weight) for name, weight in model.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_an_evaluation_puts_no_average_into_a_save_under_way(tokens, tmp_path, world):
    config = job(tokens, tmp_path, optim__ema_decay=0.9)
    for trained, saved in run_ranks(saved_and_evaluated, world, config, init=False):
        assert trained.keys() == saved.keys()
        for name, weight in trained.items():
            assert torch.equal(saved[name], weight), name


def evaluated(rank, world, run_dir):
    from kforge_train.evaluate import evaluate_run

    return evaluate_run(run_dir)["loss"]


def test_c21_a_run_that_saves_and_evaluates_often_trains_as_one_that_does_not(tokens, tmp_path):
    changes = {"optim__name": "schedule_free", "optim__schedule": "constant", "train__steps": 6}
    often = {"ckpt__every_steps": 1, "train__eval_every_steps": 1}
    assert run_ranks(train, 1, job(tokens, tmp_path / "seldom", **changes), init=False) == [0]
    assert run_ranks(train, 1, job(tokens, tmp_path / "often", **changes, **often), init=False) == [0]
    assert values(tmp_path / "often", "loss") == values(tmp_path / "seldom", "loss")
    assert values(tmp_path / "often", "loss", "eval")[6] == values(tmp_path / "seldom", "loss", "eval")[6]
