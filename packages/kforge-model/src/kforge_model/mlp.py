"""The gated feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * w_up x), without biases (Shazeer 2020, arXiv:2002.05202, equation 6)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(dim, hidden, bias=False)
        self.w_up = nn.Linear(dim, hidden, bias=False)
        self.w_down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,D] -> [B,S,D]."""
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
