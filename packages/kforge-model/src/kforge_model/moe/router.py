"""Which experts a token goes to, and what weight each of them has.

Shapes: T tokens, D features, E experts, k experts a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from kforge_model.config import ModelConfig
from kforge_model.registry import ROUTERS

TINY = 1e-20
"""Added to sums of sigmoid scores, as DeepSeek-V3's code does: all of them may be 0."""


class Routing(NamedTuple):
    """What a router says of T tokens. All but ids in the router's own dtype, float32 or wider."""

    ids: Tensor
    """[T,k] int64: the experts of each token, the best first."""
    weights: Tensor
    """[T,k]: factor on what each of them computes."""
    probabilities: Tensor
    """[T,E]: scores of all experts, of sum 1, as the balance loss wants them."""
    logits: Tensor
    """[T,E]: what the scores are made of, for the z-loss."""


class Router(nn.Module):
    """One score an expert, from one product; a kind of router says how scores are made of the logits.

    Product, scores and choice are made in float32, or wider where x is: with bfloat16 logits the choice would depend
    on rounding. The choice is by score plus ``bias``, where there is one, and goes to the lower expert between equals;
    the weights are the scores themselves. ``bias`` is a buffer, float32 or wider whatever the model is cast to, as it
    moves by steps that bfloat16 would lose.
    """

    init: ClassVar[dict[str, str]] = {"weight": "matrix", "bias": "zeros"}
    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.groups, self.top_groups = config.moe_top_k, config.router_groups, config.router_top_groups
        self.norm, self.scale = config.router_norm, config.router_scale
        self.weight = nn.Parameter(torch.zeros(config.n_experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.n_experts) if config.router_bias else None)

    def forward(self, x: Tensor) -> Routing:
        """x [T,D]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits: Tensor = WideProduct.apply(x, self.weight, wide)
        scores = self.scores(logits)
        ids = self.choose(scores.detach())
        weights = scores.gather(1, ids)
        if self.norm and self.top_k == 1:
            weights = 1 + 0 * weights  # the gradient of a quotient would be rounding: whole steps to Lion and Muon
        elif self.norm:
            weights = weights / self.total(weights)
        if self.scale != 1:
            weights = weights * self.scale
        return Routing(ids, weights, self.probabilities(scores), logits)

    def scores(self, logits: Tensor) -> Tensor:
        """logits [T,E] -> scores [T,E], not negative."""
        raise NotImplementedError

    def total(self, scores: Tensor) -> Tensor:
        """scores [T,n] -> [T,1], by which they are divided to sum to 1."""
        raise NotImplementedError

    def probabilities(self, scores: Tensor) -> Tensor:
        """scores [T,E] -> the same of sum 1."""
        raise NotImplementedError

    def group_score(self, scores: Tensor) -> Tensor:
        """Scores of the experts of each group, best first, [T,G,E/G] -> of the groups, [T,G]."""
        raise NotImplementedError

    def choose(self, scores: Tensor) -> Tensor:
        """scores [T,E] -> the experts of each token [T,k], the best first."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.top_groups < self.groups:
            grouped = scores.unflatten(1, (self.groups, -1))
            best = _best(self.group_score(grouped.sort(dim=2, descending=True).values), self.top_groups)
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return _best(scores, self.top_k)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = before.to(self.bias.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, experts={self.weight.shape[0]}, top_k={self.top_k}"


class WideProduct(torch.autograd.Function):
    """x [T,D] and w [E,D] -> y [T,E] in another dtype, in which all three products are made.

        y = x wᵀ        dx = dy w        dw = dyᵀ x

    Keeps x as it is for the backward: a wide copy would be of twice the size of a layer's input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.to(dtype) @ w.to(dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        dx = (grad @ w.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = (grad.T @ x.to(grad.dtype)).to(w.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the greatest scores [T,n] -> [T,count]. By a stable sort: topk leaves open which of two equals it
    takes."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


@ROUTERS.register("softmax")
class SoftmaxRouter(Router):
    """Scores are the softmax over all experts (Fedus et al. 2021, arXiv:2101.03961, equation 1). A group is as good as
    its best expert (DeepSeek-V2, arXiv:2405.04434, section 2.2.2)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def total(self, scores: Tensor) -> Tensor:
        return scores.sum(dim=1, keepdim=True)

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores

    def group_score(self, scores: Tensor) -> Tensor:
        return scores[..., 0]


@ROUTERS.register("sigmoid")
class SigmoidRouter(Router):
    """Scores are the sigmoid of each expert's logit by itself; a group is as good as its two best experts together
    (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16 and section 2.1.2)."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def total(self, scores: Tensor) -> Tensor:
        return scores.sum(dim=1, keepdim=True) + TINY

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores / self.total(scores)

    def group_score(self, scores: Tensor) -> Tensor:
        return scores[..., 0] + scores[..., 1]


def build_router(config: ModelConfig) -> nn.Module:
    """The router that ``config`` names. Raises ValueError where router_bias is asked of one that has no bias."""
    router: nn.Module = ROUTERS.get(config.router)(config)
    if config.router_bias and getattr(router, "bias", None) is None:
        raise ValueError(
            f"model.router_bias = True, but the router {config.router!r} has no buffer called bias; register one of "
            f"[{config.n_experts}] in it, or set router_bias = False"
        )
    return router
