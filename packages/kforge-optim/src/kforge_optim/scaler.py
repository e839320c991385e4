"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kforge_optim.scalars import on_device

SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
"""The scale moves between these two."""


class LossScaler:
    """What the loss is multiplied by so that small gradients do not vanish in float16.

    ``scale`` is a 0-dim float32 tensor on ``device``, always a power of two, so that multiplying and dividing by it
    rounds nothing. It is changed in place: take a copy to keep a value. Multiply the loss by it, divide the norm of the
    gradients and the factor of the optimizer's step by it::

        (loss * scaler.scale).backward()
        norm = clip.total_norm(model) / scaler.scale
        gate = torch.isfinite(norm)  # agreed on by all ranks
        optimizer.step(scale=clip.clip_factor(norm, 1.0) / scaler.scale, gate=gate)
        scaler.update(gate)

    It doubles after ``growth_interval`` accepted steps in a row, halves after each refused one, and stays within
    [1, 2**24]. All ranks see the same gates, so they hold the same scale without a message. With ``enabled=False`` it
    is exactly 1 and stays 1: the loop needs no branch. Nothing waits for the device.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError for an ``init_scale`` that is no power of two in [1, 2**24] and an interval below 1."""
        check_scale("init_scale", init_scale)
        if growth_interval < 1:
            raise ValueError(f"growth_interval = {growth_interval} must be at least 1 step")
        self.enabled = enabled
        self.init_scale = init_scale if enabled else 1.0
        self.growth_interval = growth_interval
        self.scale = torch.full((), self.init_scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    @torch.no_grad()
    def update(self, gate: Tensor) -> None:
        """Move the scale. ``gate``: one element on the device, above 0 where the step was accepted, else 0 or NaN."""
        if not self.enabled:
            return
        good = on_device(gate.detach().reshape(()), self.scale.device) > 0
        steps = torch.where(good, self._good_steps + 1, 0)
        grows = steps >= self.growth_interval
        factor = torch.where(good, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self._good_steps.copy_(torch.where(grows, 0, steps))

    def state_dict(self) -> dict[str, Any]:
        """``{"enabled": bool, "scale": 0-dim float32, "good_steps": 0-dim int32}``; the tensors are the live ones."""
        return {"enabled": self.enabled, "scale": self.scale, "good_steps": self._good_steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly from a saved state, of tensors or numbers. Waits for the device.

        A run may change its precision at a restart: the state of a scaler that was on says nothing to one that is off,
        and after a state of one that was off, one that is on begins at its ``init_scale``. Raises ValueError for a
        scale that is no power of two in [1, 2**24].
        """
        if not (self.enabled and state_dict["enabled"]):
            # Filled, not left: a checkpointer may have copied the saved state into the live tensors.
            self.scale.fill_(self.init_scale)
            self._good_steps.zero_()
            return
        scale, good_steps = float(state_dict["scale"]), int(state_dict["good_steps"])
        check_scale("the saved scale", scale)
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)


def check_scale(name: str, scale: float) -> None:
    """Raises ValueError unless ``scale`` is a power of two that a `LossScaler` can have."""
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE or math.frexp(scale)[0] != 0.5:
        raise ValueError(f"{name} = {scale} must be a power of two from 1 to 2**24 = {int(LARGEST_SCALE)}")
