"""What a loader reads from: the `Source` protocol, and the block of raw rows that crosses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RowBlock:
    """R raw rows of S tokens and what is known of their documents. Plain arrays, no labels yet.

    Each row carries one token more than its length, so that the label of its last column is known.
    """

    tokens: NDArray[np.unsignedinteger]
    """[R, S+1], any unsigned integer type. Column S is the look-ahead. What lies at or past `valid` is zero."""
    valid: NDArray[np.int64]
    """[R]: how many of the S+1 columns hold text; the others are padding."""
    start_rows: NDArray[np.int64]
    """[K]: row of each document start that does not lie at column 0, ascending."""
    start_columns: NDArray[np.int64]
    """[K]: its column, 1 to S, ascending within a row. A start at column S only cuts the last label."""
    source_ids: NDArray[np.int16]
    """[R]: which source of a mixture the row comes from; 0 where there is one."""
    masked: NDArray[np.bool_] | None = None
    """[R, S+1]: tokens that are read and not scored, see `kforge_data.masks`. None: all are scored."""

    def padded(self, rows: int) -> RowBlock:
        """The same block with empty rows appended until it has `rows` of them."""
        missing = rows - len(self.valid)
        if missing <= 0:
            return self
        return RowBlock(
            tokens=np.concatenate([self.tokens, np.zeros((missing, self.tokens.shape[1]), self.tokens.dtype)]),
            valid=np.concatenate([self.valid, np.zeros(missing, np.int64)]),
            start_rows=self.start_rows,
            start_columns=self.start_columns,
            source_ids=np.concatenate([self.source_ids, np.zeros(missing, np.int16)]),
            masked=None if self.masked is None else np.pad(self.masked, ((0, missing), (0, 0))),
        )


@runtime_checkable
class Source(Protocol):
    """Anything that a `Loader` can read: token shards, or something that mixes several of them.

    All four methods are pure: the same arguments give the same answer in every process, and may be called from
    several threads at once.
    """

    @property
    def fingerprint(self) -> str:
        """Names the content: two sources of equal fingerprint give the same rows."""
        ...

    def row_count(self, row_tokens: int) -> int:
        """Rows of one epoch when cut into rows of `row_tokens`."""
        ...

    def rows_at(self, positions: NDArray[np.int64], *, row_tokens: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Row ids at these positions of the endless sequence of epochs. Within an epoch each row comes once."""
        ...

    def read_rows(self, row_ids: NDArray[np.int64], row_tokens: int) -> RowBlock:
        """The raw rows of these ids, in the order asked for."""
        ...

    def max_documents(self, row_tokens: int) -> int:
        """An upper bound of the documents (padding counts as one) in any one row."""
        ...


@runtime_checkable
class MeasuredSource(Source, Protocol):
    """A source that knows how much an epoch of it holds, as a `Mixture` needs it."""

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        """(tokens, documents) in the rows of one epoch; a document that is cut counts once."""
        ...
