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

import json
import os
import secrets
import socket
import threading
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


def hold(root: RemotePath) -> Lease:
    """The lease of a folder; a process may hold it several times. Raises CheckpointError when another one has it."""
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
        about = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid(), "beat": self._beat}
        return (json.dumps(about) + "\n").encode()

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
        self._thread.join()
        try:
            found = self._read()
            if found is not None and found.get("id") == self._id:
                self._object.unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            logger.warning("%s was not removed: %s", self._object, error)


def _is_gone(found: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that is no more. (Containers that share a host name have process
    numbers of their own: there, one that cannot be seen may be alive, and its renewals are what counts.)"""
    if found.get("host") != socket.gethostname() or not isinstance(found.get("pid"), int):
        return False
    try:
        os.kill(found["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
