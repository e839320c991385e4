"""Checkpoints that exist or do not: sharded, reshardable, committed last, never read through pickle.

`Checkpointer` saves what has ``state_dict()`` and ``load_state_dict()`` and restores it in any layout;
`PerRank` marks a value that differs by rank; `RngState` carries the random streams.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_ckpt._version import __version__

if TYPE_CHECKING:
    from kforge_ckpt.checkpointer import Checkpointer as Checkpointer
    from kforge_ckpt.config import CkptConfig as CkptConfig
    from kforge_ckpt.errors import CheckpointError as CheckpointError
    from kforge_ckpt.errors import DamagedCheckpointError as DamagedCheckpointError
    from kforge_ckpt.errors import StateMismatchError as StateMismatchError
    from kforge_ckpt.errors import UnsupportedStateError as UnsupportedStateError
    from kforge_ckpt.fitting import Fit as Fit
    from kforge_ckpt.restoring import load_tensors as load_tensors
    from kforge_ckpt.rng import RngState as RngState
    from kforge_ckpt.state import PerRank as PerRank
    from kforge_ckpt.state import Stateful as Stateful

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "CkptConfig": "config",
    "DamagedCheckpointError": "errors",
    "Fit": "fitting",
    "PerRank": "state",
    "RngState": "rng",
    "StateMismatchError": "errors",
    "Stateful": "state",
    "UnsupportedStateError": "errors",
    "load_tensors": "restoring",
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
