"""One run to a folder of checkpoints in an object store, which has no locks that the system would let go of.

The run that saves holds an object, ``writer.json``, with a name of its own in it, and renews it every `BEAT` seconds.
Whoever else wants to save looks at the object for `BEATS` of these; if it does not change, its holder is dead, or cut
off, and its place is taken. A holder of this host whose process is gone is not waited for.

What it guarantees: two runs that are both alive do not save into one folder for longer than a `BEAT`; the one that was
there first goes on, the other is refused. A run that was cut off for so long that another took its place finds that out
before its next commit. Between that look and the marker, one save of each can still come to exist. Both are then whole:
no two saves share a folder, so nothing of one gets into the other.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from kforge_ckpt.errors import CheckpointError
from kforge_ckpt.remote import RemotePath
from kforge_ckpt.retrying import logger

NAME = "writer.json"
BEAT = 10.0
"""Seconds from one renewal to the next."""
BEATS = 3
"""So many that do not come mean that nobody is there."""

_held: dict[RemotePath, tuple[Lease, int]] = {}
"""Folder -> its lease, and how many of this process hold it."""
_guard = threading.Lock()
_dropped: queue.SimpleQueue[Lease] = queue.SimpleQueue()
"""Leases to be released as soon as somebody may wait."""


def _release_dropped() -> None:
    while True:
        try:
            lease = _dropped.get_nowait()
        except queue.Empty:
            return
        lease.release()


@atexit.register
def _release_all() -> None:
    _release_dropped()
    for lease, count in list(_held.values()):
        for _ in range(count if lease.process == os.getpid() else 0):
            lease.release()


def hold(root: RemotePath) -> Lease:
    """The lease of a folder; a process may hold it several times. Raises CheckpointError when another one has it."""
    _release_dropped()
    with _guard:
        lease, count = _held.get(root, (None, 0))
        if lease is None or lease.process != os.getpid():
            lease, count = Lease(root), 0
        _held[root] = (lease, count + 1)
        return lease


class Lease:
    """Held from its making to `release`."""

    def __init__(self, root: RemotePath) -> None:
        self.process = os.getpid()
        self._root = root
        self._object = root / NAME
        self._id = secrets.token_hex(8)
        self._beat = 0
        self._stop = threading.Event()
        self._acquire()
        self._thread = threading.Thread(target=self._renew, name="ckpt-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _content(self) -> bytes:
        self._beat += 1
        where = {"host": socket.gethostname(), "pid": os.getpid(), "space": _space()}
        return (json.dumps({"id": self._id, "beat": self._beat, **where}) + "\n").encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._object.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _acquire(self) -> None:
        if self._object.create(self._content()) or (found := self._read()) is None or found.get("id") == self._id:
            return
        where = f"process {found.get('pid')} on {found.get('host')}"
        if not _is_gone(found):
            logger.info("%s says that %s saves there; looking whether it does", self._object, where)
            if self._stop.wait(BEAT * BEATS) or self._read() != found:
                raise CheckpointError(
                    f"{where} saves into {self._root}; wait for it, stop it, or choose another folder"
                )
        logger.warning("%s, which saved into %s, is gone; this process takes its place", where, self._root)
        self._object.write_bytes(self._content())

    def _renew(self) -> None:
        while not self._stop.wait(BEAT):
            _release_dropped()
            if self._stop.is_set():
                return
            try:
                self.check()
                self._object.write_bytes(self._content())
            except (CheckpointError, OSError) as error:
                logger.warning("%s was not renewed: %s", self._object, error)

    def check(self) -> None:
        """Raise CheckpointError when another run has taken this one's place."""
        found = self._read()
        if found is not None and found.get("id") != self._id:
            raise CheckpointError(
                f"process {found.get('pid')} on {found.get('host')} has taken over {self._root}, since this one "
                "had not been heard of; this one does not save there any more"
            )

    def drop(self) -> None:
        """`release`, but not now: for the garbage collector, which may come while this module holds its lock."""
        _dropped.put(self)

    def release(self) -> None:
        """Let go of it; others need not wait."""
        with _guard:
            lease, count = _held.get(self._root, (None, 0))
            if lease is not self:
                return
            if count > 1:
                _held[self._root] = (self, count - 1)
                return
            del _held[self._root]
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            found = self._read()
            if found is not None and found.get("id") == self._id:
                self._object.unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            logger.warning("%s was not removed: %s", self._object, error)


def _is_gone(found: dict[str, Any]) -> bool:
    """Whether the holder was this process, or one whose number would be seen here, and is not."""
    if not found.get("space") or found["space"] != _space() or not isinstance(found.get("pid"), int):
        return False
    if found["pid"] == os.getpid():
        return True
    try:
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _space() -> str:
    """What tells where process numbers mean the same: this boot of the host, and the container. Empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
