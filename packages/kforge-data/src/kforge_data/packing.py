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
_INT16_MAX, _INT32_MAX = 2**15 - 1, 2**31 - 1


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


def row_labels(block: RowBlock, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Labels [R, S] of a block: the next token, -100 across document boundaries, on padding and where masked.

    ``out`` gives their memory."""
    rows, width = block.tokens.shape
    labels = np.empty((rows, width - 1), np.int64) if out is None else out
    labels[:] = block.tokens[:, 1:]
    labels.reshape(-1)[block.start_rows * (width - 1) + block.start_columns - 1] = IGNORE
    if block.masked is not None:
        labels[block.masked[:, 1:]] = IGNORE
    for row, valid in enumerate(block.valid.tolist()):
        if valid < width:
            labels[row, max(valid - 1, 0) :] = IGNORE
    return labels


def pack_rows(
    block: RowBlock, *, isolate_documents: bool = True, cu_length: int | None = None, allocate: Allocate = np.empty
) -> PackedRows:
    """Make model rows [R, S] of a raw block [R, S+1].

    `cu_length` is the fixed length of `cu_seqlens`, so that shapes do not change from batch to batch; None takes what
    this block needs. `allocate` gives the memory. ValueError if the block holds more documents than fit.
    """
    rows, length = block.tokens.shape[0], block.tokens.shape[1] - 1
    arrays: NDArray[np.int64] = allocate((4 if isolate_documents else 3, rows, length), np.int64)
    input_ids, labels, positions = arrays[0], arrays[1], arrays[2]
    input_ids[:] = block.tokens[:, :length]
    row_labels(block, labels)
    if not isolate_documents:
        positions[:] = np.arange(length)
        return PackedRows(input_ids, labels, positions, None, None, length)
    total = rows * length
    if total > _INT32_MAX:
        raise ValueError(f"{rows} rows of {length} tokens are more than int32 boundaries can count; use fewer rows")
    bounds = _document_bounds(block, length)
    starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
    if cu_length is None:
        cu_length = len(bounds)
    if len(bounds) > cu_length:
        raise ValueError(f"{len(starts)} documents do not fit into cu_seqlens of length {cu_length}; make it longer")
    row = starts // length
    column = starts - row * length
    number = np.arange(len(starts)) - (column == 0).nonzero()[0][row]  # of each document in its row
    # Made in the smallest type that holds a column, then widened: bytes that are written are what costs most.
    kind = np.int16 if length <= _INT16_MAX else np.int32
    each = np.repeat(np.array((column, number), kind), lengths, axis=1).reshape(2, rows, length)
    np.subtract(np.arange(length, dtype=kind), each[0], out=each[0])
    arrays[2:] = each
    cu_seqlens: NDArray[np.int32] = allocate((cu_length,), np.int32)
    cu_seqlens[: len(bounds)] = bounds
    cu_seqlens[len(bounds) :] = total
    longest = int(lengths.max(initial=1))
    return PackedRows(
        input_ids=input_ids,
        labels=labels,
        position_ids=positions,
        doc_ids=arrays[3],
        cu_seqlens=cu_seqlens,
        max_seqlen=min(length, -(-longest // SEQLEN_MULTIPLE) * SEQLEN_MULTIPLE),
    )


def _document_bounds(block: RowBlock, length: int) -> NDArray[np.int64]:
    """Where documents begin in the rows laid end to end: every row, every start inside one, and its padding; and as
    last entry R*S."""
    rows, inside = len(block.valid), block.start_rows * length + block.start_columns
    padded = [row * length + valid for row, valid in enumerate(block.valid.tolist()) if 0 < valid < length]
    bounds = np.concatenate(
        [np.arange(0, (rows + 1) * length, length), inside[block.start_columns < length], np.array(padded, np.int64)]
    )
    bounds.sort()
    return bounds
