"""kforge-resilience: what keeps a training run alive.

`StopRequest` turns signals into a flag, `Guard` makes one decision of what all ranks have seen on every step, and
`exitcodes` says to the scheduler how the run ended.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_resilience._version import __version__

if TYPE_CHECKING:
    from kforge_resilience import exitcodes as exitcodes
    from kforge_resilience.config import ResilienceConfig as ResilienceConfig
    from kforge_resilience.guard import Guard as Guard
    from kforge_resilience.guard import Verdict as Verdict
    from kforge_resilience.guard import Vote as Vote
    from kforge_resilience.signals import StopRequest as StopRequest
    from kforge_resilience.signals import shield_worker as shield_worker

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "Guard": "guard",
    "ResilienceConfig": "config",
    "StopRequest": "signals",
    "Verdict": "guard",
    "Vote": "guard",
    "exitcodes": "exitcodes",  # the module itself
    "shield_worker": "signals",
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
