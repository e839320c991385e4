"""Normalisation of the features of a token, computed in float32 or wider whatever comes in."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kforge_model.config import ModelConfig
from kforge_model.registry import NORMS


@NORMS.register("rmsnorm")
class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    Computed in float32 or wider whatever comes in, the product with the weight included; returned in x's dtype. The
    weight may have another dtype than x. With ``group`` set, whoever spreads the model has cut the last dimension over
    its ranks in parts of one size, and the mean is taken over all of them.
    """

    init: ClassVar[dict[str, str]] = {"weight": "ones"}
    group: dist.ProcessGroup | None
    """Ranks over which the features are cut. None: they are whole."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.group = None
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(_mean(wide.square(), self.group) + self.eps) * self.weight.to(wide.dtype)).to(
            x.dtype
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


@NORMS.register("layernorm")
class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    Computed in float32 or wider whatever comes in; returned in x's dtype. Weight and bias may have another dtype.
    """

    init: ClassVar[dict[str, str]] = {"weight": "ones", "bias": "zeros"}
    group: dist.ProcessGroup | None
    """As of `RMSNorm`."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.group = None
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - _mean(wide, self.group)
        scaled = centred * torch.rsqrt(_mean(centred.square(), self.group) + self.eps)
        return (scaled * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"


def _mean(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The mean over the last dimension, which may lie on several ranks in parts of one size."""
    mean = x.mean(-1, keepdim=True)
    return mean if group is None else _MeanOverRanks.apply(mean, group)


class _MeanOverRanks(torch.autograd.Function):
    """The mean of a number of each rank, on all of them: forward Σ x / n, backward Σ dy / n, as every rank's result
    depends on every rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


def build_norm(config: ModelConfig, dim: int) -> nn.Module:
    """The norm that ``config`` names, over ``dim`` features."""
    norm: nn.Module = NORMS.get(config.norm)(dim, config.norm_eps)
    return norm
