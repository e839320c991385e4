"""Which sizes and choices of a model go together, and what to say of those that do not. Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from kforge_model.config import ModelConfig

_COUNTS = ("vocab_size", "vocab_multiple", "dim", "n_layers", "n_heads", "max_seq_len", "loss_chunk_tokens")
_OPTIONAL_COUNTS = (
    "v_head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "window",
    "rope_original_len",
    "mup_base_dim",
    "expert_dim",
)
_ABOVE_0 = ("attn_scale", "rope_theta", "rope_theta_window", "rope_attn_factor", "norm_eps", "embed_scale", "init_std")
_NOT_NEGATIVE = ("attn_softcap", "logit_softcap", "mtp_depth", "mtp_weight", "z_loss", "n_experts", "shared_experts")
OF_EXPERTS = (
    "moe_pattern",
    "moe_top_k",
    "expert_dim",
    "shared_experts",
    "router",
    "router_norm",
    "router_scale",
    "router_groups",
    "router_top_groups",
    "router_bias",
    "router_bias_rate",
    "router_bias_schedule",
    "router_bias_warmup_steps",
    "balance_loss",
    "balance_over",
    "router_z_loss",
    "expert_capacity",
)
"""Fields that speak of experts, beside n_experts."""


_KINDS: Mapping[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    Mapping: ((Mapping,), "a mapping"),
}
"""Annotation of a field -> the types of its values, and what to call them."""


def check_kinds(config: ModelConfig) -> None:
    """Raise ValueError for the first field whose value is not of the kind that its annotation says."""
    for name, (kind, choices, optional) in _kinds_of().items():
        value = getattr(config, name)
        if value is None and optional:
            continue
        if choices:
            _check_choice(name, value, choices)
            continue
        types, words = _KINDS[kind]
        fits = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise ValueError(f"model.{name} = {value!r} must be {words}{', or None' if optional else ''}")
        if kind is float and not abs(value) <= sys.float_info.max:
            raise ValueError(f"model.{name} = {value} must be finite")
    if strange := [key for key in config.options if not isinstance(key, str)]:
        raise ValueError(f"model.options has the key {strange[0]!r}, and keys are names")


@cache
def _kinds_of() -> dict[str, tuple[Any, tuple[str, ...], bool]]:
    """Field -> a key of _KINDS, the choices that it has (none: any), and whether it may be None."""
    from kforge_model.config import ModelConfig

    found = {}
    hints = get_type_hints(ModelConfig)
    for field in dataclasses.fields(ModelConfig):
        hint = hints[field.name]
        optional = type(None) in get_args(hint)
        kind = get_args(hint)[0] if optional else hint
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        found[field.name] = (get_origin(kind) or kind, choices, optional)
    return found


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(value.lower(), choices, n=1) if isinstance(value, str) else []
    known = ", ".join(map(repr, choices))
    hint = f"did you mean {near[0]!r}? Known are {known}" if near else f"known are {known}"
    raise ValueError(f"model.{name} = {value!r} is not known; {hint}")


def check_model(config: ModelConfig) -> None:
    """Raise ValueError for the first thing that cannot be built, with the values and what to change."""
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"model.{name} = {value} must be at least 1")
    for name in (*_ABOVE_0, *_NOT_NEGATIVE):
        value = getattr(config, name)
        if value is not None and (value < 0 or (value == 0 and name in _ABOVE_0)):
            raise ValueError(f"model.{name} = {value} must {'be above 0' if name in _ABOVE_0 else 'not be negative'}")
    if not 0 <= config.label_smoothing < 1:
        raise ValueError(f"model.label_smoothing = {config.label_smoothing} must lie in [0, 1)")
    if config.ffn_size < 1:
        raise ValueError(f"model.ffn_dim = {config.ffn_dim} must be at least 1")
    _check_heads(config)
    _check_latents(config)
    _check_window(config)
    _check_rope(config)
    if not config.mtp_depth and config.mtp_weight != config.__dataclass_fields__["mtp_weight"].default:
        raise ValueError(
            f"model.mtp_weight = {config.mtp_weight} is of the further tokens, and model.mtp_depth = 0; set that, or "
            "leave mtp_weight out"
        )
    if config.n_experts:
        _check_experts(config)
        _check_balance(config)
    else:
        _check_dense(config)


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
    if config.rope_size < 2 or config.rope_size % 2:
        raise ValueError(
            f"model.head_dim = {config.head_size} must be even and positive: RoPE rotates pairs. Or say by rope_dim "
            "how many features of a head it rotates"
            if config.rope_dim is None
            else f"model.rope_dim = {config.rope_dim} must be even and positive: RoPE rotates pairs"
        )
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
    layers = range(config.n_layers + config.mtp_depth)
    if config.window is not None and all(config.window_of(layer) is None for layer in layers):
        raise ValueError(
            f"model.window_pattern = {config.window_pattern!r} gives the window of {config.window} tokens to none of "
            f"the {len(layers)} layers; put a W among its first letters, or leave window and window_pattern out"
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
    elif factor < 1:
        raise ValueError(f"model.rope_factor = {factor} must be at least 1: it says how many times longer rows become")
    if kind in ("yarn", "llama3"):
        if config.rope_original_len is None:
            raise ValueError(f"model.rope_scaling = {kind!r} wants model.rope_original_len, in tokens")
        if not 0 < config.rope_low < config.rope_high:
            raise ValueError(
                f"model.rope_low = {config.rope_low} and rope_high = {config.rope_high} must be above 0 and rise"
            )
    else:
        for name in ("rope_original_len", "rope_low", "rope_high"):
            if getattr(config, name) != config.__dataclass_fields__[name].default:
                raise ValueError(
                    f"model.{name} = {getattr(config, name)} is read by rope_scaling = 'yarn' and 'llama3' only"
                )
    if kind == "yarn" and config.rope_theta <= 1:
        raise ValueError(
            f"model.rope_theta = {config.rope_theta} must be above 1 under rope_scaling = 'yarn': frequencies have to "
            "fall from feature to feature"
        )
    if config.rope_attn_factor is not None and kind != "yarn":
        raise ValueError(f"model.rope_attn_factor = {config.rope_attn_factor} is read by rope_scaling = 'yarn' only")
    if kind == "ntk" and config.rope_size < 4:
        raise ValueError(
            f"model.rope_scaling = 'ntk' wants at least 4 rotated features, and rope_dim = {config.rope_size}"
        )


def _check_dense(config: ModelConfig) -> None:
    """Without experts nothing is said of them: a field that means nothing is a mistake."""
    for name in OF_EXPERTS:
        value, default = getattr(config, name), config.__dataclass_fields__[name].default
        if value != default:
            raise ValueError(
                f"model.{name} = {value!r} is for experts, and model.n_experts = 0; set n_experts, or leave it out"
            )


def _check_experts(config: ModelConfig) -> None:
    experts, groups = config.n_experts, config.router_groups
    if not 1 <= config.moe_top_k <= experts:
        raise ValueError(
            f"model.moe_top_k = {config.moe_top_k} must be at least 1 and at most n_experts = {experts}: a token goes "
            "to so many different experts"
        )
    if not config.moe_pattern or set(config.moe_pattern) - set("MD"):
        raise ValueError(
            f"model.moe_pattern = {config.moe_pattern!r} must be of the letters M (with experts) and D (dense), as in "
            "'DMMM'"
        )
    if not any(config.has_experts(layer) for layer in range(config.n_layers)):
        raise ValueError(
            f"model.moe_pattern = {config.moe_pattern!r} gives experts to none of the {config.n_layers} layers; put an "
            "M among its first letters, or set n_experts = 0"
        )
    if config.mlp_bias:
        raise ValueError("model.mlp_bias = True, and experts have no biases; set it to False")
    if config.router_scale <= 0:
        raise ValueError(f"model.router_scale = {config.router_scale} must be above 0")
    if config.expert_capacity is not None and config.expert_capacity <= 0:
        raise ValueError(
            f"model.expert_capacity = {config.expert_capacity} must be above 0: 1.0 is room for each token in balance. "
            "Leave it out to drop none"
        )
    if groups < 1 or experts % groups:
        raise ValueError(
            f"model.router_groups = {groups} does not divide n_experts = {experts}; groups are of one size"
        )
    if not 1 <= config.router_top_groups <= groups:
        raise ValueError(
            f"model.router_top_groups = {config.router_top_groups} must be at least 1 and at most router_groups = "
            f"{groups}"
        )
    if config.router_top_groups * (experts // groups) < config.moe_top_k:
        raise ValueError(
            f"model.router_top_groups = {config.router_top_groups} groups of {experts // groups} experts have fewer "
            f"than moe_top_k = {config.moe_top_k}; take more groups, or fewer experts a token"
        )
    if config.router == "sigmoid" and groups > 1 and experts // groups < 2:
        raise ValueError(
            f"model.router_groups = {groups} leaves one expert a group, and under router = 'sigmoid' a group's score "
            "is the sum of its best two; take fewer groups"
        )


def _check_balance(config: ModelConfig) -> None:
    for name in ("balance_loss", "router_z_loss"):
        if getattr(config, name) < 0:
            raise ValueError(f"model.{name} = {getattr(config, name)} must not be negative")
    if config.balance_over != "sequence" and not config.balance_loss:
        raise ValueError(
            f"model.balance_over = {config.balance_over!r} is of the balance loss, and model.balance_loss = 0; give it "
            "a weight, or leave balance_over out"
        )
    if not config.router_bias:
        for name in ("router_bias_rate", "router_bias_schedule", "router_bias_warmup_steps"):
            value = getattr(config, name)
            if value != config.__dataclass_fields__[name].default:
                raise ValueError(f"model.{name} = {value!r} is read with model.router_bias = True only; set that too")
        return
    if config.router_bias_rate <= 0:
        raise ValueError(f"model.router_bias_rate = {config.router_bias_rate} must be above 0")
    steps, warms = config.router_bias_warmup_steps, config.router_bias_schedule == "warmup"
    if warms and steps < 1:
        raise ValueError(
            f"model.router_bias_schedule = 'warmup' wants model.router_bias_warmup_steps above 0; it is {steps}"
        )
    if not warms and steps:
        raise ValueError(f"model.router_bias_warmup_steps = {steps} is read by router_bias_schedule = 'warmup' only")
