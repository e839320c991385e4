"""Hugging Face's configs and weights to ours and back, without transformers.

    config = config_from_hf(json.load(open("config.json")))                  # ModelConfig
    model.load_state_dict(from_hf(safetensors_state, config))                # weights, fused, vocabulary padded
    json.dump(config_to_hf(config), open("config.json", "w")); to_hf(model.state_dict(), config)        # and back

`families` is the data: what each family calls its parts, which options it has, what it leaves out. `configs` and
`weights` walk over it; a further family is a further entry there. What a config or a state dict says and kforge would
not compute is an error that names it, never a default.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kforge_model.hf.configs import config_from_hf as config_from_hf
    from kforge_model.hf.configs import config_to_hf as config_to_hf
    from kforge_model.hf.configs import family_of as family_of
    from kforge_model.hf.configs import find_family as find_family
    from kforge_model.hf.families import FAMILIES as FAMILIES
    from kforge_model.hf.families import Family as Family
    from kforge_model.hf.weights import HfTensors as HfTensors
    from kforge_model.hf.weights import from_hf as from_hf
    from kforge_model.hf.weights import to_hf as to_hf

# Public name -> the module it lives in; only weights needs torch.
_HOME = {
    "FAMILIES": "families",
    "Family": "families",
    "HfTensors": "weights",
    "config_from_hf": "configs",
    "config_to_hf": "configs",
    "family_of": "configs",
    "find_family": "configs",
    "from_hf": "weights",
    "to_hf": "weights",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
