"""How far a long command has come: a bar that is drawn over itself on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

BAR = 28


class Progress:
    """Tells how much of ``total`` bytes is done on a stream that people read.

    Args:
        stream: usually sys.stderr.
        every_s: seconds between two drawings. None: 0.2 on a terminal, 60 elsewhere.
        clock: seconds, for tests.
    """

    def __init__(
        self, stream: TextIO, *, every_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._clock, self._terminal = stream, clock, stream.isatty()
        self._every_s = every_s if every_s is not None else 0.2 if self._terminal else 60.0
        self._start = self._last = clock()
        self._first: int | None = None
        self._drawn = False

    def due(self) -> bool:
        """Whether it is time to call `show`, so that nothing is counted up in between."""
        return self._clock() - self._last >= self._every_s

    def show(self, done: int, total: int, what: str) -> None:
        """Draw: bytes done, bytes in all, and in words what came of them."""
        now = self._clock()
        self._first = done if self._first is None else self._first  # a resumed run did not read what lies before
        share = min(done / total, 1.0) if total else 1.0
        speed = (done - self._first) / (now - self._start) if now > self._start else 0.0
        left = f", {_span((total - done) / speed)} left" if speed > 0 and total > done else ""
        line = f"{share:4.0%} of {total / 1e6:,.1f} MB, {what}{left}"
        if self._terminal:
            full = round(BAR * share)
            self._stream.write(f"\r\x1b[K[{'█' * full}{'·' * (BAR - full)}] {line}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._last, self._drawn = now, True

    def close(self) -> None:
        """End the line of a terminal."""
        if self._drawn and self._terminal:
            self._stream.write("\n")
            self._stream.flush()
        self._drawn = False


def _span(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
