"""A small model in stages, under every schedule, against the same model in one piece."""

import pytest
import torch
from toy import IDS, Shared, Staged, Toy, fill, worst

from kforge_parallel._torch import SPLITS_BACKWARD
from kforge_testing import RankFailure, run_ranks

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
PARTS = [slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 8)]
"""Microbatches of unequal rows."""
ROWS = torch.cat((IDS, (IDS * 5 + 2) % 11))


def loss_of(logits):
    return logits.logsumexp(-1).square().sum()


def call(stage, x, number):
    y = stage(ROWS[PARTS[number]] if x is None else x)
    return y if stage.head is None else loss_of(y)


def plain(tied, steps=2):
    """Losses, gradients and weights of the whole."""
    model = Staged(tied).double()
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for _ in range(steps):
        losses.append([loss_of(model(ROWS[part])) for part in PARTS])
        sum(losses[-1]).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = [loss_of(model(ROWS[part])).item() for part in PARTS]
    losses = [[loss.item() for loss in of_step] for of_step in losses]
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}, after


def piped(rank, world, tied, options, init=True):
    from kforge_parallel import ParallelConfig, Pipeline, check_replicas, full_parameters, launch, parallelize
    from kforge_parallel.fsdp import full

    torch.manual_seed(5)
    mesh = launch(ParallelConfig(precision="fp64", dp_shard=1, pp=2, **options))
    if init:
        model = parallelize(lambda: Staged(tied), mesh, init=fill, gradients="sum")
    else:

        def build():
            model = Staged(tied).double()
            fill(model)
            return model

        model = parallelize(build, mesh, gradients="sum")
    check_replicas(model)
    pipeline = Pipeline(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shapes = [(len(ROWS[part]), 6, 6) for part in PARTS]
    losses, gradients, before = [], [], [x.item() for x in pipeline.forward(call, shapes)]
    for _ in range(2):
        losses.append([loss.item() for loss in pipeline.train(call, shapes)])
        gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    after = [x.item() for x in pipeline.forward(call, shapes[:3])] + [
        x.item() for x in pipeline.forward(lambda stage, x, number: call(stage, x, 3), shapes[3:])
    ]
    stages = [[int(name) for name in one.stage.layers] for one in model.pipeline_stages.calls]
    return losses, gradients, full_parameters(model), before, after, stages, pipeline.copies


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_is_the_model_in_one_piece(schedule, tied):
    losses, gradients, weights, after = plain(tied)
    ranks = run_ranks(piped, 2, tied, {"pp_schedule": schedule})
    ends = [0, 0] if schedule in ("zbv", "dualpipev") else [0, 1]
    for rank, (found, grads, values, before, at_the_end, _, copies) in enumerate(ranks):
        last = rank == ends[1]
        assert found == [pytest.approx(of_step, rel=1e-12) if last else [] for of_step in losses]
        assert before == (pytest.approx(losses[0], rel=1e-12) if last else [])
        assert at_the_end == (pytest.approx(after, rel=1e-12) if last else [])
        assert copies == ({"embed.weight": 2} if tied and ends[0] != ends[1] else {})
        for got, want in zip((*grads, values), (*gradients, weights), strict=True):
            assert worst(got, {name: want[name] for name in got}) < 1e-11
    assert set().union(*(values for _, _, values, *_ in ranks)) == weights.keys()
    for name in ranks[0][2].keys() & ranks[1][2].keys():
        assert torch.equal(ranks[0][2][name], ranks[1][2][name]), name  # copies stay alike


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({}, [[[0, 1, 2]], [[3, 4]]]),
        ({"pp_layers": (1, 4)}, [[[0]], [[1, 2, 3, 4]]]),
        ({"pp_schedule": "zbv"}, [[[0, 1], [4]], [[2], [3]]]),
        ({"pp_schedule": "interleaved_zero_bubble"}, [[[0, 1], [3]], [[2], [4]]]),
    ],
    ids=str,
)
def test_ranks_have_the_blocks_that_they_are_told(options, stages):
    assert [seen[5] for seen in run_ranks(piped, 2, False, options)] == stages


