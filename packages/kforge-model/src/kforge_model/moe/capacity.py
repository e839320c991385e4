"""No expert works on more than its share: what is above is dropped.

Shapes: T tokens, k experts a token, E experts; a slot is one of the T·k pairs of a token and an expert of its.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def limited(ids: Tensor, weights: Tensor, n_experts: int, capacity: float) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T,k] int64 and weights [T,k] of a routing -> the same when an expert has C = ceil(capacity · T · k / E)
    places, over all its slots, and what was kept: [T,k] bool.

    An expert drops its slots of the lowest weight, of equal ones that of the later token. The weights that a token
    keeps are scaled so that their sum stays; a token that keeps none gets 0 from its experts. A dropped slot has weight
    0 and goes to an expert that has a place left (from the first on, round robin when none has): no shape depends on
    how many are dropped, the host need not know, and with a capacity of at least 1 no expert computes more than C rows.
    """
    tokens, top_k = ids.shape
    slots = tokens * top_k
    places = math.ceil(capacity * slots / n_experts)
    experts = torch.arange(n_experts, device=ids.device)

    # By expert, in it by falling weight, then by token: two stable sorts, the last key first.
    by_weight = weights.detach().flatten().sort(descending=True, stable=True).indices
    by_expert, order = ids.flatten()[by_weight].sort(stable=True)
    order = by_weight[order]
    firsts = torch.searchsorted(by_expert, experts)
    rank = torch.arange(slots, device=ids.device) - firsts[by_expert]
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, rank < places)

    loads = torch.searchsorted(by_expert, experts, right=True) - firsts
    room = (places - loads).clamp(min=0).cumsum(0)
    number = (~kept).cumsum(0) - 1  # of a dropped slot among the dropped
    spare = torch.searchsorted(room, number, right=True)
    elsewhere = torch.where(spare < n_experts, spare, number % n_experts)
    ids = torch.where(kept, ids.flatten(), elsewhere).view(tokens, top_k)

    kept = kept.view(tokens, top_k)
    total = weights.sum(1, keepdim=True)
    weights = weights * kept
    left = weights.sum(1, keepdim=True)
    share = torch.where(left > 0, total / torch.where(left > 0, left, 1), 0)
    return ids, weights * share, kept
