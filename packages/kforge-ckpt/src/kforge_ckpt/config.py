"""When the run is saved and what is kept, as plain data. Standard library only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Checkpoints of the run."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    dir: str = ""
    """Folder of the checkpoints, or a URL (`s3://bucket/run`). Empty: `checkpoints` in the run's folder."""
    remote: str = ""
    """URL (`s3://bucket/run`) that the checkpoints of `dir` are copied to in the background, by the same rules of what
    is kept; a host whose folder has none, or older ones, goes on from there. Empty: nowhere."""
    every_steps: int = 1000
    """Save after each so many steps. 0: only at the end and when asked to stop."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept; at least 1."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted. 0: none is kept for its number."""
    keep_steps: tuple[int, ...] = ()
    """Checkpoints of these steps are never deleted."""
    keep_doubling_from: int = 0
    """Checkpoints of this step times 1, 2, 4, 8, … are never deleted: dense early, sparse late. 0: none."""
    keep_best: int = 0
    """How many of the checkpoints with the lowest held-out loss are kept; those that were evaluated count. 0: none for
    its loss."""
    every_minutes: float = 0.0
    """Save when so many minutes have passed since the last time, too; kept until there is a later one. 0: never."""
    mode: Literal["async", "sync"] = "async"
    """async: a save is copied to host memory under the next step's forward and backward, and written in the background.
    sync: training waits until it is committed."""
    writer: Literal["thread", "process"] = "thread"
    """What writes in mode async: thread, or process, a Python process of its own (Linux)."""
    staging_gib: float | None = None
    """Host memory that a rank copies to in mode async, in GiB; with less than it saves, a step may wait for the disk.
    None: as much as it saves, but no more than half of what the host has to spare, shared by the ranks on it."""
    threads: int = 1
    """Into how many files a rank deals out its tensors; they are written, and read, at once, each by a thread of its
    own (or a process, by `writer`). More than 1 is for storage that one stream does not fill: network file systems,
    arrays of disks, object stores."""
    resume: bool = True
    """Go on from the newest committed checkpoint in `dir`. False: start afresh; a folder that already holds
    checkpoints is then an error."""

    verify: Literal["fast", "full"] = "fast"
    """What is compared before a checkpoint is restored: fast (sizes of all files, checksums of the small ones), or full
    (everything is read once more for its checksum)."""
    init_from: str = ""
    """Folder or URL of a run, or of checkpoints, or a folder of Hugging Face (config.json and safetensors files): a run
    that has no checkpoint yet starts from the weights there, and from nothing else of it. Weights of a run in split
    storage come rounded to bfloat16. Empty: from the seed."""
    init_step: int | None = None
    """Which step of `init_from`. None: the newest."""
    init_exclude: tuple[str, ...] = ()
    """Tensors whose name matches one of these patterns (anywhere in `model.layers.0.…`) start from the seed."""
    init_rename: dict[str, str] = field(default_factory=dict)
    """Pattern -> replacement (`\\1` is the first group), applied in turn to the names in `init_from`."""
    init_partial: bool = False
    """Tensors that `init_from` lacks start from the seed; larger ones get its values in their common corner (more rows,
    columns, experts, vocabulary), those with one dimension more in front copies of it (a feed-forward half for each
    expert)."""

    def __post_init__(self) -> None:
        if self.remote and "://" not in self.remote:
            raise ValueError(f"ckpt.remote = {self.remote!r} is no URL; s3://bucket/run is one")
        if "://" in self.dir and (self.remote or self.writer == "process"):
            name = "remote" if self.remote else "writer"
            raise ValueError(
                f"ckpt.{name} = {getattr(self, name)!r} is for a folder, and ckpt.dir is a URL; leave one of them out"
            )
        if self.keep_last < 1:
            raise ValueError(f"ckpt.keep_last = {self.keep_last} must be at least 1: the newest is never deleted")
        if min(self.keep_steps, default=0) < 0:
            raise ValueError(f"ckpt.keep_steps = {list(self.keep_steps)} must be steps from 0 on")
        if not 0 <= self.every_minutes < math.inf:
            raise ValueError(f"ckpt.every_minutes = {self.every_minutes} must be 0 (off) or some minutes")
        if self.verify not in ("fast", "full"):
            raise ValueError(f"ckpt.verify = {self.verify!r} does not exist; there are fast and full")
        for name in ("init_step", "init_exclude", "init_rename", "init_partial"):
            if not self.init_from and getattr(self, name) not in (None, (), {}, False):
                raise ValueError(f"ckpt.{name} = {getattr(self, name)!r} is of ckpt.init_from, which is empty")
        for pattern in (*self.init_exclude, *self.init_rename):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"ckpt.init_from: {pattern!r} is no regular expression: {error}") from error
        if self.mode not in ("async", "sync"):
            raise ValueError(f"ckpt.mode = {self.mode!r} does not exist; there are async and sync")
        if self.writer not in ("thread", "process"):
            raise ValueError(f"ckpt.writer = {self.writer!r} does not exist; there are thread and process")
        if self.staging_gib is not None and not 0 < self.staging_gib < math.inf:
            raise ValueError(f"ckpt.staging_gib = {self.staging_gib} must be above 0, or left out")
        if self.threads < 1:
            raise ValueError(f"ckpt.threads = {self.threads} must be at least 1")
        if self.mode == "sync" and (self.writer != "thread" or self.staging_gib is not None):
            raise ValueError("ckpt.writer and ckpt.staging_gib are of ckpt.mode = 'async'; leave them out, or set it")
        for name in ("every_steps", "keep_every", "keep_doubling_from", "keep_best"):
            if getattr(self, name) < 0:
                raise ValueError(f"ckpt.{name} = {getattr(self, name)} must be 0 (off) or more")
