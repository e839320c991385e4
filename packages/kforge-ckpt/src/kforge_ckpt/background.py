"""Jobs that go on beside the caller, and some that go on beside one another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Stopped(Exception):
    """Raised in a job because another one failed."""


def at_once(work: Callable[[A], B], arguments: Sequence[A], threads: int) -> list[B]:
    """``work`` on each argument, ``threads`` at a time; the results, in order. One that fails keeps those that have not
    begun from it; what it failed with is raised when the others have ended."""
    if threads == 1 or len(arguments) < 2:
        return [work(argument) for argument in arguments]
    failed = threading.Event()

    def unless_failed(argument: A) -> B:
        if failed.is_set():
            raise Stopped
        try:
            return work(argument)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(threads, "ckpt-file") as pool:
        jobs = [pool.submit(unless_failed, argument) for argument in arguments]
    errors = [error for job in jobs if (error := job.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
    return [job.result() for job in jobs]


class Background:
    """Runs jobs on a thread of its own, one at a time. A process does not end before its job does."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last job ended in an error that nobody was told of yet."""
        return self._error is not None

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Begin a job; waits for the one before, and raises its error."""
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=name, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job, and raise what it failed with, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
