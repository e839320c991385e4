"""A resume is never off by one: the rate that each optimizer step used, and the counters that must agree."""

import os
import signal

import pytest
from jobs import job, values

from kforge_testing import run_ranks


def rates_used(rank, world, config, leave_at=None, signal_at=None):
    """Train; return the exit code and the rate of every optimizer step, by its number from 0, with the counters.

    Leaves without a word before step `leave_at`; gets a signal in step `signal_at`.
    """
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    used = {}

    class Leaves(Trainer):
        def step(self):
            if self.next_step == leave_at:
                raise KeyboardInterrupt
            if self.next_step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step()

    with build(config) as parts:
        trainer = Leaves(parts)
        step = parts.optimizer.step

        def noted(**arguments):
            counters = (trainer.next_step, parts.optimizer.schedule_step, parts.loader.step - 1)
            assert len(set(counters)) == 1, counters
            used[trainer.next_step] = set(parts.optimizer.lrs().values())
            step(**arguments)

        parts.optimizer.step = noted
        try:
            code = trainer.run()
        except KeyboardInterrupt:
            code = None
        return code, used


def in_turn(rank, world, runs):
    """Several runs, one after the other, in this process."""
    return [rates_used(rank, world, *run) for run in runs]


COSINE = {"optim__schedule": "cosine", "optim__warmup_steps": 5, "train__steps": 20}


def test_c25_rates_are_those_of_a_run_that_never_stopped(tokens, tmp_path):
    straight = job(tokens, tmp_path / "straight", **COSINE)
    stops = {at: job(tokens, tmp_path / str(at), **COSINE, ckpt__every_steps=at) for at in (1, 5, 6, 19)}
    asked = job(tokens, tmp_path / "asked", **COSINE)
    runs = [(straight,)]
    for at, config in stops.items():
        runs += [(config, at), (config,)]
    runs += [(asked, None, 8), (asked,)]
    ((code, expected), *others) = run_ranks(in_turn, 1, runs, init=False)[0]
    assert code == 0 and list(expected) == list(range(20))
    assert [max(rate) for rate in expected.values()][:6] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])

    pairs = list(zip([*stops, None], others[::2], others[1::2], strict=True))
    for at, (stopped, before), (code, after) in pairs:
        assert (stopped, code) == ((75, 0) if at is None else (None, 0))
        if at is not None:
            assert list(before) == list(range(at)) and list(after) == list(range(at, 20))
        assert before.keys().isdisjoint(after)
        assert before | after == expected
    told = values(tmp_path / "straight", "lr")
    assert all(values(tmp_path / name, "lr") == told for name in ("1", "5", "6", "19", "asked"))


def test_a_run_is_cooled_down_from_a_checkpoint_and_resumed_meanwhile(tokens, tmp_path):
    """WSD: train, look, decide to end it. The same losses as a run that was meant to be that long."""
    flat = {"optim__schedule": "wsd", "optim__warmup_steps": 2, "optim__decay_steps": 6, "optim__decay_shape": "1-sqrt"}
    meant = job(tokens, tmp_path / "meant", **flat, train__steps=14)
    first = job(tokens, tmp_path / "run", **flat, train__steps=100, ckpt__every_steps=8)
    down = {**flat, "optim__decay_from": 8, "train__steps": 14, "ckpt__every_steps": 1}
    cooled = job(tokens, tmp_path / "run", **down)
    runs = [(meant,), (first, 8), (cooled, 11), (cooled,)]
    (code, expected), (_, before), (_, down), (end, rest) = run_ranks(in_turn, 1, runs, init=False)[0]
    assert (code, end) == (0, 0)
    assert [list(part) for part in (before, down, rest)] == [list(range(8)), list(range(8, 11)), list(range(11, 14))]
    assert before | down | rest == expected
    assert [max(rate) for rate in expected.values()][2:9] == [0.01] * 7
    assert values(tmp_path / "run", "loss") == values(tmp_path / "meant", "loss")


def test_a_warm_up_in_tokens(tokens, tmp_path):
    """8 rows of 32 tokens are 256 a step: 600 tokens take 3 steps."""
    common = {"optim__schedule": "constant", "train__steps": 5}
    steps = job(tokens, tmp_path / "steps", **common, optim__warmup_steps=3)
    by_tokens = job(tokens, tmp_path / "tokens", **common, optim__warmup_steps=0, optim__warmup_tokens=600)
    (_, expected), (_, found) = run_ranks(in_turn, 1, [(steps,), (by_tokens,)], init=False)[0]
    assert found == expected
    assert [max(rate) for rate in found.values()] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01])
