"""Reading ahead in processes, and sending batches to a device on a stream of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kforge_data.batch import Batch, make_batch, pack_batch, to_device
from kforge_data.buffers import Blocks, Cutter, cut
from kforge_data.masks import apply
from kforge_data.mixture import ROW_BITS
from kforge_data.sources import lanes_of, merged

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from numpy.typing import NDArray

    from kforge_data.buffers import Allocate
    from kforge_data.masks import Transform
    from kforge_data.sources import RowBlock, Source

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

    def read_block(self, rows: Rows) -> RowBlock | None:
        """The raw rows alone, transformed, without padding; None if there are none."""
        source, row_tokens = self._sources[rows.phase]
        real = rows.row_ids[rows.row_ids >= 0]
        return apply(self._transforms, source.read_rows(real, row_tokens)) if real.size else None

    def pack(self, rows: Rows, blocks: Sequence[tuple[NDArray[np.int64], RowBlock]], pin: bool) -> Batch:
        """The batch of ``rows``, which lie in several blocks, each of which says which of them it has."""
        block = merged(blocks, int((rows.row_ids >= 0).sum()), self._sources[rows.phase][1])
        return pack_batch(
            block.padded(len(rows.row_ids)),
            in_phase(rows.phase, rows.row_ids),
            isolate_documents=self._isolate_documents,
            cu_length=self._cu_lengths[rows.phase][len(rows.row_ids)],
            pin=pin,
            allocate=self._blocks.cutter(),
        )

    def lanes(self, phase: int) -> int:
        """Lanes of the source of a phase; 0 if none."""
        return lanes_of(self._sources[phase][0])


MOST_BYTES = 1 << 28
"""Memory of batches that is kept to be used again, at most."""
PHASE_BITS = 56
"""A row that a loader names is phase * 2**56 + the number that its source has for it."""


def in_phase(phase: int, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The names of rows of a phase; padding stays -1."""
    return np.where(row_ids < 0, row_ids, row_ids + (phase << PHASE_BITS)) if phase else row_ids


