"""sum = sum + gradient of different dtypes in one pass, where PyTorch takes two or reads them slowly."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# Triton reads a kernel's annotations: they are for it.

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from kforge_parallel.sums import plain_add

BLOCK = 4096


@triton.jit
def _add(total, gradient, out, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < count
    value = tl.load(gradient + place, there).to(out.dtype.element_ty)
    if not FIRST:
        value += tl.load(total + place, there)
    tl.store(out + place, value, there)


def add(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """As `plain_add`."""
    alike = total is None or (total.dtype == dtype and total.stride() == gradient.stride())
    if not alike or not gradient.is_contiguous() or not gradient.numel():
        return plain_add(total, gradient, dtype)
    out = torch.empty_like(gradient, dtype=dtype) if total is None else total
    count = gradient.numel()
    with torch.cuda.device(gradient.device):
        _add[(triton.cdiv(count, BLOCK),)](out, gradient, out, count, total is None, BLOCK, num_warps=8)
    return out
