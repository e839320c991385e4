"""What a loader reads from: the `Source` protocol, and the block of raw rows that crosses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kforge_data.lanes import LaneState


ENDLESS = 1 << 47
"""The rows of a source that does not know how many it has before it has been read."""


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
    resume: NDArray[np.int64] | None = None
    """[R, 5]: of rows that come from lanes, the `LaneState` after each; -1 for others. None: there are no lanes."""

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
            resume=None if self.resume is None else np.pad(self.resume, ((0, missing), (0, 0)), constant_values=-1),
        )


def merged(blocks: Sequence[tuple[NDArray[np.int64], RowBlock]], rows: int, row_tokens: int) -> RowBlock:
    """One block of the rows of several, each of which says which rows [R_i] of the one its own are."""
    kind = np.result_type(*(block.tokens.dtype for _, block in blocks)) if blocks else np.dtype(np.uint16)
    tokens = np.empty((rows, row_tokens + 1), kind)
    valid, source_ids = np.empty(rows, np.int64), np.empty(rows, np.int16)
    masked = resume = None
    if any(block.masked is not None for _, block in blocks):
        masked = np.zeros((rows, row_tokens + 1), np.bool_)
    if found := [block.resume for _, block in blocks if block.resume is not None]:
        resume = np.full((rows, found[0].shape[1]), -1, np.int64)
    start_rows, start_columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for here, block in blocks:
        tokens[here], valid[here], source_ids[here] = block.tokens, block.valid, block.source_ids
        start_rows.append(here[block.start_rows])
        start_columns.append(block.start_columns)
        if masked is not None and block.masked is not None:
            masked[here] = block.masked
        if resume is not None and block.resume is not None:
            resume[here] = block.resume
    at_rows, at_columns = np.concatenate(start_rows), np.concatenate(start_columns)
    order = np.lexsort((at_columns, at_rows))
    return RowBlock(tokens, valid, at_rows[order], at_columns[order], source_ids, masked, resume)


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


@runtime_checkable
class LanedSource(MeasuredSource, Protocol):
    """A source that is read in order, in lanes: row n lies in lane n mod `lanes`, and each process reads whole lanes.

    Its rows are pure functions of their numbers all the same; `start_at` only saves the way to them.
    """

    lanes: int
    """L; the number of data-parallel processes must divide it."""

    def ordered(self, *, seed: int, shuffle: bool) -> LanedSource:
        """The same in the order of a seed, not begun."""
        ...

    def start_at(self, states: dict[int, LaneState]) -> None:
        """Go on from these states of lanes, from their beginning in others."""
        ...


def lanes_of(source: object) -> int:
    """Lanes that a source has, of its own or in a mixture; 0 if none."""
    return int(getattr(source, "lanes", 0))


def laned_parts(source: object) -> Mapping[int, LanedSource]:
    """The sources that are read in lanes, by their number: those of a mixture, or the one itself as number 0."""
    parts: Mapping[int, LanedSource] = getattr(source, "laned", {})
    return parts


def in_order(source: Source, *, seed: int, shuffle: bool) -> Source:
    """A source whose rows depend on the order, as those in lanes do, in the order of a seed; any other as it is."""
    ordered = getattr(source, "ordered", None)
    result: Source = ordered(seed=seed, shuffle=shuffle) if callable(ordered) else source
    return result


def lane_rows(source: Any, position: int, row_tokens: int) -> dict[int, NDArray[np.int64]]:
    """Rows [L] that each lane has given before a position, by the number of its source."""
    found: dict[int, NDArray[np.int64]] = source.lane_rows(position, row_tokens)
    return found


def rows_or_error(source: Source, row_tokens: int) -> int:
    """Rows of the source; ValueError where it has none."""
    rows = source.row_count(row_tokens)
    if rows < 1:
        raise ValueError(f"{source!r} holds no tokens, so there is nothing to read; tokenize some text first")
    return rows
