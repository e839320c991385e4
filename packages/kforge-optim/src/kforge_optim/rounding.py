"""Stochastic rounding by random bits that are a function of (seed, step, parameter, index in the whole tensor).

Rounded to the nearest, what moves by less than half a step of its format never moves. Rounded up with probability
p = (x - below) / (above - below), and down else, x is right on average, so small moves add up (Gupta et al. 2015,
section 3.2). The bits come from no generator with a state: every element has its own, whatever the layout, the device
and the step at which a run was resumed::

    key  = 64 bits of BLAKE2b("seed/step/name")
    bits = splitmix64(key + (index + 1) * golden)      (Steele, Lea, Flood 2014, figure 16: the finalizer)

A moment takes 16 of the bits (`EXP_AVG`, `EXP_AVG_SQ`), a weight 16 others (`WEIGHT`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kforge_optim._torch import shard_offset
from kforge_optim.sharding import local

CHUNK = 2**20
"""Elements that are widened, and get their random bits, at one time where no kernel does all in one go."""
EXP_AVG, EXP_AVG_SQ, WEIGHT = 0, 16, 32
"""The lowest bit of the 16 that round a first moment, a second moment, a weight."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def noise_key(seed: int, step: int, name: str) -> int:
    """What the bits of one parameter in one step begin with: 64 bits, signed."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def noise(index: Tensor, key: int) -> Tensor:
    """64 random bits, int64, for each int64 index. Multiplications wrap around, as they should."""
    z = (index + 1).mul_(_GOLDEN).add_(key)
    z = _xor_shift_(z, 30).mul_(_MIX_1)
    z = _xor_shift_(z, 27).mul_(_MIX_2)
    return _xor_shift_(z, 31)


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """z ^= z >>> bits, the shift being the logical one that int64 lacks."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def sixteen(bits: Tensor, lowest: int) -> Tensor:
    """16 of the 64 bits, from bit ``lowest`` on, as int32 numbers from 0 to 65535."""
    return ((bits >> lowest) & 0xFFFF).to(torch.int32)


def to_bfloat16(full: Tensor, random: Tensor) -> Tensor:
    """A float32 tensor rounded stochastically to bfloat16; random: int32 numbers from 0 to 65535, of its shape.

    The numbers are added to the bits that are cut off, so the carry rounds away from zero as often as it should. What
    bfloat16 holds exactly stays as it is, as do infinities and NaN.
    """
    rounded = ((full.view(torch.int32) + random) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(full.isfinite(), rounded, full.to(torch.bfloat16))


@dataclass(frozen=True)
class Box:
    """Where a shard lies in its whole tensor: both shapes, and the index of its first element in each dimension."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Box:
        """The box of this rank's shard; a plain tensor is whole. Raises ValueError for a shard that is no box."""
        offset = shard_offset(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.ndim
        return cls(tuple(local(tensor).shape), tuple(tensor.shape), offset)

    def runs(self) -> tuple[int, int, int] | None:
        """(base, length, stride): local element i is element ``base + i // length * stride + i % length`` of the whole.
        None where no such numbers exist, as for a tensor cut along its second and its third dimension."""
        cut = [dim for dim, (mine, full) in enumerate(zip(self.local, self.whole, strict=True)) if mine != full]
        base, stride = 0, 1
        for first, full in zip(reversed(self.offset), reversed(self.whole), strict=True):
            base, stride = base + first * stride, stride * full
        last = cut[-1] if cut else 0
        if any(math.prod(self.whole[:dim]) > 1 for dim in cut if dim != last):
            return None
        return base, math.prod(self.local[last:]), math.prod(self.whole[last:])

    def index(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Indices [stop - start], int64, in the whole tensor of the elements start..stop of the shard."""
        index = torch.arange(start, stop, device=device)
        if self.local == self.whole:
            return index
        total, stride = torch.zeros_like(index), 1
        for mine, full, first in zip(reversed(self.local), reversed(self.whole), reversed(self.offset), strict=True):
            total.add_((index % mine).add_(first).mul_(stride))
            index, stride = index.div(mine, rounding_mode="floor"), stride * full
        return total
