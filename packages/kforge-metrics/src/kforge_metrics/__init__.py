"""kforge-metrics: what is seen of a training run.

`Tracker` gathers numbers on the device and sends `Event` objects to sinks (`JsonlSink`, `ConsoleSink`, or your own);
`read_events` reads a run back as one history, and `write_report` makes a single HTML file of it. `get_logger` sets up
logging for several processes; `peak_flops` and `mfu` say how well the hardware is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_metrics._version import __version__

if TYPE_CHECKING:
    from kforge_metrics import sinks as sinks
    from kforge_metrics.config import MetricsConfig as MetricsConfig
    from kforge_metrics.events import Event as Event
    from kforge_metrics.logger import close_logger as close_logger
    from kforge_metrics.logger import get_logger as get_logger
    from kforge_metrics.logger import read_log as read_log
    from kforge_metrics.memory import PeakMemory as PeakMemory
    from kforge_metrics.memory import process_rss as process_rss
    from kforge_metrics.report import write_report as write_report
    from kforge_metrics.sinks import ConsoleSink as ConsoleSink
    from kforge_metrics.sinks import JsonlSink as JsonlSink
    from kforge_metrics.sinks import Sink as Sink
    from kforge_metrics.sinks import read_events as read_events
    from kforge_metrics.throughput import mfu as mfu
    from kforge_metrics.throughput import peak_flops as peak_flops
    from kforge_metrics.throughput import tokens_per_second as tokens_per_second
    from kforge_metrics.tracker import Tracker as Tracker

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "ConsoleSink": "sinks",
    "Event": "events",
    "JsonlSink": "sinks",
    "MetricsConfig": "config",
    "PeakMemory": "memory",
    "Sink": "sinks",
    "Tracker": "tracker",
    "close_logger": "logger",
    "get_logger": "logger",
    "mfu": "throughput",
    "peak_flops": "throughput",
    "process_rss": "memory",
    "read_events": "sinks",
    "read_log": "logger",
    "sinks": "sinks",  # the module itself
    "tokens_per_second": "throughput",
    "write_report": "report",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    value = module if name == _HOME[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
