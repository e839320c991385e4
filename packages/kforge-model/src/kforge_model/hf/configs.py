"""config.json of Hugging Face <-> ModelConfig. Plain dicts; needs neither transformers nor torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kforge_model.config import ModelConfig
from kforge_model.hf import experts, latents, rope, windows
from kforge_model.hf.families import FAMILIES, IGNORED, MUST_BE, REMEDIES, Family, Key, embed_scale_of
from kforge_model.hf.kinds import misfits


def config_from_hf(hf: Mapping[str, Any], family: str | None = None) -> ModelConfig:
    """The ModelConfig of a config.json, read as a dict.

    Keys that it leaves out have transformers' defaults. What config.json does not say (`families.FREE`) has kforge's;
    change it with `dataclasses.replace`, vocab_multiple for instance. Raises ValueError, which names the keys, for an
    unknown family, for values of another kind than their key's, for what kforge would compute otherwise (a rope type,
    an activation, dropout, …), and for keys that it does not know: what they mean cannot be guessed.
    """
    name = family_of(hf) if family is None else family
    family_ = _family(name)
    if said := misfits(hf):
        raise ValueError(f"config of {name}: {'; '.join(said)}")
    hf = _without_aliases(hf, family_)
    _check_keys(hf, name, family_)
    values = {key: hf.get(key, family_.defaults.get(key)) for key in _their_keys(family_)}
    fields: dict[str, Any] = dict(family_.fixed)
    for key in family_.keys:
        value = CHANGES[key.change].from_hf(values[key.theirs])
        if value is _NONE:
            raise ValueError(f"{key.theirs} = {values[key.theirs]!r} is not known to kforge{CHANGES[key.change].why}")
        fields[key.ours] = value
    heads, dim = fields["n_heads"], fields["dim"]
    if family_.latent:
        fields |= latents.latents_from_hf(hf, family_)
    else:
        fields["n_kv_heads"] = heads if fields["n_kv_heads"] is None else fields["n_kv_heads"]
        fields["head_dim"] = dim // heads if fields["head_dim"] is None else fields["head_dim"]
    if family_.experts is not None:
        fields |= experts.pattern_from_hf(hf, family_)
    fields |= windows.windows_from_hf(hf, family_)
    fields |= rope.rope_from_hf(hf, family_, fields["window"] is not None, fields["head_dim"])
    if fields["attn_scale"] is not None and math.isclose(fields["attn_scale"], fields["head_dim"] ** -0.5):
        fields["attn_scale"] = None
    return ModelConfig(**fields, embed_scale=embed_scale_of(family_, dim))


def config_to_hf(config: ModelConfig, family: str | None = None) -> dict[str, Any]:
    """The config.json of a ModelConfig, as a dict, for transformers 4 and 5.

    ``family``: a key of FAMILIES; None: the first that can say all of it (`find_family`). Tokens with a meaning (bos,
    eos, pad) are written as none, because transformers else takes its own family's: set those of your tokenizer.
    Raises ValueError, which names the fields, when the family cannot say all of it.
    """
    name = find_family(config) if family is None else family
    family_ = _family(name)
    if said := unsayable(config, family_):
        raise ValueError(f"{name} cannot say {', '.join(said.values())}")
    result: dict[str, Any] = {"architectures": [family_.architecture], "model_type": name}
    for key in family_.keys:
        result[key.theirs] = CHANGES[key.change].to_hf(_resolved(config, key.ours))
    if family_.latent:
        result |= latents.latents_to_hf(config)
    if family_.experts is not None:
        result |= experts.pattern_to_hf(config, family_)
    result |= windows.windows_to_hf(config, family_)
    result |= rope.rope_to_hf(config, family_)
    result |= family_.written
    return {**result, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def family_of(hf: Mapping[str, Any]) -> str:
    """The key of FAMILIES that a config.json belongs to, from its model_type and architectures.

    Raises ValueError when it belongs to none, or is not of a causal language model.
    """
    if wrong := misfits(hf, ("model_type", "architectures")):
        raise ValueError("; ".join(wrong))
    kind, classes = hf.get("model_type"), list(hf.get("architectures") or [])
    if kind is None:
        kind = next((name for name, family in FAMILIES.items() if family.architecture in classes), None)
    if kind is None or kind not in FAMILIES:
        said = f"model_type = {kind!r}, architectures = {classes}"
        raise ValueError(f"{said}: known Hugging Face families are {', '.join(FAMILIES)}")
    if classes and FAMILIES[kind].architecture not in classes:
        raise ValueError(
            f"architectures = {classes} with model_type = {kind!r}; wanted is {FAMILIES[kind].architecture}, the "
            "language model with its head"
        )
    return str(kind)


def find_family(config: ModelConfig) -> str:
    """The first of FAMILIES that can say all of a config. Raises ValueError, which names what stands in the way."""
    obstacles = {name: unsayable(config, family) for name, family in FAMILIES.items()}
    if fitting := [name for name, said in obstacles.items() if not said]:
        return fitting[0]
    nowhere = [
        said for field, said in obstacles["llama"].items() if all(field in other for other in obstacles.values())
    ]
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    what = (
        f"no Hugging Face family of {', '.join(FAMILIES)} has {', '.join(nowhere)}"
        if nowhere
        else (f"no one Hugging Face family of {', '.join(FAMILIES)} has all options of this model")
    )
    raise ValueError(f"{what}; the nearest, {nearest}, cannot say {', '.join(obstacles[nearest].values())}")


def unsayable(config: ModelConfig, family: Family) -> dict[str, str]:
    """Fields of a config that a family has no words for -> "field = value", with the reason where it needs one."""
    said: dict[str, str] = {}

    def add(field: str, reason: str = "") -> None:
        said.setdefault(field, f"{field} = {getattr(config, field)!r}{reason}")

    for field, value in family.fixed.items():
        if field == "attn_scale":
            if not math.isclose(config.score_scale, config.head_size**-0.5, rel_tol=1e-6):
                add(field)
        elif getattr(config, field) != value:
            add(field, "" if not value or value == "none" else f" (it has {value!r})")
    written: dict[str, tuple[str, Any]] = {}
    for key in family.keys:
        value = CHANGES[key.change].to_hf(_resolved(config, key.ours))
        if value is _NONE:
            add(key.ours, CHANGES[key.change].why)
            continue
        other, others = written.setdefault(key.theirs, (key.ours, value))
        if others != value:
            add(key.ours, f" with {other} = {getattr(config, other)!r}")
    if not math.isclose(config.embed_scale, embed_scale_of(family, config.dim), rel_tol=1e-6):
        add("embed_scale", f" (it has {f'sqrt(dim) = {config.dim**0.5:g}' if family.scaled_embedding else 1})")
    letters = windows.letters_of(config)
    if "W" in letters and family.window == "none":
        add("window")
    if "W" in letters and "F" in letters and family.window in ("none", "all", "switch_all"):
        add("window_pattern")
    if family.experts is not None and config.n_experts and not experts.has_pattern(config, family):
        add("moe_pattern")
    if family.latent and not latents.has_scale(config):
        add("attn_scale", " (it has 1 / sqrt(head_dim) but under yarn)")
    if not family.latent and config.rope_size != config.head_size:
        add("rope_dim")
    own_base = config.rope_theta_window is not None and "W" in letters
    if own_base and not family.rope_by_layer:
        add("rope_theta_window")
    if family.whole_heads and config.dim % config.n_heads:
        add("dim", f" with n_heads = {config.n_heads} (transformers wants a multiple)")
    return said


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"unknown Hugging Face family {name!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _their_keys(family: Family) -> set[str]:
    return {key.theirs for key in family.keys}


def _without_aliases(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The same with one name for each key. Raises ValueError where two names of one say different things."""
    result = {key: value for key, value in hf.items() if key not in family.aliases}
    for alias, key in family.aliases.items():
        if alias in hf and result.setdefault(key, hf[alias]) != hf[alias]:
            raise ValueError(f"{alias} = {hf[alias]!r} and {key} = {hf[key]!r} say different things; leave one out")
    return result


