"""Reading ahead in processes, and sending batches to a device on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kforge_data.batch import Batch, make_batch, to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kforge_data.masks import Transform
    from kforge_data.sources import Source

WORKER_KINDS = ("thread", "fork", "spawn")


class Rows(NamedTuple):
    """What one microbatch is made of."""

    phase: int
    row_ids: NDArray[np.int64]
    """[B], as the source of the phase numbers its rows; -1 for padding, which is last."""


class RowReader(Dataset[Batch]):
    """Rows -> their batch on the host: all that a worker has of the loader, and nothing that changes.

    Args:
        sources: source and row length of each phase.
        cu_lengths: for each phase the length of `cu_seqlens` by the rows of a microbatch.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Source, int]],
        isolate_documents: bool,
        cu_lengths: Sequence[dict[int, int | None]],
        transforms: Sequence[Transform] = (),
    ) -> None:
        self._sources, self._transforms = list(sources), tuple(transforms)
        self._isolate_documents, self._cu_lengths = isolate_documents, list(cu_lengths)

    def read(self, rows: Rows, pin: bool = False) -> Batch:
        """The batch of these rows, in pinned memory if asked for."""
        source, row_tokens = self._sources[rows.phase]
        batch = make_batch(
            source,
            rows.row_ids,
            row_tokens=row_tokens,
            isolate_documents=self._isolate_documents,
            cu_length=self._cu_lengths[rows.phase][len(rows.row_ids)],
            pin=pin,
            transforms=self._transforms,
        )
        batch["row_ids"] = in_phase(rows.phase, rows.row_ids)
        return batch

    def __getitem__(self, rows: Rows) -> Batch:
        return self.read(rows)


PHASE_BITS = 56
"""A row that a loader names is phase * 2**56 + the number that its source has for it."""


def in_phase(phase: int, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The names of rows of a phase; padding stays -1."""
    return np.where(row_ids < 0, row_ids, row_ids + (phase << PHASE_BITS)) if phase else row_ids


def read_in_processes(
    reader: RowReader, row_ids: Iterable[Rows], *, workers: int, kind: str, ahead: int, pin: bool
) -> Iterator[Batch]:
    """The batch of each of ``row_ids``, in order, from worker processes of torch's DataLoader, ``ahead`` at a time.

    An error in a worker is raised here with the worker's traceback, and so is its death. The processes end with the
    iterator.
    """
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=row_ids,
        num_workers=workers,
        prefetch_factor=max(2, -(-ahead // workers)),
        collate_fn=_as_it_is,
        multiprocessing_context=kind,
        pin_memory=pin,
    )
    return iter(loader)


def _as_it_is(batch: Any) -> Any:
    return batch


class Sent(NamedTuple):
    """A batch on its device, and what says that it has arrived there; None where it has."""

    batch: Batch
    arrived: torch.cuda.Event | None


class Sender:
    """Copies batches to a device: on CUDA from pinned memory, on a stream of its own, so that neither the host nor what
    the device computes waits for it. From any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Batch) -> Sent:
        """Begin the copy."""
        if self._stream is None:
            return Sent(to_device(batch, self._device), None)
        with torch.cuda.stream(self._stream):
            return Sent(to_device(batch, self._device), self._stream.record_event())

    def receive(self, sent: Sent) -> Batch:
        """The batch, for work that is queued on the current stream from here on."""
        if sent.arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent.arrived)
            for value in sent.batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(current)  # or the memory could be given away while it is still read
        return sent.batch
