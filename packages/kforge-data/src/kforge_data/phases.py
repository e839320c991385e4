"""Parts of a run in which rows are of another length, or come from another source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kforge_data.sources import Source


@dataclass(frozen=True)
class RowPhase:
    """From ``step`` on a `Loader` reads rows of ``row_tokens`` from ``source`` (None: the one that it has).

    Rows of another length are other rows, so each phase reads a sequence of its own, from its beginning, in an order of
    its own: positions inside it count from the phase's first row, and its epochs from 0. The names of its rows, in
    `rows_of`, `quarantine` and batches, hold the number of the phase above bit 56.
    """

    step: int
    row_tokens: int
    source: Source | None = None
