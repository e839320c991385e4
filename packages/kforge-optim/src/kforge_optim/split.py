"""Split storage: a float32 weight as a bfloat16 parameter and a 16-bit remainder, together exact.

The bits of a float32 weight, read as an integer, are cut into two halves that add up to it::

    bits = (high << 16) + low        high = (bits + 0x8000) >> 16        low in [-0x8000, 0x7fff]

``high``, the parameter, is the weight rounded to the nearest bfloat16, what FSDP would make of a float32 shard at the
all-gather; only exact ties differ (they go away from zero here, to even there). ``low``, the remainder, is signed and
belongs to the optimizer. Both hold two bytes, so nothing is stored twice: a rule of updating sees the float32 weight,
put together for a few parameters at a time, and both halves are written back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from kforge_optim.algorithm import Slot
from kforge_optim.rounding import CHUNK, WEIGHT, Box, noise, sixteen, to_bfloat16
from kforge_optim.sharding import distinct_shards, like_layout, local, local_gradient

_BATCH_ELEMENTS = 2**24
"""Elements of this rank that are put together at one time: 64 MiB of weights and as much of gradients."""


def split_float32(full: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor -> its bfloat16 half and its int16 remainder, of its shape; `join_float32` gives it back.

    Every bit pattern comes back, and no two pairs of halves mean the same weight. The bfloat16 half is the nearest
    one, ties away from zero; a value beyond 3.3961776e38, the middle between the largest bfloat16 and the next power
    of two, has infinity for its half, as in a cast. A NaN that is not the canonical one may have a half that is no
    NaN. Plain tensors only; raises ValueError for another dtype.
    """
    if full.dtype != torch.float32:
        raise ValueError(f"only float32 splits into bfloat16 and a remainder, not {full.dtype}")
    bits = full.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = bits.to(torch.int16)  # the lower 16 bits, read as a signed number, are what the sum lacks
    return high.view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor that `split_float32` took apart. Raises ValueError for other dtypes."""
    if high.dtype != torch.bfloat16 or low.dtype != torch.int16:
        raise ValueError(f"a weight is joined from bfloat16 and int16, not from {high.dtype} and {low.dtype}")
    return (high.view(torch.int16).to(torch.int32) << 16).add_(low).view(torch.float32)


def new_remainder(parameter: Tensor) -> Tensor:
    """A remainder of zeros: the float32 weight is what the bfloat16 parameter says."""
    return torch.zeros_like(parameter.detach(), dtype=torch.int16)


def full_weight(slot: Slot) -> Tensor:
    """The float32 weight of a bfloat16 slot, detached, laid out as its parameter; a new tensor."""
    high, low = local(slot.parameter), slot.remainder
    return like_layout(
        high.to(torch.float32) if low is None else join_float32(high, local(low).to(high.device)), slot.parameter
    )


def store(slot: Slot, full: Tensor) -> None:
    """Write ``full``, float32 and of this rank, into the two halves of a slot."""
    assert slot.remainder is not None
    high, low = split_float32(full.to(slot.parameter.device))
    local(slot.parameter).copy_(high)
    local(slot.remainder).copy_(low)


def write(slot: Slot, full: Tensor) -> None:
    """Write ``full``, this rank's part of a weight at full precision, into the parameter, or into its two halves."""
    if slot.remainder is None:
        local(slot.parameter).copy_(full)
    else:
        store(slot, full)


def whole(slot: Slot) -> Slot:
    """A slot of the weight at full precision, without a gradient, and with the very state of ``slot``; ``slot`` itself
    where it is stored at that."""
    if slot.parameter.dtype != torch.bfloat16:
        return slot
    return Slot(slot.name, nn.Parameter(full_weight(slot), requires_grad=False), slot.state, fused=slot.fused)


def store_rounded(slot: Slot, full: Tensor, key: int) -> None:
    """Write ``full``, float32 and of this rank, into a bfloat16 parameter without a remainder, rounded stochastically
    by the random bits of ``key``."""
    box, here = Box.of(slot.parameter), local(slot.parameter)
    flat = full.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        random = sixteen(noise(box.index(start, stop, flat.device), key), WEIGHT)
        rounded[start:stop] = to_bfloat16(flat[start:stop], random)
    here.copy_(rounded.view(here.shape))


def widened(slot: Slot) -> Slot:
    """`whole` of a bfloat16 slot, with the gradient in float32.

    A bfloat16 gradient is exact in float32; one that is float32 already stays as it is.
    """
    wide = whole(slot)
    if slot.parameter.grad is not None:
        wide.parameter.grad = like_layout(local_gradient(slot.parameter).to(torch.float32), slot.parameter)
    return wide


def batches(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """bfloat16 slots in groups of at most `_BATCH_ELEMENTS` elements a rank, but one slot at least.

    Like shapes come together. Only sizes that all ranks agree on count, so that all
    ranks make the same groups.
    """
    batch: list[Slot] = []
    elements = 0
    for slot in sorted(slots, key=lambda slot: tuple(slot.parameter.shape)):
        size = -(-slot.parameter.numel() // distinct_shards(slot.parameter))
        if batch and elements + size > _BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(slot)
        elements += size
    if batch:
        yield batch
