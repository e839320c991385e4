"""Which layers have a window, as config.json says it: a list, a pattern, a switch, or for all alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kforge_model.config import ModelConfig
from kforge_model.hf.families import Family

KEYS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "all": frozenset({"sliding_window"}),
    "switch_all": frozenset({"sliding_window", "use_sliding_window", "max_window_layers"}),
    "switch": frozenset({"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"}),
    "types": frozenset({"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}),
}
"""Family.window -> the keys of config.json that speak of it."""

_LETTERS = {"sliding_attention": "W", "full_attention": "F"}
_TYPES = {letter: kind for kind, letter in _LETTERS.items()}


def windows_from_hf(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields window and window_pattern of ModelConfig. Raises ValueError for layers that are neither windowed nor
    full, for windowed ones without a width, and for a first windowed layer where transformers has none."""
    if family.window == "none":
        return {"window": None, "window_pattern": "W"}
    width = hf.get("sliding_window", family.defaults["sliding_window"])
    n_layers: int = hf["num_hidden_layers"]
    if family.window.startswith("switch") and not hf.get("use_sliding_window", family.defaults["use_sliding_window"]):
        width = None
    if family.window == "switch_all" and width is not None and hf.get("max_window_layers"):
        raise ValueError(
            f"max_window_layers = {hf['max_window_layers']} with use_sliding_window: older readers begin with the "
            "window there, and transformers 5 has it in all layers"
        )
    if family.window in ("all", "switch_all"):
        return {"window": width, "window_pattern": "W"}
    types = hf.get("layer_types")
    if types is not None:
        if len(types) != n_layers:
            raise ValueError(f"layer_types has {len(types)} entries, and num_hidden_layers = {n_layers}")
        if unknown := sorted(set(types) - set(_LETTERS)):
            raise ValueError(f"layer_types has {', '.join(unknown)}; kforge has {' and '.join(_LETTERS)}")
        letters = "".join(_LETTERS[kind] for kind in types)
    elif family.window == "switch":
        first = hf.get("max_window_layers", family.defaults["max_window_layers"])
        letters = "".join("W" if width is not None and i >= first else "F" for i in range(n_layers))
    else:
        every = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern", family.window_pattern))
        letters = "".join("W" if (i + 1) % every else "F" for i in range(n_layers))
    if "W" not in letters:
        return {"window": None, "window_pattern": "W"}
    if width is None:
        raise ValueError(f"layer_types = {types}, but sliding_window says no width (or use_sliding_window is false)")
    return {"window": width, "window_pattern": shortest(letters)}


def windows_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json."""
    letters = letters_of(config)
    types = [_TYPES[letter] for letter in letters]
    windowed = "W" in letters
    if family.window == "none":
        return {}
    if family.window == "all":
        return {"sliding_window": config.window if windowed else None}
    if family.window == "types":  # transformers wants a width even where no layer has it
        return {"sliding_window": config.window if windowed else config.max_seq_len, "layer_types": types}
    full = letters.find("W") if windowed else len(letters)  # read where layer_types is not, by older transformers
    switch = {
        "use_sliding_window": windowed,
        "sliding_window": config.window if windowed else None,
        "max_window_layers": full,
    }
    return switch if family.window == "switch_all" else {**switch, "layer_types": types}


def letters_of(config: ModelConfig) -> str:
    """A letter for each layer: W with a window, F without."""
    return "".join("F" if config.window_of(layer) is None else "W" for layer in range(config.n_layers))


def shortest(letters: str) -> str:
    """The shortest pattern that gives these letters when it is repeated over them."""
    lengths = range(1, len(letters) + 1)
    return next(letters[:n] for n in lengths if all(x == letters[i % n] for i, x in enumerate(letters)))
