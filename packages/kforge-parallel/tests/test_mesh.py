import pytest

from kforge_parallel import ParallelConfig, resolve_axes


@pytest.mark.parametrize("world", [1, 2, 7, 64])
def test_minus_one_takes_all(world):
    assert resolve_axes(ParallelConfig(), world) == {
        "pp": 1,
        "dp_replicate": 1,
        "dp_shard": world,
        "cp": 1,
        "tp": 1,
    }


@pytest.mark.parametrize(("axis", "world"), [(4, 2), (2, 4), (1, 3)])
def test_a_product_other_than_the_world_is_refused_with_both_numbers(axis, world):
    with pytest.raises(ValueError, match=f"wants {axis} processes, but {world} are running"):
        resolve_axes(ParallelConfig(dp_shard=axis), world)
