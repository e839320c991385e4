"""The process that writes: the same files as in this one, errors with their number, an end when it is cut off."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kforge_ckpt import CheckpointError
from kforge_ckpt.files import write_file
from kforge_ckpt.staging import BLOCK_BYTES, HostBlock, HostMemory
from kforge_ckpt.writer import WriterProcess


@pytest.fixture
def memory() -> HostMemory:
    memory = HostMemory(shared=True)
    memory.reserve(2 * BLOCK_BYTES)
    return memory


def filled(memory: HostMemory) -> list[HostBlock]:
    for number, block in enumerate(memory.blocks):
        block.used = 1000 + number
        block.memory[: block.used] = torch.arange(block.used).to(torch.uint8)
    return memory.blocks


@pytest.fixture
def process(memory: HostMemory) -> Iterator[WriterProcess]:
    assert memory.handle is not None
    process = WriterProcess(memory.handle)
    yield process
    process.close()
    assert not process.alive


def test_it_writes_what_this_process_would(tmp_path: Path, memory: HostMemory, process: WriterProcess) -> None:
    blocks = filled(memory)
    record = process.write_file(tmp_path / "a", b"head", blocks)
    assert record == write_file(tmp_path / "b", [b"head", *(block.wait() for block in blocks)])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert process.write_file(tmp_path / "empty", b"", []).size == 0


def test_its_errors_are_the_system_s_and_it_goes_on(tmp_path: Path, memory: HostMemory, process: WriterProcess) -> None:
    with pytest.raises(FileNotFoundError) as error:
        process.write_file(tmp_path / "no" / "a", b"", [])
    assert error.value.errno == errno.ENOENT and error.value.filename == str(tmp_path / "no" / "a")

    def broken() -> Iterator[HostBlock]:
        yield filled(memory)[0]
        raise RuntimeError("the copy failed")

    with pytest.raises(RuntimeError, match="the copy failed"):
        process.write_file(tmp_path / "a", b"", broken())
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        process.write_file(tmp_path / "c", b"head", filled(memory))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
    assert process.write_file(tmp_path / "b", b"12", []).size == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_that_ask_a_job_to_stop_do_not_end_it(
    tmp_path: Path, memory: HostMemory, process: WriterProcess, number: int
) -> None:
    process.write_file(tmp_path / "a", b"it is up", [])
    os.kill(process.pid, number)
    assert process.write_file(tmp_path / "b", b"still", []).size == 5


def test_one_that_is_killed_is_an_error_that_says_so(tmp_path: Path, memory: HostMemory) -> None:
    assert memory.handle is not None
    process = WriterProcess(memory.handle)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"the process that writes checkpoints is gone \(exit code -9\)"):
        process.write_file(tmp_path / "a", b"", [])
    process.close()
