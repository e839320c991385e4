"""One job at a time, and its error told once; several at once, and the error that counts."""

from __future__ import annotations

import threading

import pytest

from kforge_ckpt.background import Background, Stopped, at_once


def test_a_job_is_waited_for_and_its_error_raised_once() -> None:
    background, go, done = Background(), threading.Event(), []

    def job() -> None:
        go.wait()
        done.append(1)
        raise OSError(28, "full")

    background.start("one", job)
    assert background.busy and not background.failed and not done
    go.set()
    with pytest.raises(OSError, match="full"):
        background.wait()
    assert done == [1] and not background.busy and not background.failed
    background.wait()


def test_the_next_job_waits_for_the_one_before_and_raises_its_error() -> None:
    background, order = Background(), []

    def fails() -> None:
        order.append(1)
        raise ValueError("first")

    background.start("one", fails)
    with pytest.raises(ValueError, match="first"):
        background.start("two", lambda: order.append(2))
    background.start("three", lambda: order.append(3))
    background.start("four", lambda: order.append(4))
    background.wait()
    assert order == [1, 3, 4]


def test_jobs_at_once_run_side_by_side_and_answer_in_order() -> None:
    met = threading.Barrier(3, timeout=30)

    def square(number: int) -> int:
        met.wait()  # would break if one waited for another to end
        return number**2

    assert at_once(square, [1, 2, 3], 3) == [1, 4, 9]
    assert at_once(abs, [-1, 2, -3], 1) == [1, 2, 3]


def test_one_that_fails_stops_the_others_and_is_what_is_told() -> None:
    failed, seen = threading.Event(), []

    def work(number: int) -> None:
        seen.append(number)
        if number == 1:
            failed.set()
            raise OSError(28, "full")
        assert failed.wait(30)
        raise Stopped  # as one does that is cut off by the failure

    with pytest.raises(OSError, match="full"):
        at_once(work, [0, 1, 2, 3, 4], 2)
    assert {0, 1} <= set(seen) and 4 not in seen
