"""Jobs of models that are not kforge's own: a plain module, and Hugging Face's, in any layout as on one process."""

import own_models
import pytest
from jobs import job, values

from kforge_testing import run_ranks
from kforge_train import ConfigError
from kforge_train.build import check

TP = {"parallel__tp": 2, "parallel__sequence_parallel": False}


@pytest.mark.parametrize("kind", ["own-mixer", "hf-qwen3"])
def test_a_job_logs_what_one_process_logs_and_goes_on_in_another_layout(tokens, tmp_path, kind):
    def of(name, **more):
        more = {"train__steps": 6, "optim__schedule": "constant"} | more
        return job(tokens, tmp_path / name, model__kind=kind, **more)

    assert run_ranks(own_models.train, 1, of("one")) == [[0]]
    losses = values(tmp_path / "one", "loss")
    assert losses[6] < losses[1] - 0.1
    layouts = (of("shards"), of("halves", **TP))
    first = of("moved", train__steps=3, **TP)
    assert run_ranks(own_models.train, 2, *layouts, first) == [[0, 0, 0]] * 2
    assert run_ranks(own_models.train, 1, of("moved")) == [[0]]
    for name in ("shards", "halves", "moved"):
        assert values(tmp_path / name, "loss") == pytest.approx(losses, rel=1e-10), name
        at_end = values(tmp_path / name, "loss", "eval")[6]
        assert at_end == pytest.approx(values(tmp_path / "one", "loss", "eval")[6], rel=1e-10)


def test_a_hugging_face_job_in_stages_over_experts_and_parts_of_rows(tokens, tmp_path):
    def of(name, **more):
        return job(tokens, tmp_path / name, model__kind="hf-qwen3-moe", train__steps=3, train__eval_rows=0, **more)

    stages = of("stages", parallel__pp=2, data__microbatch_rows=2)
    assert run_ranks(own_models.train, 1, of("one")) == [[0]]
    assert (
        run_ranks(own_models.train, 2, stages, of("experts", parallel__ep=2), of("rows", parallel__cp=2))
        == [[0, 0, 0]] * 2
    )
    for name in ("stages", "experts", "rows"):
        assert values(tmp_path / name, "loss") == pytest.approx(values(tmp_path / "one", "loss"), rel=1e-10), name


def test_buffers_that_change_in_forward_are_saved_as_they_were(tokens, tmp_path):
    config = job(tokens, tmp_path, model__kind="own-counting")
    assert run_ranks(own_models.saved_before_a_step, 1, config) == [(3, 4)]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "own-mixer",
            {"parallel__pp": 2},
            "parallel.pp = 2 needs to know how to cut Model: give the class a method st",
        ),
        ("own-mixer", {"parallel__cp": 2}, "parallel.cp = 2, but block 0 of Model .Mixer. has no attention core"),
        ("own-mixer", {"parallel__ep": 2}, "parallel.ep = 2, but Model has no experts"),
        ("own-mixer", {"parallel__precision": "bf16", "parallel__storage": "split"}, "no method init_value_"),
        ("own-mixer", {"parallel__recompute": "auto"}, "cannot be estimated: sizes are known of the Transformer only"),
        ("hf-qwen3", {"parallel__tp": 2}, "has whole rows; set parallel.sequence_parallel to false"),
        ("hf-qwen3", {**TP, "model__n_kv_heads": 1}, "num_key_value_heads = 1, which parallel.tp = 2 does not divide"),
        ("hf-qwen3-moe", {**TP, "parallel__ep": 2}, "set tp to 1, or ep to 1"),
        ("hf-qwen3", {"parallel__pp": 2, "model__n_layers": 1}, "n_layers = 1 is fewer than the 2 stages"),
    ],
)
def test_what_a_model_cannot_is_refused_before_processes_meet(tokens, tmp_path, kind, changes, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        check(job(tokens, tmp_path / "run", model__kind=kind, **changes), 2)
