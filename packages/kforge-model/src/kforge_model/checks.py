"""Which sizes and choices of a model go together, and what to say of those that do not. Standard library only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kforge_model.config import ModelConfig

_COUNTS = ("vocab_size", "vocab_multiple", "dim", "n_layers", "n_heads", "max_seq_len", "loss_chunk_tokens")
_OPTIONAL_COUNTS = ("v_head_dim", "kv_lora_rank", "q_lora_rank", "window", "rope_original_len", "mup_base_dim")
_ABOVE_0 = ("attn_scale", "rope_theta", "rope_theta_window", "rope_attn_factor", "norm_eps", "embed_scale", "init_std")
_NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "mtp_depth", "mtp_weight", "z_loss")


def check_model(config: ModelConfig) -> None:
    """Raise ValueError for the first thing that cannot be built, with the values and what to change."""
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"model.{name} = {value} must be at least 1")
    for name in (*_ABOVE_0, *_NOT_NEGATIVE):
        value = getattr(config, name)
        if value is not None and not (value > 0 or (value == 0 and name in _NOT_NEGATIVE)):
            raise ValueError(
                f"model.{name} = {value} must {'not be negative' if name in _NOT_NEGATIVE else 'be above 0'}"
            )
    if not 0 <= config.label_smoothing < 1:
        raise ValueError(f"model.label_smoothing = {config.label_smoothing} must lie in [0, 1)")
    if config.ffn_size < 1:
        raise ValueError(f"model.ffn_dim = {config.ffn_dim} must be at least 1")
    _check_heads(config)
    _check_latents(config)
    _check_window(config)
    _check_rope(config)


def _check_heads(config: ModelConfig) -> None:
    if config.kv_heads < 1 or config.n_heads % config.kv_heads:
        raise ValueError(
            f"model.n_kv_heads = {config.n_kv_heads} does not divide n_heads = {config.n_heads}; "
            "every key/value head serves the same number of query heads"
        )
    if config.head_dim is None and config.dim % config.n_heads:
        raise ValueError(
            f"model.dim = {config.dim} is not a multiple of n_heads = {config.n_heads}; change one, or set head_dim"
        )
    if config.head_size < 2:
        raise ValueError(f"model.head_dim = {config.head_size} must be even and positive: RoPE rotates pairs")
    if config.rope_size < 2 or config.rope_size % 2:
        name = "head_dim" if config.rope_dim is None else "rope_dim"
        raise ValueError(f"model.{name} = {config.rope_size} must be even and positive: RoPE rotates pairs")
    if config.rope_size > config.head_size:
        raise ValueError(
            f"model.rope_dim = {config.rope_size} is more than head_dim = {config.head_size}: it is the part of a head "
            "that is rotated"
        )


def _check_latents(config: ModelConfig) -> None:
    if config.attention == "gqa":
        for name in ("v_head_dim", "kv_lora_rank", "q_lora_rank"):
            if getattr(config, name) is not None:
                raise ValueError(
                    f"model.{name} = {getattr(config, name)} belongs to attention = 'mla'; leave it out, or set that"
                )
        return
    if config.kv_lora_rank is None:
        raise ValueError("model.attention = 'mla' wants model.kv_lora_rank, the width of the latent that it keeps")
    if config.rope_dim is None or config.rope_size >= config.head_size:
        raise ValueError(
            f"model.attention = 'mla' wants model.rope_dim below head_dim = {config.head_size}: the part of a head "
            f"that is rotated and shared by all heads (it is {config.rope_dim})"
        )
    if config.n_kv_heads is not None:
        raise ValueError(
            f"model.n_kv_heads = {config.n_kv_heads} belongs to attention = 'gqa'; mla makes keys for each of n_heads "
            "from its latent, so leave it out"
        )
    for name in ("qkv_bias", "qk_norm"):
        if getattr(config, name) not in (False, "none"):
            raise ValueError(
                f"model.{name} = {getattr(config, name)} belongs to attention = 'gqa'; mla normalises its latents and "
                "has no biases there"
            )


def _check_window(config: ModelConfig) -> None:
    if not config.window_pattern or set(config.window_pattern) - set("WF"):
        raise ValueError(
            f"model.window_pattern = {config.window_pattern!r} must be of the letters W (windowed) and F (full), "
            "as in 'WWWF'"
        )
    if config.window is None and config.window_pattern != "W":
        raise ValueError(
            f"model.window_pattern = {config.window_pattern!r}, but model.window is not set; say how many tokens a "
            "windowed layer sees"
        )
    if config.rope_theta_window is not None and config.window is None:
        raise ValueError(
            f"model.rope_theta_window = {config.rope_theta_window} is for windowed layers, and model.window is not set"
        )


def _check_rope(config: ModelConfig) -> None:
    kind, factor = config.rope_scaling, config.rope_factor
    if kind == "none":
        if factor != 1:
            raise ValueError(f"model.rope_factor = {factor} does nothing without model.rope_scaling; name a kind")
    elif not factor >= 1:
        raise ValueError(f"model.rope_factor = {factor} must be at least 1: it says how many times longer rows become")
    if kind in ("yarn", "llama3"):
        if config.rope_original_len is None:
            raise ValueError(f"model.rope_scaling = {kind!r} wants model.rope_original_len, in tokens")
        if not 0 < config.rope_low < config.rope_high:
            raise ValueError(
                f"model.rope_low = {config.rope_low} and rope_high = {config.rope_high} must be above 0 and rise"
            )
    elif config.rope_original_len is not None:
        raise ValueError(
            f"model.rope_original_len = {config.rope_original_len} is read by rope_scaling = 'yarn' and 'llama3' only"
        )
    if config.rope_attn_factor is not None and kind != "yarn":
        raise ValueError(f"model.rope_attn_factor = {config.rope_attn_factor} is read by rope_scaling = 'yarn' only")
    if kind == "ntk" and config.rope_size < 4:
        raise ValueError(
            f"model.rope_scaling = 'ntk' wants at least 4 rotated features, and rope_dim = {config.rope_size}"
        )
    if not math.isfinite(factor):
        raise ValueError(f"model.rope_factor = {factor} must be finite")
