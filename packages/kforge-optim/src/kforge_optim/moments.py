"""AdamW's moments in less than float32: bfloat16, or codes of 8 bits with a scale for each block.

Every number stored is rounded stochastically (`rounding`), so a moment is right on average: with decay rate b it moves
by 1 - b of its distance from the new gradient, and rounded to the nearest, it would stand still wherever that is less
than half a step of the format. Steps of bfloat16 are 0.4 to 0.8 % of the value, so a second moment with b = 0.999 would
never come down again.

Rounded stochastically, the mean over the random bits is the float32 moment, exactly; what is added is noise. A
rounding of x has variance (x - below)(above - x) ≤ (step/2)², and a share b of a deviation survives a step, so the
standard deviation stays below

    step / (2 √(1 - b²)),   step ≤ 2⁻⁷ of the value in bfloat16: 1.3 % of a second moment at b = 0.95, 9 % at 0.999.

Blocks of 8 bits (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"): 256 elements along the last
dimension share the largest magnitude among them as scale, float32, and each is one of 256 numbers between -1 and 1 (0
and 1 for second moments) times that: "dynamic" numbers, evenly spaced within a power of ten, with half as many steps in
each next one down to 1e-7. A second moment that is not of an empty block is never stored as 0, since its root divides.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from kforge_optim._torch import laid_out, sharded_dim
from kforge_optim.rounding import EXP_AVG, EXP_AVG_SQ, sixteen, to_bfloat16
from kforge_optim.sharding import local

BLOCK = 256
"""Elements along the last dimension of the whole tensor that share a scale."""
SMALLEST = 4096
"""Tensors of fewer elements keep float32 moments instead of codes, as do those of one dimension."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""What ``optim.moments`` means; float64 weights keep float64 moments under fp32."""


def storage_dtype(parameter: Tensor, moments: str) -> torch.dtype:
    """In which dtype the moments of a parameter are kept; it depends on the whole tensor, not on its layout."""
    if moments == "int8" and (parameter.ndim < 2 or parameter.numel() < SMALLEST):
        moments = "fp32"
    wanted = DTYPES[moments]
    return torch.promote_types(parameter.dtype, wanted) if moments == "fp32" else wanted


def new_moments(parameter: Tensor, moments: str) -> dict[str, Tensor]:
    """Zero moments of a parameter, in its layout: ``exp_avg`` and ``exp_avg_sq``, and in 8 bits ``exp_avg_scale`` and
    ``exp_avg_sq_scale`` [..., ceil(last / 256)], float32, laid out as the parameter is but whole along the blocks."""
    weight, dtype = parameter.detach(), storage_dtype(parameter, moments)
    state: dict[str, Tensor] = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = torch.zeros_like(weight, dtype=dtype)
        if dtype == torch.uint8:
            state[f"{kind}_scale"] = _new_scale(weight)
    return state


def blocks(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // BLOCK)


def _new_scale(weight: Tensor) -> Tensor:
    whole = torch.Size((*weight.shape[:-1], blocks(weight.shape[-1])))
    here = (*local(weight).shape[:-1], whole[-1])
    scale = torch.zeros(here, dtype=torch.float32, device=local(weight).device)
    if not isinstance(weight, DTensor):
        return scale
    placements = [Replicate() if _cuts_columns(weight, dim) else p for dim, p in enumerate(weight.placements)]
    stride = torch.empty(whole, device="meta").stride()
    return laid_out(scale, weight.device_mesh, placements, whole, stride)


def _cuts_columns(weight: DTensor, dim: int) -> bool:
    """Whether the mesh dimension ``dim`` cuts the last dimension of the tensor."""
    return weight.device_mesh.size(dim) > 1 and sharded_dim(weight.placements[dim]) == weight.ndim - 1


def column_groups(weight: Tensor) -> list[dist.ProcessGroup]:
    """The groups over which the last dimension is cut: their ranks hold parts of one block."""
    if not isinstance(weight, DTensor):
        return []
    return [weight.device_mesh.get_group(dim) for dim in range(weight.device_mesh.ndim) if _cuts_columns(weight, dim)]


@cache
def codes(signed: bool, device: torch.device | None = None) -> Tensor:
    """The 256 numbers that a code stands for, float32, rising.

    The dynamic map of bitsandbytes for 8 bits: in the power of ten that ends at 10⁻ⁱ, the middles of 64/2ⁱ equal parts
    (128/2ⁱ, unsigned), i from 0 to 6, and 0 and 1. Signed, -1 takes the place of its smallest negative number, so
    that blocks whose largest is negative are scaled right.
    """
    parts = [2**6 >> i if signed else 2**7 >> i for i in range(7)]
    values = []
    for i, count in enumerate(parts):
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        values.append((edges[1:] + edges[:-1]) / 2 * 10.0**-i)
    positive = torch.cat(values)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    if signed:
        ends = torch.cat([ends, -ends[1:], -positive.sort().values[1:]])
    return torch.cat([positive, ends]).sort().values.to(torch.float32).to(device)


def block_of(first_column: int, columns: int, device: torch.device) -> Tensor:
    """The block [columns] of each of the columns from ``first_column`` on."""
    return torch.arange(first_column, first_column + columns, device=device).div_(BLOCK, rounding_mode="floor")


def widen(stored: Tensor, scale: Tensor | None, block: Tensor | None, signed: bool, dtype: torch.dtype) -> Tensor:
    """Stored moments, flat, as numbers of ``dtype``: the very tensor if it has this dtype. In 8 bits, scale
    [rows, blocks] and block [columns]."""
    if scale is None or block is None:
        return stored.to(dtype)
    rows = stored.view(scale.shape[0], block.shape[0])
    return (codes(signed, stored.device)[rows.int()] * scale[:, block]).view(-1).to(dtype)


def largest(full: Tensor, scale: Tensor, block: Tensor) -> Tensor:
    """The largest magnitude in each block of moments, flat: what is to take the place of scale [rows, blocks]."""
    rows = full.view(scale.shape[0], block.shape[0])
    top = torch.zeros(scale.shape, dtype=full.dtype, device=full.device)
    return top.scatter_reduce_(1, block.expand(rows.shape), rows.abs(), "amax").to(torch.float32)


def narrow(full: Tensor, random: Tensor, scale: Tensor | None, block: Tensor | None, signed: bool) -> Tensor:
    """What is stored of moments, flat: bfloat16, or given their scales [rows, blocks], codes.

    random: 64 random bits an element; the signed moment takes its own 16 of them, the unsigned one others.
    """
    bits = sixteen(random, EXP_AVG if signed else EXP_AVG_SQ)
    full = full.to(torch.float32)
    if scale is None or block is None:
        return to_bfloat16(full, bits)
    of = scale[:, block].view(-1)
    share = torch.where(of > 0, full / of, 0.0)
    table = codes(signed, full.device)
    below = torch.searchsorted(table, share, right=True).sub_(1).clamp_(0, 254)
    low, high = table[below], table[below + 1]
    code = below + (share - low > (bits * 2.0**-16) * (high - low))
    return code.clamp_min_(0 if signed else 1).to(torch.uint8)
