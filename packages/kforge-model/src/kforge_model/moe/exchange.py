"""How tokens get to their experts and back. Here all experts are at hand; a module that spreads them over ranks takes
this one's place, `MoE.exchange`.

Shapes: T tokens, D features, k experts a token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kforge_model.moe.experts import Experts


class LocalExchange(nn.Module):
    """Sorts the tokens by expert, and adds up what comes back in the order of each token's experts: no sum depends on
    which thread was first, in either direction."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """x [T,D], ids [T,k] int64, weights [T,k] -> y [T,D] in x's dtype, y_t = Σ_j weights_tj · expert_(ids_tj)(x_t).

        The sum is made in the dtype of the weights, which is float32 or wider.
        """
        top_k = ids.shape[1]
        by_expert, order = ids.flatten().sort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(experts.n_experts, device=ids.device)
        ends = torch.searchsorted(by_expert, numbers, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        sent = _Copies.apply(x, order, place, top_k)
        back = _Copies.apply(experts(sent, counts), place, order, 1)
        return (back.unflatten(0, (-1, top_k)) * weights[..., None]).sum(1).to(x.dtype)

    def sum_counts(self, counts: Tensor) -> Tensor:
        """counts [B,…] of the tokens here -> summed over the ranks that hold other tokens of the same rows."""
        return counts


class _Copies(torch.autograd.Function):
    """y_i = x_(order_i div copies), where order [N · copies] is a permutation and place its inverse. The gradient is
    gathered and summed over the copies in their order, and not added up by atomics as that of plain indexing is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x[order if copies == 1 else order // copies]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        back = grad[place]
        return back if ctx.copies == 1 else back.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
