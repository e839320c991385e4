"""What kind of value each key of config.json has that is read. A file is somebody's: a value of another kind is told by
its key before anything is computed with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kforge_model.hf.families import words


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "a whole number": _whole,
    "a whole number above 0": lambda value: _whole(value) and value > 0,
    "a whole number, 0 or above": lambda value: _whole(value) and value >= 0,
    "a number": _number,
    "a number above 0": lambda value: _number(value) and value > 0,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, Mapping),
    "a list of texts": lambda value: isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value),
    "a list of whole numbers": lambda value: isinstance(value, (list, tuple)) and all(map(_whole, value)),
}

KEYS: Mapping[str, frozenset[str]] = {
    "a whole number": words("sliding_window max_window_layers"),  # whatever they are where they are switched off
    "a whole number above 0": words(
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
        "max_position_embeddings sliding_window_pattern _sliding_window_pattern decoder_sparse_step",
        "moe_intermediate_size kv_lora_rank q_lora_rank v_head_dim qk_rope_head_dim qk_nope_head_dim qk_head_dim",
        "original_max_position_embeddings",
    ),
    "a whole number, 0 or above": words(
        "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group",
        "first_k_dense_replace num_nextn_predict_layers num_mtp_layers",
    ),
    "a number": words("attn_logit_softcapping final_logit_softcapping mscale mscale_all_dim"),
    "a number above 0": words(
        "rms_norm_eps initializer_range query_pre_attn_scalar routed_scaling_factor rope_theta rope_local_base_freq",
        "factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow partial_rotary_factor",
    ),
    "true or false": words("tie_word_embeddings attention_bias mlp_bias norm_topk_prob use_sliding_window truncate"),
    "a text": words("model_type hidden_act hidden_activation rope_type type"),
    "an object": words("rope_scaling rope_parameters full_attention sliding_attention"),
    "a list of texts": words("architectures layer_types"),
    "a list of whole numbers": words("mlp_only_layers"),
}
"""What to call a kind -> the keys that are of it."""

_MAY_BE_NULL = words(
    "model_type architectures num_key_value_heads head_dim sliding_window max_window_layers layer_types",
    "rope_scaling rope_parameters rope_theta rope_local_base_freq full_attention sliding_attention",
    "attn_logit_softcapping final_logit_softcapping hidden_activation attention_bias mlp_bias",
    "q_lora_rank qk_head_dim mlp_only_layers first_k_dense_replace",
    "original_max_position_embeddings low_freq_factor high_freq_factor attention_factor beta_fast beta_slow mscale",
    "factor mscale_all_dim truncate partial_rotary_factor",
)
"""Keys of which null is as good as nothing said, or that are asked for where they are read."""


def misfits(values: Mapping[str, Any], keys: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the values of a config.json, or of an object in it; of ``keys`` alone where they are given."""
    said = []
    for kind, of_kind in KEYS.items():
        for key in of_kind.intersection(values if keys is None else keys, values):
            value = values[key]
            if not (_FITS[kind](value) or (value is None and key in _MAY_BE_NULL)):
                said.append(f"{key} = {value!r} must be {kind}{', or null' if key in _MAY_BE_NULL else ''}")
    return sorted(said)
