"""Which layers have experts, as config.json says it, and the two forms of their weights.

A file of the hub has three matrices for each expert; transformers 5 joins them when it loads a file and takes them
apart when it saves one. Its modules, and so its state dicts, hold two tensors for all experts of a layer:

    mlp.experts.<e>.gate_proj.weight, .up_proj.weight [F, D]   <->  mlp.experts.gate_up_proj [E, 2F, D]
    mlp.experts.<e>.down_proj.weight [D, F]                    <->  mlp.experts.down_proj [E, D, F]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kforge_model.config import ModelConfig
from kforge_model.hf.families import Family
from kforge_model.hf.windows import shortest

if TYPE_CHECKING:
    from torch import Tensor

KEYS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "first": frozenset({"first_k_dense_replace"}),
    "step": frozenset({"decoder_sparse_step", "mlp_only_layers"}),
}
"""Family.dense_layers -> the keys of config.json that speak of it."""


def pattern_from_hf(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The field moe_pattern of ModelConfig."""
    n_layers: int = hf["num_hidden_layers"]
    if family.further_layers:
        n_layers += hf.get("num_nextn_predict_layers", 0) or 0
    if family.dense_layers == "none":
        letters = "M"
    elif family.dense_layers == "first":
        dense = min(hf.get("first_k_dense_replace", family.defaults["first_k_dense_replace"]) or 0, n_layers)
        letters = "D" * dense + "M" * (n_layers - dense)
    else:
        step = hf.get("decoder_sparse_step", family.defaults["decoder_sparse_step"])
        dense = hf.get("mlp_only_layers") or ()
        letters = "".join("D" if i in dense or (i + 1) % step else "M" for i in range(n_layers))
    return {"moe_pattern": shortest(letters)}


def pattern_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json."""
    dense = _dense_layers(config)
    if family.dense_layers == "none":
        return {}
    if family.dense_layers == "first":
        return {"first_k_dense_replace": len(dense)}
    for step in range(1, config.n_layers + 1):
        if dense == [i for i in range(config.n_layers) if (i + 1) % step]:
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def has_pattern(config: ModelConfig, family: Family) -> bool:
    """Whether config.json can say which layers have experts."""
    dense = _dense_layers(config)
    allowed = {"none": [], "first": list(range(len(dense))), "step": dense}
    return dense == allowed[family.dense_layers]


def _dense_layers(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.n_layers + config.mtp_depth) if not config.has_experts(layer)]


def join(state: Mapping[str, Tensor], config: ModelConfig, family: Family) -> dict[str, Tensor]:
    """A state dict with the names of a file -> the same with those of transformers' modules, which pass through.

    Copies once. Names of experts that the config does not have stay; raises ValueError, which names them, for experts
    that are missing beside others of their layer, and for other shapes than the config's.
    """
    import torch

    names = family.experts
    if names is None:
        return dict(state)
    rest = {_renamed(key, names.block, "mlp"): tensor for key, tensor in state.items()}
    of_layer = re.compile(rf"(.*\.mlp\.experts)\.\d+\.(?:{names.gate}|{names.up}|{names.down})\.weight")
    owners = dict.fromkeys(match[1] for match in map(of_layer.fullmatch, rest) if match)
    result = {}
    for owner in owners:
        hidden, width = config.expert_size, config.dim
        for leaf, parts, shape in (
            ("gate_up_proj", (names.gate, names.up), (hidden, width)),
            ("down_proj", (names.down,), (width, hidden)),
        ):
            wanted = [f"{owner}.{e}.{part}.weight" for e in range(config.n_experts) for part in parts]
            if missing := [name for name in wanted if name not in rest]:
                raise ValueError(f"missing: {', '.join(_renamed(name, 'mlp', names.block) for name in missing)}")
            tensors = [rest.pop(name) for name in wanted]
            for name, tensor in zip(wanted, tensors, strict=True):
                if tensor.shape != shape:
                    raise ValueError(
                        f"{_renamed(name, 'mlp', names.block)} is {list(tensor.shape)}, and the config wants "
                        f"{list(shape)}"
                    )
            rows = len(parts) * shape[0]
            joined = torch.cat(tensors).view(config.n_experts, rows, shape[1])
            result[f"{owner}.{leaf}"] = joined
    return rest | result


def split(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """The inverse of `join`; copies nothing."""
    names = family.experts
    if names is None:
        return dict(state)
    result = {}
    for key, tensor in state.items():
        owner, _, leaf = key.rpartition(".")
        if not owner.endswith(".mlp.experts"):
            result[_renamed(key, "mlp", names.block)] = tensor
            continue
        owner = _renamed(owner, "mlp", names.block)
        parts = (names.gate, names.up) if leaf == "gate_up_proj" else (names.down,)
        for e, expert in enumerate(tensor):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                result[f"{owner}.{e}.{part}.weight"] = matrix
    return result


def _renamed(name: str, old: str, new: str) -> str:
    """Another name of the module that holds router and experts."""
    return re.sub(rf"(\.layers\.\d+)\.{old}(?=\.(?:gate|experts)(?:\.|$))", rf"\1.{new}", name)
