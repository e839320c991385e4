import pytest

from kforge_parallel import ParallelConfig


@pytest.mark.parametrize("axis", ["dp_replicate", "tp", "cp", "pp", "ep"])
def test_axes_that_do_not_exist_yet_are_refused_by_name(axis):
    with pytest.raises(ValueError, match=rf"parallel\.{axis} = 2 is not available"):
        ParallelConfig(**{axis: 2})
    with pytest.raises(ValueError, match=rf"parallel\.{axis} = 0"):
        ParallelConfig(**{axis: 0})


@pytest.mark.parametrize(
    ("field", "value"), [("dp_shard", 0), ("dp_shard", -2), ("init_timeout_s", 0), ("step_timeout_s", -1)]
)
def test_values_that_cannot_be_are_named(field, value):
    with pytest.raises(ValueError, match=f"parallel.{field} = {value}"):
        ParallelConfig(**{field: value})
