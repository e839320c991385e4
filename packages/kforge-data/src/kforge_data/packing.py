"""Raw rows -> what a model is fed: ids, shifted labels, positions, document numbers and boundaries. Arrays only.

A row is a piece of the stream of documents, so it may begin and end inside one. Within a row each document, or the
part of it that lies there, counts as a document of its own: a document continued from an earlier row restarts at
position 0. Padding, which only the end of the stream has, is one more document that nothing scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kforge_data.buffers import Allocate
    from kforge_data.sources import RowBlock

IGNORE = -100
SEQLEN_MULTIPLE = 128


@dataclass(frozen=True)
class PackedRows:
    """R rows of S tokens, ready for a model."""

    input_ids: NDArray[np.int64]
    """[R, S]."""
    labels: NDArray[np.int64]
    """[R, S]: the token after each one; -100 where that belongs to another document or is padding."""
    position_ids: NDArray[np.int64]
    """[R, S]: position inside the document, or inside the row when documents are not isolated."""
    doc_ids: NDArray[np.int64] | None
    """[R, S]: number of the document inside its row, from 0. None when documents are not isolated."""
    cu_seqlens: NDArray[np.int32] | None
    """[N+1]: where each document begins in the R*S tokens laid end to end, then R*S as often as fills the length."""
    max_seqlen: int
    """Longest document, rounded up to a multiple of 128, at most S. S when documents are not isolated."""


def row_labels(block: RowBlock, allocate: Allocate = np.empty) -> NDArray[np.int64]:
    """Labels [R, S] of a block: the next token, -100 across document boundaries, on padding and where masked."""
    rows, width = block.tokens.shape
    labels: NDArray[np.int64] = allocate((rows, width - 1), np.int64)
    labels[:] = block.tokens[:, 1:]
    labels[block.start_rows, block.start_columns - 1] = IGNORE
    if block.masked is not None:
        labels[block.masked[:, 1:]] = IGNORE
    for row in np.flatnonzero(block.valid < width).tolist():
        labels[row, max(int(block.valid[row]) - 1, 0) :] = IGNORE
    return labels


def pack_rows(
    block: RowBlock, *, isolate_documents: bool = True, cu_length: int | None = None, allocate: Allocate = np.empty
) -> PackedRows:
    """Make model rows [R, S] of a raw block [R, S+1].

    `cu_length` is the fixed length of `cu_seqlens`, so that shapes do not change from batch to batch; None takes what
    this block needs. `allocate` gives the memory. ValueError if the block holds more documents than fit.
    """
    rows, length = block.tokens.shape[0], block.tokens.shape[1] - 1
    input_ids: NDArray[np.int64] = allocate((rows, length), np.int64)
    input_ids[:] = block.tokens[:, :length]
    labels = row_labels(block, allocate)
    positions: NDArray[np.int64] = allocate((rows, length), np.int64)
    if not isolate_documents:
        positions[:] = np.arange(length)
        return PackedRows(input_ids, labels, positions, None, None, length)
    total = rows * length
    if total > np.iinfo(np.int32).max:
        raise ValueError(f"{rows} rows of {length} tokens are more than int32 boundaries can count; use fewer rows")
    starts = _document_starts(block, length)
    if cu_length is None:
        cu_length = len(starts) + 1
    if len(starts) >= cu_length:
        raise ValueError(f"{len(starts)} documents do not fit into cu_seqlens of length {cu_length}; make it longer")
    lengths = np.diff(starts, append=total)
    # Document number inside the row: number in the block, less that of the row's first document.
    first_of_row = np.flatnonzero(starts % length == 0)
    number = np.arange(len(starts)) - np.repeat(first_of_row, np.diff(first_of_row, append=len(starts)))
    doc_ids: NDArray[np.int64] = allocate((rows, length), np.int64)
    _fill_documents(positions.reshape(-1), doc_ids.reshape(-1), starts, lengths, number)
    cu_seqlens: NDArray[np.int32] = allocate((cu_length,), np.int32)
    cu_seqlens[: len(starts)] = starts
    cu_seqlens[len(starts) :] = total
    longest = int(lengths.max(initial=1))
    return PackedRows(
        input_ids=input_ids,
        labels=labels,
        position_ids=positions,
        doc_ids=doc_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=min(length, -(-longest // SEQLEN_MULTIPLE) * SEQLEN_MULTIPLE),
    )


# Documents of so many tokens, on the mean, are filled in one after the other; shorter ones all at once.
_LONG = 256


def _fill_documents(
    positions: NDArray[np.int64],
    doc_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    number: NDArray[np.int64],
) -> None:
    """Positions 0.. of each document, and its number, into arrays [n] that documents at ``starts`` fill."""
    if len(starts) * _LONG <= len(positions):
        count = np.arange(int(lengths.max(initial=0)))
        for start, size, which in zip(starts.tolist(), lengths.tolist(), number.tolist(), strict=True):
            positions[start : start + size] = count[:size]
            doc_ids[start : start + size] = which
        return
    np.subtract(np.arange(len(positions)), np.repeat(starts, lengths), out=positions)
    doc_ids[:] = np.repeat(number, lengths)


def _document_starts(block: RowBlock, length: int) -> NDArray[np.int64]:
    """Where documents begin in the rows laid end to end: every row, every start inside one, and its padding."""
    inside = block.start_columns < length
    padded = np.flatnonzero((block.valid > 0) & (block.valid < length))
    starts = np.concatenate(
        [
            np.arange(len(block.valid)) * length,
            block.start_rows[inside] * length + block.start_columns[inside],
            padded * length + block.valid[padded],
        ]
    )
    starts.sort()
    return starts
