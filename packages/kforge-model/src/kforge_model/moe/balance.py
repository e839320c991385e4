"""Even load: what is counted of the experts, the losses that even it out, the bias that does so without a loss.

Shapes: B rows, S tokens of a row (of which a rank may have a part), E experts, k experts a token, s_te the scores of
token t. The losses of a microbatch, which are in the gradients and never in the loss that is returned:

    balance = α Σ_rows w Σ_e f_e P_e           (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20)
        f_e = E / (k S) · (slots of the row that went to e)     over the ranks that share the row; no gradient
        P_e = 1/S Σ_t s_te / Σ_e' s_te'                         of the tokens here: the ranks' parts add up
        w   = Σ_t scale_t                                       what the row weighs in the loss, as a whole
    z       = β Σ_t scale_t logsumexp(logits_t)²                (Zoph et al. 2022, arXiv:2202.08906, equation 5)

with α = balance_loss and β = router_z_loss. As scale is 1 / scored tokens of the global batch, microbatches and ranks
add up. Under balance_over = "batch" all rows of a microbatch are one. In balance Σ_e f_e P_e is 1.

Both losses and the counts take part through one function that passes y through: its backward gives the losses a
gradient of 1, and adds the counts to the layer's `Tally`. So what is computed twice (activation checkpointing) counts
once, and what has no backward not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kforge_model.config import ModelConfig
from kforge_model.moe.router import Routing

Reduce = Callable[[Tensor], Any]
"""Sums a tensor in place over all ranks that see other tokens."""


class Tally:
    """What a layer has counted since the last update of its bias: a tensor [E+3] float64 on its device, or nothing yet.
    Not in any state dict: it is of one optimizer step."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, counted: Tensor) -> None:
        """counted [E+3]: slots of each expert; sums over tokens of the router's entropy in nats and of Σ f P; dropped
        slots."""
        self.total = counted if self.total is None else self.total + counted

    def read(self, n_experts: int, device: torch.device) -> Tensor:
        """The sums so far, a copy."""
        if self.total is None:
            return torch.zeros(n_experts + 3, dtype=torch.float64, device=device)
        return self.total.clone()

    def clear(self) -> None:
        """Begin anew."""
        self.total = None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def balanced(
    y: Tensor,
    routing: Routing,
    kept: Tensor | None,
    scale: Tensor | None,
    config: ModelConfig,
    sum_counts: Callable[[Tensor], Tensor],
    tally: Tally,
) -> Tensor:
    """y [B,S,D] as it is; in backward the losses of the module's docstring, and the counts for ``tally``.

    kept [T,k] bool: slots that were not dropped; None: all. scale: one number or [B,S] of the whole row; None: no loss
    is made. sum_counts: `LocalExchange.sum_counts`. Raises ValueError for a scale of each token where a rank has a part
    of the tokens that the scale is of, and router_z_loss.
    """
    batch, seq = y.shape[:2]
    experts, top_k = config.n_experts, config.moe_top_k
    numbers = torch.arange(experts, device=y.device)
    counts = (routing.ids.reshape(batch, seq * top_k, 1) == numbers).sum(1)  # [B,E]
    summed = sum_counts(counts)
    likely = routing.probabilities.reshape(batch, seq, experts).sum(1)  # [B,E]: S · P
    weight = None if scale is None else _row_weights(scale, summed, seq, top_k, sum_counts)
    if config.balance_over == "batch":
        summed, likely = summed.sum(0, keepdim=True), likely.sum(0, keepdim=True)
        weight = None if weight is None else weight.sum(0, keepdim=True)
    summed = summed.to(likely.dtype)
    tokens = summed.sum(1) / top_k  # [B], S of the whole row
    fraction = summed * experts / (top_k * tokens[:, None])
    uneven = (fraction * likely).sum(1)  # [B]: S · Σ f P of the tokens here

    loss = None
    if weight is not None and config.balance_loss:
        loss = config.balance_loss * (weight * uneven / tokens).sum()
    if scale is not None and config.router_z_loss:
        squares = routing.logits.logsumexp(1).square().view(batch, seq)
        if scale.ndim and scale.shape != squares.shape:
            raise ValueError(
                f"a scale of {tuple(scale.shape)} tokens does not fit {tuple(squares.shape)} on this rank: "
                "model.router_z_loss cannot know which are its own. Pass one scale for all, or set router_z_loss = 0"
            )
        z = config.router_z_loss * (squares * scale).sum()
        loss = z if loss is None else loss + z
    counted = _counted(counts, routing, uneven, kept)
    out: Tensor = _PassThrough.apply(y, loss, counted, tally)
    return out


@torch.no_grad()
def _counted(counts: Tensor, routing: Routing, uneven: Tensor, kept: Tensor | None) -> Tensor:
    entropy = torch.special.entr(routing.probabilities).sum()
    dropped = torch.zeros_like(entropy) if kept is None else (~kept).sum()
    sums = [x.to(torch.float64) for x in (entropy, uneven.sum(), dropped)]
    return torch.cat((counts.sum(0).to(torch.float64), torch.stack(sums)))


def _row_weights(scale: Tensor, summed: Tensor, seq: int, top_k: int, sum_counts: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ_t scale_t of each whole row, [B]. A scale [B,S'] of the tokens here, or of a row of which this rank has an
    equal part of ``seq`` tokens: the parts add up to the row."""
    if scale.ndim == 0:
        return scale * (summed.sum(1) // top_k)
    return sum_counts(scale.sum(1, keepdim=True) * (seq / scale.shape[1])).squeeze(1)


class _PassThrough(torch.autograd.Function):
    """y, and in backward a gradient of 1 for the loss, and the counts to the tally."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor | None, counted: Tensor, tally: Tally) -> Tensor:
        ctx.save_for_backward(counted)
        ctx.tally = tally
        ctx.like = None if loss is None else (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        ctx.tally.add(*ctx.saved_tensors)
        one = None if ctx.like is None else torch.ones((), dtype=ctx.like[0], device=ctx.like[1])
        return grad, one, None, None


def bias_rate(config: ModelConfig, step: int, steps: int) -> float:
    """How far the bias moves at optimizer step ``step`` of ``steps``, from 0."""
    rate = config.router_bias_rate
    if config.router_bias_schedule == "cosine":
        return rate * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0))) / 2
    if config.router_bias_schedule == "warmup":
        return rate * min((step + 1) / config.router_bias_warmup_steps, 1.0)
    return rate


def bias_step(loads: Tensor) -> Tensor:
    """loads [L,E] -> which way each bias goes, [L,E]: sign(mean load - load_e), up where there is too little
    (DeepSeek-V3, section 2.1.2)."""
    return (loads.mean(1, keepdim=True) - loads).sign()


def ratios(totals: Tensor, top_k: int) -> Mapping[str, Tensor]:
    """Sums of layers [L,E+3], as a `Tally` has them, of all ranks -> [L] each: greatest and least load over the mean
    one, entropy of the router in nats, share of slots dropped, Σ f P. All 0 where nothing was counted."""
    loads, (entropy, uneven, dropped) = totals[:, :-3], totals[:, -3:].unbind(1)
    slots = loads.sum(1).clamp(min=1)
    mean = slots / loads.shape[1]
    return {
        "load_max": loads.amax(1) / mean,
        "load_min": loads.amin(1) / mean,
        "entropy": entropy * top_k / slots,
        "dropped": dropped / slots,
        "balance_loss": uneven * top_k / slots,
    }
