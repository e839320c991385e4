"""Memory of batches that is used again, as fresh memory costs more than what is written into it.

A batch of 16 rows of 4,096 tokens takes 2.2 MB. The system gives such blocks page by page, at each first touch, and
takes them back when they are let go; that made up to three quarters of the time of a batch. So blocks are kept, and one
is used again as soon as nothing refers to it: every array cut from a block refers to it, and every tensor to its array.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Allocate = Callable[[tuple[int, ...], "DTypeLike"], "NDArray[Any]"]
"""(shape, dtype) -> an array that holds anything, as `np.empty`."""
_ALIGN = 64


class Cutter:
    """Cuts arrays from a block of bytes, one behind the other; from fresh memory when it is used up."""

    def __init__(self, block: NDArray[np.uint8]) -> None:
        self._block, self._used = block, 0
        self.offsets: list[int] = []
        """Where in the block each array lies, in the order in which they were asked for; -1: not in it."""

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        begin = -(-self._used // _ALIGN) * _ALIGN
        if begin + size > len(self._block):
            self.offsets.append(-1)
            return np.empty(shape, dtype)
        self._used = begin + size
        self.offsets.append(begin)
        return cut(self._block, begin, shape, dtype)


def cut(block: NDArray[np.uint8], begin: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """The array of this shape and type that lies at a place of a block."""
    return np.ndarray(shape, dtype, block, begin)


class Blocks:
    """Blocks of bytes, of which those are free that nothing outside of this list refers to. From any thread."""

    def __init__(self, blocks: Sequence[NDArray[np.uint8]] = (), *, size: int = 0, most: int = 0) -> None:
        """``blocks`` to begin with; up to ``most`` in all, new ones of ``size`` bytes, are made when none is free."""
        self._blocks, self._size, self._most = list(blocks), size, most
        self._lock = threading.Lock()
        fresh = [np.empty(1, np.uint8)]
        self._unused = sys.getrefcount(fresh[0])

    def take(self, reserved: Sequence[int] = ()) -> int | None:
        """Number of a free block that is not ``reserved``; None if there is none and no more may be made.

        It is free still: the caller makes an array of it before it lets another thread ask, or reserves it.
        """
        for number in range(len(self._blocks)):
            if number not in reserved and sys.getrefcount(self._blocks[number]) == self._unused:
                return number
        if len(self._blocks) < self._most:
            self._blocks.append(np.empty(self._size, np.uint8))
            return len(self._blocks) - 1
        return None

    def __getitem__(self, number: int) -> NDArray[np.uint8]:
        return self._blocks[number]

    def cutter(self) -> Allocate:
        """What cuts from a free block; from fresh memory where there is none."""
        with self._lock:
            number = self.take()
            return np.empty if number is None else Cutter(self._blocks[number])
