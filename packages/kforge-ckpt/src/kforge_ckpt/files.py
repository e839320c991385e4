"""New files: written block by block, made durable, and known by size and checksum afterwards."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Block = bytes | memoryview


@dataclass(frozen=True)
class FileRecord:
    """What the manifest keeps of a file: ``size`` in bytes and ``checksum`` as ``crc32:<8 hex digits>``."""

    size: int
    checksum: str


def checksum(data: Block, before: int = 0) -> int:
    """CRC-32 of ``data``, going on from that of what came ``before``: finds accidents at memory speed. It is no defence
    against an author of bad files."""
    return zlib.crc32(data, before)


def checksum_text(crc: int) -> str:
    """``crc32:<8 hex digits>``, as the manifest has it."""
    return f"crc32:{crc:08x}"


def write_file(path: Path | str, blocks: Iterable[Block]) -> FileRecord:
    """Write a file that was not there, from ``blocks``, and fsync it. The checksum of a block is made while it is
    written. A block is done with when the next one is asked for."""
    crc = size = 0
    with open(path, "xb") as file, ThreadPoolExecutor(1, "ckpt-checksum") as other:
        for block in blocks:
            summed = other.submit(checksum, block, crc)
            write_block(file, block)
            crc = summed.result()
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, checksum_text(crc))


def write_block(file: Any, block: Block) -> None:
    """Tests put a function here that dies in the middle of a file."""
    file.write(block)


def write_json(path: Path, value: dict[str, Any]) -> FileRecord:
    """Write an object as JSON, one line an entry, and fsync the file."""
    entries = (f"{json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in value.items())
    return write_file(path, [("{\n" + ",\n".join(entries) + "\n}\n").encode()])
