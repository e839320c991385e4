"""Jobs whose rows are cut over ranks: training, evaluation, text, and what cannot be."""

import pytest
import torch
from jobs import job, train, values

from kforge_testing import RankFailure, run_ranks

STYLES = ("allgather", "ulysses", "ring")
EVEN = {"model__vocab_size": 64, "data__microbatch_rows": 2, "train__steps": 4}
EVEN |= {"train__eval_every_steps": 3, "train__eval_rows": 0}


@pytest.fixture(scope="module")
def one(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert run_ranks(train, 1, job(tokens, folder, **EVEN), init=False) == [0]
    return folder


@pytest.mark.parametrize("style", STYLES)
def test_a_job_over_parts_of_rows_logs_what_one_process_logs(tokens, tmp_path, one, style):
    axes = {"parallel__dp_shard": 2, "parallel__cp": 2, "parallel__cp_style": style}
    assert run_ranks(train, 4, job(tokens, tmp_path, **EVEN, **axes), init=False) == [0] * 4
    for name in ("loss", "grad_norm", "tokens_total"):
        assert values(tmp_path, name) == pytest.approx(values(one, name), rel=1e-12), name
    for name in ("loss", "tokens"):
        assert values(tmp_path, name, "eval") == pytest.approx(values(one, name, "eval"), rel=1e-12)
    if style == "ring":  # and is scored on another number of processes than it was trained on
        right = values(one, "loss", "eval")[4]
        for world in (1, 2):
            assert run_ranks(score, world, tmp_path, init=False) == [pytest.approx(right, rel=1e-10)] * world


def score(rank, world, run_dir):
    from kforge_train.evaluate import evaluate_run

    return evaluate_run(run_dir)["loss"]


def text_of(rank, world, config):
    """What the model makes of two prompts, with a cache."""
    from kforge_model import generate
    from kforge_train.build import build

    with build(config) as parts:
        parts.model.eval()
        prompts = torch.tensor([[3, 5, 7], [11, 13, 17]])
        return [row.tolist() for row in generate(parts.model, prompts, max_new_tokens=6, temperature=0.0)]


def test_every_rank_of_a_row_generates_what_one_process_generates(tokens, tmp_path):
    config = job(tokens, tmp_path / "one", **EVEN, model__init_std=0.5)
    right = run_ranks(text_of, 1, config, init=False)[0]
    config = job(tokens, tmp_path / "cut", **EVEN, model__init_std=0.5, parallel__cp=2)
    assert run_ranks(text_of, 2, config, init=False) == [right, right]


def trained_in_bf16(rank, world, config):
    """Losses of four steps."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        vote, losses = parts.guard.vote, []

        def noted(*arguments, **more):
            result = vote(*arguments, **more)
            losses.append(result.loss.item())
            return result

        parts.guard.vote = noted
        trainer = Trainer(parts)
        for _ in range(4):
            trainer.step()
        return losses


@pytest.mark.parametrize("style", STYLES)
def test_in_bf16_losses_are_near_those_of_one_process(tokens, tmp_path, style):
    narrow = {**EVEN, "parallel__precision": "bf16"}
    (right,) = run_ranks(trained_in_bf16, 1, job(tokens, tmp_path / "one", **narrow), init=False)
    axes = {"parallel__cp": 2, "parallel__cp_style": style, "parallel__recompute": "full"}
    for losses in run_ranks(trained_in_bf16, 2, job(tokens, tmp_path / "cut", **narrow, **axes), init=False):
        assert losses == pytest.approx(right, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__sinks": True}, "model.sinks cannot be with parallel.cp = 2"),
        ({"model__attn_softcap": 20.0, "parallel__cp_style": "ring"}, "computes attention itself, without soft-cap"),
        ({"model__mtp_depth": 1}, "model.mtp_depth = 1 cannot be with parallel.cp = 2"),
        ({"data__row_tokens": 30}, "data.row_tokens = 30 cannot be split over parallel.cp = 2"),
        ({"model__n_heads": 1, "model__n_kv_heads": 1, "parallel__cp_style": "ulysses"}, "model.n_heads = 1 cannot"),
    ],
    ids=["sinks", "soft-cap", "further", "row", "heads"],
)
def test_what_cannot_be_is_refused_before_processes_meet(tokens, tmp_path, changes, words):
    config = job(tokens, tmp_path, **{**EVEN, "parallel__cp": 2, **changes})
    with pytest.raises(RankFailure) as failure:
        run_ranks(train, 2, config, init=False)
    assert "ConfigError" in str(failure.value) and words in str(failure.value)
