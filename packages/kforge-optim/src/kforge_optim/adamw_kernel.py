"""AdamW's step on many tensors in one Triton launch: each byte of weights, gradients and moments is read and written
once, whatever they are stored in, and nothing is widened but in registers.

Symbols: w weight, g gradient, m and v moments, s and a scale and gate (0-dim, read on the device), t accepted steps.
In float32, an operation at a time (products are not fused into sums, so that every way of storing takes the very same
steps, and root and quotients are rounded as IEEE 754 says):

    g = s g      m = β₁ m + (1-β₁) g      v = β₂ v + ((1-β₂) g) g
    w = w - (lr·wd) w                     where it decays: everywhere, or where m w ≥ 0
    w = w - (c₁ m) / (c₂ √v + eps)        c₁ = lr / (1-β₁ᵗ),  c₂ = 1 / √(1-β₂ᵗ), in float64 before, rounded to float32

w is float32, or bfloat16 with an int16 remainder, or bfloat16 rounded stochastically; m and v are float32, bfloat16 or
8 bits in blocks; g is float32 or bfloat16. bfloat16 is read and written as int16, so that rounding is integer
arithmetic, the same as in `rounding` and `moments`. With gate 0 a program ends before it reads any of them.

A tensor is rows of columns: the whole shard as one row, unless blocks of 8 bits want its real rows, or the shard is
several runs of the whole tensor and rounding wants to know which. A program takes `TILE` pieces of 256 columns. A table
of int64, one line a tensor (`FIELDS`), says where they are; the line is found by bisection.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
# Triton reads a kernel's annotations: they are for it.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from kforge_optim import moments as kept
from kforge_optim._torch import foreach_add_
from kforge_optim.rounding import Box, noise_key
from kforge_optim.sharding import local, local_gradient

if TYPE_CHECKING:
    from kforge_optim.adamw import AdamW
    from kforge_optim.algorithm import Rates, Slot

FIELDS = 15
"""Numbers of a line: addresses of w, remainder, g, m, v, scales of m, scales of v; columns, pieces of 256 a row, pieces
in all, first program; then of the runs of the shard in the whole tensor: base, length, stride; key of the noise."""
PIECE = tl.constexpr(256)
TILE = tl.constexpr(8)
WARPS = 8

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)

WHOLE, SPLIT, ROUNDED = 0, 1, 2
"""How a weight is stored: float32; bfloat16 and remainder; bfloat16."""
WIDE, HALF, CODES = 0, 1, 2
"""How moments are stored: float32; bfloat16; 8 bits."""


@triton.jit
def _address(table, field, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer of the table; ALIGNED: to 16 bytes, as are all."""
    pointer = tl.load(table + field).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _widen(high):
    """The float32 number of bfloat16 bits, int16."""
    return (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_half(full, random):
    """bfloat16 bits, int16, of a float32 number rounded stochastically; random: 0 to 65535."""
    bits = full.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    # An infinity stays; a NaN keeps its sign and a bit that no cut takes away.
    other = tl.where((bits & 0x7FFFFF) == 0, bits, bits | 0x400000)
    return (tl.where(finite, bits + random, other) >> 16).to(tl.int16)


@triton.jit
def _noise(index, key):
    """64 random bits an index, as `rounding.noise`."""
    z = key.to(tl.uint64) + (index + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _sixteen(bits, LOWEST: tl.constexpr):
    return ((bits >> LOWEST) & 0xFFFF).to(tl.int32)


@triton.jit
def _encode(full, scale, codes, random, LEAST: tl.constexpr):
    """Codes, uint8, of moments [TILE, 256] of scales [TILE, 1], rounded stochastically among the 256 at ``codes``."""
    some = scale > 0
    share = tl.where(some, tl.div_rn(full, tl.where(some, scale, 1.0)), 0.0)
    below = tl.zeros(full.shape, tl.int32)
    for bit in tl.static_range(7, -1, -1):
        further = below + (1 << bit)
        below = tl.where(tl.load(codes + further) <= share, further, below)
    below = tl.minimum(below, 254)
    low = tl.load(codes + below)
    up = share - low > random.to(tl.float32) * 0.0000152587890625 * (tl.load(codes + below + 1) - low)
    return tl.maximum(below + up.to(tl.int32), LEAST).to(tl.uint8)


@triton.jit(do_not_specialize=["tensors"])
def _adamw(
    table,
    corrections,
    scale_ptr,
    gate_ptr,
    codes,
    tensors,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    WEIGHT: tl.constexpr,
    MOMENTS: tl.constexpr,
    WIDE_GRAD: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    SCALE: tl.constexpr,
    GATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BISECTIONS: tl.constexpr,
    LINE: tl.constexpr,
):
    accepted = 1.0
    if GATE:
        accepted = tl.load(gate_ptr)
    if accepted != 0:
        program = tl.program_id(0).to(tl.int64)
        first, end = 0, tensors
        for _ in tl.static_range(BISECTIONS):
            middle = (first + end) // 2
            there = tl.load(table + middle * LINE + 10) <= program
            first = tl.where(there, middle, first)
            end = tl.where(there, end, middle)
        c1 = tl.load(corrections + 2 * first)
        c2 = tl.load(corrections + 2 * first + 1)
        table += first * LINE

        columns = tl.load(table + 7)
        if ALIGNED:
            columns = tl.multiple_of(columns, 16)
        a_row = tl.load(table + 8)
        pieces = tl.load(table + 9)
        piece = (program - tl.load(table + 10)) * TILE + tl.arange(0, TILE)[:, None]
        row = piece // a_row
        column = (piece - row * a_row) * PIECE + tl.arange(0, PIECE)[None, :]
        mask = (piece < pieces) & (column < columns)
        at = row * columns + column

        if WIDE_GRAD:
            g = tl.load(_address(table, 2, tl.float32, ALIGNED) + at, mask=mask, other=0.0)
        else:
            g = _widen(tl.load(_address(table, 2, tl.int16, ALIGNED) + at, mask=mask, other=0))
        if SCALE:
            g = g * tl.load(scale_ptr)

        if MOMENTS == 0:
            m_ptr = _address(table, 3, tl.float32, ALIGNED) + at
            v_ptr = _address(table, 4, tl.float32, ALIGNED) + at
            m = tl.load(m_ptr, mask=mask, other=0.0)
            v = tl.load(v_ptr, mask=mask, other=0.0)
        elif MOMENTS == 1:
            m_ptr = _address(table, 3, tl.int16, ALIGNED) + at
            v_ptr = _address(table, 4, tl.int16, ALIGNED) + at
            m = _widen(tl.load(m_ptr, mask=mask, other=0))
            v = _widen(tl.load(v_ptr, mask=mask, other=0))
        else:
            m_ptr = _address(table, 3, tl.uint8, ALIGNED) + at
            v_ptr = _address(table, 4, tl.uint8, ALIGNED) + at
            m_scale_ptr = _address(table, 5, tl.float32, False) + piece
            v_scale_ptr = _address(table, 6, tl.float32, False) + piece
            m_scale = tl.load(m_scale_ptr, mask=piece < pieces, other=0.0)
            v_scale = tl.load(v_scale_ptr, mask=piece < pieces, other=0.0)
            m = tl.load(codes + tl.load(m_ptr, mask=mask, other=0).to(tl.int32)) * m_scale
            v = tl.load(codes + 256 + tl.load(v_ptr, mask=mask, other=0).to(tl.int32)) * v_scale
        m = beta1 * m + rest1 * g
        v = beta2 * v + (rest2 * g) * g

        if WEIGHT == 0:
            w_ptr = _address(table, 0, tl.float32, ALIGNED) + at
            w = tl.load(w_ptr, mask=mask, other=0.0)
        else:
            w_ptr = _address(table, 0, tl.int16, ALIGNED) + at
            high = tl.load(w_ptr, mask=mask, other=0)
            w = _widen(high)
            if WEIGHT == 1:
                low_ptr = _address(table, 1, tl.int16, ALIGNED) + at
                low = tl.load(low_ptr, mask=mask, other=0).to(tl.int32)
                w = ((high.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
        decayed = w - decay * w
        if CAUTIOUS:
            decayed = tl.where(m * w >= 0, decayed, w)
        w = decayed - tl.div_rn(c1 * m, tl.sqrt_rn(v) * c2 + eps)

        if WEIGHT == 2 or MOMENTS != 0:
            length = tl.load(table + 12)
            here = row * columns + (piece - row * a_row) * PIECE  # a piece lies in one run
            run = here // length
            start = tl.load(table + 11) + run * tl.load(table + 13) + (here - run * length)
            random = _noise(start + tl.arange(0, PIECE)[None, :], tl.load(table + 14))

        if WEIGHT == 0:
            tl.store(w_ptr, w, mask=mask)
        else:
            bits = w.to(tl.int32, bitcast=True)
            if WEIGHT == 1:
                tl.store(w_ptr, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
                tl.store(low_ptr, bits.to(tl.int16), mask=mask)
            else:
                tl.store(w_ptr, _round_half(w, _sixteen(random, 32)), mask=mask)

        if MOMENTS == 0:
            tl.store(m_ptr, m, mask=mask)
            tl.store(v_ptr, v, mask=mask)
        elif MOMENTS == 1:
            tl.store(m_ptr, _round_half(m, _sixteen(random, 0)), mask=mask)
            tl.store(v_ptr, _round_half(v, _sixteen(random, 16)), mask=mask)
        else:
            m_scale = tl.max(tl.where(mask, tl.abs(m), 0.0), 1, keep_dims=True)
            v_scale = tl.max(tl.where(mask, tl.abs(v), 0.0), 1, keep_dims=True)
            tl.store(m_scale_ptr, m_scale, mask=piece < pieces)
            tl.store(v_scale_ptr, v_scale, mask=piece < pieces)
            tl.store(m_ptr, _encode(m, m_scale, codes, _sixteen(random, 0), 0), mask=mask)
            tl.store(v_ptr, _encode(v, v_scale, codes + 256, _sixteen(random, 16), 1), mask=mask)


_WEIGHT = {torch.float32: WHOLE, torch.bfloat16: ROUNDED}
_MOMENTS = {torch.float32: WIDE, torch.bfloat16: HALF, torch.uint8: CODES}


def divide(slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
    """Those that the kernel can update, and the others."""
    taken = [_takes(slot) for slot in slots]
    pairs = list(zip(slots, taken, strict=True))
    return [slot for slot, yes in pairs if yes], [slot for slot, yes in pairs if not yes]


def _takes(slot: Slot) -> bool:
    """Left to others is what is rare: float64, weights that are not contiguous, 8 bits whose rows are cut (ranks agree
    on these, which meet for them), and shards that are rounded and are in no runs."""
    if slot.parameter.dtype not in _WEIGHT or not local(slot.parameter).is_contiguous():
        return False
    coded, rounds = _stored(slot)
    if coded and kept.column_groups(slot.parameter):
        return False
    return not rounds or Box.of(slot.parameter).runs() is not None


def _stored(slot: Slot) -> tuple[bool, bool]:
    """Whether moments are codes, and whether anything is rounded stochastically."""
    dtype = slot.state["exp_avg"].dtype
    rounded_weight = slot.parameter.dtype == torch.bfloat16 and slot.remainder is None
    return dtype == torch.uint8, rounded_weight or dtype != torch.float32


def update(slots: Sequence[Slot], of: AdamW, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
    """One step of slots that the kernel `takes`, all on one device; their counters move, too.

    One launch for each way in which some of them are stored. The table goes to the device without a wait.
    """
    device = slots[0].state["step"].device
    one = torch.ones((), device=device) if gate is None else gate.to(torch.float32)
    foreach_add_([slot.state["step"] for slot in slots], one)
    beta1, beta2 = of.betas[0] if rates.momentum is None else rates.momentum, of.betas[1]
    codes = torch.cat([kept.codes(True, device), kept.codes(False, device)]) if of.moments == "int8" else one

    launches: dict[tuple[Any, ...], list[tuple[Slot, list[int]]]] = {}
    copies = []  # gradients laid out anew live until the launch that reads them
    for slot in slots:
        grad = local_gradient(slot.parameter)
        grad = grad if grad.dtype == torch.bfloat16 else grad.to(torch.float32)
        copies.append(grad.contiguous())
        line, aligned = _line(slot, copies[-1], rates)
        stored = SPLIT if slot.remainder is not None else _WEIGHT[slot.parameter.dtype]
        way = (stored, _MOMENTS[slot.state["exp_avg"].dtype], grad.dtype == torch.float32, aligned)
        if grad.numel():
            launches.setdefault(way, []).append((slot, line))
    for (stored, moments, wide_grad, aligned), batch in launches.items():
        programs = 0
        for _, line in batch:
            line[10] = programs
            programs += -(-line[9] // TILE.value)
        table = torch.tensor([line for _, line in batch], dtype=torch.int64, pin_memory=device.type == "cuda")
        taken = torch.stack([slot.state["step"] for slot, _ in batch]).to(torch.float64)
        corrections = torch.stack([rates.lr / (1 - beta1**taken), (1 - beta2**taken).rsqrt()], 1).to(torch.float32)
        with torch.cuda.device_of(taken):  # Triton launches where torch now is, not where its tensors are
            _adamw[(programs,)](
                table.to(device, non_blocking=True),
                corrections,
                one if scale is None else scale.to(torch.float32),
                one,
                codes,
                len(batch),
                rates.lr * rates.weight_decay,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                of.eps,
                WEIGHT=stored,
                MOMENTS=moments,
                WIDE_GRAD=wide_grad,
                CAUTIOUS=of.cautious_decay,
                SCALE=scale is not None,
                GATE=gate is not None,
                ALIGNED=aligned,
                BISECTIONS=len(batch).bit_length(),
                LINE=FIELDS,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )


def _line(slot: Slot, grad: Tensor, rates: Rates) -> tuple[list[int], bool]:
    """A line of the table (`FIELDS`), and whether all rows begin at multiples of 16 bytes."""
    weight, state = local(slot.parameter), slot.state
    coded, rounds = _stored(slot)
    size = weight.numel()
    runs = Box.of(slot.parameter).runs() if rounds else None
    base, length, stride = runs or (0, size, size)
    columns = max(weight.shape[-1] if coded else length, 1)
    low = 0 if slot.remainder is None else local(slot.remainder).data_ptr()
    moments = [local(state[name]).data_ptr() for name in ("exp_avg", "exp_avg_sq")]
    scales = [local(state[f"{name}_scale"]).data_ptr() if coded else 0 for name in ("exp_avg", "exp_avg_sq")]
    tensors = [weight.data_ptr(), low, grad.data_ptr(), *moments]
    a_row = kept.blocks(columns)
    key = noise_key(rates.seed, rates.step, slot.name) if rounds else 0
    line = [*tensors, *scales, columns, a_row, size // columns * a_row, 0, base, max(length, 1), stride, key]
    return line, columns % 16 == 0 and all(address % 16 == 0 for address in tensors)
