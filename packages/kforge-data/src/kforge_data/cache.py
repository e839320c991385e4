"""Folders that are made once and used by every process of a machine, and by every later run."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_WAIT_S = 0.05


def cache_folder(given: str | Path | None = None) -> Path:
    """``given``, else $KFORGE_DATA_CACHE, else kforge-data under the user's cache folder."""
    if given:
        return Path(given)
    if named := os.environ.get("KFORGE_DATA_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kforge-data"


def build_once(folder: Path, build: Callable[[Path], None], *, timeout_s: float = 3600.0) -> Path:
    """``folder``, filled by ``build`` unless it exists already. One process of a machine builds, the others wait.

    ``build`` gets a folder of its own, which is renamed when it is done. If it is killed, the next process gets the
    same half-filled folder and may go on with what lies there. TimeoutError after ``timeout_s`` seconds of waiting.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), timeout_s):
        if not folder.exists():
            partial = folder.with_name(folder.name + ".partial")
            partial.mkdir(exist_ok=True)
            build(partial)
            try:
                os.rename(partial, folder)
            except OSError:  # another machine that shares the disk was first
                if not folder.exists():
                    raise
                shutil.rmtree(partial, ignore_errors=True)
    return folder


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
