"""One run to a folder of checkpoints: two that saved into it would remove each other's unfinished saves."""

from __future__ import annotations

import os
from pathlib import Path

from kforge_ckpt import lease
from kforge_ckpt.errors import CheckpointError
from kforge_ckpt.files import Place
from kforge_ckpt.remote import RemotePath
from kforge_ckpt.retrying import logger

_held: dict[tuple[int, int], tuple[int, int]] = {}
"""(device, inode) of a folder -> its file descriptor, and how many locks of this process are on it."""


def lock(root: Place) -> FolderLock | lease.Lease:
    """What keeps others from saving into ``root``, held until its `release`. Raises CheckpointError when another
    process has it."""
    return lease.hold(root) if isinstance(root, RemotePath) else FolderLock(root)


class FolderLock:
    """Held from its making to `release`, by this process; it may hold several on one folder. The system lets go of it
    when the process dies, however that happens, and where the file system knows no locks of folders none is held.

    Raises CheckpointError when another process holds it.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        found = root.stat()
        self._key: tuple[int, int] | None = (found.st_dev, found.st_ino)
        handle, count = _held.get(self._key, (-1, 0))
        if not count:
            handle = os.open(root, os.O_RDONLY)
            try:
                _lock(handle)
            except BlockingIOError:
                os.close(handle)
                raise CheckpointError(
                    f"another process saves into {root}; wait for it, stop it, or choose another folder"
                ) from None
            except OSError as error:  # NFS, say, locks no folders
                logger.warning(
                    "%s cannot be locked (%s): nothing keeps a second run from saving there; take care that there is "
                    "none",
                    root,
                    error,
                )
        _held[self._key] = (handle, count + 1)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """It cannot be lost."""

    def drop(self) -> None:
        """`release`, for the garbage collector."""
        self.release()

    def release(self) -> None:
        """Let go of it; once is enough."""
        if self._key is None:
            return
        handle, count = _held.pop(self._key)
        if count > 1:
            _held[self._key] = (handle, count - 1)
        else:
            os.close(handle)
        self._key = None


def _lock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
