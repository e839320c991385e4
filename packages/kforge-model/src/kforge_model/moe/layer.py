"""The feed-forward half of a layer with experts."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kforge_model.config import ModelConfig
from kforge_model.mlp import GATED, PLAIN, GatedMLP, PlainMLP
from kforge_model.moe.balance import Tally, balanced
from kforge_model.moe.capacity import limited
from kforge_model.moe.exchange import LocalExchange
from kforge_model.moe.experts import Experts
from kforge_model.moe.router import Routing, build_router
from kforge_model.rows import Rows


class MoE(nn.Module):
    """y_t = shared(x_t) + Σ_j weight_tj · expert_(id_tj)(x_t), ids and weights being the router's.

    ``layer`` is its place in the model. ``exchange`` has no parameters and may be replaced. What passes through in
    training is counted in backward (`balance`), for the layer's ``tally``.
    """

    plan: ClassVar[dict[str, str]] = {"router": "sequence", "experts": "experts"}

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.router = build_router(config)
        self.experts = Experts(config.n_experts, config.dim, config.expert_size, config.mlp)
        self.shared = _shared(config) if config.shared_experts else None
        self.exchange: nn.Module = LocalExchange()
        self.tally = Tally()

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D]. ``rows.scale``, where it is, says what a token weighs in the loss."""
        flat = x.flatten(0, 1)
        routing: Routing = self.router(flat)
        ids, weights, kept = routing.ids, routing.weights, None
        if self.training and self.config.expert_capacity is not None:
            ids, weights, kept = limited(ids, weights, self.config.n_experts, self.config.expert_capacity)
        y = self.exchange(flat, ids, weights, self.experts).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        if self.training and torch.is_grad_enabled():
            scale = getattr(rows, "scale", None)
            y = balanced(y, routing, kept, scale, self.config, self.exchange.sum_counts, self.tally)
        return y

    def counted(self) -> Tensor:
        """What the tally has, [E+3] float64 (`Tally.add`); zeros where there is nothing yet."""
        return self.tally.read(self.config.n_experts, next(self.experts.parameters()).device)


def _shared(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The shared experts as one feed-forward half. Under tensor parallelism each rank has its own tokens here, and all
    of the weights."""
    kind, activation = (GatedMLP, GATED[config.mlp]) if config.mlp in GATED else (PlainMLP, PLAIN[config.mlp])
    shared: GatedMLP | PlainMLP = kind(config.dim, config.shared_size, activation)
    shared.plan = {name: "sequence" for name, _ in shared.named_children()}
    return shared
