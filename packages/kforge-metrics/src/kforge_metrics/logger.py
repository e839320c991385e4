"""Log lines of a run with several processes: rank 0 speaks on the console, and no rank's warning is lost."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO

_OURS = "_kforge_handler"


def get_logger(
    rank: int = 0,
    world: int = 1,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    name: str = "kforge",
    level: int = logging.INFO,
) -> logging.Logger:
    """Set up logging of this process as rank ``rank`` of ``world`` and return the logger ``name``.

    ==================  ==============================================  =======================================
    rank                console (standard error)                        file in ``run_dir``
    ==================  ==============================================  =======================================
    0                   ``level`` and up of loggers named ``kforge*``,  ``log.jsonl``: the same
                        warnings of all others
    any other           nothing (without ``run_dir``: warnings, with    ``log.rank_00003.jsonl``: warnings, made
                        the rank before them)                           at the first one
    ==================  ==============================================  =======================================

    Files hold a JSON object a line, each rank its own, so that no two processes write one file; `read_log` merges
    them. Handlers are set on the root logger, where all packages' loggers end. Calling it again (with another rank
    or folder, or none) replaces the handlers of the last call: nothing is decided at import, and no line comes twice.

    Raises ValueError for a rank outside the world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank = {rank} is none of a world of {world}; ranks count from 0 to {world - 1}")
    close_logger()
    root = logging.getLogger()
    handlers: list[logging.Handler] = []
    if rank == 0 or run_dir is None:
        console = _ConsoleHandler()
        before = "" if rank == 0 else f"[rank {rank}] "
        console.setFormatter(logging.Formatter(f"%(asctime)s {before}%(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        handlers.append(console)
    if run_dir is not None:
        handlers.append(_JsonHandler(log_path(run_dir, rank), rank))
    for handler in handlers:
        handler.setLevel(level if rank == 0 else max(level, logging.WARNING))
        handler.addFilter(_of_interest)
        setattr(handler, _OURS, root.level)
        root.addHandler(handler)
    root.setLevel(min(level, root.level) if root.level else level)
    return logging.getLogger(name)


def close_logger() -> None:
    """Take away the handlers of `get_logger` and close their files."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if hasattr(handler, _OURS):
            root.removeHandler(handler)
            root.setLevel(getattr(handler, _OURS))
            handler.close()


def log_path(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """The log file of one rank."""
    return Path(run_dir) / ("log.jsonl" if rank == 0 else f"log.rank_{rank:05d}.jsonl")


def read_log(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The log lines of all ranks in order of time; each has time, rank, level, logger, message."""
    lines: list[dict[str, Any]] = []
    for path in sorted(Path(run_dir).glob("log*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # half a line of a process that was killed
            if isinstance(line, dict) and "time" in line:
                lines.append(line)
    return sorted(lines, key=lambda line: float(line["time"]))


def _of_interest(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith("kforge")


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the moment: a progress bar puts itself in between while it stands."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonHandler(logging.FileHandler):
    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, mode="a", encoding="utf-8", delay=True)
        self.rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "rank": self.rank,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        return json.dumps(line)