def test_values_that_a_model_brings_along_are_those_of_the_whole():
    want = plain(True)
    for seen in run_ranks(piped, 2, True, {"pp_schedule": "zbv"}, False):
        assert worst(seen[2], {name: want[2][name] for name in seen[2]}) < 1e-11


def refused(rank, world, build, options):
    from kforge_parallel import ParallelConfig, launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64", dp_shard=1, pp=2, **options))
    try:
        parallelize(build, mesh, init=fill)
    except ValueError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (Toy, {}, "needs to know how to cut Toy: give the class a method stage(first, layers, last)"),
        (Staged, {"pp_layers": (2, 2)}, "add up to model.n_layers = 5"),
        (Shared, {"pp_schedule": "zbv"}, "embed.weight is in 4 stages, and can be in two"),
    ],
    ids=["whole", "layers", "shared"],
)
def test_what_cannot_be_cut_is_refused(build, options, words):
    assert all(words in said for said in run_ranks(refused, 2, build, options))


def in_one_piece(rank, world):
    from kforge_parallel import ParallelConfig, Pipeline, launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64"))
    Pipeline(parallelize(Staged, mesh, init=fill), mesh)


def test_a_model_in_one_piece_is_no_pipeline():
    with pytest.raises(RankFailure, match="a pipeline wants what `parallelize` returns on a mesh with pp > 1"):
        run_ranks(in_one_piece, 1)


def twice(rank, world, options):
    """Gradients of one call, and of two without anything between them."""
    from kforge_parallel import ParallelConfig, Pipeline, launch, parallelize
    from kforge_parallel.fsdp import full

    mesh = launch(ParallelConfig(precision="fp64", dp_shard=1, pp=2, **options))
    model = parallelize(lambda: Staged(True), mesh, init=fill, gradients="sum")
    pipeline, found = Pipeline(model, mesh), []
    for _ in range(2):
        pipeline.train(call, [(len(ROWS[part]), 6, 6) for part in PARTS])
        found.append({name: full(p.grad) for name, p in model.named_parameters()})
    try:
        pipeline.train(call, [(2, 6, 6), (2, 5, 6)])
    except ValueError as error:
        return found, str(error)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_gradients_add_up_over_calls(schedule):
    for (once, both), said in run_ranks(twice, 2, {"pp_schedule": schedule}):
        assert worst(both, {name: 2 * grad for name, grad in once.items()}) < 1e-14
        assert "alike but for the rows" in said


def failing(rank, world):
    from kforge_parallel import ParallelConfig, Pipeline, launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64", dp_shard=1, pp=2))
    model = parallelize(Staged, mesh, init=fill, gradients="sum")

    def bad(stage, x, number):
        if x is not None:
            raise ArithmeticError("out of cheese")
        return stage(ROWS[:2])

    try:
        Pipeline(model, mesh).forward(bad, [(2, 6, 6)])
    except ArithmeticError as error:
        return str(error), model.pipeline_stages.calls[0].call


def test_what_a_stage_raises_comes_out_and_nothing_of_the_call_is_kept():
    assert run_ranks(failing, 2) == [None, ("out of cheese", None)]


def recomputed(rank, world, options):
    """How often each block of this rank runs forward in a step of four microbatches."""
    from kforge_parallel import ParallelConfig, Pipeline, launch, layout, parallelize

    layout.check_schedule = lambda *_: None
    mesh = launch(ParallelConfig(precision="fp64", dp_shard=1, pp=2, **options))
    model = parallelize(Staged, mesh, init=fill, gradients="sum")
    runs = []
    for block in model.layers.values():
        block.linear.register_forward_pre_hook(lambda *_: runs.append(1))
    Pipeline(model, mesh).train(call, [(len(ROWS[part]), 6, 6) for part in PARTS])
    return len(runs) / len(PARTS) / len(model.layers)


def test_recomputation_runs_a_block_twice_and_under_a_split_backward_more_often():
    """The reason why `check_schedule` refuses it there: the number grows with the parameters of a block."""
    assert run_ranks(recomputed, 2, {"recompute": "full"}) == [2, 2]
    for runs in run_ranks(recomputed, 2, {"recompute": "full", "pp_schedule": "zbv"}):
        assert runs > 2.5 if SPLITS_BACKWARD else runs == 2
