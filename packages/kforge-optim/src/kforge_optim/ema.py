"""An exponential moving average of the weights, moved after accepted steps.

    average = average + (1-d) (weight - average)        d = min(decay, (1+t) / (10+t)),  t moves before this one

The warm-up of d forgets the first weights fast and is always there. The average starts as the weights are before the
first step. It has at least float32, lies in shards as the weights do, and takes their full precision under split
storage. Parameters only: buffers, such as the bias of a router, stay those of the run.

On the CPU it costs the device no memory: after a step it travels up, tensor by tensor, is moved there and travels back,
on a stream of its own beside the next forward and backward. The host waits for none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kforge_optim import split
from kforge_optim.algorithm import Slot
from kforge_optim.sharding import copy_into, like_layout, local


class Ema:
    """The average of the weights in ``slots``; `Optimizer.ema`, which moves it.

    decay: above 0 and below 1, the share that a move leaves of the average.
    every_steps: it moves after steps whose number is a multiple of this, where they are accepted.
    device: ``same`` as the weights, or ``cpu``: pinned memory, where the weights are on a CUDA device.

    State: ``weights``, name -> average, with the placement of the parameter, and ``moves``, a 0-dim int64 tensor. It
    loads into any layout.
    """

    def __init__(self, slots: Sequence[Slot], *, decay: float, every_steps: int = 1, device: str = "same") -> None:
        self.decay = decay
        self.every_steps = every_steps
        self.device = device
        self.started = False
        """Whether it holds an average already: after the first step, or after `load_state_dict`."""
        self._slots = list(slots)
        self._weights: dict[str, Tensor] = {}
        self._moves: Tensor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # What the optimizer calls.

    @torch.no_grad()
    def before_step(self) -> None:
        """Begin with the weights as they are, where there is no average yet; else let the last move read them first."""
        if not self.started:
            self._copy_weights()
            self.started = True
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    @torch.no_grad()
    def after_step(self, step: int, gate: Tensor | None) -> None:
        """Move, where step number ``step`` (from 1) is one after which it moves and ``gate``, 0-dim, is 1 or None."""
        if step % self.every_steps:
            return
        assert self._moves is not None
        accept = torch.ones_like(self._moves, dtype=torch.bool) if gate is None else gate.to(self._moves.device) > 0
        rate = (9 / (10 + self._moves.to(torch.float64))).clamp(min=1 - self.decay)
        for slot in self._slots:
            average, device = local(self._weights[slot.name]), slot.parameter.device
            if average.device == device:
                _move(average, slot, rate.to(device), accept.to(device))
            else:
                self._move_beside(average, slot, rate.to(device), accept.to(device))
        self._moves += accept

    def _move_beside(self, average: Tensor, slot: Slot, rate: Tensor, accept: Tensor) -> None:
        """Move an average in pinned memory on the device of its weight, on a stream beside the current one."""
        device = slot.parameter.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for scalar in (rate, accept):
                scalar.record_stream(stream)
            there = average.to(device, non_blocking=True)
            _move(there, slot, rate, accept)
            average.copy_(there, non_blocking=True)

    # What others may.

    def weights(self) -> dict[str, Tensor]:
        """Name -> average, the live tensors; waits for a move that is under way."""
        if not self._weights:
            with torch.no_grad():
                self._copy_weights()
        for stream in self._streams.values():
            stream.synchronize()
        return self._weights

    def state_dict(self) -> dict[str, Any]:
        """The live tensors; before the first step, copies of the weights."""
        return {"weights": dict(self.weights()), "moves": self._moves}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a saved average into this one, in place, whatever its layout. Raises ValueError, before anything is
        changed, when names or shapes differ."""
        weights, saved = self.weights(), state_dict["weights"]
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        theirs = {name: tuple(weight.shape) for name, weight in saved.items()}
        if shapes != theirs:
            names = sorted(name for name in shapes.keys() | theirs.keys() if shapes.get(name) != theirs.get(name))
            raise ValueError(f"the saved average has other weights, or others of them: {names}; was the model changed?")
        for name, weight in weights.items():
            copy_into(weight, saved[name])
        assert self._moves is not None
        self._moves.copy_(state_dict["moves"])
        self.started = True

    def _copy_weights(self) -> None:
        for slot in self._slots:
            weight = split.whole(slot).parameter.detach()
            if slot.name not in self._weights:
                self._weights[slot.name] = self._empty(weight)
            local(self._weights[slot.name]).copy_(local(weight))
        if self._moves is None:
            self._moves = torch.zeros((), dtype=torch.int64, device=self._slots[0].parameter.device)

    def _empty(self, weight: Tensor) -> Tensor:
        """Memory for the average of ``weight``, laid out as it is."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        device = weight.device if self.device == "same" else torch.device("cpu")
        pinned = device.type == "cpu" and weight.is_cuda
        values = torch.empty_like(local(weight), dtype=dtype, device=device, pin_memory=pinned)
        return like_layout(values, weight)


def _move(average: Tensor, slot: Slot, rate: Tensor, accept: Tensor) -> None:
    """Move ``average``, of this rank, by ``rate`` towards the weight; no bit of it where ``accept`` is false."""
    weight = local(split.whole(slot).parameter).to(average.dtype)
    torch.where(accept, average.lerp(weight, rate.to(average.dtype)), average, out=average)
