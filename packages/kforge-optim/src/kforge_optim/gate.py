"""What a gate does where a kernel has none of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def put(olds: Sequence[Tensor], news: Sequence[Tensor], accept: Tensor | None) -> None:
    """Each old one becomes the new one where the device scalar ``accept`` is true, and keeps every bit where it is not,
    also where the new one has NaNs. None: true. The host does not wait."""
    for old, new in zip(olds, news, strict=True):
        if accept is None:
            old.copy_(new)
        else:
            torch.where(accept, new, old, out=old)
