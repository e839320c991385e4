"""Decoder-only transformers that are numerically right, in any layout.

``Transformer`` is built on the meta device, cut and sharded by whoever likes, materialised anywhere, and starts from
the same bits wherever it lies. ``HeadLoss`` gives the loss without ever holding the logits. ``generate`` samples with
a key/value cache. ``flops_per_token`` counts what a step costs. Nothing is imported until it is asked for, so
``ModelConfig``, ``PRESETS`` and the counts need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_model._version import __version__

if TYPE_CHECKING:
    from kforge_model.attention import Attention as Attention
    from kforge_model.attention import SdpaCore as SdpaCore
    from kforge_model.block import Block as Block
    from kforge_model.cache import KVCache as KVCache
    from kforge_model.config import ModelConfig as ModelConfig
    from kforge_model.flops import flops_per_token as flops_per_token
    from kforge_model.flops import model_shape as model_shape
    from kforge_model.flops import num_parameters as num_parameters
    from kforge_model.generation import generate as generate
    from kforge_model.generation import sample as sample
    from kforge_model.head_loss import HeadLoss as HeadLoss
    from kforge_model.head_loss import linear_cross_entropy as linear_cross_entropy
    from kforge_model.init import init_normal_ as init_normal_
    from kforge_model.mlp import SwiGLU as SwiGLU
    from kforge_model.norm import RMSNorm as RMSNorm
    from kforge_model.presets import PRESETS as PRESETS
    from kforge_model.rope import Rotary as Rotary
    from kforge_model.rows import Rows as Rows
    from kforge_model.transformer import Transformer as Transformer

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "Attention": "attention",
    "Block": "block",
    "HeadLoss": "head_loss",
    "KVCache": "cache",
    "ModelConfig": "config",
    "PRESETS": "presets",
    "RMSNorm": "norm",
    "Rotary": "rope",
    "Rows": "rows",
    "SdpaCore": "attention",
    "SwiGLU": "mlp",
    "Transformer": "transformer",
    "flops_per_token": "flops",
    "generate": "generation",
    "init_normal_": "init",
    "linear_cross_entropy": "head_loss",
    "model_shape": "flops",
    "num_parameters": "flops",
    "sample": "generation",
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
