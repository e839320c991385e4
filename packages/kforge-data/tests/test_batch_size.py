"""Rows of a step, rows before it, and the step after so many: each against counting step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kforge_data.batch_size import BatchSize

SOME = st.integers(1, 9)


@given(SOME, st.lists(st.tuples(SOME, SOME), max_size=4))
def test_equals_counting(global_rows: int, phases: list[tuple[int, int]]) -> None:
    size = BatchSize(global_rows, tuple(phases))
    rows = [each for steps, each in phases for _ in range(steps)] + [global_rows] * 5
    assert [size.at(step) for step in range(len(rows))] == rows
    before = [sum(rows[:step]) for step in range(len(rows) + 1)]
    assert [size.before(step) for step in range(len(rows) + 1)] == before
    for total in range(before[-1] + 1):
        assert size.step_at(total) == next(step for step, seen in enumerate(before) if seen >= total)


def test_far_away_costs_nothing() -> None:
    size = BatchSize(2048, ((10**6, 64), (10**6, 512)))
    assert size.before(10**12) == 10**6 * (64 + 512) + (10**12 - 2 * 10**6) * 2048
    assert size.step_at(size.before(10**12) - 1) == 10**12
    assert size.at(10**6 - 1) == 64 and size.at(10**6) == 512 and size.at(2 * 10**6) == 2048


@pytest.mark.parametrize("phase", [(0, 4), (4, 0)])
def test_a_phase_of_nothing_is_an_error(phase: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"batch_phases\[1\] has . steps of . rows; both must be at least 1"):
        BatchSize(4, ((1, 1), phase))
