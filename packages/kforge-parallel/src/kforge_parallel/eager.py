"""What the norms and feed-forward half of a block keep for backward where it is not compiled, asked of the modules
themselves: each is run on a few tokens on the meta device, in bf16, and what autograd saves is counted.

Every family of transformers writes its norms in its own way: one keeps its input and what is scaled in fp32, another
its input alone. An estimate takes the counts from a model's ``shape`` (`ModelShape`), else kforge's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

_TOKENS = 64


def eager_sizes(blocks: Iterable[nn.Module], dim: int, ffn: int) -> dict[str, int]:
    """Of the first block with a feed-forward half ``mlp`` without experts, else of the first: elements that it keeps
    of a token in fp32 (``wide``) and in bf16 (``narrow``), by the key that `ModelShape` gives them.

    norm_wide, norm_narrow: of a feature of the residual stream, over all norms of it.
    head_norm_wide, head_norm_narrow: of a feature of queries and keys, where these are normed.
    mlp_kept: of a feature of the feed-forward half, its input apart.

    A module that wants more than hidden states is left out.
    """
    blocks = list(blocks)
    plain = [block for block in blocks if _mlp_of(block) is not None]
    block = [*plain, *blocks][0]
    found: dict[str, int] = {}
    norms = [kept for norm in _norms(block) if (kept := _kept(norm, dim)) is not None]
    if norms:
        found["norm_wide"], found["norm_narrow"] = (round(sum(kept) / dim) for kept in zip(*norms, strict=True))
    heads = [m for child in block.children() for name, m in child.named_children() if name in ("q_norm", "k_norm")]
    weights = [weight for norm in heads for weight in norm.parameters()]
    if weights and (kept := _kept(heads[0], weights[0].shape[-1])) is not None:
        found["head_norm_wide"], found["head_norm_narrow"] = (round(n / weights[0].shape[-1]) for n in kept)
    mlp = _mlp_of(block)
    if mlp is not None and (kept := _kept(mlp, dim)) is not None:
        found["mlp_kept"] = round((2 * kept[0] + kept[1] - dim) / ffn)
    return found


def _mlp_of(block: nn.Module) -> nn.Module | None:
    mlp = getattr(block, "mlp", None)
    matrices = all(parameter.ndim < 3 for parameter in mlp.parameters()) if isinstance(mlp, nn.Module) else False
    return mlp if matrices and not hasattr(mlp, "experts") else None


def _norms(block: nn.Module) -> Iterator[nn.Module]:
    """Those of the residual stream: the block's own children."""
    for child in block.children():
        if "norm" in type(child).__name__.lower():
            yield child


def _kept(module: nn.Module, dim: int) -> tuple[float, float] | None:
    """Elements of a token [dim] that a module keeps in fp32 and in bf16, with its input; None: it cannot be asked."""
    tensors: dict[str, Any] = {
        name: torch.empty_like(tensor, dtype=torch.bfloat16, device="meta").requires_grad_()
        for name, tensor in module.named_parameters()
    }
    saved: dict[int, torch.Tensor] = {}
    weights = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    tensors |= {name: buffer.to("meta") for name, buffer in module.named_buffers()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in weights:
            saved[x.untyped_storage()._cdata] = x
        return x

    x = torch.empty(1, _TOKENS, dim, dtype=torch.bfloat16, device="meta", requires_grad=True) * 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            functional_call(copy.copy(module), tensors, (x,))
    except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError):
        return None
    counts = {4: 0.0, 2: 0.0}
    for tensor in saved.values():
        size = 4 if tensor.element_size() >= 4 else 2
        counts[size] += tensor.untyped_storage().nbytes() / size / _TOKENS
    return counts[4], counts[2]
