"""New files: written block by block, made durable, and known by size and checksum afterwards."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kforge_ckpt.remote import RemotePath, Upload, is_url

Place = Path | RemotePath
"""A file or folder of this machine, or a name in an object store."""
Block = bytes | memoryview
SMALL_BYTES = 2**16


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


def place(text: str | Place) -> Place:
    """Where a text points to: what has ``://`` in it is a URL of fsspec, all else a path."""
    if isinstance(text, RemotePath):
        return text
    return RemotePath(str(text)) if is_url(text) else Path(text)


def entries(folder: Place) -> dict[str, int | None]:
    """What is in a folder: name -> size in bytes, None for a folder. Nothing where there is no such folder; what goes
    away meanwhile, and links to nowhere, are not in it."""
    if isinstance(folder, RemotePath):
        return folder.entries()
    sizes: dict[str, int | None] = {}
    try:
        with os.scandir(folder) as found:
            for one in found:
                with suppress(FileNotFoundError):
                    sizes[one.name] = None if one.is_dir() else one.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return sizes


def write_file(path: Place | str, blocks: Iterable[Block]) -> FileRecord:
    """Write a file that was not there, from ``blocks``, and make it durable. The checksum of a block is made while it
    is written. A block is done with when the next one is asked for."""
    crc = size = 0
    new = path.upload() if isinstance(path, RemotePath) else open(path, "xb")  # noqa: SIM115
    with new as file, ThreadPoolExecutor(1, "ckpt-checksum") as other:
        for block in blocks:
            if len(block) < SMALL_BYTES:  # quicker than asking another thread
                crc = checksum(block, crc)
                write_block(file, block)
            else:
                summed = other.submit(checksum, block, crc)
                write_block(file, block)
                crc = summed.result()
            size += len(block)
        if isinstance(file, Upload):
            file.complete()
        else:
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(size, checksum_text(crc))


def write_block(file: Any, block: Block) -> None:
    """Tests put a function here that dies in the middle of a file."""
    file.write(block)


def write_json(path: Place, value: dict[str, Any]) -> FileRecord:
    """Write an object as JSON, one line an entry, and make the file durable."""
    entries = (f"{json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in value.items())
    return write_file(path, [("{\n" + ",\n".join(entries) + "\n}\n").encode()])


def replace_file(path: Place, data: bytes) -> None:
    """Write a small file, or put it in the place of another, so that a reader sees the one or the other,
    after a power cut too."""
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp")
    with open(staged, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)


def remove_tree(folder: Place) -> None:
    """Delete a folder with all that is in it."""
    if isinstance(folder, RemotePath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder)
