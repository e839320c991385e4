"""Where events go. A sink is anything with ``emit(event)`` and ``close()``."""

from __future__ import annotations

from typing import Protocol

from kforge_metrics.events import Event
from kforge_metrics.sinks.console import ConsoleSink
from kforge_metrics.sinks.jsonl import JsonlSink, read_events

__all__ = ["ConsoleSink", "JsonlSink", "Sink", "read_events"]


class Sink(Protocol):
    """What a `Tracker` sends its events to. Made on every rank, it opens nothing before its first event."""

    def emit(self, event: Event) -> None:
        """Take one event; called in order, by one thread."""

    def close(self) -> None:
        """No more events; may be called twice."""
