"""How a checkpoint comes to exist: written aside, sealed, then renamed; and how a reader knows that it does.

A save of step 10 goes through these states, and a process that dies in any of them leaves a loadable folder:

1. ``step_00000010.tmp-1a2b3c4d/`` is made; the ranks write their files into it, each followed by fsync.
2. ``manifest.json`` gets the size and checksum of every file; ``COMMITTED``, written last, the manifest's checksum.
3. The folder is renamed to ``step_00000010``. From here on the checkpoint exists.
4. ``latest`` is replaced, in one rename, by a file with the folder's name. It is for people and scripts: readers
   here go by the folders, so that a lost or wrong ``latest`` costs nothing.

Deleting goes the other way: renamed to a staging name first, then removed.

An object store knows no rename. There the folder is called ``step_00000010-1a2b3c4d/`` from the start, a name that no
other save has, and exists as a checkpoint from the moment that its marker is there, which is written last. Deleting
removes the marker first.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
from typing import Any

from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError
from kforge_ckpt.files import (
    FileRecord,
    Place,
    checksum,
    checksum_text,
    entries,
    remove_tree,
    replace_file,
    write_json,
)
from kforge_ckpt.remote import RemotePath

FORMAT = 1
"""Version of the layout on disk. A reader refuses a higher one."""
MARKER = "COMMITTED"
MANIFEST = "manifest.json"
LATEST = "latest"

POINTS = (
    "staged",
    "tensors written",
    "rank written",
    "all ranks written",
    "manifest written",
    "marker written",
    "renamed",
    "latest staged",
    "latest written",
    "prune renamed",
    "pruned",
)
"""The named points of a save, in order, at which `reached` is called (the last two for each deleted step). In an object
store nothing is renamed, or staged to be."""

logger = logging.getLogger("kforge_ckpt")
_STEP = re.compile(r"step_(\d+)(-[0-9a-f]{8})?", re.ASCII)
_STAGING = re.compile(r"step_\d+\.tmp-[0-9a-f]{8}", re.ASCII)
_PUT_BY = "put-by-"
"""How an object begins that keeps a folder without a marker from being removed."""
_under_way: set[str] = set()
"""Staging folders of this process, by name: what another `Checkpointer` of it must not take for left behind."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


def reached(point: str) -> None:
    """Called at each of `POINTS`; does nothing. Tests put a function here that dies or raises."""


def folder_name(step: int) -> str:
    """``step_00000010``."""
    return f"step_{step:08d}"


def committed(root: Place) -> dict[int, Place]:
    """The committed checkpoints of a folder by step, ascending. Any zero padding counts; other names are ignored."""
    found: dict[int, Place] = {}
    for name, size in sorted(entries(root).items()):
        if size is not None:
            continue
        match = _STEP.fullmatch(name)
        if match and (root / name / MARKER).is_file():
            step = int(match[1])
            if step not in found or name == folder_name(step):
                found[step] = root / name
    return dict(sorted(found.items()))


def is_temporary(folder: Place) -> bool:
    """Whether a committed checkpoint says that it is of use until there is a later one."""
    try:
        return json.loads((folder / MARKER).read_bytes()).get("temporary") is True
    except (OSError, ValueError, AttributeError):
        return False


def stage(root: Place, step: int) -> Place:
    """Make an empty staging folder for a step."""
    if isinstance(root, RemotePath):
        name = f"{folder_name(step)}-{secrets.token_hex(4)}"
        _under_way.add(name)
        reached("staged")
        return root / name
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"
    folder.mkdir()
    _under_way.add(folder.name)
    reached("staged")
    return folder


def leftovers(root: Place) -> list[Place]:
    """What dead saves and deletions left behind, by its exact form of name."""
    if isinstance(root, RemotePath):
        names = {name for name, size in entries(root).items() if size is None} | root.unfinished()
        return [root / name for name in sorted(names - _under_way) if _is_left(root / name)]
    if not root.is_dir():
        return []
    found: list[Place] = [
        root / name
        for name in sorted(set(os.listdir(root)) - _under_way)
        if _STAGING.fullmatch(name) and (root / name).is_dir()
    ]
    staged = root / f".{LATEST}.tmp"
    return [*found, staged] if staged.exists() else found


def _is_left(folder: RemotePath) -> bool:
    match = _STEP.fullmatch(folder.name)
    if match is None or match[2] is None:
        return False
    return not any(name == MARKER or name.startswith(_PUT_BY) for name in folder.entries())


def discard(left: Place) -> None:
    """Remove a staging folder, or another of the `leftovers`, as far as it can be."""
    _under_way.discard(left.name)
    try:
        if isinstance(left, RemotePath) or left.is_dir():
            remove_tree(left)
        else:
            left.unlink(missing_ok=True)
    except (OSError, CheckpointError) as error:
        logger.info("%s was not removed: %s", left, error)


