"""Several matrices that read one input, kept as one weight: one product, and still every matrix a view of its part.

The parts lie along dimensions of their own, before rows and columns. A rank that has whole parts, or the same rows or
columns of every part, has a plain slice of each matrix: which part is which never depends on how the weight is cut.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class StackedLinear(nn.Module):
    """``shape`` = (…, rows) and D input features: y = x Wᵀ + b with W [*shape, D], b [*shape], y [..., *shape].

    ``StackedLinear(256, (2, 512))`` is two matrices [512, 256] in one weight.
    """

    init: ClassVar[dict[str, str]] = {"weight": "matrix", "bias": "zeros"}
    is_linear: ClassVar[bool] = True
    """Tells who replaces products (by such in FP8, say) that this module is one, as an nn.Linear is."""

    def __init__(self, in_features: int, shape: tuple[int, ...], bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, in_features))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None
        bound = 1 / math.sqrt(in_features)
        for parameter in self.parameters():
            if not parameter.is_meta:
                nn.init.uniform_(parameter, -bound, bound)  # as nn.Linear does, for who uses it alone

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., *shape]; the shape is that of this rank's weight."""
        weight = self.weight
        bias = None if self.bias is None else self.bias.flatten()
        return F.linear(x, weight.flatten(0, -2), bias).unflatten(-1, weight.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.weight.shape[-1]}, {tuple(self.weight.shape[:-1])}, bias={self.bias is not None}"


def linear(in_features: int, out_features: int, bias: bool, init: str) -> nn.Linear:
    """An nn.Linear that says how it starts: ``init`` is a word of `Transformer.init_weights`."""
    module: Any = nn.Linear(in_features, out_features, bias=bias)
    module.init = {"weight": init, "bias": "zeros"} if bias else {"weight": init}
    return module  # type: ignore[no-any-return]
