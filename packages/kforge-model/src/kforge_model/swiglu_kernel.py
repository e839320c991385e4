"""The gradient of h = silu(g) u in one pass over g, u and dh. With s = 1 / (1 + exp(-g)):

    dg = dh u s (1 + g (1 - s))        du = dh g s

in float32, rounded once.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# Triton reads a kernel's annotations: they are for it.

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK = 1024


@triton.jit
def _backward(grad, pair, out, size, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    gate_at = 2 * row * size + column
    dh = tl.load(grad + row * size + column, there).to(tl.float32)
    g = tl.load(pair + gate_at, there).to(tl.float32)
    u = tl.load(pair + gate_at + size, there).to(tl.float32)
    s = tl.sigmoid(g)
    kind = out.dtype.element_ty
    tl.store(out + gate_at, (dh * u * s * (1.0 + g * (1.0 - s))).to(kind), there)
    tl.store(out + gate_at + size, (dh * g * s).to(kind), there)


def swiglu_backward(grad: Tensor, pair: Tensor) -> Tensor:
    """grad [..., F] of h and pair [..., 2, F] of g and u -> [..., 2, F] of dg and du."""
    grad, pair = grad.contiguous(), pair.contiguous()
    out = torch.empty_like(pair)
    size = pair.shape[-1]
    rows = grad.numel() // max(size, 1)
    if rows:
        _backward[(rows, triton.cdiv(size, BLOCK))](grad, pair, out, size, BLOCK)
    return out
