"""One pass over a source for an evaluation: every rank reads its rows, and all ranks as many batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kforge_data.batch import PADDING_ROW, Batch, cu_seqlens_length, make_batch, to_device
from kforge_data.sources import rows_or_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kforge_data.masks import Transform
    from kforge_data.sources import Source


def evaluation_rows(source: Source, *, row_tokens: int, max_rows: int = 0) -> NDArray[np.int64]:
    """Rows that an evaluation reads: all of them, or `max_rows` spread evenly over the source. int64, ascending."""
    if max_rows < 0:
        raise ValueError(f"max_rows = {max_rows} must be 0 (all rows) or more")
    rows = rows_or_error(source, row_tokens)
    count = min(max_rows, rows) if max_rows else rows
    return np.arange(count, dtype=np.int64) * rows // count


def evaluation_batches(
    source: Source,
    *,
    row_tokens: int,
    microbatch_rows: int,
    rank: int = 0,
    world: int = 1,
    max_rows: int = 0,
    isolate_documents: bool = True,
    transforms: Sequence[Transform] = (),
    device: str | torch.device = "cpu",
) -> Iterator[Batch]:
    """One pass over `evaluation_rows`, in order, each row on exactly one rank.

    Every rank yields the same number of batches of `microbatch_rows` rows; what is missing at the end are rows of
    padding whose labels are all -100. The mean over ranks must therefore be Σ nll / Σ scored tokens.
    """
    if microbatch_rows < 1:
        raise ValueError(f"microbatch_rows = {microbatch_rows} must be at least 1")
    if not 0 <= rank < world:
        raise ValueError(f"rank = {rank} is not one of {world} processes, counted from 0")
    rows = evaluation_rows(source, row_tokens=row_tokens, max_rows=max_rows)
    return _evaluation_batches(
        source,
        rows,
        row_tokens,
        microbatch_rows,
        rank,
        world,
        isolate_documents,
        tuple(transforms),
        torch.device(device),
    )


def _evaluation_batches(
    source: Source,
    rows: NDArray[np.int64],
    row_tokens: int,
    microbatch_rows: int,
    rank: int,
    world: int,
    isolate_documents: bool,
    transforms: Sequence[Transform],
    device: torch.device,
) -> Iterator[Batch]:
    cu_length = (
        cu_seqlens_length(source, row_tokens=row_tokens, microbatch_rows=microbatch_rows) if isolate_documents else None
    )
    for start in range(0, len(rows), world * microbatch_rows):
        here = rows[start + rank * microbatch_rows :][:microbatch_rows]
        row_ids = np.full(microbatch_rows, PADDING_ROW, np.int64)
        row_ids[: len(here)] = here
        batch = make_batch(
            source,
            row_ids,
            row_tokens=row_tokens,
            isolate_documents=isolate_documents,
            cu_length=cu_length,
            pin=device.type == "cuda",
            transforms=transforms,
        )
        yield to_device(batch, device)
