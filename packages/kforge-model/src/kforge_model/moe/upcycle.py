"""A dense model made one with experts, which are copies of its feed-forward halves (Komatsuzaki et al. 2022,
arXiv:2212.05055)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from kforge_model.checks import OF_EXPERTS
from kforge_model.config import ModelConfig
from kforge_model.exchange import check_whole
from kforge_model.transformer import Transformer


@torch.no_grad()
def upcycle(
    state: Mapping[str, Tensor], dense: ModelConfig, moe: ModelConfig, *, seed: int | None = 0
) -> dict[str, Tensor]:
    """The state dict of ``Transformer(dense)`` -> one of ``Transformer(moe)``, which differs from dense in its experts
    only: in each layer that has them, every expert is a copy of the layer's feed-forward half.

    seed: routers start as `Transformer.init_weights` of that seed starts them; None: at zeros, where every token goes
    to the same experts until training tells them apart. Shared experts are copies too, but for their w_down, which
    starts at 0: at first they add nothing. So the model computes what the dense one does, as long as the weights of a
    token's experts sum to 1 (router_norm, router_scale = 1) and none is dropped.

    Plain tensors, whole; they keep dtype and device, and what is not copied is the given tensor. Raises ValueError for
    other tensors, configs that differ in more, an expert_dim that is not dense's ffn_dim, and names or shapes that are
    not of dense.
    """
    _check(dense, moe)
    check_whole(state)
    state = dict(state)
    if dense.tie_embeddings:
        state.pop("head.weight", None)
    with torch.device("meta"):
        old, new = Transformer(dense).state_dict(), Transformer(moe)
    if state.keys() != old.keys():
        missing, unknown = sorted(old.keys() - state.keys()), sorted(state.keys() - old.keys())
        raise ValueError(
            f"the state is not of the dense model: missing are {', '.join(missing) or 'none'}, not known are "
            f"{', '.join(unknown) or 'none'}"
        )
    for name, tensor in state.items():
        if tensor.shape != old[name].shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, and the dense config wants {list(old[name].shape)}")
    buffers = dict(new.named_buffers())
    result = {}
    for name, wanted in new.state_dict().items():
        if name in state:
            result[name] = state[name]
            continue
        layer, leaf = name.split(".moe.")
        source = state[f"{layer}.mlp.w_down.weight"]
        dtype = wanted.dtype if name in buffers else source.dtype
        empty = torch.empty(wanted.shape, dtype=dtype, device=source.device)
        if leaf.startswith("router."):
            result[name] = empty.zero_() if seed is None else new.init_value_(name, empty, seed)
        elif leaf == "shared.w_down.weight":
            result[name] = empty.zero_()
        elif leaf.startswith("experts."):
            source = state[f"{layer}.mlp.{leaf.removeprefix('experts.')}.weight"]
            result[name] = empty.copy_(source)  # for each of the experts
        else:
            source = state[f"{layer}.mlp.{leaf.removeprefix('shared.')}"]
            result[name] = torch.cat([source] * moe.shared_experts, dim=-2)
    return result


def _check(dense: ModelConfig, moe: ModelConfig) -> None:
    if dense.n_experts or not moe.n_experts:
        raise ValueError(
            f"dense.n_experts = {dense.n_experts} must be 0, and moe.n_experts = {moe.n_experts} above 0: upcycling "
            "makes experts of a model that has none"
        )
    if moe.expert_size != dense.ffn_size:
        raise ValueError(
            f"moe.expert_dim = {moe.expert_size} is not dense.ffn_dim = {dense.ffn_size}: an expert is a copy of the "
            "feed-forward half; leave expert_dim out"
        )
    names = [field.name for field in fields(ModelConfig) if field.name not in ("n_experts", *OF_EXPERTS)]
    if differ := [name for name in names if getattr(dense, name) != getattr(moe, name)]:
        said = ", ".join(f"{name} = {getattr(dense, name)!r} and {getattr(moe, name)!r}" for name in differ)
        raise ValueError(f"the configs may differ in the experts only, and have {said}; make them equal")
