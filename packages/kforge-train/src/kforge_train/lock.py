"""One job to a run's folder: two that saved into it would clear away each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from kforge_train.agree import on_first_rank
from kforge_train.errors import ConfigError


class RunLock:
    """Holds ``run_dir/lock`` on rank 0 while the context lasts; every rank enters it.

    Raises ConfigError, on all ranks, when another process holds it. The system lets go of it when its holder dies,
    however that happens. Where the file system knows no locks, none is held.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / "lock"
        self.rank = rank
        self._file = -1

    def __enter__(self) -> RunLock:
        on_first_rank(self._take)
        return self

    def _take(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 200).decode("utf-8", "replace").strip() or "another process"
            os.close(self._file)
            self._file = -1
            raise ConfigError(
                f"{self.path.parent} is being trained in by {holder}; wait for it, stop it, or choose another "
                "--train.run_dir"
            ) from None
        except OSError:
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
