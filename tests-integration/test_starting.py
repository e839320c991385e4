"""Runs that start from the weights of another: the same, a part of them, under other names, in a larger model."""

import pytest
import torch
from jobs import job, train, values

from kforge_ckpt import Checkpointer
from kforge_parallel.fsdp import full
from kforge_testing import RankFailure, run_ranks
from kforge_train import ConfigError
from kforge_train.build import check

FRESH = {"train__seed": 5, "train__steps": 2}


def restored(rank, world, config):
    """The weights that a run starts with, whole and at full precision, and the state of everything else."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        trainer.restore()
        weights = {name: full(parts.optimizer.full_weight(name)) for name, _ in parts.model.named_parameters()}
        moments = parts.optimizer.state_dict()["state"].values()
        assert not any(full(state["exp_avg"]).any() for state in moments)
        return weights, trainer.next_step, parts.optimizer.schedule_step


class Read:
    def __init__(self, shapes, dtype):
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        pass


def weights_of(run, like, step=None, dtype=torch.float64):
    read = Read({name: weight.shape for name, weight in like.items()}, dtype)
    Checkpointer(run / "checkpoints").restore({"model": read}, step)
    return read.tensors


@pytest.fixture(scope="module")
def source(tokens, tmp_path_factory):
    run = tmp_path_factory.mktemp("source")
    assert run_ranks(train, 1, job(tokens, run, ckpt__every_steps=3)) == [0]
    return run


@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_the_weights_and_nothing_else(tokens, tmp_path, source, world, step):
    config = job(tokens, tmp_path, ckpt__init_from=str(source), ckpt__init_step=step, **FRESH)
    for weights, next_step, schedule_step in run_ranks(restored, world, config, init=False):
        assert (next_step, schedule_step) == (0, 0)
        for name, saved in weights_of(source, weights, step).items():
            assert weights[name].equal(saved), name
    assert run_ranks(train, world, config, init=False) == [0] * world
    # Its own checkpoint comes before the other's.
    again = job(tokens, tmp_path, ckpt__init_from=str(source), **{**FRESH, "train__steps": 3})
    assert run_ranks(train, world, again, init=False) == [0] * world
    assert list(values(tmp_path, "loss")) == [1, 2, 3]


@pytest.mark.parametrize("world", [1, 2])
def test_fp32_weights_into_split_storage_lose_no_bit(tokens, tmp_path, world):
    run = tmp_path / "wide"
    assert run_ranks(train, 1, job(tokens, run, parallel__precision="bf16")) == [0]
    changes = {"parallel__precision": "bf16", "parallel__storage": "split", **FRESH}
    config = job(tokens, tmp_path / "split", ckpt__init_from=str(run / "checkpoints"), **changes)
    for weights, *_ in run_ranks(restored, world, config, init=False):
        for name, saved in weights_of(run, weights, dtype=torch.float32).items():
            assert weights[name].equal(saved), name


def test_a_larger_model_and_vocabulary(tokens, tmp_path, source):
    larger = {"model__dim": 32, "model__n_layers": 3, "model__head_dim": 4, "model__vocab_size": 70, **FRESH}
    ((seeded, *_),) = run_ranks(restored, 1, job(tokens, tmp_path / "seed", **larger), init=False)
    config = job(tokens, tmp_path / "larger", ckpt__init_from=str(source), **larger)
    with pytest.raises(RankFailure, match="of another shape"):
        run_ranks(restored, 1, config, init=False)
    config = job(tokens, tmp_path / "larger", ckpt__init_from=str(source), ckpt__init_partial=True, **larger)
    ((weights, *_),) = run_ranks(restored, 1, config, init=False)
    small = job(tokens, tmp_path / "small", ckpt__init_from=str(source), **FRESH)
    ((first, *_),) = run_ranks(restored, 1, small, init=False)
    assert len(weights) > len(first)
    for name, weight in weights.items():
        expected = seeded[name]
        if name in first:
            corner = tuple(slice(size) for size in first[name].shape)
            expected[corner] = first[name]
        assert weight.equal(expected), name


def test_parts_excluded_and_a_feed_forward_half_for_each_expert(tokens, tmp_path, source):
    experts = {"model__n_experts": 4, "model__moe_top_k": 2, **FRESH}
    ((seeded, *_),) = run_ranks(restored, 1, job(tokens, tmp_path / "seed", **experts), init=False)
    changes = {
        "ckpt__init_from": str(source),
        "ckpt__init_partial": True,
        "ckpt__init_exclude": (r"\.embed\.",),
        "ckpt__init_rename": {
            r"\.mlp\.w_gate_up\.weight$": ".moe.experts.w_gate_up",
            r"\.mlp\.w_down\.weight$": ".moe.experts.w_down",
        },
    }
    ((weights, *_),) = run_ranks(restored, 1, job(tokens, tmp_path / "experts", **experts, **changes), init=False)
    small = job(tokens, tmp_path / "small", ckpt__init_from=str(source), **FRESH)
    ((dense, *_),) = run_ranks(restored, 1, small, init=False)
    for name, weight in weights.items():
        half = name.replace(".moe.experts.", ".mlp.") + ".weight"
        if "embed" in name or "router" in name:
            assert weight.equal(seeded[name]), name
        elif "experts" in name:
            assert all(expert.equal(dense[half]) for expert in weight), name
        else:
            assert weight.equal(dense[name]), name


def test_what_is_not_there_to_start_from_is_told_before_processes_meet(tokens, tmp_path, source):
    def of(place, **more):
        return job(tokens, tmp_path / "run", ckpt__init_from=str(place), **more)

    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        with pytest.raises(ConfigError, match=rf"ckpt\.init_from = .*{place} holds no committed checkpoint"):
            check(of(tmp_path / place), 2)
    with pytest.raises(ConfigError, match=r"ckpt\.init_step = 77: .* holds no checkpoint of it; there are \d"):
        check(of(source, ckpt__init_step=77), 2)
    check(of(source), 2)
    assert run_ranks(train, 1, of(source, train__steps=2), init=False) == [0]
    check(of(tmp_path / "nowhere"), 2)  # a run with checkpoints of its own goes on from them
