"""A signal to one process is a decision of all."""

import os
import signal
from itertools import pairwise

import pytest
from jobs import job, train, values

from kforge_metrics import read_events
from kforge_testing import RankFailure, run_ranks


def train_with_signal(rank, world, config, victim, at_step, number):
    """Train; rank `victim` gets a signal while it is in step `at_step`."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Struck(Trainer):
        def step(self):
            if rank == victim and self.next_step == at_step:
                os.kill(os.getpid(), number)
            return super().step()

    with build(config) as parts:
        trainer = Struck(parts)
        return trainer.run(), trainer.next_step, parts.checkpointer.latest()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_at_one_step(tokens, tmp_path, number):
    config = job(tokens, tmp_path / "run", train__steps=30)
    results = run_ranks(train_with_signal, 2, config, 1, 5, number, init=False)
    (code, step, saved), *others = results
    assert code == 75
    assert all(other == results[0] for other in others)
    assert saved == step
    assert step in (6, 7)  # asked for in the sixth step, agreed on in it, acted on before the next but one

    whole = job(tokens, tmp_path / "whole", train__steps=30)
    assert run_ranks(train, 2, whole, init=False) == [0, 0]
    assert run_ranks(train, 2, config, init=False) == [0, 0]
    assert values(tmp_path / "run", "loss") == values(tmp_path / "whole", "loss")


def train_with_evaluations(rank, world, config, step):
    """Train; a signal comes in step ``step``, or the run is killed outright before it where it is negative."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Struck(Trainer):
        def step(self):
            if self.next_step == -step:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.next_step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step()

    with build(config) as parts:
        return Struck(parts).run()


def test_each_evaluation_that_is_due_is_made_once_however_a_run_is_stopped(tokens, tmp_path):
    often = {"train__eval_every_steps": 1, "train__eval_rows": 8, "ckpt__every_steps": 2, "ckpt__keep_best": 1}
    whole = job(tokens, tmp_path / "whole", **often, train__steps=8)
    assert run_ranks(train, 1, whole, init=False) == [0]
    config = job(tokens, tmp_path / "run", **often, train__steps=8)
    assert run_ranks(train_with_evaluations, 1, config, 2, init=False) == [75]
    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(train_with_evaluations, 1, config, -6, init=False)
    assert run_ranks(train, 1, config, init=False) == [0]
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event.kind == "eval"]
    assert [event.step for event in events] == list(range(1, 9))
    assert values(tmp_path / "run", "loss", "eval") == values(tmp_path / "whole", "loss", "eval")


def poisoned(rank, world, config, victim, at_step):
    """Train with a loss that is not a number on one rank in one step."""
    from kforge_parallel import full_parameters
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        forward_backward = parts.engine.forward_backward
        weights = []

        def bad(window, scale):
            weights.append(full_parameters(parts.model))
            loss = forward_backward(window, scale)
            if rank == victim and trainer.next_step == at_step:
                for parameter in parts.model.parameters():
                    parameter.grad.mul_(float("nan"))
                return loss * float("nan")
            return loss

        parts.engine.forward_backward = bad
        trainer = Trainer(parts)
        code = trainer.run()
        weights.append(full_parameters(parts.model))
    moved = [any(not a[n].equal(b[n]) for n in a) for a, b in pairwise(weights)]
    finite = all(bool(t.isfinite().all()) for t in weights[-1].values())
    return code, moved, finite


@pytest.mark.parametrize("victim", [0, 1])
def test_a_bad_loss_on_one_rank_skips_the_step_on_all(tokens, tmp_path, victim):
    config = job(tokens, tmp_path, train__steps=6)
    for code, moved, finite in run_ranks(poisoned, 2, config, victim, 3, init=False):
        assert code == 0
        assert moved == [True, True, True, False, True, True]
        assert finite
    assert [step for step, skipped in values(tmp_path, "skipped").items() if skipped] == [4]


def test_abort_ends_all_ranks_with_its_own_code(tokens, tmp_path):
    config = job(tokens, tmp_path, train__steps=6, resilience__nonfinite="abort")
    for code, moved, finite in run_ranks(poisoned, 2, config, 1, 2, init=False):
        assert code == 76
        assert not moved[2]
        assert finite
