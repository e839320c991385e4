"""Initial values that are a function of (seed, parameter name, index in the whole tensor), and of nothing else.

A stateful generator gives a shard other numbers than the whole would have had there. Here every element is computed
from its own place, so a rank fills its shard alone, in any layout, and all layouts start from the same bits.

    key    = 64 bits of BLAKE2b("seed/name")
    u      = splitmix64(key + (index + 1) * golden)      (Steele, Lea, Flood 2014, figure 16: the finalizer)
    normal = sqrt(2) * erfinv(2u - 1)                    in float64, rounded once to the tensor's dtype
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kforge_model._torch import local_box

CHUNK = 1 << 22
"""Elements computed at one time: 32 MiB an intermediate."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """z ^= z >>> bits, the shift being the logical one that int64 lacks."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def counter_normal(index: Tensor, key: int, cut: float | None = None) -> Tensor:
    """Standard normal numbers, float64, one for each int64 index; with ``cut``, of the normal distribution cut off at
    ± cut. Multiplications wrap around, as they should."""
    z = (index + 1).mul_(GOLDEN).add_(key)
    z = _xor_shift_(z, 30).mul_(MIX_1)
    z = _xor_shift_(z, 27).mul_(MIX_2)
    z = _xor_shift_(z, 31)
    # 52 bits and a half: the centre of a cell, exact in float64, never 0 or 1.
    cell = (z >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64)
    uniform = cell.add_(0.5).mul_(2.0**-51).sub_(1.0)
    if cut is not None:
        uniform.mul_(math.erf(cut / math.sqrt(2.0)))
    return uniform.erfinv_().mul_(math.sqrt(2.0))


def _whole_index(
    start: int, stop: int, local: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> Tensor:
    """Flat indices in the whole tensor of the elements start..stop of a box's own flat order."""
    index = torch.arange(start, stop, device=device)
    if local == whole:
        return index
    if local[1:] == whole[1:]:  # cut along the first dimension only: still one run of the whole
        return index.add_(offset[0] * math.prod(whole[1:]))
    total, stride = torch.zeros_like(index), 1
    for mine, full, first in zip(reversed(local), reversed(whole), reversed(offset), strict=True):
        total.add_((index % mine).add_(first).mul_(stride))
        index, stride = index.div(mine, rounding_mode="floor"), stride * full
    return total


@torch.no_grad()
def init_normal_(tensor: Tensor, seed: int, name: str, std: float, cut: float | None = None) -> Tensor:
    """Fill a tensor in place with normal numbers of standard deviation ``std`` and mean 0; returns it. With ``cut``,
    the distribution is cut off at ± cut · std.

    Element i (flat, in the whole tensor) depends on (seed, name, i), std and cut only: not on shape, device, dtype or
    layout, but for rounding. A DTensor's ranks each fill their own shard and do not communicate. On one kind of
    device all layouts give the same bits; CPU and CUDA may differ in the last place of float32.

    Raises ValueError for a tensor on meta (give it storage first) or a partial DTensor.
    """
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no storage to fill; call to_empty(device=...) first")
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} has placements {tensor.placements}; a partial sum cannot be initialised")
        local, offset = local_box(tensor)
    else:
        local, offset = tensor, (0,) * tensor.ndim
    key, whole, box = _key(seed, name), tuple(tensor.shape), tuple(local.shape)
    target = local if local.is_contiguous() else torch.empty_like(local, memory_format=torch.contiguous_format)
    flat = target.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        index = _whole_index(start, stop, box, whole, offset, local.device)
        flat[start:stop] = counter_normal(index, key, cut).mul_(std)
    if target is not local:
        local.copy_(target)
    return tensor


@torch.no_grad()
def fill_(tensor: Tensor, value: float) -> Tensor:
    """Fill a tensor, or this rank's shard of a DTensor, with one value."""
    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(value)
    return tensor
