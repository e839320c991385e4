"""Where the kforge packages meet: one typed job, the trainer that runs it, the ``kforge`` command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_train._version import __version__

if TYPE_CHECKING:
    from kforge_train.config import JobConfig as JobConfig
    from kforge_train.config import TrainConfig as TrainConfig
    from kforge_train.errors import ConfigError as ConfigError
    from kforge_train.resolve import Resolved as Resolved
    from kforge_train.resolve import load_config as load_config
    from kforge_train.resolve import resolve_config as resolve_config
    from kforge_train.trainer import Trainer as Trainer
    from kforge_train.trainer import run as run

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "ConfigError": "errors",
    "JobConfig": "config",
    "Resolved": "resolve",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "load_config": "resolve",
    "resolve_config": "resolve",
    "run": "trainer",
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
