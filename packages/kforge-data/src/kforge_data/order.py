"""Position -> row, as a pure function of (seed, position), in constant memory.

The rows of an epoch are visited in the order of a keyed pseudo-random permutation of 0..n-1. Nothing is shuffled and
nothing is stored: the permutation is computed at the positions asked for, so position 10**12 costs what position 0
does, and a resume needs only the position.

The permutation is a Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) on the
smallest power of two that holds n, brought down to n by cycle walking (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002): a value that falls outside is sent through again until it lands inside. At most half of the
domain lies outside, so a value takes less than two passes on average.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Four rounds make a network indistinguishable from random for large halves; tiny domains, whose halves are one or two
# bits, need more to reach all their permutations evenly (the tests count them).
ROUNDS = 12


class Permutation:
    """A pseudo-random permutation of 0..size-1, chosen by (seed, epoch)."""

    def __init__(self, size: int, *, seed: int, epoch: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} rows does not exist; the source is empty")
        if size > 1 << 62:
            raise ValueError(f"{size} rows are more than a permutation can number; the limit is 2**62")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        # Python integers of any size and sign are legal seeds; the hash folds them into round keys.
        text = f"kforge-data order {seed} {epoch}".encode()
        digest = hashlib.shake_256(text).digest(8 * ROUNDS)
        self._keys = [np.uint64(key) for key in struct.unpack(f"<{ROUNDS}Q", digest)]

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Images of `index` (int64, any shape, each in 0..size-1)."""
        index = np.asarray(index, np.int64)
        if index.size and (index.min() < 0 or index.max() >= self.size):
            raise ValueError(f"index {index.min()}..{index.max()} lies outside of a permutation of {self.size}")
        if self.size == 1:
            return np.zeros_like(index)
        values = self._network(index.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(index.shape)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low = values & self._low_mask
        high = values >> self._low_bits
        # Each half in turn is masked with a hash of the other: undone by doing it again, hence a bijection.
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                high ^= _mix(low + key) & self._high_mask
            else:
                low ^= _mix(high + key) & self._low_mask
        return (high << self._low_bits) | low


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014); arithmetic is modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_order(positions: NDArray[np.int64], *, rows: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Row at each position (int64, not negative) of an endless sequence of epochs of `rows` rows.

    Position p lies in epoch p // rows. Each epoch has its own permutation; without `shuffle` rows come as they lie.
    """
    positions = np.asarray(positions, np.int64)
    if rows < 1:
        raise ValueError("the source has no rows, so no position leads to one")
    if positions.size and positions.min() < 0:
        raise ValueError(f"position {positions.min()} is negative")
    epochs, index = np.divmod(positions, rows)
    if not shuffle:
        return index
    result = np.empty_like(index)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        result[here] = Permutation(rows, seed=seed, epoch=epoch)(index[here])
    return result
