from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_ckpt.retention import expendable


def test_newest_and_multiples_are_kept() -> None:
    steps = [100, 150, 200, 250, 300, 350]
    assert expendable(steps, keep_last=2) == [100, 150, 200, 250]
    assert expendable(steps, keep_last=2, keep_every=100) == [150, 250]
    assert expendable(steps, keep_last=1, protect=[100]) == [150, 200, 250, 300]
    assert expendable([], keep_last=1) == []


@settings(deadline=None)
@given(st.sets(st.integers(0, 500)), st.integers(1, 5), st.integers(0, 7))
def test_the_rule(steps: set[int], keep_last: int, keep_every: int) -> None:
    gone = expendable(steps, keep_last=keep_last, keep_every=keep_every)
    left = steps - set(gone)
    assert set(gone) <= steps
    assert sorted(steps)[-keep_last:] == sorted(left)[-keep_last:]
    assert all(not keep_every or step % keep_every for step in gone)
    assert expendable(left, keep_last=keep_last, keep_every=keep_every) == []


def test_numbers_that_would_delete_everything_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last = 0"):
        expendable([], keep_last=0)
    with pytest.raises(ValueError, match="keep_every = -1"):
        expendable([], keep_last=1, keep_every=-1)