def _check_keys(hf: Mapping[str, Any], name: str, family: Family) -> None:
    """Every key is known, none says what we would not do, and none is missing that has no default."""
    must_be = {**MUST_BE, **family.must_be}
    known = {*_their_keys(family), *rope.KEYS, *windows.KEYS[family.window], *must_be, *IGNORED, *family.ignored}
    known |= experts.KEYS[family.dense_layers]
    if family.latent:
        known |= latents.KEYS
    if family.rope_by_layer:
        known.add("rope_local_base_freq")
    problems = [f"{key} = {value!r} is not known" for key, value in hf.items() if key not in known]
    problems += [
        f"{key} = {hf[key]!r} ({REMEDIES.get(key) or 'kforge computes ' + ' or '.join(map(repr, allowed))})"
        for key, allowed in must_be.items()
        if key in hf and hf[key] not in allowed
    ]
    problems += [f"{key} is missing" for key in sorted(_their_keys(family) - {*hf, *family.defaults})]
    if problems:
        raise ValueError(f"config of {name}: {'; '.join(problems)}")


_RESOLVED: Mapping[str, str] = {
    "n_kv_heads": "kv_heads",
    "head_dim": "head_size",
    "ffn_dim": "ffn_size",
    "attn_scale": "score_scale",
    "v_head_dim": "value_size",
    "expert_dim": "expert_size",
}
"""Fields that may be left to a default -> the property of ModelConfig with the default resolved."""