class _InBlock(NamedTuple):
    """An array that lies in a block of shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class _Failure(NamedTuple):
    """What was raised in a worker."""

    kind: type[BaseException]
    text: str

    def error(self) -> BaseException:
        try:
            return self.kind(self.text)
        except Exception:  # a kind that wants other arguments
            return RuntimeError(self.text)


_PARENT_CHECK_S = 5.0
_END_S = 10.0


def _work(jobs: Connection, others: Sequence[Connection], work: Callable[[Any], Any], parent: int) -> None:
    """What a worker process does: answer the jobs that come through the pipe, until it is closed at the other end.

    Signals that are meant for the process of the loader reach its whole group; it decides when workers end.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    for other in others:  # ends that a fork has copied, and that would keep other pipes open
        other.close()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    try:
        while True:
            while not jobs.poll(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            job = jobs.recv()
            try:
                answer = work(job)
            except Exception as error:  # of any kind: what is read over a network raises those of broken pipes too
                answer = _Failure(type(error), f"in a worker process: {error}\n\n{traceback.format_exc()}")
            jobs.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


_OURS: weakref.WeakSet[Connection] = weakref.WeakSet()
"""The ends of pipes that this process has, to workers of all its loaders: a forked worker closes its copies, or those
that it has copies for would never see them closed."""


class Workers:
    """Worker processes that each answer, in order, the jobs that they are sent: ``work(job)``.

    An error in one is raised by `receive` with its traceback, and so is its death. They end by `close`, or when the
    process that made them is gone.
    """

    def __init__(self, count: int, kind: str, work: Callable[[Any], Any]) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        # Where nobody closes: before the interpreter, at its end, waits for them, who do not heed its SIGTERM.
        Finalize(self, _close_all, (self._pipes,), exitpriority=100)
        context: Any = multiprocessing.get_context(kind)
        for number in range(count):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            _OURS.add(ours)
            copied = tuple(_OURS) if kind == "fork" else ()
            process = context.Process(
                target=_work, args=(theirs, copied, work, os.getpid()), name=f"kforge-data-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def send(self, worker: int, job: Any) -> None:
        """Give a worker a job."""
        try:
            self._pipes[worker].send(job)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(worker) from None

    def receive(self, worker: int) -> Any:
        """Its answer to the oldest of its jobs that has none yet."""
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._death(worker) from None
        if isinstance(answer, _Failure):
            raise answer.error()
        return answer

    def _death(self, worker: int) -> RuntimeError:
        for process in self._processes:
            process.join(_END_S if process is self._processes[worker] else 0)
        ends = [f"{process.name} (pid {process.pid}) {_end_of(process.exitcode)}" for process in self._processes]
        return RuntimeError(f"a worker process that read rows has ended: {', '.join(ends)}")

    def close(self) -> None:
        """End the processes and wait for them."""
        _close_all(self._pipes)
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():  # it hangs where it reads
                process.kill()
                process.join()


class _BatchIn:
    """(rows, number of a block) -> their batch, with arrays in the place of tensors: told where in the block they lie,
    or whole."""

    def __init__(self, reader: RowReader, tensors: Sequence[torch.Tensor]) -> None:
        self._reader, self._tensors = reader, tensors

    def __call__(self, job: tuple[Rows, int | None]) -> Batch:
        rows, number = job
        block = None if number is None else self._tensors[number].numpy()
        batch = self._reader.read(rows, allocate=None if block is None else Cutter(block))
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                array = value.numpy()
                offset = -1 if block is None else array.ctypes.data - block.ctypes.data
                inside = block is not None and 0 <= offset < len(block)
                batch[name] = _InBlock(offset, array.shape, array.dtype.str) if inside else array
        return batch


class ProcessReader:
    """The batch of each of ``rows``, in order, from worker processes that are ``ahead`` batches ahead, and one each.

    Tensors come in blocks of shared memory that are used again; through the pipes goes only where they lie. An error in
    a worker is raised here with the worker's traceback, and so is its death. Processes end by `close`, or when the one
    that made them is gone.
    """

    def __init__(
        self, reader: RowReader, rows: Iterable[Rows], *, workers: int, kind: str, ahead: int, pin: bool
    ) -> None:
        self._ahead, self._pin, self._rows = ahead + workers, pin, iter(rows)
        # Those on the way, and in use; what there is no room for comes through the pipe.
        count = min(self._ahead + 3 * ahead, min(MOST_BYTES, _shared_room() // 2) // reader.batch_bytes)
        tensors = [torch.empty(reader.batch_bytes, dtype=torch.uint8).share_memory_() for _ in range(count)]
        self._blocks = Blocks([tensor.numpy() for tensor in tensors])
        self._on_the_way: deque[int | None] = deque()
        self._sent = self._received = 0
        self._workers = Workers(workers, kind, _BatchIn(reader, tensors))

    def _send_ahead(self) -> None:
        while len(self._on_the_way) < self._ahead and (rows := next(self._rows, None)) is not None:
            number = self._blocks.take([n for n in self._on_the_way if n is not None])
            self._workers.send(self._sent % len(self._workers), (rows, number))
            self._on_the_way.append(number)
            self._sent += 1

    def __next__(self) -> Batch:
        self._send_ahead()
        if not self._on_the_way:
            raise StopIteration
        answer: Batch = self._workers.receive(self._received % len(self._workers))
        number = self._on_the_way[0]
        for name, value in answer.items():
            if isinstance(value, _InBlock):
                assert number is not None
                value = cut(self._blocks[number], *value)
            if isinstance(value, np.ndarray) and name not in ("row_ids", "lane_states"):
                tensor = torch.from_numpy(value)
                answer[name] = tensor.pin_memory() if self._pin else tensor
        self._on_the_way.popleft()
        self._received += 1
        return answer

    def close(self) -> None:
        """End the processes and wait for them."""
        self._workers.close()


class LaneReader:
    """The batch of each of ``rows`` of a source in lanes, from worker processes that read ``ahead`` batches ahead.

    The lanes that this process has of ``world`` are dealt to the workers. Each reads raw rows of its own lanes, of all
    microbatches, and they are put together here; so no lane is read twice, and workers that have none are idle.
    """

    def __init__(
        self, reader: RowReader, rows: Iterable[Rows], *, workers: int, kind: str, ahead: int, pin: bool, world: int
    ) -> None:
        self._reader, self._rows, self._ahead, self._pin, self._world = reader, iter(rows), ahead, pin, world
        self._on_the_way: deque[Rows] = deque()
        self._workers = Workers(workers, kind, reader.read_block)

    def _own(self, rows: Rows, worker: int) -> NDArray[np.bool_]:
        """Which rows a worker reads: those of its lanes, or any of a phase that has none."""
        lanes, number = self._reader.lanes(rows.phase), rows.row_ids & ((1 << ROW_BITS) - 1)
        group = number % lanes // self._world if lanes else np.arange(len(number))
        own: NDArray[np.bool_] = (group % len(self._workers) == worker) & (rows.row_ids >= 0)
        return own

    def __next__(self) -> Batch:
        while len(self._on_the_way) < self._ahead and (some := next(self._rows, None)) is not None:
            for worker in range(len(self._workers)):
                self._workers.send(worker, Rows(some.phase, some.row_ids[self._own(some, worker)]))
            self._on_the_way.append(some)
        if not self._on_the_way:
            raise StopIteration
        rows, blocks = self._on_the_way[0], []
        for worker in range(len(self._workers)):
            block: RowBlock | None = self._workers.receive(worker)
            if block is not None:
                blocks.append((np.flatnonzero(self._own(rows, worker)), block))
        self._on_the_way.popleft()
        return self._reader.pack(rows, blocks, self._pin)

    def close(self) -> None:
        """End the processes and wait for them."""
        self._workers.close()


def _close_all(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


def _shared_room() -> int:
    """Bytes that are left for shared memory, which containers often have little of."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return MOST_BYTES
    return room.f_bavail * room.f_frsize


def _end_of(code: int | None) -> str:
    if code is None:
        return "is alive"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}; if that was SIGKILL, perhaps for want of memory"
    return f"exited with code {code}"


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
