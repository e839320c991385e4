"""The permutation is one, differs by seed and epoch, mixes, and costs the same anywhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_data import Permutation, epoch_order


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_it_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    image = Permutation(size, seed=seed, epoch=epoch)(np.arange(size))
    assert image.dtype == np.int64
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(1, 2**62), data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_index_of_any_size_stays_inside_and_distinct(size: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    image = Permutation(size, seed=3)(np.array(index))
    assert image.min() >= 0 and image.max() < size and len(set(image.tolist())) == len(index)


def test_one_value_at_a_time_equals_all_at_once() -> None:
    permutation = Permutation(1000, seed=5, epoch=2)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([i]))[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()
    assert permutation(np.arange(1000).reshape(10, 100)).shape == (10, 100)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_permutations_come_about_equally_often(size: int) -> None:
    orders = Counter(tuple(Permutation(size, seed=seed)(np.arange(size)).tolist()) for seed in range(2400))
    kinds = int(np.prod(np.arange(1, size + 1)))
    expected = 2400 / kinds
    assert len(orders) == kinds
    chi_square = sum((count - expected) ** 2 / expected for count in orders.values())
    assert chi_square < kinds - 1 + 5 * np.sqrt(2 * kinds)  # five standard deviations


def test_a_large_permutation_mixes() -> None:
    size = 100_000
    image = Permutation(size, seed=1)(np.arange(size))
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.02
    steps = np.abs(np.diff(image))
    assert abs(steps.mean() / (size / 3) - 1) < 0.02  # mean distance of two uniform draws
    halves = image[: size // 2] < size // 2
    assert abs(halves.mean() - 0.5) < 0.01


def test_the_order_is_fixed_for_all_time() -> None:
    """Saved positions outlive releases, so the values themselves are part of the contract."""
    assert epoch_order(np.arange(12), rows=10, seed=1).tolist() == GOLDEN


GOLDEN = [4, 8, 7, 1, 2, 6, 0, 5, 3, 9, 6, 5]


def test_epochs_follow_one_another_and_differ() -> None:
    positions = np.arange(48)
    order = epoch_order(positions, rows=16, seed=7).reshape(3, 16)
    assert all(sorted(epoch) == list(range(16)) for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) == 3
    assert np.array_equal(order.reshape(-1), epoch_order(positions, rows=16, seed=7))
    assert not np.array_equal(order.reshape(-1), epoch_order(positions, rows=16, seed=8))
    assert epoch_order(np.array([40, 3]), rows=16, seed=7).tolist() == [order[2, 8], order[0, 3]]


def test_without_shuffle_rows_come_as_they_lie() -> None:
    assert epoch_order(np.arange(7), rows=3, seed=1, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="source is empty"):
        Permutation(0, seed=1)
    with pytest.raises(ValueError, match=r"2\*\*62"):
        Permutation(2**62 + 1, seed=1)
    with pytest.raises(ValueError, match="outside of a permutation of 5"):
        Permutation(5, seed=1)(np.array([5]))
    with pytest.raises(ValueError, match="no rows"):
        epoch_order(np.arange(3), rows=0, seed=1)
    with pytest.raises(ValueError, match="-1 is negative"):
        epoch_order(np.array([-1]), rows=3, seed=1)
