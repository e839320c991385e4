"""Events as lines of JSON: appended while the run goes, read back as one history however often it was restarted."""

from __future__ import annotations

import io
import os
from pathlib import Path

from kforge_metrics.events import Event


class JsonlSink:
    """Append every event to the file ``path`` as one line, in one write that is in the file when `emit` returns.

    Nothing is ever deleted or rewritten. A process that was killed in the middle of a line leaves half of one; the next
    process starts on a new line, and `read_events` passes over the half. The file and its folder are made at the
    first event.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: io.FileIO | None = None
        self._torn = False

    def emit(self, event: Event) -> None:
        """Append one event. Raises OSError where the file cannot be written."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_in_half_a_line(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)
        data = (("\n" if self._torn else "") + event.to_json() + "\n").encode("ascii")
        self._torn = True  # until all of it is written
        written = self._file.write(data)
        if written != len(data):
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes were written; is the disk full?")
        self._torn = False

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a run in the order they were written, each point once.

    A run that was resumed from step s has written some of the points after s twice: those of the process that died,
    and those of the one that took over. Of these only the newer are given: a "resume" event with step s makes void
    whatever was written before it with a later step. So does a "start" that no "resume" follows (a run that began
    again from its own step). Lines that are no events, such as half a line, are passed over.

    Raises FileNotFoundError.
    """
    kept: list[Event] = []
    started: tuple[int, int] | None = None  # a start: its place in the list and its step
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = Event.from_json(line)
            except ValueError:
                continue
            if event.kind == "start":
                started = (len(kept), event.step)
            elif event.kind == "resume":
                kept = _without_later(kept, len(kept), event.step)
                started = None
            elif event.kind == "step" and started is not None:
                # Only now is it sure that the start was not the first half of a resume.
                kept = _without_later(kept, *started)
                started = None
            kept.append(event)
    return kept


def _without_later(events: list[Event], place: int, step: int) -> list[Event]:
    return [event for event in events[:place] if event.step <= step] + events[place:]


def _ends_in_half_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
