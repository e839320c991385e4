"""Jobs in stages: what is logged, and checkpoints that go on in other layouts, against one process."""

import pytest
from jobs import job, train, values

from kforge_metrics import read_events
from kforge_testing import run_ranks
from kforge_train import ConfigError

SHAPE = {
    "model__vocab_size": 64,  # a multiple of tp
    "model__n_layers": 5,
    "model__tie_embeddings": True,
    "data__microbatch_rows": 1,
    "optim__clip_norm": 0.05,
    "optim__schedule_steps": 6,
    "train__eval_every_steps": 2,
}
EXPERTS = {**SHAPE, "model__n_experts": 4, "model__moe_pattern": "DM", "model__router_bias": True}
STAGES = {"parallel__pp": 2, "parallel__dp_shard": 1}


def seen(run_dir):
    """Every number of every step that depends on the model, and the evaluations."""
    names = {name for event in read_events(run_dir / "events.jsonl") if event.kind == "step" for name in event.values}
    told = [name for name in names if name in ("loss", "grad_norm", "lr") or name.startswith(("norm/", "moe/"))]
    return {name: values(run_dir, name) for name in told} | {"evaluation": values(run_dir, "loss", "eval")}


def check_same(found, want):
    assert found.keys() == want.keys()
    for name, by_step in want.items():
        assert found[name] == pytest.approx(by_step, rel=1e-11, abs=1e-14), name


@pytest.fixture(scope="module")
def whole(tokens, tmp_path_factory):
    """The same jobs on one process."""
    found = {}
    for name, options in (("dense", {**SHAPE, "optim__ema_decay": 0.5}), ("experts", EXPERTS), ("muon", SHAPE)):
        folder = tmp_path_factory.mktemp(name)
        more = {"optim__name": "muon"} if name == "muon" else {}
        assert run_ranks(train, 1, job(tokens, folder, **options, **more)) == [0]
        found[name] = seen(folder)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {"optim__ema_decay": 0.5, "parallel__pp_split": "cost"}),
        ("dense", {"optim__ema_decay": 0.5, "parallel__pp_schedule": "zbv"}),
        ("experts", {"parallel__pp_schedule": "interleaved_1f1b", **EXPERTS}),
        ("muon", {"optim__name": "muon"}),
    ],
    ids=["dense", "dense-v", "experts", "muon"],
)
def test_a_job_in_stages_tells_what_one_process_tells(tokens, tmp_path, whole, name, options):
    config = job(tokens, tmp_path, **{**SHAPE, **STAGES, **options})
    assert run_ranks(train, 2, config, init=False) == [0, 0]
    check_same(seen(tmp_path), whole[name])
    parameters = [e.values["parameters"] for e in read_events(tmp_path / "events.jsonl") if e.kind == "start"]
    assert parameters == [sum_of_parameters(config)]


def sum_of_parameters(config):
    from kforge_model import build_model

    return sum(parameter.numel() for parameter in build_model(config.model).parameters())


JOURNEY = [
    (2, STAGES),
    (2, {"parallel__tp": 2}),
    (4, {"parallel__cp": 2, "parallel__dp_shard": 2}),
    (2, {**STAGES, "parallel__pp_schedule": "zbv"}),
    (1, {}),
    (4, {"parallel__pp": 2, "parallel__dp_shard": 2, "parallel__pp_schedule": "interleaved_zero_bubble"}),
]
"""(processes, layout) of each step of one run."""


def test_microbatches_need_not_divide_the_rows_of_a_step(tokens, tmp_path, whole):
    config = job(tokens, tmp_path, **{**SHAPE, **STAGES, "optim__name": "muon", "data__microbatch_rows": 3})
    assert run_ranks(train, 2, config, init=False) == [0, 0]
    check_same(seen(tmp_path), whole["muon"])


def test_a_checkpoint_goes_on_in_any_layout(tokens, tmp_path, whole):
    for step, (world, layout) in enumerate(JOURNEY, start=1):
        options = {**SHAPE, "optim__ema_decay": 0.5, **layout, "train__steps": step, "train__eval_every_steps": 0}
        assert run_ranks(train, world, job(tokens, tmp_path, **options), init=False) == [0] * world
    found = seen(tmp_path)
    assert list(found["loss"]) == [1, 2, 3, 4, 5, 6]
    evaluations = found.pop("evaluation")
    check_same(found, {name: by_step for name, by_step in whole["dense"].items() if name != "evaluation"})
    for step, loss in whole["dense"]["evaluation"].items():
        assert evaluations[step] == pytest.approx(loss, rel=1e-11)


def test_a_run_in_stages_is_scored_on_one_process_and_in_stages(tokens, tmp_path):
    config = job(tokens, tmp_path, **SHAPE, **STAGES, train__eval_rows=0)
    assert run_ranks(train, 2, config, init=False) == [0, 0]
    one, two = run_ranks(score, 1, tmp_path)[0], run_ranks(score, 2, tmp_path, init=False)
    assert two[0]["loss"] == two[1]["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert one["loss"] == pytest.approx(values(tmp_path, "loss", "eval")[6], rel=1e-12)


def score(rank, world, run_dir):
    from kforge_train.evaluate import evaluate_run

    return evaluate_run(run_dir)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data__microbatch_rows": 8}, r"1f1b wants at least as many microbatches as its 2 stages, and a step has 1"),
        ({"parallel__pp_schedule": "dualpipev", "data__microbatch_rows": 4}, r"as its 4 stages, and a step has 2"),
        ({"parallel__pp_layers": (2, 2)}, r"parallel\.pp_layers = \[2, 2\] must be 2 numbers.* model\.n_layers = 5"),
        ({"parallel__accumulate": "sharded"}, r"parallel\.accumulate = sharded cannot be with parallel\.pp = 2"),
        ({"parallel__recompute": "full", "parallel__pp_schedule": "zbv"}, r"up to 7 times a microbatch"),
    ],
    ids=["1f1b", "dualpipev", "layers", "sharded", "recompute"],
)
def test_what_cannot_be_in_stages_is_refused_before_a_group_exists(tokens, tmp_path, options, words):
    from kforge_train.build import check

    with pytest.raises((ConfigError, ValueError), match=words):
        check(job(tokens, tmp_path, **{**SHAPE, **STAGES, **options}), 2)
