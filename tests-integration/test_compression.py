"""Compressed gradients in whole jobs: where they go on every axis, a loss as without, and a resume to the bit."""

import statistics

import pytest
import torch
from jobs import job, train, values, write_tokens
from test_parity import check_spread, three_steps

from kforge_testing import run_ranks

REP2 = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1}
AXES = {
    "rep2-tp2": {"parallel__tp": 2},
    "rep2-cp2": {"parallel__cp": 2},
    "rep2-shard2": {"parallel__dp_shard": 2},
    "rep2-shard2-accumulated": {"parallel__dp_shard": 2, "parallel__accumulate": "sharded"},
}


def sent_whole(rank, world, config, run):
    """A job whose replicas send every bit, under the name of bf16."""
    from kforge_parallel import compress

    compress.CODECS["bf16"] = (lambda x: x.view(torch.uint8), lambda sent, dtype: sent.view(dtype))
    return run(rank, world, config)


@pytest.mark.parametrize("axes", AXES)
def test_where_nothing_is_rounded_jobs_equal_one_process(tokens, tmp_path, axes):
    changes = {"optim__clip_norm": 0.05, "data__microbatch_rows": 1, "model__vocab_size": 64}
    one = run_ranks(three_steps, 1, job(tokens, tmp_path / "one", **changes), init=False)[0]
    config = job(tokens, tmp_path / axes, **{**changes, **REP2, **AXES[axes]}, parallel__compress="bf16")
    check_spread(one, run_ranks(sent_whole, 4, config, three_steps, init=False))


@pytest.mark.parametrize(
    "axes", [{"parallel__pp": 2}, {"parallel__dp_shard": 2, "parallel__ep": 2, "model__n_experts": 4}], ids=str
)
def test_stages_and_experts_train_as_one_process(tokens, tmp_path, axes):
    changes = {"data__microbatch_rows": 2, **{k: v for k, v in axes.items() if k.startswith("model")}}
    run_ranks(train, 1, job(tokens, tmp_path / "one", **changes), init=False)
    config = job(tokens, tmp_path / "spread", **{**changes, **REP2, **axes}, parallel__compress="bf16")
    run_ranks(sent_whole, 4, config, train, init=False)
    assert values(tmp_path / "spread", "loss") == pytest.approx(values(tmp_path / "one", "loss"), rel=1e-10)


def without_feedback(rank, world, config, run):
    """The planted fault: what is lost is forgotten."""
    from kforge_parallel.compress import Reduction

    remember = Reduction.settle

    def settle(self, gate):
        remember(self, gate)
        for name, tensor in self.kept.items():
            if "error" in name:
                tensor.zero_()

    Reduction.settle = settle
    return run(rank, world, config)


INT8 = {"parallel__compress": "int8"}
POWERSGD = {"parallel__compress": "powersgd", "parallel__compress_rank": 4}


def test_the_loss_is_that_of_uncompressed_gradients_and_feedback_is_why(tmp_path):
    """After 300 steps within 2 %, on what is trained on and on what is held out. Without feedback PowerSGD is 6 % off;
    int8 loses too little for a loss to show, and what that does is in test_compress.py."""
    changes = {**REP2, "train__steps": 300, "model__dim": 32, "parallel__precision": "fp32"}
    changes |= {"optim__schedule": "linear", "optim__warmup_steps": 10, "optim__min_lr_ratio": 0.0}

    write_tokens(tmp_path / "train", documents=2500, seed=1)
    write_tokens(tmp_path / "heldout", documents=40, seed=2)

    def losses(name, more, fault=False):
        config = job(tmp_path, tmp_path / name, **changes, **more)
        run_ranks(*((without_feedback, 2, config, train) if fault else (train, 2, config)), init=False, timeout_s=200)
        seen = values(tmp_path / name, "loss")
        assert max(seen) == 300
        return statistics.mean(seen[step] for step in range(251, 301)), values(tmp_path / name, "loss", "eval")[300]

    trained, heldout = losses("none", {})
    for name, more in (("int8", INT8), ("powersgd", POWERSGD)):
        mine = losses(name, more)
        assert mine[0] == pytest.approx(trained, rel=0.02) and mine[1] == pytest.approx(heldout, rel=0.02), name
    assert losses("forgetful", POWERSGD, fault=True)[0] > 1.04 * trained


@pytest.mark.parametrize("compress", [INT8, POWERSGD], ids=lambda more: more["parallel__compress"])
def test_a_resume_goes_on_with_what_was_left_over(tokens, tmp_path, compress):
    """Bit for bit, two ranks of shards and two replicas; and a run that compresses may go on from one that did not."""
    changes = {**REP2, "parallel__dp_shard": 2, "model__dim": 32, "parallel__precision": "fp32"}

    def run(name, more):
        assert run_ranks(train, 4, job(tokens, tmp_path / name, **changes, **more), init=False) == [0] * 4
        return values(tmp_path / name, "loss")

    whole = run("whole", compress)
    for stop in (3, 6):
        # The rate does not come down here, so that a shorter run is the beginning of a longer one.
        halves = run("halves", {**compress, "train__steps": stop, "optim__schedule_steps": 6})
    assert halves == whole and len(whole) == 6
    run("other", {"train__steps": 3, "optim__schedule_steps": 6})
    other = run("other", compress)
    assert len(other) == 6 and other[6] != whole[6] and other[6] == pytest.approx(whole[6], rel=0.2)


def refused_step(rank, world, config):
    """What is left over and the weights, before and after a step in which one replica had a NaN."""
    from kforge_parallel import compression_of, full_parameters
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        trainer.step()
        before = {k: v.clone() for k, v in compression_of(parts.model).state_dict()["left"].items()}
        weights = full_parameters(parts.model)
        if rank == 1:
            parts.engine.scored_tokens, count = (lambda window: count(window) * torch.nan), parts.engine.scored_tokens
        trainer.step()
        after = compression_of(parts.model).state_dict()["left"]
        same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
        same &= all(torch.equal(p, weights[name]) for name, p in full_parameters(parts.model).items())
        if rank == 1:
            parts.engine.scored_tokens = count
        trainer.step()
        moved = any(not torch.equal(after[name], tensor) for name, tensor in before.items())
        return same, moved, any(bool(tensor.any()) for tensor in before.values())


@pytest.mark.parametrize("compress", [INT8, POWERSGD], ids=lambda more: more["parallel__compress"])
def test_a_refused_step_leaves_what_was_left_over(tokens, tmp_path, compress):
    config = job(tokens, tmp_path, **REP2, **compress, model__dim=32)
    assert run_ranks(refused_step, 2, config, init=False) == [(True, True, True)] * 2
