"""Which tokens of a row each rank has under context parallelism, and which of them see one another.

A row of S tokens is cut into chunks of equal length; its columns are numbered from 0. Documents are told by ``doc_ids``
[B,S], a number for each token that never falls along a row, or by ``cu_seqlens`` [N+1], where they begin in the rows
laid end to end, the last value repeated as often as one likes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kforge_parallel.layout import CHUNKS, check_row


def chunks_of(rank: int, size: int, style: str) -> list[int]:
    """Which chunks of a row a rank has, of ``size`` × `CHUNKS`."""
    return [rank, 2 * size - 1 - rank] if CHUNKS[style] == 2 else [rank]


def columns_of(rank: int, size: int, style: str, tokens: int, device: torch.device | None = None) -> Tensor:
    """[S'] the columns of a row of S tokens that a rank has, rising. Raises ValueError for an S that cannot be cut."""
    check_row(tokens, size, style)
    length = tokens // (size * CHUNKS[style])
    starts = [chunk * length for chunk in chunks_of(rank, size, style)]
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])


def document_ids(rows: Any, batch: int, tokens: int) -> Tensor | None:
    """[B,S] a number for each token's document, never falling along a row; None for rows of one document each. Does
    not wait for the device."""
    docs: Tensor | None = getattr(rows, "doc_ids", None)
    ends = getattr(rows, "cu_seqlens", None)
    if docs is not None or ends is None:
        return docs
    every = torch.arange(batch * tokens, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends[1:].contiguous(), every, right=True).view(batch, tokens)


def document_ends(rows: Any, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, int]:
    """cu_seqlens and the longest document, for rows that may be of one document each."""
    ends: Tensor | None = getattr(rows, "cu_seqlens", None)
    if ends is not None:
        return ends, rows.max_seqlen
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device), tokens


def clipped_ends(ends: Tensor, tokens: int, start: int, stop: int) -> Tensor:
    """cu_seqlens over rows of ``tokens`` -> those over columns start .. stop - 1 of each, laid end to end. A document
    without a token there has length 0."""
    return (ends // tokens) * (stop - start) + (ends % tokens - start).clamp(0, stop - start)


def seen(queries: Tensor, keys: Tensor, docs: Tensor | None, window: int | None) -> Tensor:
    """Which keys each query sees, [B or 1,Q,K] bool: those of its document at its column or before, and of those the
    last ``window``. queries [Q], keys [K]: columns; docs as of `document_ids`."""
    back = queries[:, None] - keys[None]
    visible = (back >= 0)[None]
    if window is not None:
        visible = visible & (back < window)
    if docs is not None:
        visible = visible & (docs[:, queries, None] == docs[:, None, keys])
    return visible
