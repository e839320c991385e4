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
    from kforge_model.block import Block as Block
    from kforge_model.cache import CachedRows as CachedRows
    from kforge_model.cache import KVCache as KVCache
    from kforge_model.config import ModelConfig as ModelConfig
    from kforge_model.core import AttentionCore as AttentionCore
    from kforge_model.exchange import fuse as fuse
    from kforge_model.exchange import separate as separate
    from kforge_model.extraction import extract as extract
    from kforge_model.flops import flops_per_token as flops_per_token
    from kforge_model.flops import model_shape as model_shape
    from kforge_model.flops import num_parameters as num_parameters
    from kforge_model.generation import NO_TOKEN as NO_TOKEN
    from kforge_model.generation import generate as generate
    from kforge_model.generation import score as score
    from kforge_model.generation import stream as stream
    from kforge_model.head_loss import HeadLoss as HeadLoss
    from kforge_model.hf.configs import config_from_hf as config_from_hf
    from kforge_model.hf.configs import config_to_hf as config_to_hf
    from kforge_model.hf.configs import family_of as family_of
    from kforge_model.hf.configs import find_family as find_family
    from kforge_model.hf.weights import from_hf as from_hf
    from kforge_model.hf.weights import to_hf as to_hf
    from kforge_model.init import init_normal_ as init_normal_
    from kforge_model.linear import StackedLinear as StackedLinear
    from kforge_model.losses import LossOptions as LossOptions
    from kforge_model.losses import cross_entropy as cross_entropy
    from kforge_model.losses import linear_cross_entropy as linear_cross_entropy
    from kforge_model.mla import LatentAttention as LatentAttention
    from kforge_model.mlp import GatedMLP as GatedMLP
    from kforge_model.mlp import PlainMLP as PlainMLP
    from kforge_model.moe.exchange import LocalExchange as LocalExchange
    from kforge_model.moe.experts import Experts as Experts
    from kforge_model.moe.layer import MoE as MoE
    from kforge_model.moe.router import Router as Router
    from kforge_model.moe.router import Routing as Routing
    from kforge_model.moe.upcycle import upcycle as upcycle
    from kforge_model.norm import LayerNorm as LayerNorm
    from kforge_model.norm import RMSNorm as RMSNorm
    from kforge_model.points import attention_weights as attention_weights
    from kforge_model.points import capture as capture
    from kforge_model.points import find_points as find_points
    from kforge_model.presets import PRESETS as PRESETS
    from kforge_model.presets import depth_config as depth_config
    from kforge_model.presets import preset as preset
    from kforge_model.presets import preset_values as preset_values
    from kforge_model.qk_clip import max_logits as max_logits
    from kforge_model.qk_clip import qk_factors as qk_factors
    from kforge_model.qk_clip import scale_qk as scale_qk
    from kforge_model.registry import ATTENTION_CORES as ATTENTION_CORES
    from kforge_model.registry import LOSSES as LOSSES
    from kforge_model.registry import MLPS as MLPS
    from kforge_model.registry import MODELS as MODELS
    from kforge_model.registry import NORMS as NORMS
    from kforge_model.registry import ROUTERS as ROUTERS
    from kforge_model.registry import Registry as Registry
    from kforge_model.rope import Rotary as Rotary
    from kforge_model.rope import rope_frequencies as rope_frequencies
    from kforge_model.rows import Rows as Rows
    from kforge_model.sampling import sample as sample
    from kforge_model.transformer import Transformer as Transformer
    from kforge_model.transformer import build_model as build_model
    from kforge_model.transformer import check_parts as check_parts

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "ATTENTION_CORES": "registry",
    "Attention": "attention",
    "AttentionCore": "core",
    "Block": "block",
    "CachedRows": "cache",
    "Experts": "moe.experts",
    "GatedMLP": "mlp",
    "HeadLoss": "head_loss",
    "KVCache": "cache",
    "LOSSES": "registry",
    "LatentAttention": "mla",
    "LayerNorm": "norm",
    "LocalExchange": "moe.exchange",
    "LossOptions": "losses",
    "MLPS": "registry",
    "MODELS": "registry",
    "MoE": "moe.layer",
    "ModelConfig": "config",
    "NORMS": "registry",
    "NO_TOKEN": "generation",
    "PRESETS": "presets",
    "PlainMLP": "mlp",
    "RMSNorm": "norm",
    "ROUTERS": "registry",
    "Registry": "registry",
    "Rotary": "rope",
    "Router": "moe.router",
    "Routing": "moe.router",
    "Rows": "rows",
    "StackedLinear": "linear",
    "Transformer": "transformer",
    "attention_weights": "points",
    "build_model": "transformer",
    "capture": "points",
    "check_parts": "transformer",
    "config_from_hf": "hf.configs",
    "config_to_hf": "hf.configs",
    "cross_entropy": "losses",
    "depth_config": "presets",
    "extract": "extraction",
    "family_of": "hf.configs",
    "find_family": "hf.configs",
    "find_points": "points",
    "flops_per_token": "flops",
    "from_hf": "hf.weights",
    "fuse": "exchange",
    "generate": "generation",
    "init_normal_": "init",
    "linear_cross_entropy": "losses",
    "max_logits": "qk_clip",
    "model_shape": "flops",
    "num_parameters": "flops",
    "preset": "presets",
    "preset_values": "presets",
    "rope_frequencies": "rope",
    "sample": "sampling",
    "qk_factors": "qk_clip",
    "scale_qk": "qk_clip",
    "score": "generation",
    "separate": "exchange",
    "stream": "generation",
    "to_hf": "hf.weights",
    "upcycle": "moe.upcycle",
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
