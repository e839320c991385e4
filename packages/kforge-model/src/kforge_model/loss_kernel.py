"""The loss of a chunk of logits in one Triton kernel: two readings of the logits and one writing, nothing in between.

Symbols: T tokens of the chunk, R columns of logits, of which the first V are tokens and the others padding; z⁰ [T,R]
logits, y [T] labels, s [T] or [] scale, c soft-cap, ε label smoothing, λ weight of the z-loss. Per row i, in float32
whatever z⁰ is stored in:

    first reading    z_j = c tanh(z⁰_j/c), or z⁰_j without a cap       m = max_{j<V} z_j       S = Σ_{j<V} exp(z_j - m)
    a row            lse = m + log S        nll = log S + (m - z_y)      l = nll - (ε/V) Σ_{j<V} (z_j - z_y) + λ lse²
    second reading   dz⁰_j = s ((1 + 2λ lse) exp(z_j - m) / S - ε/V - (1-ε) [j = y]) (1 - (z_j/c)²)        0 where j ≥ V

dz⁰ takes the place of z⁰, rounded once to its dtype. A row that is not scored (y = -100) is not read: nll, l and dz⁰
are 0. m and S are kept apart for each column modulo the block, and joined at the row's end, so that no thread waits for
another while it reads; one exponential an element suffices, since of exp(z - m) and exp(m - z) one is 1. These are the
formulas of `losses`, in an order that differs in float32's last digits, and with the device's quick exponential (error
under 1e-6 of the value times the distance from the maximum). A label that is no token gives nll = NaN.

Options that are off are compiled away; values are arguments, so a new value compiles nothing.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# Triton reads a kernel's annotations: they are for it.

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""What a maximum begins with: finite, so that its distance from -inf is not NaN."""


@triton.jit
def _tanh(x):
    """tanh(x) and its derivative, both to a few units in the last place."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    x2 = x * x
    series = x * (1.0 - x2 * (1.0 / 3.0 - x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))  # 1 - e has lost digits there
    return tl.where(size < 0.25, series, t), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _row(
    z_ptr,
    labels_ptr,
    scale_ptr,
    nll_ptr,
    each_ptr,
    scale_stride,
    columns,
    tokens,
    softcap,
    smoothing,
    z_loss,
    IGNORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * columns
    y = tl.load(labels_ptr + row)
    lanes = tl.arange(0, BLOCK)
    if y == IGNORE:
        tl.store(nll_ptr + row, 0.0)
        if SMOOTHING or Z_LOSS:
            tl.store(each_ptr + row, 0.0)
        if GRAD:
            zero = tl.zeros([BLOCK], z_ptr.dtype.element_ty)
            for start in range(0, columns, BLOCK):
                tl.store(z_ptr + start + lanes, zero, mask=start + lanes < columns)
    else:
        z_y = tl.load(z_ptr + y, mask=(y >= 0) & (y < tokens), other=float("nan")).to(tl.float32)
        if SOFTCAP:
            t_y, _ = _tanh(z_y / softcap)  # no name of a loop's: a variable keeps its shape in Triton's loops
            z_y = softcap * t_y

        tops = tl.full([BLOCK], LOWEST, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        spread = tl.zeros([BLOCK], tl.float32)
        for start in range(0, tokens, BLOCK):
            there = start + lanes < tokens
            z = tl.load(z_ptr + start + lanes, mask=there, other=float("-inf")).to(tl.float32)
            if SOFTCAP:
                t, slope = _tanh(z / softcap)
                z = tl.where(there, softcap * t, float("-inf"))
            if SMOOTHING:
                spread += tl.where(there, z - z_y, 0.0)
            over = z - tops
            e = tl.exp(-tl.abs(over))
            sums = tl.where(over > 0, sums * e + 1.0, sums + e)
            tops = tl.maximum(tops, z)
        top = tl.max(tops, 0)
        total = tl.sum(sums * tl.exp(tops - top), 0)

        log_total = tl.log(total)
        lse = top + log_total
        nll = log_total + (top - z_y)
        tl.store(nll_ptr + row, nll)
        if SMOOTHING or Z_LOSS:
            each = nll
            if SMOOTHING:
                each -= smoothing / tokens * tl.sum(spread, 0)
            if Z_LOSS:
                each += z_loss * lse * lse
            tl.store(each_ptr + row, each)

        if GRAD:
            s = tl.load(scale_ptr + row * scale_stride)
            factor = s / total
            if Z_LOSS:
                factor *= 1.0 + 2.0 * z_loss * lse
            at_y = s
            if SMOOTHING:
                at_y = s * (1.0 - smoothing)
            evenly = s * smoothing / tokens
            for start in range(0, columns, BLOCK):
                column = start + lanes
                z = tl.load(z_ptr + column, mask=column < tokens, other=float("-inf")).to(tl.float32)
                if SOFTCAP:
                    t, slope = _tanh(z / softcap)
                    z = softcap * t
                d = tl.exp(z - top) * factor
                if SMOOTHING:
                    d -= evenly
                d = tl.where(column == y, d - at_y, d)
                if SOFTCAP:
                    d *= slope
                d = tl.where(column < tokens, d, 0.0)
                tl.store(z_ptr + column, d.to(z_ptr.dtype.element_ty), mask=column < columns)


def _shape(columns: int) -> tuple[int, int]:
    """Columns and warps of a block."""
    block = min(max(triton.next_power_of_2(columns), 2048), 8192)
    return block, block // 512


@torch.library.custom_op("kforge_model::loss_rows", mutates_args=("z", "nll", "each"), schema=(
    "(Tensor(a!) z, Tensor labels, Tensor scale, Tensor(b!) nll, Tensor(c!)? each, int tokens, float softcap, "
    "float label_smoothing, float z_loss, int ignore, bool grad) -> ()"
))  # fmt: skip
def loss_rows(
    z: Tensor,
    labels: Tensor,
    scale: Tensor,
    nll: Tensor,
    each: Tensor | None,
    tokens: int,
    softcap: float,
    label_smoothing: float,
    z_loss: float,
    ignore: int,
    grad: bool,
) -> None:
    """Loss and gradient of logits z [T,R] (bf16, fp16 or fp32, contiguous) of which the first ``tokens`` columns count.

    labels [T] int64, ``ignore`` where not scored; scale [] or [T] float32. nll [T] and, with smoothing or z-loss, l in
    each [T] are written, float32; with ``grad`` dz⁰ takes the place of z. The formulas are this module's.
    """
    if not z.shape[0]:
        return
    block, warps = _shape(z.shape[1])
    with torch.cuda.device_of(z):  # Triton launches where torch now is, not where its tensors are
        _row[(z.shape[0],)](
            z,
            labels,
            scale,
            nll,
            nll if each is None else each,
            scale.ndim,
            z.shape[1],
            tokens,
            softcap,
            label_smoothing,
            z_loss,
            IGNORE=ignore,
            SOFTCAP=softcap > 0,
            SMOOTHING=label_smoothing > 0,
            Z_LOSS=z_loss > 0,
            GRAD=grad,
            BLOCK=block,
            num_warps=warps,
        )


@loss_rows.register_fake
def _(*_: Any) -> None:
    """Nothing is made, so there is nothing to say of it."""
