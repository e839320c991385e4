"""Bytes copied to host memory in order, within a limit, and a copy that ends whatever happens to the writer."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_ckpt import staging
from kforge_ckpt.background import Stopped, at_once
from kforge_ckpt.safetensors import flat_bytes
from kforge_ckpt.staging import HostMemory, Staging


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", mmap.PAGESIZE)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.booleans()), max_size=6),
    st.sampled_from([None, 1, 3 * mmap.PAGESIZE]),
    st.booleans(),
)
def test_what_comes_out_is_what_went_in(shapes: list[tuple[int, int, bool]], limit: int | None, shared: bool) -> None:
    torch.manual_seed(0)
    staging.BLOCK_BYTES = mmap.PAGESIZE
    pieces = [torch.randn(a, b, dtype=torch.float64).T if turned else torch.randn(a, b) for a, b, turned in shapes]
    expected = b"".join(flat_bytes(piece).numpy().tobytes() for piece in pieces)
    memory = HostMemory(limit, shared=shared)
    for _ in range(2):  # the same memory again
        copy = Staging(pieces, memory, None)
        assert b"".join(block.wait().tobytes() for block in copy.blocks()) == expected
        copy.wait()
    most = -(-len(expected) // mmap.PAGESIZE)
    assert len(memory.blocks) == (most if limit is None else min(most, max(2, limit // mmap.PAGESIZE)))


def test_with_memory_for_all_the_copy_does_not_wait_for_the_writer() -> None:
    piece = torch.ones(10 * mmap.PAGESIZE, dtype=torch.uint8)
    copy = Staging([piece], HostMemory(), None)
    copy.wait()  # nobody has read a block yet
    piece.zero_()
    assert all(bytes(block.wait()) == b"\1" * mmap.PAGESIZE for block in copy.blocks())


def test_with_less_it_waits_for_blocks_to_come_back() -> None:
    piece = torch.arange(10, dtype=torch.uint8).repeat_interleave(mmap.PAGESIZE)
    copy = Staging([piece], HostMemory(1), None)
    ended = threading.Event()
    threading.Thread(target=lambda: (copy.wait(), ended.set())).start()
    seen = []
    for block in copy.blocks():
        assert len(seen) > 6 or not ended.is_set()  # two blocks of ten are held by the memory
        seen.append(int(block.wait()[0]))
    assert seen == list(range(10))
    assert ended.wait(10)


def test_a_writer_that_stops_lets_the_copy_end() -> None:
    memory = HostMemory(1)
    copy = Staging([torch.ones(10 * mmap.PAGESIZE, dtype=torch.uint8)], memory, None)
    assert bytes(next(copy.blocks()).wait()) == b"\1" * mmap.PAGESIZE
    copy.stop()
    copy.wait()
    assert copy._ended.is_set() and isinstance(copy._error, Stopped) and len(memory.blocks) == 2


@pytest.mark.parametrize("limit", [1, None])
def test_files_get_blocks_in_turns(limit: int | None) -> None:
    """However little memory there is, all of them are written at once."""
    page = mmap.PAGESIZE
    sizes = [[3 * page, page + 1], [], [5 * page], [0], [7]]
    pieces = [torch.full((size,), number, dtype=torch.uint8) for number, file in enumerate(sizes) for size in file]
    memory = HostMemory(limit)
    copy = Staging(pieces, memory, None, files=[len(file) for file in sizes])

    def read(number: int) -> tuple[bytes, list[int]]:
        blocks = [(bytes(block.wait()), block.offset // page) for block in copy.blocks(number)]
        return b"".join(data for data, _ in blocks), [place for _, place in blocks]

    got = at_once(read, range(5), 5)
    assert [data for data, _ in got] == [bytes([number]) * sum(file) for number, file in enumerate(sizes)]
    if limit is None:
        assert [places for _, places in got] == [[0, 3, 5, 7, 9], [], [1, 4, 6, 8, 10], [], [2]]
    else:
        assert len(memory.blocks) == 2


def test_what_the_copy_fails_with_is_raised_at_the_writer() -> None:
    copy = Staging([torch.zeros(3), torch.zeros(3).to_sparse()], HostMemory(), None)
    copy.wait()
    with pytest.raises(Exception, match="sparse"):
        list(copy.blocks())


def test_shared_memory_has_no_name_and_ends_with_its_users(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    memory = HostMemory(shared=True)
    memory.reserve(mmap.PAGESIZE)
    assert memory.handle is not None and set(os.listdir("/dev/shm")) <= before
    memory.blocks[0].memory[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with mmap.mmap(memory.handle, 3, prot=mmap.PROT_READ) as view:
        assert bytes(view) == b"\1\2\3"


def test_memory_reserved_ahead_is_what_a_save_uses() -> None:
    memory = HostMemory()
    memory.reserve_ahead(5 * mmap.PAGESIZE)
    memory.reserve(4 * mmap.PAGESIZE)
    blocks = [block.memory.data_ptr() for block in memory.blocks]
    assert len(blocks) == 5
    copy = Staging([torch.ones(6 * mmap.PAGESIZE, dtype=torch.uint8)], memory, None)
    assert b"".join(block.wait().tobytes() for block in copy.blocks()) == b"\1" * 6 * mmap.PAGESIZE
    assert [block.memory.data_ptr() for block in memory.blocks][:5] == blocks


def test_what_could_not_be_reserved_ahead_is_an_error_of_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    memory = HostMemory()
    monkeypatch.setattr(memory, "_allocate", refuse)
    memory.reserve_ahead(mmap.PAGESIZE)
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.reserve(mmap.PAGESIZE)
