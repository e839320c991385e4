"""A process that writes files from memory it shares with the one that trains: ``python -m kforge_ckpt.writer FD``.

It knows neither torch nor the caller's script. Commands come as lines of JSON on its standard input, an answer to each
on its standard output::

    {"open": path}            a new file, as the one that is written     {}
    {"hex": bytes}            more of the file                           {}
    {"map": [offset, size]}   more of the file, from the shared memory   {}
    {"close": true}           fsync it                                   {"size": …, "checksum": …}
    {"drop": true}            close it as it is                          {}

or ``{"error": [errno, text]}``. It ends when its input does, as when the process that started it is killed. Signals by
which a scheduler asks a job to stop go to all of its processes; this one lets them pass, since what stops writes a last
checkpoint.
"""

from __future__ import annotations

import json
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_ckpt.errors import CheckpointError
from kforge_ckpt.files import Block, FileRecord, write_file

if TYPE_CHECKING:
    from kforge_ckpt.staging import HostBlock


class WriterProcess:
    """The other process, seen from here. Its file descriptor ``memory`` is that of the shared memory."""

    def __init__(self, memory: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kforge_ckpt.writer", str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory],
            text=True,
            # Ctrl-C is for the process that trains; this one ends after it.
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it end, and wait for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write_file(self, path: Path, head: bytes, blocks: Iterable[HostBlock]) -> FileRecord:
        """As `files.write_file`, of ``head`` and then the blocks. Raises OSError as that does, and CheckpointError when
        the process is gone."""
        self._ask({"open": str(path)})
        try:
            self._ask({"hex": head.hex()})
            for block in blocks:
                self._ask({"map": [block.offset, len(block.wait())]})
            answer = self._ask({"close": True})
        except BaseException:
            with suppress(CheckpointError, OSError):
                self._ask({"drop": True})
            raise
        return FileRecord(int(answer["size"]), str(answer["checksum"]))

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = self._process.wait()
            raise CheckpointError(f"the process that writes checkpoints is gone (exit code {code})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer


class _Dropped(Exception):
    """The file is not wanted any more."""


def serve(memory: int, commands: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Carry out ``commands`` until there are no more; see the module's docstring."""
    lines = iter(commands)

    def blocks() -> Iterator[Block]:
        answer({})
        for line in lines:
            command = json.loads(line)
            if "close" in command:
                return
            if "drop" in command:
                break
            if "hex" in command:
                yield bytes.fromhex(command["hex"])
            else:
                offset, size = command["map"]
                with mmap.mmap(memory, size, prot=mmap.PROT_READ, offset=offset) as shared, memoryview(shared) as view:
                    yield view
            answer({})  # it is written, or nobody would have asked for the next one
        raise _Dropped

    for line in lines:
        command = json.loads(line)
        if "open" not in command:
            answer({})  # a file that has failed is dropped already
            continue
        try:
            record = write_file(command["open"], blocks())
        except _Dropped:
            answer({})
        except OSError as error:
            answer({"error": [error.errno, error.strerror, error.filename]})
        else:
            answer({"size": record.size, "checksum": record.checksum})


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    serve(int(sys.argv[1]), sys.stdin, _answer)
