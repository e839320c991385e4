"""Scalars of one device that are needed on another: scales and gates, beside weights that are offloaded."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(scalar: Tensor, device: torch.device) -> Tensor:
    """``scalar`` on ``device``; itself where it is there already.

    To the host it is waited for: a copy that is not would be read before it has arrived. To a device nothing waits.
    """
    return scalar.to(device, non_blocking=device.type != "cpu")
