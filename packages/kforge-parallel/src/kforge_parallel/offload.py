"""Offload of activations: what a block saves for backward waits in host memory.

On a device the copy runs on a stream of its own, next to the computation, into pinned memory. In backward the first
look at what a block saved also fetches what the block before it saved, which is then there when it is needed. What
comes back has the bits, the strides and the aliases that went. On the CPU it is a copy.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kforge_parallel._torch import times_written
from kforge_parallel.activation import wrap

SMALL = 4096
"""Bytes; what is smaller stays where it is."""


def offload_blocks(blocks: list[nn.Module]) -> None:
    """Let what each block saves for backward wait in host memory. In place. Weights and buffers stay where they are,
    as do arguments of the block that have no gradient, which all blocks share."""
    last: list[weakref.ref[_Trip] | None] = [None]

    def away(call: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        before = last[0] if block is not blocks[0] else None
        trip = _Trip(block, (args, kwargs), before)
        last[0] = weakref.ref(trip)
        with torch.autograd.graph.saved_tensors_hooks(trip.pack, _unpack):
            out = call(*args, **kwargs)
        trip.seen.clear()
        trip.stays.clear()
        return out

    for block in blocks:
        wrap(block, away)


class _Trip:
    """What one forward of one block saves."""

    def __init__(self, block: nn.Module, args: Any, before: weakref.ref[_Trip] | None) -> None:
        self.before = before
        self.block = block
        self.stays = {_address(t) for t in _tensors(args) if not t.requires_grad}
        self.seen: dict[tuple[int, int], tuple[_Away, Tensor]] = {}
        """The tensors are held until the forward ends: an address is not given to another one meanwhile."""
        self.parts: weakref.WeakSet[_Away] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        """The tensor where it stays, else what `_unpack` makes it of again."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.untyped_storage().nbytes() < SMALL:
            return tensor
        address = tensor.untyped_storage().data_ptr()
        key = (address, times_written(tensor))
        if key not in self.seen:
            # Looked up each time: a part of the block may have weights that are gathered only while it runs.
            weights = (*self.block.parameters(), *self.block.buffers())
            if address in self.stays or any(_address(weight) == address for weight in weights):
                return tensor
            self.seen[key] = (_Away(self, tensor), tensor)
            self.parts.add(self.seen[key][0])
        place = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        return self.seen[key][0], place

    def fetch(self) -> None:
        """Start to bring everything back."""
        for part in list(self.parts):
            part.fetch()


class _Away:
    """One storage in host memory."""

    def __init__(self, trip: _Trip, tensor: Tensor) -> None:
        self.trip, self.device = trip, tensor.device
        self.back: Tensor | None = None
        memory = _bytes(tensor)
        self.host = torch.empty(memory.shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        if self.device.type != "cuda":
            self.host.copy_(memory)
            return
        side = _side_stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.host.copy_(memory, non_blocking=True)
        memory.record_stream(side)

    def fetch(self) -> None:
        """Start to bring it back, once."""
        if self.back is not None:
            return
        if self.device.type != "cuda":
            self.back = self.host.clone()
            return
        side = _side_stream(self.device)
        with torch.cuda.stream(side):  # after the copy away, which this stream made
            self.back = self.host.to(self.device, non_blocking=True)
            self.arrived = side.record_event()

    def wait(self) -> Tensor:
        """The bytes on the device, for what is computed next."""
        self.trip.fetch()
        assert self.back is not None
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.arrived)
            self.back.record_stream(current)
        before = self.trip.before() if self.trip.before is not None else None
        if before is not None:
            before.fetch()
        return self.back


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    away, (dtype, size, stride, offset) = packed
    return torch.empty(0, dtype=dtype, device=away.device).set_(away.wait().untyped_storage(), offset, size, stride)


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _address(tensor: Tensor) -> int:
    """Where the memory begins of what this rank has."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and data classes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))


_side: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side:
        _side[device] = torch.cuda.Stream(device)
    return _side[device]
