"""One job at a time, and its error told once."""

from __future__ import annotations

import threading

import pytest

from kforge_ckpt.background import Background


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
