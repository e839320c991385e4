"""A command that was stopped, and goes on where it was: a note of what is done, renewed as the work goes.

The note lies beside what is written and disappears when all is done. One process at a time holds its folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kforge_data.text_files import file_size, file_version

NOTE = "unfinished.json"
_VERSION = 2
_ANEW = "start anew with resume off (--no-resume)"


class CannotGoOn(ValueError):
    """What an earlier run began cannot be gone on with: its note or its files are damaged, or it was another run."""


def read_note(folder: Path) -> dict[str, Any] | None:
    """What an earlier run noted in this folder; None if there is nothing. `CannotGoOn` for a note that is damaged."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CannotGoOn(f"{folder / NOTE} is damaged: {error}; {_ANEW}") from error
    if not isinstance(note, dict):
        raise CannotGoOn(f"{folder / NOTE} is damaged: it is no table; {_ANEW}")
    if (version := note.get("version")) != _VERSION:
        raise CannotGoOn(f"{folder / NOTE} is of version {version!r}, and this one goes on from {_VERSION}; {_ANEW}")
    if note.pop("sha256", None) != _digest(note):
        raise CannotGoOn(f"{folder / NOTE} is damaged: it is not what was written; {_ANEW}")
    return note


def _digest(note: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Put a note into the folder, whole or not at all."""
    partial, note = folder / (NOTE + ".partial"), {"version": _VERSION, **note}
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({**note, "sha256": _digest(note)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / NOTE)


def remove_note(folder: Path) -> None:
    """Take the note away: all is done, or begins anew."""
    for name in (NOTE, NOTE + ".partial"):
        (folder / name).unlink(missing_ok=True)


def describe_files(files: Sequence[str | Path]) -> list[list[Any]]:
    """Name, size and version of each file, by which a later run knows that it is the same."""
    return [[str(file), file_size(file), file_version(file)] for file in files]


def check_note(note: Mapping[str, Any], options: Mapping[str, Any], files: Sequence[str | Path], folder: Path) -> None:
    """`CannotGoOn` that says what differs, unless this run would write what the unfinished one was writing."""
    before = note["options"]
    differing = [
        f"{key} was {before.get(key)!r} and is {options[key]!r}" for key in options if before[key] != options[key]
    ]
    done = note["files"]
    for was, now in zip(done, describe_files(files[: len(done)]), strict=False):
        if was != now:
            differing.append(f"{was[0]} has changed" if was[0] == now[0] else f"{was[0]} came where {now[0]} comes now")
    if len(files) < len(done):
        differing.append(f"{done[len(files)][0]} was read and is not named now")
    if differing:
        raise CannotGoOn(
            f"{folder} holds an unfinished run that differs: {'; '.join(differing)}. Give what it was given, or {_ANEW}"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if need be, until the block or the process ends. ValueError if another one does."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {folder}; wait for it, or write elsewhere") from None
        yield
    finally:
        os.close(handle)
