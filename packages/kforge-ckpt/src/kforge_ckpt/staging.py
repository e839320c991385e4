"""Tensors copied into host memory while the caller goes on; a writer takes them from there.

A save in the background must not see what the caller does to its tensors next. So a thread copies their bytes, in the
order of the file, into blocks of host memory (on CUDA pinned, and by a stream of its own); a second thread writes full
blocks and gives them back. Of several files each gets a block in turn, and has a thread that writes it. With memory for
all of the state the copy never waits for the disk; with less, a block is filled again as soon as it is written.

The blocks are allocated once and used by every save.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from kforge_ckpt.background import Stopped
from kforge_ckpt.safetensors import flat_bytes

BLOCK_BYTES = 2**25
"""32 MiB: large beside the cost of a write, small beside the state of a model."""


@dataclass
class HostBlock:
    """``memory`` [BLOCK_BYTES] uint8, of which the first ``used`` bytes count once ``copied`` has happened. ``offset``:
    where the block begins in shared memory."""

    memory: torch.Tensor
    offset: int
    used: int = 0
    copied: torch.cuda.Event | None = None

    def wait(self) -> memoryview:
        """The bytes, as soon as they are there."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return memoryview(self.memory[: self.used].numpy())  # type: ignore[arg-type] # numpy 2 stubs on 3.11


def spare_bytes() -> int | None:
    """Half of the memory that this host has to spare, shared by its ranks (LOCAL_WORLD_SIZE); None: not known."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    return available // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class HostMemory:
    """Blocks to copy to, at most ``limit_bytes`` of them (but two at least). None: as much as a save needs, within the
    `spare_bytes` of the first time.

    shared: another process can map the blocks, through the file descriptor ``handle`` (Linux).
    """

    def __init__(self, limit_bytes: int | None = None, *, pinned: bool = False, shared: bool = False) -> None:
        self.limit_bytes = spare_bytes() if limit_bytes is None else limit_bytes
        self.pinned = pinned
        self.handle: int | None = os.memfd_create("checkpoint") if shared else None
        self.blocks: list[HostBlock] = []
        self._ahead: threading.Thread | None = None
        self._free: queue.SimpleQueue[HostBlock | None] = queue.SimpleQueue()

    def reserve_ahead(self, nbytes: int) -> None:
        """Begin to allocate what `reserve` will ask for, on a thread of its own: pinning takes about half a second
        a GB. Where that fails, `reserve` tries again, and raises."""

        def run() -> None:
            with suppress(RuntimeError, OSError):
                self._grow(nbytes)

        self._ahead = threading.Thread(target=run, name="ckpt-reserve", daemon=True)
        self._ahead.start()

    def reserve(self, nbytes: int) -> None:
        """Have blocks for ``nbytes``, within the limit. Nothing may be in use."""
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
        self._grow(nbytes)
        self._free = queue.SimpleQueue()
        for block in self.blocks:
            self._free.put(block)

    def _grow(self, nbytes: int) -> None:
        wanted = -(-nbytes // BLOCK_BYTES)
        if self.limit_bytes is not None:
            wanted = min(wanted, max(2, self.limit_bytes // BLOCK_BYTES))
        for number in range(len(self.blocks), wanted):
            self.blocks.append(HostBlock(self._allocate(number), number * BLOCK_BYTES))

    def _allocate(self, number: int) -> torch.Tensor:
        if self.handle is None:
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self.pinned)
        os.ftruncate(self.handle, (number + 1) * BLOCK_BYTES)
        memory = torch.frombuffer(
            mmap.mmap(self.handle, BLOCK_BYTES, offset=number * BLOCK_BYTES), dtype=torch.uint8, count=BLOCK_BYTES
        )
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), BLOCK_BYTES, 0))
        return memory

    def take(self) -> HostBlock | None:
        """An empty block, as soon as there is one; None after `stop`."""
        block = self._free.get()
        if block is None:
            self._free.put(None)
            return None
        block.used = 0
        return block

    def give(self, block: HostBlock) -> None:
        self._free.put(block)

    def stop(self) -> None:
        """Nobody will give blocks back: let whoever waits for one go."""
        self._free.put(None)


class _Bytes:
    """Tensors as a stream of bytes; ``rest`` are those of the first of them that are still to come."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        self._pieces = iter(pieces)
        self.rest = torch.empty(0, dtype=torch.uint8)

    def more(self) -> bool:
        """Whether there are any; in ``rest`` then."""
        while not len(self.rest):
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self.rest = flat_bytes(piece)
        return True


def room_for(files: Iterable[Iterable[torch.Tensor]]) -> int:
    """Bytes of the blocks that hold files of these pieces, no two of them in one block."""
    sizes = (sum(piece.numel() * piece.itemsize for piece in pieces) for pieces in files)
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


class Staging:
    """The copy of ``pieces``, one after the other, into ``memory``; begun at once, on a thread of its own.

    device: where pieces lie that are not on the CPU.
    files: how many of the pieces belong to each file; None: all to one. The files get blocks in turns.
    """

    def __init__(
        self,
        pieces: Iterable[torch.Tensor],
        memory: HostMemory,
        device: torch.device | None,
        *,
        files: Sequence[int] | None = None,
    ) -> None:
        rest = iter(list(pieces))
        self._files = [list(rest)] if files is None else [list(islice(rest, count)) for count in files]
        self._memory = memory
        self._device = device
        self._full: list[queue.SimpleQueue[HostBlock | None]] = [queue.SimpleQueue() for _ in self._files]
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._last: torch.cuda.Event | None = None
        self._before: torch.cuda.Event | None = None
        memory.reserve(room_for(self._files))
        if device is not None and device.type == "cuda":
            self._before = torch.cuda.Event()
            self._before.record(torch.cuda.current_stream(device))
        # It ends by itself or through `blocks`; a process that wants to end does not wait for it.
        threading.Thread(target=self._run, name="ckpt-copy", daemon=True).start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                if self._before is None:
                    self._copy(None)
                    return
                torch.cuda.set_device(self._device)
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    stream.wait_event(self._before)
                    self._copy(stream)
                    self._last = torch.cuda.Event()
                    self._last.record(stream)
        except BaseException as error:
            self._error = error
        finally:
            self._files = []
            self._ended.set()
            for full in self._full:
                full.put(None)

    def _copy(self, stream: torch.cuda.Stream | None) -> None:
        turns = deque(zip(map(_Bytes, self._files), self._full, strict=True))
        while turns:
            source, full = turns.popleft()
            if not source.more():
                continue
            block = self._memory.take()
            if block is None:
                raise Stopped
            while block.used < BLOCK_BYTES and source.more():
                count = min(len(source.rest), BLOCK_BYTES - block.used)
                block.memory[block.used : block.used + count].copy_(source.rest[:count], non_blocking=True)
                block.used += count
                source.rest = source.rest[count:]
            if stream is not None:
                block.copied = torch.cuda.Event()
                block.copied.record(stream)
            full.put(block)
            turns.append((source, full))

    def wait(self) -> None:
        """Return when the tensors may be changed: on the CPU when they are copied, on CUDA when what the current stream
        does from now on comes after the copy."""
        self._ended.wait()
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def blocks(self, file: int = 0) -> Iterator[HostBlock]:
        """What was copied of a file, in order, for one reader; a block is given back when the next one is asked for.
        Every file must have its reader. Raises what the copy failed with, and `Stopped` after `stop`."""
        while (block := self._full[file].get()) is not None:
            yield block
            self._memory.give(block)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Nobody will read any more: let the copy end."""
        self._memory.stop()
