"""How a model learns: AdamW, Muon, Lion, groups, schedules, exact split storage, one gradient norm over any sharding.

`build_optimizer` makes an `Optimizer` from an `OptimConfig`; `clip.total_norm` and `clip.clip_factor` give the scale
for its ``step``; `LossScaler` keeps float16 gradients from vanishing. Everything works on plain tensors and on DTensors
(FSDP2, tensor parallelism) alike.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_optim._version import __version__

if TYPE_CHECKING:
    from kforge_optim import clip as clip
    from kforge_optim.adamw import AdamW as AdamW
    from kforge_optim.algorithm import Algorithm as Algorithm
    from kforge_optim.algorithm import Rates as Rates
    from kforge_optim.algorithm import Slot as Slot
    from kforge_optim.algorithm import register_optimizer as register_optimizer
    from kforge_optim.config import GroupRule as GroupRule
    from kforge_optim.config import OptimConfig as OptimConfig
    from kforge_optim.ema import Ema as Ema
    from kforge_optim.groups import Group as Group
    from kforge_optim.groups import build_groups as build_groups
    from kforge_optim.groups import groups_table as groups_table
    from kforge_optim.lion import Lion as Lion
    from kforge_optim.muon import Muon as Muon
    from kforge_optim.optimizer import Optimizer as Optimizer
    from kforge_optim.optimizer import build_optimizer as build_optimizer
    from kforge_optim.orthogonal import newton_schulz as newton_schulz
    from kforge_optim.orthogonal import polar_express as polar_express
    from kforge_optim.scaler import LossScaler as LossScaler
    from kforge_optim.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
    from kforge_optim.schedules import build_schedule as build_schedule
    from kforge_optim.schedules import constant as constant
    from kforge_optim.schedules import cosine as cosine
    from kforge_optim.schedules import inverse_sqrt as inverse_sqrt
    from kforge_optim.schedules import linear as linear
    from kforge_optim.schedules import polynomial as polynomial
    from kforge_optim.schedules import register_schedule as register_schedule
    from kforge_optim.schedules import rex as rex
    from kforge_optim.schedules import wsd as wsd
    from kforge_optim.split import join_float32 as join_float32
    from kforge_optim.split import split_float32 as split_float32
    from kforge_optim.torch_optim import TorchOptimizer as TorchOptimizer

# Public name -> the module it lives in; `clip` is a module itself. Nothing is imported until it is asked for.
_HOME = {
    "AdamW": "adamw",
    "Algorithm": "algorithm",
    "Ema": "ema",
    "Group": "groups",
    "GroupRule": "config",
    "Lion": "lion",
    "LossScaler": "scaler",
    "Muon": "muon",
    "OptimConfig": "config",
    "Optimizer": "optimizer",
    "Rates": "algorithm",
    "ScheduleFreeAdamW": "schedule_free",
    "Slot": "algorithm",
    "TorchOptimizer": "torch_optim",
    "build_groups": "groups",
    "build_optimizer": "optimizer",
    "build_schedule": "schedules",
    "clip": "clip",
    "constant": "schedules",
    "cosine": "schedules",
    "groups_table": "groups",
    "join_float32": "split",
    "linear": "schedules",
    "rex": "schedules",
    "polynomial": "schedules",
    "inverse_sqrt": "schedules",
    "newton_schulz": "orthogonal",
    "polar_express": "orthogonal",
    "register_optimizer": "algorithm",
    "register_schedule": "schedules",
    "split_float32": "split",
    "wsd": "schedules",
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
