import dataclasses
import inspect
import re

import pytest

from kforge_parallel import ParallelConfig

AXES = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_is_a_number_or_what_is_left(axis):
    others = {} if axis == "dp_shard" else {"dp_shard": 1}
    for value in (1, 2, -1):
        assert getattr(ParallelConfig(**{**others, axis: value}), axis) == value
    for value in (0, -2):
        with pytest.raises(ValueError, match=rf"parallel\.{axis} = {value} must be at least 1, or -1"):
            ParallelConfig(**{**others, axis: value})


def test_only_one_axis_takes_what_is_left():
    with pytest.raises(ValueError, match=r"parallel\.dp_shard and parallel\.tp are -1, but only one axis can take"):
        ParallelConfig(tp=-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ep", 0),
        ("ep", -1),
        ("prefetch", -1),
        ("init_timeout_s", 0),
        ("build_timeout_s", 0),
        ("step_timeout_s", -1),
        ("step_timeout_s", float("nan")),
        ("step_timeout_s", float("inf")),
    ],
)
def test_values_that_cannot_be_are_named(field, value):
    with pytest.raises(ValueError, match=rf"parallel\.{field} = {value}"):
        ParallelConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tp", "2", "= '2' must be an integer"),
        ("tp", 2.0, "= 2.0 must be an integer"),
        ("dp_shard", True, "= True must be an integer"),
        ("prefetch", None, "= None must be an integer"),
        ("compile", 1, "= 1 must be true or false"),
        ("sequence_parallel", "false", "= 'false' must be true or false"),
        ("step_timeout_s", "60", "= '60' must be a number"),
        ("init_timeout_s", True, "= True must be a number"),
        ("device", "gpu", "= 'gpu' is unknown; use one of auto, cpu, cuda"),
        ("storage", "splt", "= 'splt' is unknown; use one of fp32, split, stochastic"),
        ("precision", "fp8", "= 'fp8' is unknown; use one of bf16, fp16, tf32, fp32, fp64"),
        ("recompute", True, "= True is unknown; use one of none, full, selective"),
        ("accumulate", ["sharded"], "= ['sharded'] is unknown; use one of unsharded, sharded"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_to_use(field, value, says):
    with pytest.raises(ValueError, match=re.escape(f"parallel.{field} {says}")):
        ParallelConfig(**{field: value})


def test_every_field_is_of_a_kind_that_is_checked():
    for field in dataclasses.fields(ParallelConfig):
        wrong = 2 if isinstance(field.default, tuple) else ()
        with pytest.raises(ValueError, match=rf"parallel\.{field.name} = {re.escape(str(wrong))}"):
            ParallelConfig(**{field.name: wrong})
    assert ParallelConfig(init_timeout_s=60).init_timeout_s == 60  # a whole number is a number


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pp_stages": 2}, "parallel.pp_stages = 2 cannot be with parallel.pp_schedule = 1f1b; only the interleaved"),
        ({"pp_stages": 2, "pp_schedule": "zbv"}, "only the interleaved schedules take a number; use 0"),
        ({"pp_stages": 1, "pp_schedule": "interleaved_1f1b"}, "parallel.pp_stages = 1 .* use 2 or more, or 0 for 2"),
        ({"pp_stages": -1, "pp_schedule": "interleaved_zero_bubble"}, "parallel.pp_stages = -1"),
        ({"pp_layers": (2, 0)}, r"parallel.pp_layers = \(2, 0\) must be whole numbers of at least 1"),
        ({"pp_layers": (2, True)}, "must be whole numbers"),
        ({"fp8_skip": ("*head", 3)}, r"parallel.fp8_skip = \('\*head', 3\) must be patterns of names"),
        ({"pp_layers": (2, 2), "pp_split": "cost"}, "parallel.pp_split = cost both deal blocks to stages; give one"),
    ],
    ids=str,
)
def test_a_pipeline_is_told_of_in_one_way(fields, says):
    with pytest.raises(ValueError, match=says):
        ParallelConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recompute_every": 2}, "recompute_every = 2 cannot be with parallel.recompute = none"),
        ({"recompute_every": 0, "recompute": "full"}, "recompute_every = 0 .* at least 1"),
        ({"recompute_blocks": 2}, "recompute_blocks = 2 cannot be with parallel.recompute = none"),
        ({"recompute_blocks": -1, "recompute": "full"}, "recompute_blocks = -1 .* must not be negative"),
        ({"recompute_blocks": 2, "recompute_every": 2, "recompute": "full"}, "where recompute_every says how many"),
        ({"recompute_keep": (), "recompute": "selective"}, r"recompute_keep = \(\) must name operations; to keep none"),
        ({"recompute_keep": (1,), "recompute": "selective"}, r"recompute_keep = \(1,\) must name operations"),
        ({"recompute_keep": ("products",), "recompute": "full"}, "= full; set it to selective, or leave"),
        ({"offload_activations": True, "recompute": "selective"}, "set recompute to full or none, or offload"),
    ],
    ids=str,
)
def test_activations_are_kept_in_one_way(fields, says):
    with pytest.raises(ValueError, match=says):
        ParallelConfig(**fields)


def test_split_storage_is_of_bf16_only():
    with pytest.raises(ValueError, match=r"parallel\.storage = split .* parallel\.precision = fp32"):
        ParallelConfig(storage="split", precision="fp32")


def test_every_field_says_what_it_is():
    source = inspect.getsource(ParallelConfig)
    for field in dataclasses.fields(ParallelConfig):
        said = re.search(rf'\n    {field.name}: [^\n]*\n    """(.*?)"""', source, re.S)
        assert said, field.name
        if field.name.endswith("_s"):
            assert "in seconds" in said[1], field.name


@pytest.mark.parametrize("blocks", [1, 7, 32])
def test_blocks_that_are_run_again_are_as_many_as_asked_and_spread_evenly(blocks):
    assert ParallelConfig().run_again(blocks) == [False] * blocks
    assert ParallelConfig(recompute="full", recompute_every=3).run_again(7) == [True, False, False] * 2 + [True]
    for count in range(1, 40):
        again = ParallelConfig(recompute="full", recompute_blocks=count).run_again(blocks)
        assert sum(again) == min(count, blocks)
        for width in range(1, blocks + 1):  # every stretch of one width has the same number, or one more
            sums = {sum(again[i : i + width]) for i in range(blocks - width + 1)}
            assert max(sums) - min(sums) <= 1
