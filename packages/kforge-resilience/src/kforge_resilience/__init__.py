"""kforge-resilience."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_resilience._version import __version__

if TYPE_CHECKING:
    from kforge_resilience.config import ResilienceConfig as ResilienceConfig

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "ResilienceConfig": "config",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