def _resolved(config: ModelConfig, field: str) -> Any:
    return getattr(config, _RESOLVED.get(field, field))


class Change(NamedTuple):
    """How a value of config.json becomes one of ours, and back; _NONE where there is none, for a reason to be told."""

    from_hf: Callable[[Any], Any]
    to_hf: Callable[[Any], Any]
    why: str = ""


_NONE: Any = object()
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
# Gemma's first files say gelu and mean the approximation by tanh, which transformers reads into them.
_GEMMA_ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}


def _table(table: Mapping[str, str]) -> Change:
    back: dict[str, str] = {}
    for theirs, ours in table.items():
        back.setdefault(ours, theirs)
    return Change(lambda value: table.get(value, _NONE), lambda value: back.get(value, _NONE))


def _whole_inverse_square(scale: float) -> Any:
    """A whole number n with 1 / sqrt(n) = scale, which is what transformers accepts."""
    number = round(scale**-2)
    return number if number and math.isclose(number**-0.5, scale, rel_tol=1e-6) else _NONE


def _millionth(value: float) -> Any:
    return 1e-6 if math.isclose(value, 1e-6, rel_tol=1e-6) else _NONE


CHANGES: Mapping[str, Change] = {
    "same": Change(lambda value: value, lambda value: value),
    "number": Change(float, float),
    "activation": _table(_ACTIVATIONS),
    "gemma_activation": _table(_GEMMA_ACTIVATIONS),
    "zero_is_none": Change(lambda value: 0.0 if value is None else float(value), lambda value: value or None),
    "at_least_one": Change(lambda value: value or _NONE, lambda value: value or _NONE),
    "millionth": Change(
        _millionth,
        _millionth,
        " (transformers gives the norms of the latents 1e-06 whatever the config says, and kforge has one for all)",
    ),
    "inverse_square": Change(lambda value: float(value) ** -0.5, _whole_inverse_square),
}

__all__ = ["CHANGES", "Change", "Key", "config_from_hf", "config_to_hf", "family_of", "find_family", "unsayable"]
