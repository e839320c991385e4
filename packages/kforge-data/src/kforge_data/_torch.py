"""Private names of torch that this package uses, each with the public thing it stands in for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def end_workers(batches: Iterator[Any]) -> None:
    """End the worker processes of an iterator of a DataLoader and wait for them.

    Stands in for ``del``: an error that a worker raised keeps the iterator, and with it the workers, alive.
    """
    batches._shutdown_workers()  # type: ignore[attr-defined]