def sync_folder(path: Place) -> None:
    """fsync a folder, so that the names in it survive a power cut; an object store needs none."""
    if isinstance(path, RemotePath):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems know no fsync of a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def commit(root: Place, folder: Place, step: int, files: dict[str, FileRecord], *, temporary: bool = False) -> Place:
    """Seal a staging folder that holds ``files`` and give it its name. Returns the committed folder. ``temporary`` says
    in the marker that it is of use until there is a later one."""
    sizes = entries(folder)
    for name, record in files.items():
        size = sizes.get(name)
        if size is None:
            raise CheckpointError(
                f"{name} was written by another rank, but rank 0 does not see it in {folder}: all ranks must save to "
                "one shared folder"
            )
        if size != record.size:
            raise CheckpointError(f"{folder / name} has {size} bytes where {record.size} were written")
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: {"size": r.size, "checksum": r.checksum} for name, r in sorted(files.items())},
    }
    seal = write_json(folder / MANIFEST, manifest)
    sync_folder(folder)
    reached("manifest written")
    marker = {"format": FORMAT, "step": step, "manifest": seal.checksum}
    write_json(folder / MARKER, {**marker, "temporary": True} if temporary else marker)
    sync_folder(folder)
    reached("marker written")
    if isinstance(root, RemotePath) or isinstance(folder, RemotePath):
        _under_way.discard(folder.name)
        return folder
    final = root / folder_name(step)
    if final.is_dir() and not (final / MARKER).is_file():
        put_by(root, final, "unmarked")  # no checkpoint; whole, but not in the way
    folder.rename(final)
    _under_way.discard(folder.name)
    sync_folder(root)
    reached("renamed")
    return final


def put_by(root: Place, folder: Place, why: str) -> Place:
    """Take a folder that is no good out of the way, renamed, or without its marker, so that no reader looks at it and
    nobody removes it; returns where it is."""
    if isinstance(folder, RemotePath) or isinstance(root, RemotePath):
        replace_file(folder / f"{_PUT_BY}{why}", (folder / MARKER).read_bytes())
        (folder / MARKER).unlink(missing_ok=True)
        return folder
    return folder.rename(root / f"{folder.name}.{why}-{secrets.token_hex(4)}")


def point_latest(root: Place, folder: Place) -> None:
    """Let ``latest`` name a committed folder, at once."""
    if isinstance(root, RemotePath):
        replace_file(root / LATEST, f"{folder.name}\n".encode())
        reached("latest written")
        return
    staged = root / f".{LATEST}.tmp"
    with open(staged, "w", encoding="utf-8") as file:
        file.write(folder.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    reached("latest staged")
    staged.replace(root / LATEST)
    sync_folder(root)
    reached("latest written")


def put_aside(root: Place, folder: Place) -> Place:
    """Take a committed checkpoint away from every reader, at once; `remove` then deletes its files."""
    if isinstance(root, RemotePath) or isinstance(folder, RemotePath):
        (folder / MARKER).unlink(missing_ok=True)
        reached("prune renamed")
        return folder
    aside = root / f"{folder.name}.tmp-{secrets.token_hex(4)}"
    folder.rename(aside)
    reached("prune renamed")
    return aside


def remove(aside: Place) -> None:
    """Delete what was put aside."""
    remove_tree(aside)
    reached("pruned")


class Contents:
    """A committed folder whose marker and manifest were found in order; gives out its files checked.

    Raises DamagedCheckpointError, naming the file, for what is not as it was written.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        marker = self._parse(MARKER, self._bytes(MARKER))
        data = self._bytes(MANIFEST)
        if not isinstance(marker.get("format"), int):
            raise DamagedCheckpointError(f"{folder / MARKER} is not the marker of a checkpoint")
        if marker["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has format {marker['format']}, written by a newer kforge-ckpt; this one reads up to {FORMAT}"
            )
        if marker.get("manifest") != checksum_text(checksum(data)):
            raise DamagedCheckpointError(f"{folder / MANIFEST} is not the one that {MARKER} was written for")
        self.checksum = f"{checksum(data):08x}"
        """Of the manifest, and with it of all that the checkpoint holds, 8 hex digits."""
        manifest = self._parse(MANIFEST, data)
        try:
            self.step = int(manifest["step"])
            self.files = {str(k): FileRecord(int(v["size"]), str(v["checksum"])) for k, v in manifest["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"{folder / MANIFEST} is not a manifest: {error!r}") from error
        for name in self.files:
            if not _FILE.fullmatch(name):
                raise DamagedCheckpointError(f"{folder / MANIFEST} names {name!r}, which is no file of a checkpoint")

    def check(self, part: int = 0, parts: int = 1, full: bool = False) -> None:
        """Compare the files with the manifest: sizes, and with ``full`` checksums too.

        Of ``parts`` readers each looks at its share, ``part``, so that a large job does not read all of it each.
        """
        sizes = entries(self.folder)
        for name in sorted(self.files)[part::parts]:
            path, record = self.folder / name, self.files[name]
            size = sizes.get(name)
            if size is None:
                raise DamagedCheckpointError(f"{path} cannot be read: it is not there")
            try:
                found = _checksum_file(path) if full and size == record.size else record.checksum
            except OSError as error:
                raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
            if size != record.size:
                raise DamagedCheckpointError(f"{path} has {size} bytes where {record.size} were written")
            if found != record.checksum:
                raise DamagedCheckpointError(f"{path} is damaged: its checksum is not that of the manifest")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint, its checksum compared."""
        return self._parse(name, self.content(name))

    def content(self, name: str) -> bytes:
        """The bytes of a (small) file, their checksum compared."""
        if name not in self.files:
            raise DamagedCheckpointError(f"{self.folder / MANIFEST} does not name {name}")
        data = self._bytes(name)
        if checksum_text(checksum(data)) != self.files[name].checksum:
            raise DamagedCheckpointError(f"{self.folder / name} is damaged: its checksum is not that of the manifest")
        return data

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise DamagedCheckpointError(f"{self.folder / name} cannot be read: {error}") from error

    def _parse(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{self.folder / name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise DamagedCheckpointError(f"{self.folder / name} does not hold a JSON object")
        return value


def _checksum_file(path: Place) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = checksum(block, crc)
    return checksum_text(crc)
