"""Folders that are made once and used by every process of a machine, and by every later run.

What is kept is read for weeks, so a folder is looked at whenever it is opened, and made anew where it is damaged.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("kforge_data")

_WAIT_S = 0.05
_SUMS = "sums.json"
_CHUNK = 1 << 24


def cache_folder(given: str | Path | None = None) -> Path:
    """``given``, else $KFORGE_DATA_CACHE, else kforge-data under the user's cache folder."""
    if given:
        return Path(given)
    if named := os.environ.get("KFORGE_DATA_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kforge-data"


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    timeout_s: float = 3600.0,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """``folder``, filled by ``build`` unless it exists already. One process of a machine builds, the others wait.

    ``build`` gets a folder of its own, which is renamed when it is done. If it is killed, the next process gets the
    same half-filled folder and may go on with what lies there. TimeoutError after ``timeout_s`` seconds of waiting.

    ``check`` raises ValueError for a folder that is damaged, which is then told of, removed and built anew. None: sizes
    and checksums of all files, which are written down when they have been built; that reads them whole, 2 GB a second.
    """
    sound = check or _check_sums
    if folder.exists() and not _damage(folder, sound):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), timeout_s):
        if folder.exists() and (damage := _damage(folder, sound)):
            logger.warning("%s is damaged and made anew: %s", folder, damage)
            shutil.rmtree(folder)
        if not folder.exists():
            partial = folder.with_name(folder.name + ".partial")
            partial.mkdir(exist_ok=True)
            build(partial)
            if check is None:
                _write_sums(partial)
            try:
                os.rename(partial, folder)
            except OSError:  # another machine that shares the disk was first
                if not folder.exists():
                    raise
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _damage(folder: Path, check: Callable[[Path], object]) -> str:
    """What is wrong with a folder; "" if nothing is."""
    try:
        check(folder)
    except ValueError as error:
        return str(error)
    return ""


def _write_sums(folder: Path) -> None:
    """Write down size and CRC-32 of each file."""
    sums = {file.name: _sum(file) for file in sorted(folder.iterdir()) if file.name != _SUMS}
    (folder / _SUMS).write_text(json.dumps(sums))


def _check_sums(folder: Path) -> None:
    """ValueError unless the files are those that were written down."""
    try:
        sums = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise ValueError(f"{_SUMS}: {error}") from error
    if not isinstance(sums, dict) or not sums:
        raise ValueError(f"{_SUMS} lists no files")
    for name, wanted in sums.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is not there")
        if (found := _sum(folder / name)) != wanted:
            raise ValueError(f"{name} has size and checksum {found}, and was written with {wanted}")


def _sum(file: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    size = total = 0
    with open(file, "rb") as content:
        while chunk := content.read(_CHUNK):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
    return [size, total]


@contextmanager
def _locked(file: Path, timeout_s: float) -> Iterator[None]:
    """Hold a lock that the system takes back when its holder dies."""
    deadline = time.monotonic() + timeout_s
    with open(file, "w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has been building {file.with_suffix('')} for {timeout_s:.0f} s; see whether "
                        "it is alive, or wait longer"
                    ) from None
                time.sleep(_WAIT_S)
        yield
