"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4).

    Computed in float32 or wider whatever comes in, the product with the weight included; returned in x's dtype. The
    weight may have another dtype than x.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.to(wide.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"
