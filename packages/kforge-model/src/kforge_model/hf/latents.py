"""Multi-head latent attention, as config.json says it: the sizes of its heads, and its softmax scale under yarn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kforge_model.config import ModelConfig
from kforge_model.hf.families import Family

KEYS = frozenset({"num_key_value_heads", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "head_dim"})
"""Keys of config.json that speak of it."""


def latents_from_hf(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields head_dim, rope_dim and n_kv_heads of ModelConfig.

    transformers' own head_dim is the rotated part of a head, and qk_head_dim the whole. Raises ValueError where they
    are not, and for fewer key/value heads than query heads, which latent attention does not have.
    """
    heads = hf["num_attention_heads"]
    plain, rotated = (hf.get(key, family.defaults[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim"))
    wanted = {"num_key_value_heads": heads, "qk_head_dim": plain + rotated, "head_dim": rotated}
    for key, value in wanted.items():
        said = hf.get(key, family.defaults.get(key))
        if said is not None and said != value:
            raise ValueError(
                f"{key} = {said}, and with num_attention_heads = {heads}, qk_nope_head_dim = {plain} and "
                f"qk_rope_head_dim = {rotated} it is {value}"
            )
    return {"n_kv_heads": None, "head_dim": plain + rotated, "rope_dim": rotated}


def latents_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json."""
    return {
        "num_key_value_heads": config.n_heads,
        "qk_nope_head_dim": config.head_size - config.rope_size,
        "qk_rope_head_dim": config.rope_size,
    }


def scale_from_hf(parameters: Mapping[str, Any], head_size: int) -> float | None:
    """The factor on the scores under yarn; None: 1 / sqrt(head_size).

    DeepSeek-V3's m² / sqrt(head_size), m = 0.1 · mscale_all_dim · ln(factor) + 1.
    """
    power = parameters.get("mscale_all_dim")
    if not power or parameters["factor"] <= 1:
        return None
    return float(head_size**-0.5 * _mscale(parameters["factor"], power) ** 2)


def mscales_of(config: ModelConfig) -> dict[str, float]:
    """mscale and mscale_all_dim that say a yarn config's factors on the scores and on what is rotated.

    Empty where the scores have none. transformers reads neither where mscale is 0: attention_factor says it then.
    """
    power = _power(config.rope_factor, math.sqrt(config.score_scale * config.head_size**0.5))
    if not power:
        return {}
    factor = config.rope_attn_factor
    rotated = _mscale(config.rope_factor, 1.0) if factor is None else factor
    return {
        "mscale": _power(config.rope_factor, rotated * _mscale(config.rope_factor, power)),
        "mscale_all_dim": power,
    }


def has_scale(config: ModelConfig) -> bool:
    """Whether config.json can say the factor on the scores."""
    plain = math.isclose(config.score_scale, config.head_size**-0.5, rel_tol=1e-6)
    return plain or (config.rope_scaling == "yarn" and config.rope_factor > 1)


def _mscale(factor: float, power: float) -> float:
    return 0.1 * power * math.log(factor) + 1 if factor > 1 else 1.0


def _power(factor: float, mscale: float) -> float:
    """The inverse of `_mscale`, to twelve decimals: what was a round number is one again."""
    return round((mscale - 1) / (0.1 * math.log(factor)), 12) if factor > 1 else 0.0
