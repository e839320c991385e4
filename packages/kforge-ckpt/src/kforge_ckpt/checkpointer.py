"""`Checkpointer`: save and restore named states, in one committed folder a step."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from kforge_ckpt import commit
from kforge_ckpt.errors import CheckpointError
from kforge_ckpt.ranks import Ranks
from kforge_ckpt.restoring import Plan, Saved, read_meta
from kforge_ckpt.retention import expendable
from kforge_ckpt.safetensors import FileRecord
from kforge_ckpt.saving import Collected, agree, collect, write, write_shared
from kforge_ckpt.state import Json, Stateful, enter_forms

logger = logging.getLogger("kforge_ckpt")

Event = Callable[[str, dict[str, Any]], None]


class Checkpointer:
    """Saves what is `Stateful` under a name, and restores it in any number of processes and any layout.

    Works with and without a process group; with one, `save` and `restore` are collective calls of all its ranks and
    ``dir`` is a folder that all of them see. `latest`, `steps` and `meta` are local.

    dir: the folder of the checkpoints; made by the first save.
    keep_last: how many of the newest are kept; at least 1. The one just saved is kept always.
    keep_every: steps that are multiples of it are never deleted; 0: none.
    mode: "sync": `save` returns when the checkpoint is committed.
    on_event: called on rank 0 with ``("checkpoint_saved" | "checkpoint_restored" | "checkpoint_deleted", values)``;
        by default these lines go to the logger ``kforge_ckpt``.
    """

    def __init__(
        self,
        dir: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        mode: Literal["sync"] = "sync",
        on_event: Event | None = None,
    ) -> None:
        if mode != "sync":
            raise ValueError(f"mode = {mode!r} does not exist; there is 'sync'")
        expendable((), keep_last=keep_last, keep_every=keep_every)  # says what is wrong with the numbers, if anything
        self.dir = Path(dir)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._on_event = on_event
        self._ranks_now: Ranks | None = None

    # What is there.

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(commit.committed(self.dir))

    def latest(self) -> int | None:
        """The highest committed step, or None."""
        return max(commit.committed(self.dir), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was given as ``meta`` when the step was saved."""
        return read_meta(commit.Contents(self._folder(step)))

    def _folder(self, step: int) -> Path:
        found = commit.committed(self.dir)
        if step not in found:
            there = f"there are {', '.join(map(str, found))}" if found else "there is none at all"
            raise CheckpointError(f"no committed checkpoint of step {step} in {self.dir}; {there}")
        return found[step]

    # Saving.

    def save(self, step: int, states: Mapping[str, Stateful], meta: dict[str, Any] | None = None) -> bool:
        """Save ``states`` as the checkpoint of ``step``; on return it is committed, and old ones are deleted.

        ``meta`` is a small dict of plain values to be read without loading anything (rank 0's counts). Returns False
        when ``step`` is committed already: it is left as it is, whatever the states are now.

        Raises CheckpointError on all ranks when any of them could not do its part, and then nothing of this step is
        visible; UnsupportedStateError when a value cannot be written or the ranks disagree about it.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step = {step!r} must be a whole number from 0 on")
        started = time.perf_counter()
        ranks = self._ranks()
        if not ranks.joined and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise CheckpointError(
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']}, but there is no process group: every process would save a "
                f"checkpoint of its own into {self.dir}; call torch.distributed.init_process_group first"
            )
        what = f"checkpoint of step {step} in {self.dir} was not saved"
        if ranks.first(what, lambda: step in commit.committed(self.dir)):
            if ranks.rank == 0:
                logger.info("step %d is committed already in %s; it is left as it is", step, self.dir)
            return False
        with ExitStack() as stack:
            ranks.all(what, lambda: enter_forms(states, stack))
            collected = ranks.all(what, lambda: collect(states, meta))
            tree = agree(ranks, what, step, collected)
            folder = Path(ranks.first(what, lambda: self._stage(step)))
            try:
                files, index = write(ranks, what, folder, collected)
                size = ranks.first(what, lambda: self._commit(step, folder, files, index, tree, collected, ranks.world))
            except BaseException:
                if ranks.rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        ranks.first(f"step {step} is committed, but not what follows", lambda: self._tidy(step, started, size))
        return True

    def _stage(self, step: int) -> str:
        for name in commit.clean(self.dir):
            logger.info("removed %s, left behind by a save or a deletion that did not end", self.dir / name)
        return str(commit.stage(self.dir, step))

    def _commit(
        self,
        step: int,
        folder: Path,
        files: dict[str, FileRecord],
        index: dict[str, Any],
        tree: Json,
        collected: Collected,
        world: int,
    ) -> int:
        commit.reached("all ranks written")
        files = {**files, **write_shared(folder, step, world, index, tree, collected.meta)}
        commit.commit(self.dir, folder, step, files)
        return sum(record.size for record in files.values())

    def _tidy(self, step: int, started: float, size: int) -> None:
        """After the commit. The checkpoint exists: what fails here is told, and is no reason to stop a run."""
        found = commit.committed(self.dir)
        seconds = time.perf_counter() - started
        self._tell("checkpoint_saved", step=step, seconds=seconds, bytes=size, path=str(found[step]))
        try:
            commit.point_latest(self.dir, found[max(found)])
            for old in expendable(found, keep_last=self.keep_last, keep_every=self.keep_every, protect=[step]):
                commit.delete(self.dir, found[old])
                self._tell("checkpoint_deleted", step=old, path=str(found[old]))
        except OSError as error:
            logger.warning("step %d is committed, but tidying up %s failed: %s", step, self.dir, error)

    # Restoring.

    def restore(
        self, states: Mapping[str, Stateful], step: int | None = None, *, verify: Literal["fast", "full"] = "fast"
    ) -> int | None:
        """Restore ``states`` from the newest committed checkpoint, or from that of ``step``; returns its step.

        Tensors are filled in place, from whatever layout they were saved in; then each object's ``load_state_dict``
        is called, `RngState` last. Names saved but not asked for are left alone. Returns None, and changes nothing,
        when ``step`` is None and there is no checkpoint.

        ``verify="fast"`` compares the sizes of all files and the checksums of the small ones, ``"full"`` reads
        everything once more for its checksum.

        Raises on all ranks, before anything is changed: StateMismatchError naming the tensors that are missing, too
        many, of another shape or dtype; DamagedCheckpointError naming the file; CheckpointError for a ``step`` that
        is not there.
        """
        if verify not in ("fast", "full"):
            raise ValueError(f"verify = {verify!r} does not exist; there are 'fast' and 'full'")
        started = time.perf_counter()
        ranks = self._ranks()
        what = f"nothing was restored from {self.dir}"
        found = ranks.first(what, lambda: self._choose(step))
        if found is None:
            return None
        chosen, folder = found[0], Path(found[1])
        what = f"{folder} was not restored"

        def opened() -> Saved:
            saved = Saved(folder)
            saved.contents.check(ranks.rank, ranks.world, full=verify == "full")
            return saved

        saved = ranks.all(what, opened)
        with ExitStack() as stack:
            ranks.all(what, lambda: enter_forms(states, stack))
            plan = ranks.all(what, lambda: Plan(saved, states, stack))
            plan.compare(ranks, what)
            ready = ranks.all(what, lambda: plan.ready(ranks))
            plan.fill(ranks, what)
            ranks.all(f"{folder} was restored in part", lambda: plan.hand_over(ready))
        if ranks.rank == 0:
            self._tell("checkpoint_restored", step=chosen, seconds=time.perf_counter() - started, path=str(folder))
        return chosen

    def _choose(self, step: int | None) -> tuple[int, str] | None:
        if step is None:
            step = self.latest()
            if step is None:
                return None
        return step, str(self._folder(step))

    # Both.

    def _ranks(self) -> Ranks:
        if self._ranks_now is None or self._ranks_now.stale:
            self._ranks_now = Ranks()
        return self._ranks_now

    def _tell(self, kind: str, **values: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, values)
        else:
            logger.info("%s %s", kind.replace("_", " "), " ".join(f"{key}={value}" for key, value in values.items()))
