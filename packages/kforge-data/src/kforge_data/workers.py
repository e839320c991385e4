"""Reading ahead in processes, and sending batches to a device on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kforge_data._torch import end_workers
from kforge_data.batch import Batch, make_batch, to_device
from kforge_data.buffers import Blocks, Cutter, cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kforge_data.buffers import Allocate
    from kforge_data.masks import Transform
    from kforge_data.sources import Source

WORKER_KINDS = ("thread", "fork", "spawn")


class Rows(NamedTuple):
    """What one microbatch is made of."""

    phase: int
    row_ids: NDArray[np.int64]
    """[B], as the source of the phase numbers its rows; -1 for padding, which is last."""


class RowReader:
    """Rows -> their batch on the host: all that a worker has of the loader, and nothing that changes but its memory.

    Args:
        sources: source and row length of each phase.
        cu_lengths: for each phase the length of `cu_seqlens` by the rows of a microbatch.
        keep: so many batches that are alive at a time have memory that is used again when they are not.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Source, int]],
        isolate_documents: bool,
        cu_lengths: Sequence[dict[int, int | None]],
        transforms: Sequence[Transform] = (),
        keep: int = 0,
    ) -> None:
        self._sources, self._transforms = list(sources), tuple(transforms)
        self._isolate_documents, self._cu_lengths = isolate_documents, list(cu_lengths)
        self._keep = min(keep, MOST_BYTES // self.batch_bytes)
        self._blocks = Blocks(size=self.batch_bytes, most=self._keep)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._blocks = Blocks(size=self.batch_bytes, most=self._keep)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the tensors of the largest batch."""
        a_token = 2 + 8 * (4 if self._isolate_documents else 3)
        return max(
            rows * row_tokens * a_token + 4 * (cu or 0) + 6 * 64
            for (_, row_tokens), lengths in zip(self._sources, self._cu_lengths, strict=True)
            for rows, cu in lengths.items()
        )

    def read(self, rows: Rows, pin: bool = False, allocate: Allocate | None = None) -> Batch:
        """The batch of these rows, in pinned memory if asked for, or in that which ``allocate`` gives."""
        source, row_tokens = self._sources[rows.phase]
        batch = make_batch(
            source,
            rows.row_ids,
            row_tokens=row_tokens,
            isolate_documents=self._isolate_documents,
            cu_length=self._cu_lengths[rows.phase][len(rows.row_ids)],
            pin=pin,
            transforms=self._transforms,
            allocate=allocate or self._blocks.cutter(),
        )
        batch["row_ids"] = in_phase(rows.phase, rows.row_ids)
        return batch


MOST_BYTES = 1 << 28
"""Memory of batches that is kept to be used again, at most."""
PHASE_BITS = 56
"""A row that a loader names is phase * 2**56 + the number that its source has for it."""


def in_phase(phase: int, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The names of rows of a phase; padding stays -1."""
    return np.where(row_ids < 0, row_ids, row_ids + (phase << PHASE_BITS)) if phase else row_ids


class _InBlock(NamedTuple):
    """A tensor that lies in a block of shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class _SharedReader(Dataset[Batch]):
    """What a worker process has: the reader, and blocks of memory that it shares with the process of the loader."""

    def __init__(self, reader: RowReader, blocks: list[torch.Tensor]) -> None:
        self._reader, self._blocks = reader, blocks

    def __getitem__(self, job: tuple[Rows, int | None]) -> Batch:
        """The batch of some rows, its tensors in the block of this number, and then only told where they lie in it."""
        rows, number = job
        if number is None:
            return self._reader.read(rows)
        block = self._blocks[number].numpy()
        batch = self._reader.read(rows, allocate=Cutter(block))
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                offset = value.data_ptr() - block.ctypes.data
                if 0 <= offset < len(block):
                    batch[name] = _InBlock(offset, tuple(value.shape), value.numpy().dtype.str)
        return batch


class ProcessReader:
    """The batch of each of ``rows``, in order, from worker processes of torch's DataLoader, ``ahead`` at a time.

    Tensors come in blocks of shared memory that are used again, not through the pipe nor in memory made for each.
    An error in a worker is raised here with the worker's traceback, and so is its death.
    """

    def __init__(
        self, reader: RowReader, rows: Iterable[Rows], *, workers: int, kind: str, ahead: int, pin: bool
    ) -> None:
        prefetch = max(2, -(-ahead // workers))
        count = min(workers * prefetch + 3 * ahead, MOST_BYTES // reader.batch_bytes)  # those on the way, and in use
        tensors = [torch.empty(reader.batch_bytes, dtype=torch.uint8).share_memory_() for _ in range(count)]
        self._blocks = Blocks([tensor.numpy() for tensor in tensors])
        self._on_the_way: deque[int | None] = deque()
        self._pin = pin
        loader = DataLoader(
            _SharedReader(reader, tensors),
            batch_size=None,
            sampler=self._jobs(rows),
            num_workers=workers,
            prefetch_factor=prefetch,
            collate_fn=_as_it_is,
            multiprocessing_context=kind,
        )
        self._batches = iter(loader)

    def _jobs(self, rows: Iterable[Rows]) -> Iterator[tuple[Rows, int | None]]:
        for some in rows:
            number = self._blocks.take(tuple(n for n in self._on_the_way if n is not None))
            self._on_the_way.append(number)
            yield some, number

    def __next__(self) -> Batch:
        batch: Batch = next(self._batches)
        number = self._on_the_way[0]
        for name, value in batch.items():
            if isinstance(value, _InBlock):
                assert number is not None
                value = torch.from_numpy(cut(self._blocks[number], *value))
                batch[name] = value.pin_memory() if self._pin else value
            elif self._pin and isinstance(value, torch.Tensor):
                batch[name] = value.pin_memory()
        self._on_the_way.popleft()
        return batch

    def close(self) -> None:
        """End the processes and wait for them."""
        end_workers(self._batches)


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
