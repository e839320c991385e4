import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_parallel import ParallelConfig
from kforge_parallel.stages import (
    SCHEDULES,
    check_schedule,
    rank_of_stage,
    split_layers,
    stages_of_rank,
    stages_per_rank,
)


def test_stages_lie_in_a_loop_or_in_a_v():
    assert [rank_of_stage(stage, 3, v=False) for stage in range(9)] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [rank_of_stage(stage, 3, v=True) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [stages_of_rank(rank, ParallelConfig(pp_schedule="zbv"), 2) for rank in (0, 1)] == [[0, 3], [1, 2]]
    three = ParallelConfig(pp_schedule="interleaved_1f1b", pp_stages=3)
    assert [stages_of_rank(rank, three, 2) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_per_rank(ParallelConfig(pp_schedule=word)) for word in SCHEDULES] == [1, 1, 2, 2, 2, 2]


def test_every_word_is_a_schedule_of_torch():
    import torch.distributed.pipelining as pipelining

    for kind in SCHEDULES.values():
        assert hasattr(pipelining, kind.torch_name)


def counts(config, pp, *rest):
    return [len(layers) for layers in split_layers(config, pp, *rest)]


def test_blocks_are_dealt_evenly_with_one_more_to_the_first():
    assert counts(ParallelConfig(), 4, 8) == [2, 2, 2, 2]
    assert counts(ParallelConfig(), 4, 10) == [3, 3, 2, 2]
    assert counts(ParallelConfig(pp_schedule="zbv"), 2, 5) == [2, 1, 1, 1]


def test_blocks_are_dealt_as_told():
    assert counts(ParallelConfig(pp_layers=(1, 3, 2)), 3, 6) == [1, 3, 2]
    for layers, told in (((1, 3), 3), ((1, 3, 1), 6)):
        with pytest.raises(ValueError, match=r"parallel.pp_layers = .* must be 3 numbers, .* add up to model.n_layers"):
            split_layers(ParallelConfig(pp_layers=layers), 3, told)


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(ValueError, match=r"n_layers = 3 is fewer than the 4 stages of parallel\.pp = 2 × 2 a rank: .*"):
        split_layers(ParallelConfig(pp_schedule="dualpipev"), 2, 3)
    with pytest.raises(ValueError, match=r"set pp to at most 3, or n_layers to at least 4"):
        split_layers(ParallelConfig(), 4, 3)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(0, 20), st.integers(1, 3))
def test_by_cost_no_other_cut_has_a_cheaper_worst_stage(costs, last, stages):
    config = ParallelConfig(pp_split="cost")

    def worst(cuts):
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) + (last if b == len(costs) else 0) for a, b in itertools.pairwise(edges))

    found = split_layers(config, stages, len(costs), costs, last)
    assert [i for layers in found for i in layers] == list(range(len(costs))) and all(found)
    best = min(worst(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    assert worst([layers.stop for layers in found[:-1]]) == best


def test_a_dear_head_has_fewer_blocks_beside_it():
    config = ParallelConfig(pp_split="cost")
    assert counts(config, 2, 8, [1.0] * 8, 4.0) == [6, 2]
    assert counts(config, 2, 8, [1.0] * 8) == [4, 4]
    assert counts(config, 2, 8) == [4, 4]  # nothing is known of costs


@pytest.mark.parametrize(
    ("config", "microbatches", "words"),
    [
        ({"pp_schedule": "zbv", "recompute": "full"}, None, "run each block up to 7 times a microbatch"),
        ({"pp_schedule": "interleaved_zero_bubble", "recompute": "full"}, None, "set recompute to none"),
        ({"accumulate": "sharded"}, None, "reduces gradients once, after its last microbatch"),
        ({"cpu_offload": True}, None, "parallel.cpu_offload = true has not been proven with parallel.pp = 2"),
        ({}, 1, "wants at least as many microbatches as its 2 stages, and a step has 1"),
        ({"pp_schedule": "dualpipev"}, 3, "as its 4 stages, and a step has 3 on each data rank; .* pp_schedule to zbv"),
        (
            {"pp_schedule": "interleaved_1f1b"},
            5,
            "in 2 equal rounds, and 5 of them, .* fewer than 4 or a multiple of 2",
        ),
    ],
    ids=str,
)
def test_what_a_schedule_cannot_do_is_said_with_what_to_change(config, microbatches, words):
    with pytest.raises(ValueError, match=words):
        check_schedule(ParallelConfig(**config), 2, microbatches)
    check_schedule(ParallelConfig(**config), 1, microbatches)  # no pipeline


@pytest.mark.parametrize("word", SCHEDULES)
def test_what_is_accepted_is_what_torch_accepts(word):
    """torch's own schedule, built for a pipeline of two, refuses the same numbers of microbatches."""
    from types import SimpleNamespace

    import torch.distributed.pipelining as pipelining

    kind, config = SCHEDULES[word], ParallelConfig(pp_schedule=word)
    own = stages_of_rank(0, config, 2)
    for microbatches in range(1, 10):
        stages = [
            SimpleNamespace(
                stage_index=number, num_stages=2 * len(own), group_size=2, group_rank=0, submod=None,
                is_first=number == 0, is_last=False, has_backward=True,
            )
            for number in own
        ]  # fmt: skip
        accepted = []
        for attempt in (
            lambda n=microbatches: check_schedule(config, 2, n),
            lambda n=microbatches, s=stages: getattr(pipelining, kind.torch_name)(
                s if kind.stages > 1 else s[0], n, loss_fn=max
            ),
        ):
            try:
                attempt()
                accepted.append(True)
            except ValueError:
                accepted.append(False)
        assert accepted[0] == accepted[1], microbatches
