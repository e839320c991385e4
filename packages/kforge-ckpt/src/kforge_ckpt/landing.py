"""Bytes on their way from a file to a device: the next ones are read while those before them travel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_BYTES = 2**25
"""32 MiB, as in `staging`."""


class Landing:
    """Two blocks of host memory, pinned where the target is on CUDA, filled in turns and copied from there."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, target: Tensor, read: Callable[[memoryview], None]) -> None:
        """Fill ``target``, contiguous, of any dtype and on any device, in order; ``read`` fills what it is given with
        the bytes that come next. On CUDA the copies are part of the current stream, and the host does not wait for
        the last ones."""
        flat = target.detach().reshape(-1).view(torch.uint8)
        if not self._blocks:
            self._blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda) for _ in range(2)]
        for part in flat.split(BLOCK_BYTES):
            turn = self._turn
            self._turn = 1 - turn
            before = self._copied[turn]
            if before is not None:
                before.synchronize()
            block = self._blocks[turn][: len(part)]
            read(memoryview(block.numpy()))  # type: ignore[arg-type] # numpy 2 stubs on 3.11
            part.copy_(block, non_blocking=True)
            if target.is_cuda:
                stream = torch.cuda.current_stream(target.device)
                self._copied[turn] = stream.record_event()
