"""The step on the CPU (ZeRO-Offload, Ren et al. 2021, https://arxiv.org/abs/2101.06840, section 4.2).

What an optimizer remembers lies on the host: moments, counters and, under split storage, the remainder. A step takes a
chunk of parameters after the other through pinned memory::

    device -> host      gradients and weights                  a stream of its own
    host                the step, by what steps a CPU model    the caller's thread
    host -> device      the new weights                        another stream

While one chunk is stepped, the next comes down and the one before goes up. Moments never travel, so they lie in
ordinary memory. A weight has one place, the device: nothing on the host must be kept equal to it, and whoever else
writes weights (a checkpoint, a clip of scores) has nothing to tell. That costs 2 bytes a parameter more on the way down
under split storage, 4 under fp32, beside those of the gradient.

The host has to wait for the gradients, and does so in one place, `_Chunk.wait`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kforge_optim import split
from kforge_optim.algorithm import Slot
from kforge_optim.groups import Group
from kforge_optim.sharding import like_layout, local, local_gradient

Work = tuple[Group, list[Slot], Tensor | None, Tensor | None]
"""Slots of one group on one device, with the scale and the gate of the step there."""


@dataclass
class _Chunk:
    """Some slots of a group, and their copies on the host, which may be on their way still."""

    slots: list[Slot]
    work: Work
    """What is stepped on the host."""
    grads: list[Tensor]
    """On the device: those made for this copy must stay until it is done, which is on another stream."""
    arrived: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the copies are there: here the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Offload:
    """Takes the steps of an optimizer to the CPU; see the module."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}

    def chunks(self, work: Iterable[Work]) -> Iterator[Work]:
        """The same work in chunks and on the host. Each chunk must be stepped before the next one is asked for; its
        weights then go back."""
        parts = [(group, batch, scale, gate) for group, slots, scale, gate in work for batch in split.batches(slots)]
        coming = deque(self._fetch(*part) for part in parts[:1])
        for following in range(1, len(parts) + 1):
            chunk = coming.popleft()
            coming.extend(self._fetch(*part) for part in parts[following : following + 1])
            chunk.wait()
            yield chunk.work
            self._put_back(chunk)
        for (_, device), stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _fetch(self, group: Group, slots: list[Slot], scale: Tensor | None, gate: Tensor | None) -> _Chunk:
        device = slots[0].parameter.device
        grads = [local_gradient(slot.parameter) for slot in slots]  # some are sent for, as ever on the current stream
        with self._beside("down", device) as stream:
            copies = [_copy(slot, grad) for slot, grad in zip(slots, grads, strict=True)]
            scalars = [None if scalar is None else _to_host(scalar) for scalar in (scale, gate)]
            arrived = None if stream is None else stream.record_event()
        return _Chunk(slots, (group, copies, *scalars), grads, arrived)  # type: ignore[arg-type]

    def _put_back(self, chunk: _Chunk) -> None:
        with self._beside("up", chunk.slots[0].parameter.device):
            for slot, copy in zip(chunk.slots, chunk.work[1], strict=True):
                local(slot.parameter).copy_(local(copy.parameter), non_blocking=True)

    @contextmanager
    def _beside(self, way: str, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """A stream beside the current one of a CUDA device, which follows it; nothing elsewhere."""
        if device.type != "cuda":
            yield None
            return
        if (way, device) not in self._streams:
            self._streams[way, device] = torch.cuda.Stream(device)
        stream = self._streams[way, device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield stream


def on_host(slot: Slot) -> Slot:
    """The slot with a copy of its weight on the host, and with its very state. The host waits."""
    copy = _copy(slot, None)
    if slot.parameter.is_cuda:
        torch.cuda.current_stream(slot.parameter.device).synchronize()
    return copy


def _copy(slot: Slot, grad: Tensor | None) -> Slot:
    """The slot with copies of weight and local gradient on the host, laid out as they are."""
    parameter = nn.Parameter(like_layout(_to_host(local(slot.parameter)), slot.parameter), requires_grad=False)
    if grad is not None:
        parameter.grad_dtype = grad.dtype
        parameter.grad = like_layout(_to_host(grad), slot.parameter)
    return replace(slot, parameter=parameter)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a tensor on a CUDA device in pinned memory, and on its way."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
