"""Checkpoints laid onto tensors that are not quite those that were saved: other names, other shapes, a part of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kforge_ckpt.errors import StateMismatchError
from kforge_ckpt.state import Spec
from kforge_ckpt.storage import Chunk, StoredTensor


@dataclass(frozen=True)
class Fit:
    """What may differ between a checkpoint and the tensors to be filled; by default nothing.

    exclude: patterns (`re.search`) over the names of here; what matches stays as it is, and is not missed there.
    rename: pairs (pattern, replacement) of `re.sub`, applied one after the other to the saved names.
    partial: tensors that the checkpoint lacks stay as they are, and what it has beyond them is left; of a tensor with
        the same number of dimensions the common corner is filled (rows, columns, experts, a vocabulary that grew); one
        that has a dimension more, in front, is filled with copies (a feed-forward half into experts).
    cast: dtypes may differ.
    """

    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    partial: bool = False
    cast: bool = False

    def __post_init__(self) -> None:
        for pattern in (*self.exclude, *(pattern for pattern, _ in self.rename)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error

    @property
    def strict(self) -> bool:
        """Nothing may differ."""
        return self == Fit()

    def wants(self, name: str) -> bool:
        """Whether a tensor of here is to be filled."""
        return not any(re.search(pattern, name) for pattern in self.exclude)

    def renamed(self, index: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, StoredTensor]:
        """Of ``names`` in ``index``, the stored tensors by the names of here. Raises StateMismatchError for a name that
        two of them get."""
        result: dict[str, StoredTensor] = {}
        origin: dict[str, str] = {}
        for name in sorted(names):
            new = name
            for pattern, replacement in self.rename:
                new = re.sub(pattern, replacement, new)
            if not self.wants(new):
                continue
            if new in result:
                raise StateMismatchError(f"rename makes {new} of both {origin[new]} and {name}; let only one match")
            result[new], origin[new] = index[name], name
        return result

    def laid(self, stored: StoredTensor, spec: Spec) -> StoredTensor | None:
        """The stored tensor as one of the dtype and shape of here; None when it cannot be."""
        dtype, shape = spec
        if stored.dtype != dtype and not self.cast:
            return None
        if stored.shape == shape:
            return stored
        if not self.partial:
            return None
        if len(stored.shape) == len(shape):
            chunks = [clipped for chunk in stored.chunks if (clipped := _clipped(chunk, shape)) is not None]
        elif stored.shape == shape[1:]:
            chunks = [
                replace(chunk, offset=(copy, *chunk.offset), shape=(1, *chunk.shape))
                for copy in range(shape[0])
                for chunk in stored.chunks
            ]
        else:
            return None
        return StoredTensor(stored.dtype, shape, tuple(chunks))

    def told(
        self, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Spec], unclaimed: Iterable[str]
    ) -> list[str]:
        """What is filled with what, where it is not simply the same: lines for people. unclaimed: stored tensors that
        no rank wants."""
        lines = []
        for name, (dtype, shape) in wanted.items():
            found = stored.get(name)
            if found is None:
                lines.append(f"{name} {list(shape)}: not in the checkpoint, stays as it is")
            elif found.shape != shape:
                how = "copies of" if len(found.shape) < len(shape) else "the common corner of"
                lines.append(f"{name} {list(shape)}: {how} {list(found.shape)}")
            elif found.dtype != dtype:
                lines.append(f"{name}: {dtype} from {found.dtype}")
        lines += [f"{name}: only in the checkpoint, left there" for name in sorted(unclaimed)]
        return lines


def _clipped(chunk: Chunk, shape: tuple[int, ...]) -> Chunk | None:
    """What of a chunk lies within a tensor of this shape."""
    sizes = [min(o + s, whole) - o for o, s, whole in zip(chunk.offset, chunk.shape, shape, strict=True)]
    return None if any(size <= 0 for size in sizes) else replace(chunk, shape=tuple(sizes))
