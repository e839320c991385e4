"""Which layers have experts, as config.json says it, and the two forms of their weights.

A file of the hub has three matrices for each expert; transformers 5 joins them when it loads a file and takes them
apart when it saves one. Its modules, and so its state dicts, hold two tensors for all experts of a layer:

    mlp.experts.<e>.gate_proj.weight, .up_proj.weight [F, D]   <->  mlp.experts.gate_up_proj [E, 2F, D]
    mlp.experts.<e>.down_proj.weight [D, F]                    <->  mlp.experts.down_proj [E, D, F]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kforge_model.config import ModelConfig
from kforge_model.hf.families import Family
from kforge_model.hf.windows import shortest

if TYPE_CHECKING:
    import torch
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


def are_joined(keys: Iterable[str]) -> bool:
    """Whether a state dict has the names of transformers' modules for its experts, not those of files."""
    return any(map(holds_all, keys))


def holds_all(key: str) -> bool:
    """Whether a name of transformers' modules is of a tensor of all experts of a layer."""
    return key.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))


def join(matrices: Iterable[Tensor], shape: torch.Size) -> Tensor:
    """What a module holds in one tensor of ``shape``, from the matrices of a file in the order in which `split` names
    them. Each is let go of as soon as it is copied."""
    import torch

    result, first = None, 0
    for matrix in matrices:
        if result is None:
            result = torch.empty((shape[0] * shape[1], *shape[2:]), dtype=matrix.dtype, device=matrix.device)
        elif matrix.dtype != result.dtype:
            result = result.to(torch.promote_types(matrix.dtype, result.dtype))
        result[first : first + len(matrix)] = matrix
        first += len(matrix)
    assert result is not None
    return result.view(shape)


def split(state: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """A state dict with the names of transformers' modules -> the same with those of a file; copies nothing."""
    names = family.experts
    if names is None:
        return dict(state)
    result = {}
    for key, tensor in state.items():
        owner, _, leaf = key.rpartition(".")
        if not holds_all(key):
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
