"""A state dict with one 2-D weight for each matrix, the form in which weights are exchanged.

    attn.wqkv [KV, R+2, Dh, D]  <->  attn.wq [KV R Dh, D], attn.wk [KV Dh, D], attn.wv [KV Dh, D]     (biases too)
    mlp.w_gate_up [2, F, D]     <->  mlp.w_gate [F, D], mlp.w_up [F, D]     (of moe.shared too)

All other entries pass through; so do moe.experts' weights, which are batches of matrices. Splitting copies nothing but
wq, wk, wv (their rows lie apart); joining copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kforge_model.config import ModelConfig

_FUSED = re.compile(r"(?P<owner>(?:.*\.)?)(?:attn\.wqkv|(?P<half>mlp|moe\.shared)\.w_gate_up)\.(?P<leaf>weight|bias)")
_SEPARATE = re.compile(
    r"(?P<owner>(?:.*\.)?)(?P<part>attn\.w[qkv]|(?P<half>mlp|moe\.shared)\.w_(?:gate|up))\.(?P<leaf>weight|bias)"
)


def check_whole(state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a tensor of which each rank has a part (a DTensor)."""
    for name, tensor in state.items():
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}, spread over ranks, and whole tensors are wanted; gather each on "
                "every rank, {name: tensor.full_tensor() …}, or load a checkpoint into a model on one process"
            )


def separate(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of a `Transformer` -> the same with separate matrices. Plain tensors, whole; raises ValueError for
    others."""
    check_whole(state)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        owner, leaf = match["owner"], match["leaf"]
        if ".wqkv." in f".{name}":
            heads = config.n_heads // config.kv_heads
            parts = tensor.split((heads, 1, 1), dim=1)
            for letter, part in zip("qkv", parts, strict=True):
                result[f"{owner}attn.w{letter}.{leaf}"] = part.flatten(0, 2)
        else:
            owner += match["half"]
            result[f"{owner}.w_gate.{leaf}"], result[f"{owner}.w_up.{leaf}"] = tensor.unbind(0)
    return result


def fuse(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `separate`. Raises ValueError when a part of a fused weight is missing."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = _SEPARATE.fullmatch(name)
        if match is None or (match["half"] is None and config.attention == "mla"):
            result[name] = tensor
            continue
        if match["half"] is not None and not config.gated_mlp:
            result[name] = tensor
            continue
        owner, leaf = match["owner"], match["leaf"]
        in_attention = match["half"] is None
        fused = f"{owner}attn.wqkv.{leaf}" if in_attention else f"{owner}{match['half']}.w_gate_up.{leaf}"
        if fused in result:
            continue
        names = (
            [f"{owner}attn.w{x}.{leaf}" for x in "qkv"]
            if in_attention
            else [f"{owner}{match['half']}.w_{x}.{leaf}" for x in ("gate", "up")]
        )
        if missing := [part for part in names if part not in state]:
            raise ValueError(f"{name} is there, but {', '.join(missing)} is not: they are one weight of the model")
        parts = [state[part] for part in names]
        if in_attention:
            rows = (config.kv_heads, -1, config.head_size)
            result[fused] = torch.cat([part.unflatten(0, rows) for part in parts], dim=1)
        else:
            result[fused] = torch.stack(parts)
    return result
