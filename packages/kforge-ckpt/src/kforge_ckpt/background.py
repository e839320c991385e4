"""One job at a time that goes on beside the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
