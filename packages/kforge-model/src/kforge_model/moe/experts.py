"""The experts of a layer: feed-forward halves of one shape, kept as batches of matrices.

Shapes: N rows, each in the part of its expert; E experts here; D features, F hidden features of an expert.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kforge_model.gated import gated
from kforge_model.mlp import GATED, PLAIN

ALIGNED = 16
"""Bytes of which every row of a factor of `grouped_mm` must be a multiple."""


class Experts(nn.Module):
    """E feed-forward halves, gated or plain as ``mlp`` says, without biases.

    ``w_gate_up`` is [E,2,F,D] (gate, then up) or ``w_up`` [E,F,D] where there is no gate; ``w_down`` is [E,D,F]. The
    number of experts is read off the weights, so a rank that holds some of them computes those.
    """

    init: ClassVar[dict[str, str]] = {"w_gate_up": "matrix", "w_up": "matrix", "w_down": "residual"}

    def __init__(self, n_experts: int, dim: int, hidden: int, mlp: str = "swiglu") -> None:
        """Raises ValueError for a feed-forward half that a package adds: of its weights nothing is known."""
        super().__init__()
        known_mlp(mlp)
        self.n_experts = n_experts
        """Of the whole layer, wherever they lie."""
        self.gated = mlp in GATED
        self.activation = GATED[mlp] if self.gated else PLAIN[mlp]
        if self.gated:
            self.w_gate_up = nn.Parameter(torch.zeros(n_experts, 2, hidden, dim))
        else:
            self.w_up = nn.Parameter(torch.zeros(n_experts, hidden, dim))
        self.w_down = nn.Parameter(torch.zeros(n_experts, dim, hidden))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [N,D], the rows of expert 0 first, and counts [E] int64 of sum N -> [N,D].

        On CUDA in bfloat16 the host does not learn the counts (`groups_can`). Elsewhere, and for widths that are no
        multiple of 8, one expert after the other, which on CUDA waits for the device.
        """
        w_in = self.w_gate_up.flatten(1, 2) if self.gated else self.w_up  # [E, 2F or F, D]
        if groups_can(x, w_in, self.w_down):
            ends = counts.cumsum(0, dtype=torch.int32)
            hidden: Tensor = GroupedProduct.apply(x, w_in, ends)
            y: Tensor = GroupedProduct.apply(self._activated(hidden), self.w_down, ends)
            return y
        return self._one_by_one(x, counts, w_in)

    # Sizes depend on the data: a graph would be made anew for each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _one_by_one(self, x: Tensor, counts: Tensor, w_in: Tensor) -> Tensor:
        sizes = counts.tolist() if len(x) else [0] * len(w_in)
        parts = zip(x.split(sizes), w_in.unbind(), self.w_down.unbind(), strict=True)
        return torch.cat([F.linear(self._activated(F.linear(part, a)), b) for part, a, b in parts])

    def _activated(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(hidden)
        return gated(hidden.unflatten(-1, (2, -1)), self.activation)

    def extra_repr(self) -> str:
        experts, dim, hidden = self.w_down.shape
        return f"{experts}, {dim}, hidden={hidden}, gated={self.gated}"


def known_mlp(mlp: str) -> None:
    """Raise ValueError for a feed-forward half that cannot be an expert."""
    if mlp not in GATED and mlp not in PLAIN:
        raise ValueError(
            f"model.mlp = {mlp!r} cannot be an expert, as nothing is known of its weights; with n_experts choose one "
            f"of {', '.join((*GATED, *PLAIN))}"
        )


class GroupedProduct(torch.autograd.Function):
    """x [N,C], the rows of group 0 first, w [E,R,C], and the ends of the groups [E] int32 -> y [N,R].

        y_n = w_e x_n        dx_n = w_eᵀ dy_n        dw_e = Σ_n dy_n x_nᵀ, over the rows n of group e

    The kernels refuse gradients that are expanded, and on Blackwell leave dw_e undefined where a group has no rows
    (pytorch/pytorch#172439).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return F.grouped_mm(x, w.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, w, ends = ctx.saved_tensors
        grad = grad.contiguous()
        dx = F.grouped_mm(grad, w, offs=ends) if ctx.needs_input_grad[0] else None
        dw = F.grouped_mm(grad.mT, x, offs=ends) if ctx.needs_input_grad[1] else None
        if dw is not None and (not x.is_cuda or _generation(x.device.index) >= 10):
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            dw = dw.masked_fill(empty[:, None, None], 0)
        return dx, dw, None


def groups_can(x: Tensor, *weights: Tensor) -> bool:
    """Whether ``grouped_mm`` computes x @ wᵀ, and its gradients, without the host knowing where groups end: bfloat16 on
    CUDA of compute capability 9 and 10 (on others torch loops over the groups too), rows of a multiple of 16 bytes, and
    at least one."""
    if not x.is_cuda or not len(x) or any(t.dtype != torch.bfloat16 for t in (x, *weights)):
        return False
    aligned = all(n * x.itemsize % ALIGNED == 0 for w in weights for n in w.shape[-2:])
    return aligned and _generation(x.device.index) in (9, 10)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _generation(device_index: int | None) -> int:
    """Major compute capability. A number: torch 2.11 cannot trace a comparison of tuples that are constants."""
    return torch.cuda.get_device_capability(device_index)[0]
