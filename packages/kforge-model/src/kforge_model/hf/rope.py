"""Rotary scaling as config.json says it: rope_theta with rope_scaling (transformers 4), or rope_parameters (5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kforge_model.config import ModelConfig
from kforge_model.hf import latents
from kforge_model.hf.families import Family
from kforge_model.hf.kinds import misfits

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
"""Keys of config.json that speak of it; rope_local_base_freq too, where windowed layers have a base of their own."""

_KNOWN: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
        | {"mscale_all_dim", "truncate", "finetuned"}
    ),
}
"""rope_type -> what belongs to it, beside type and base."""
_WANTED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_UNSCALED: Mapping[str, Any] = {
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "rope_original_len": None,
    "rope_low": ModelConfig.rope_low,
    "rope_high": ModelConfig.rope_high,
    "rope_attn_factor": None,
}


def rope_from_hf(hf: Mapping[str, Any], family: Family, windows: bool, head_size: int) -> dict[str, Any]:
    """The rope fields of ModelConfig, and attn_scale under latent attention. ``windows``: whether some layer has one.

    Raises ValueError for a rope_type, or something in it, that we do not compute, and when rope_scaling and
    rope_parameters say different things.
    """
    length = hf.get("max_position_embeddings", family.defaults["max_position_embeddings"])
    scaling, parameters = hf.get("rope_scaling"), hf.get("rope_parameters")
    theta = _first(hf.get("rope_theta"), family.defaults["rope_theta"])
    local = _first(hf.get("rope_local_base_freq"), family.defaults.get("rope_local_base_freq"))

    def read(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
        if not family.rope_by_layer:
            fields = _read(parameters, theta, length, where)
            return fields | {"attn_scale": latents.scale_from_hf(parameters, head_size)} if family.latent else fields
        if unknown := sorted(set(parameters) - {"full_attention", "sliding_attention"}):
            raise ValueError(f"{where} has {', '.join(unknown)}; wanted is one dict for each of its kinds of layer")
        if said := misfits(parameters):
            raise ValueError(f"{where}: {'; '.join(said)}")
        if old := [
            kind for kind, value in parameters.items() if value and "type" in value and "rope_type" not in value
        ]:
            raise ValueError(
                f"{where}.{old[0]} = {parameters[old[0]]} says type, which transformers 5 leaves unread where kinds "
                "of layers differ; say rope_type"
            )
        full, windowed = (
            _read(parameters.get(kind) or {}, base, length, f"{where}.{kind}")
            for kind, base in (("full_attention", theta), ("sliding_attention", local))
        )
        if not windows or windowed == full:
            return full
        if windowed["rope_scaling"] != "none":
            raise ValueError(
                f"{where}.sliding_attention = {parameters['sliding_attention']} scales the frequencies of windowed "
                "layers, and a base of their own is all that kforge gives them"
            )
        return {**full, "rope_theta_window": windowed["rope_theta"]}

    old = read({"full_attention": scaling or {}} if family.rope_by_layer else scaling or {}, "rope_scaling")
    if not parameters:
        return old
    new = read(parameters, "rope_parameters")
    stated = {name for name in ("rope_theta", "rope_local_base_freq") if hf.get(name) is not None}
    differ = (
        set(old) | set(new) if scaling else {{"rope_local_base_freq": "rope_theta_window"}.get(x, x) for x in stated}
    )
    if any(old.get(name) != new.get(name) for name in differ):
        said = {
            key: hf[key] for key in ("rope_theta", "rope_local_base_freq", "rope_scaling") if hf.get(key) is not None
        }
        raise ValueError(f"rope_parameters = {parameters} and {said} say different things; leave one of them out")
    return new


def _read(parameters: Mapping[str, Any], theta: float, length: int, where: str) -> dict[str, Any]:
    """One dict of parameters -> fields of ModelConfig; ``theta`` where it has no base."""
    if said := misfits(parameters):
        raise ValueError(f"{where}: {'; '.join(said)}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KNOWN:
        raise ValueError(f"{where}: rope_type = {kind!r} is not known: kforge computes {', '.join(_KNOWN)}")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        part = parameters["partial_rotary_factor"]
        raise ValueError(f"{where}: partial_rotary_factor = {part}, and the family rotates whole heads")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KNOWN[kind]}
    if unknown := {key: value for key, value in parameters.items() if key not in known and value is not None}:
        raise ValueError(f"{where}: {unknown} is not known for rope type {kind!r}")
    if missing := [key for key in _WANTED.get(kind, ()) if parameters.get(key) is None]:
        raise ValueError(f"{where}: rope type {kind!r} wants {', '.join(missing)}")
    fields: dict[str, Any] = {**_UNSCALED, "rope_theta": float(_first(parameters.get("rope_theta"), theta))}
    if kind == "default":
        return fields
    fields |= {"rope_scaling": kind, "rope_factor": float(parameters["factor"])}
    if kind != "linear":
        fields["rope_original_len"] = _first(parameters.get("original_max_position_embeddings"), length)
    if kind == "llama3":
        fields |= {"rope_low": float(parameters["low_freq_factor"]), "rope_high": float(parameters["high_freq_factor"])}
    if kind == "yarn":
        if parameters.get("truncate", True) is not True:  # null is false to transformers
            said = parameters["truncate"]
            raise ValueError(f"{where}: truncate = {said}; the ends of the ramp of yarn are whole pairs in kforge")
        fields["rope_low"] = float(parameters.get("beta_slow") or 1)
        fields["rope_high"] = float(parameters.get("beta_fast") or 32)
        fields["rope_attn_factor"] = _yarn_factor(parameters)
    return fields


def _yarn_factor(parameters: Mapping[str, Any]) -> float | None:
    """The factor on what is rotated, where it is not yarn's own; transformers' rule for DeepSeek's two mscales."""
    if (said := parameters.get("attention_factor")) is not None:
        return float(said)
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (over and under):
        return None
    log = math.log(parameters["factor"])
    return float((0.1 * over * log + 1) / (0.1 * under * log + 1))


def rope_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json, in the form of transformers 4 and in that of 5.

    ntk becomes the larger base that it is: theta · factor^(R/(R-2)), without scaling.
    """
    kind, theta = config.rope_scaling, config.rope_theta
    scaling: dict[str, Any] = {"rope_type": "default"}
    if kind == "ntk":
        theta *= config.rope_factor ** (config.rope_size / (config.rope_size - 2))
    elif kind != "none":
        scaling = {"rope_type": kind, "factor": config.rope_factor}
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = config.rope_original_len
    if kind == "llama3":
        scaling |= {"low_freq_factor": config.rope_low, "high_freq_factor": config.rope_high}
    if kind == "yarn":
        scaling |= {"beta_slow": config.rope_low, "beta_fast": config.rope_high}
        mscales = latents.mscales_of(config) if family.latent else {}
        if not mscales.get("mscale") and config.rope_attn_factor is not None:
            scaling["attention_factor"] = config.rope_attn_factor
        scaling |= mscales
    full = {"rope_theta": theta, **scaling}
    if not family.rope_by_layer:
        old = None if scaling["rope_type"] == "default" else scaling
        return {"rope_theta": theta, "rope_scaling": old, "rope_parameters": full}
    own = config.rope_theta_window
    windowed = dict(full) if own is None else {"rope_theta": own, "rope_type": "default"}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}
    if windowed["rope_type"] != "default":
        return new  # transformers 4 cannot scale windowed layers
    old = None if scaling["rope_type"] == "default" else scaling
    return {"rope_theta": theta, "rope_local_base_freq": windowed["rope_theta"], "rope_scaling": old, **new}


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
