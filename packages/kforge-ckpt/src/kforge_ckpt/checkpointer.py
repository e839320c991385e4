"""`Checkpointer`: save and restore named states, in one committed folder a step."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from kforge_ckpt import commit
from kforge_ckpt.background import Background
from kforge_ckpt.damage import Damage
from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError
from kforge_ckpt.files import FileRecord, Place, place, write_file
from kforge_ckpt.fitting import Fit
from kforge_ckpt.lease import Lease
from kforge_ckpt.lock import FolderLock, lock
from kforge_ckpt.mirror import Mirror
from kforge_ckpt.ranks import Ranks
from kforge_ckpt.remote import is_url
from kforge_ckpt.restoring import Plan, Saved, read_meta
from kforge_ckpt.retention import Retention, Scores, mended_scores, write_scores
from kforge_ckpt.safetensors import header_of, write_tensors
from kforge_ckpt.saving import Agreement, Collected, WriteTensors, collect, write, write_shared
from kforge_ckpt.staging import HostMemory, Staging, room_for
from kforge_ckpt.state import Json, Stateful, enter_forms
from kforge_ckpt.storage import Layout
from kforge_ckpt.writer import WriterProcess

logger = logging.getLogger("kforge_ckpt")

DIRECT_BYTES = 2**28
"""Host memory through which a save in mode "sync" writes what lies on a device: 256 MiB."""

Event = Callable[[str, dict[str, Any]], None]


@dataclass
class Save:
    """One save, once the ranks have agreed on it."""

    step: int
    what: str
    folder: Place
    started: float
    collected: Collected
    tree: Json
    layout: Layout
    temporary: bool
    hosts: int


class Checkpointer:
    """Saves what is `Stateful` under a name, and restores it in any number of processes and any layout.

    Works with and without a process group; with one, `save` and `restore` are collective calls of all its ranks and
    ``dir`` is a place that all of them see. `latest`, `steps` and `meta` are local.

    dir: the folder of the checkpoints; made by the first save. Or a URL of fsspec (``s3://bucket/run``): each rank
        sends its files there itself.
    keep_last, keep_every, keep_steps, keep_doubling_from, keep_best, best_metric, best_is_highest: which checkpoints
        are kept, by default the three newest; the fields of `Retention`. The one just saved is kept always.
    mode: "sync": `save` returns when the checkpoint is committed. "async": tensors are copied to host memory, and
        written in the background, one save at a time.
    overlap: in mode "async", `save` returns before the copy is done; you call `staged` before you change a tensor.
    writer: in mode "async", "thread", or "process": another Python process writes, so that this one's interpreter does
        not share its time with it (Linux).
    staging_bytes: host memory to copy to, in bytes; with less than this rank writes, `staged` may wait for the disk.
        None: as much as it writes, within half of what the host has to spare. In blocks of 32 MiB, two at least.
    threads: into so many files a rank deals out its tensors, and writes them at once, each by a thread (or process) of
        its own; so many files are read at once, too. In an object store each thread has its own requests under way.
    remote: URL that committed checkpoints are copied to by rank 0, in order, in the background; here each is kept
        until it is there. `restore` takes the newest of both places. `close` waits for the copies.
    on_event: called on rank 0 with ``("checkpoint_saved" | "checkpoint_restored" | "checkpoint_deleted" |
        "checkpoint_copied", values)``;
        by default these lines go to the logger ``kforge_ckpt``.
    """

    def __init__(
        self,
        dir: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_steps: Sequence[int] = (),
        keep_doubling_from: int = 0,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_is_highest: bool = False,
        mode: Literal["sync", "async"] = "sync",
        overlap: bool = False,
        writer: Literal["thread", "process"] = "thread",
        staging_bytes: int | None = None,
        threads: int = 1,
        remote: str = "",
        on_event: Event | None = None,
    ) -> None:
        if mode not in ("sync", "async"):
            raise ValueError(f"mode = {mode!r} does not exist; there are 'sync' and 'async'")
        if writer not in ("thread", "process"):
            raise ValueError(f"writer = {writer!r} does not exist; there are 'thread' and 'process'")
        if mode == "sync" and (overlap or writer != "thread" or staging_bytes is not None):
            raise ValueError("overlap, writer and staging_bytes are of mode 'async'; leave them out, or set the mode")
        if writer == "process" and not hasattr(os, "memfd_create"):
            raise ValueError("writer = 'process' needs memory without a name, which only Linux has; use 'thread'")
        if writer == "process" and is_url(dir):
            raise ValueError("writer = 'process' writes files of this host, and a URL is none; use 'thread'")
        if staging_bytes is not None and staging_bytes < 1:
            raise ValueError(f"staging_bytes = {staging_bytes} must be some bytes, or None")
        if threads < 1:
            raise ValueError(f"threads = {threads} must be at least 1")
        if remote and is_url(dir):
            raise ValueError("remote is where checkpoints of a folder are copied to; give a folder, or no remote")
        if remote and not is_url(remote):
            raise ValueError(f"remote = {remote!r} is no URL; s3://bucket/run is one")
        self.dir = place(dir)
        self.remote = place(remote) if remote else None
        self.keep = Retention(
            last=keep_last,
            every=keep_every,
            steps=tuple(keep_steps),
            doubling_from=keep_doubling_from,
            best=keep_best,
            metric=best_metric,
            highest=best_is_highest,
        )
        self.mode = mode
        self.overlap = overlap
        self.writer = writer
        self.staging_bytes = staging_bytes
        self.threads = threads
        self._on_event = on_event
        self._ranks_now: Ranks | None = None
        self._ranks_then: Ranks | None = None
        self._agreement = Agreement(threads)
        self._damage = Damage(self.dir)
        self._told: list[tuple[int, dict[str, float]]] = []
        self._scoring = threading.Lock()
        self._lock: FolderLock | Lease | None = None
        self._abandoned: weakref.finalize[..., Any] | None = None
        self._saving = Background()
        self._tidying = Background()
        self._staging: Staging | None = None
        self._memory: HostMemory | None = None
        self._processes: dict[int, WriterProcess] = {}
        self._mirror: Mirror | None = None
        if self.remote is not None:
            self._mirror = Mirror(self.dir, self.remote, self.keep, self._tell, self._damage)

    # What is there.

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return sorted({step for step, _, _ in self._found()})

    def latest(self) -> int | None:
        """The highest committed step, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was given as ``meta`` when the step was saved."""
        _, away, name = self._choose(step)[0]
        return read_meta(commit.Contents(self._root(away) / name))

    def _root(self, away: bool) -> Place:
        assert not away or self.remote is not None
        return self.remote if away and self.remote is not None else self.dir

    def _found(self) -> list[tuple[int, bool, str]]:
        """Step, whether in the remote place, and folder of each checkpoint: the newest first, of one in both places
        that of here."""
        places = [(False, self.dir)] if self.remote is None else [(False, self.dir), (True, self.remote)]
        found = [(step, away, path.name) for away, root in places for step, path in commit.committed(root).items()]
        return sorted(found, key=lambda one: (-one[0], one[1]))

    # Saving.

    def save(
        self,
        step: int,
        states: Mapping[str, Stateful],
        meta: dict[str, Any] | None = None,
        *,
        temporary: bool = False,
    ) -> bool:
        """Save ``states`` as the checkpoint of ``step``; in mode "sync" it is committed on return.

        ``meta`` is a small dict of plain values to be read without loading anything (rank 0's counts). A ``temporary``
        checkpoint is kept until there is a later one. Returns False when ``step`` is committed already: it is left as
        it is, whatever the states are now.

        In mode "async" it returns when the states may be changed again, and the rest goes on beside the caller; with
        ``overlap`` it does not wait for that either, and the caller waits by `staged` before it changes a tensor. A
        save that is still going on is waited for first, and what it failed with is raised here.

        Raises CheckpointError on all ranks when any of them could not do its part, and then nothing of this step is
        visible; UnsupportedStateError when a value cannot be written or the ranks disagree about it.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step = {step!r} must be a whole number from 0 on")
        started = time.perf_counter()
        self.wait()
        ranks = self._ranks()
        if not ranks.joined and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise CheckpointError(
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']}, but there is no process group: every process would save a "
                f"checkpoint of its own into {self.dir}; call torch.distributed.init_process_group first"
            )
        what = f"checkpoint of step {step} in {self.dir} was not saved"
        if ranks.first(what, lambda: self._there(step)):
            if ranks.rank == 0:
                logger.info("step %d is committed already in %s; it is left as it is", step, self.dir)
            return False
        with ExitStack() as stack:
            passing = ranks.all(what, lambda: enter_forms(states, stack))
            collected, tree, layout = self._agreement.reach(ranks, what, step, lambda: collect(states, meta))
            folder = self.dir / ranks.first(what, lambda: self._stage(step))
            job = Save(step, what, folder, started, collected, tree, layout, temporary, self._agreement.hosts)
            if self.mode == "sync":
                self._finish(ranks, job, self._direct(job))
                return True
            try:
                beside = self._ranks_beside()
                staging = self._staging = self._copy(job)
            except BaseException:
                if ranks.rank == 0:
                    commit.discard(folder)
                raise
            self._saving.start(f"ckpt-save-{step}", lambda: self._finish(beside, job, self._staged(job, staging)))
            if passing or not self.overlap:
                self.staged()
        return True

    def prepare(self, states: Mapping[str, Stateful]) -> None:
        """Plan saves of ``states`` and begin to allocate the host memory that they take, beside the caller; the first
        save then waits for neither. All ranks call it; in mode "sync" it does nothing. Raises as `save` does."""
        if self.mode == "sync" or self._memory is not None:
            return
        ranks, what = self._ranks(), f"saves to {self.dir} were not prepared"
        with ExitStack() as stack:
            ranks.all(what, lambda: enter_forms(states, stack))
            collected, _, layout = self._agreement.reach(ranks, what, 0, lambda: collect(states, None))
            files = [list(file.pieces(collected.parts.tensors)) for file in layout.files]
        self._memory_for(list(chain(*files))).reserve_ahead(room_for(files))

    def _there(self, step: int) -> bool:
        """Whether a step is committed; one that is damaged is put out of the way."""
        found = commit.committed(self.dir)
        if step in found and self._damage(step):
            logger.warning("%s is damaged, and now %s", found[step], commit.put_by(self.dir, found[step], "damaged"))
            return False
        return step in found

    def score(self, step: int, **values: float) -> None:
        """Tell how good the checkpoint of a step is, for `Retention.best`: metrics by name. On rank 0 alone; others do
        nothing. Kept beside the checkpoints, for whoever goes on with them. Where that cannot be written, it is told in
        the log, and tried again with the next score, and before a checkpoint is deleted."""
        if self._ranks().rank == 0:
            self._told.append((step, {name: float(value) for name, value in values.items()}))
            try:
                self._scores()
            except (OSError, CheckpointError) as error:
                logger.error("the score of step %d is not in %s yet: %s", step, self.dir, error)

    def _scores(self) -> Scores:
        """All scores, once those that were told of are beside the checkpoints."""
        with self._scoring:
            scores = mended_scores(self.dir, commit.committed(self.dir))
            for step, values in self._told:
                scores[step] = {**(scores.get(step) or {}), **values}
            if self._told:
                write_scores(self.dir, scores)
                self._told.clear()
            return scores

    def staged(self) -> None:
        """Wait until the tensors of the last save may be changed. On CUDA the host does not wait: the current stream
        does, for the copy. Call it before an optimizer's step when ``overlap`` is on."""
        if self._staging is not None:
            self._staging.wait()
            self._staging = None

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, on whatever rank. `wait` raises its error."""
        return self._saving.failed

    def wait(self) -> None:
        """Wait until all that was begun is done: a save is committed, old checkpoints are deleted. Raises what the
        save in the background failed with; that is the same error on all ranks."""
        self.staged()
        try:
            self._saving.wait()
        finally:
            self._tidying.wait()

    def close(self) -> None:
        """`wait`, and let go of the folder, and of the process that writes, if there is one. It may save again. With a
        ``remote``, rank 0 waits until all is copied there, and raises what keeps it from that."""
        with ExitStack() as stack:
            stack.callback(self._let_go)
            if self._mirror is not None and self._lock is not None:  # rank 0, which has saved
                stack.callback(self._end_copies, self._mirror)
            self.wait()

    def _end_copies(self, mirror: Mirror) -> None:
        """Wait for the copies, and delete here what was kept for them."""
        mirror.close()
        found = commit.committed(self.dir)
        self._delete(self._put_aside(found, max(found, default=0)))

    def _let_go(self) -> None:
        while self._processes:
            self._processes.popitem()[1].close()
        if self._lock is not None:
            assert self._abandoned is not None
            self._abandoned.detach()
            self._lock.release()
            self._lock = None

    def _stage(self, step: int) -> str:
        if self._lock is None:
            self._lock = lock(self.dir)
            self._abandoned = weakref.finalize(self, self._lock.drop)
        left = commit.leftovers(self.dir)
        folder = commit.stage(self.dir, step)
        if left:
            self._tidying.start("ckpt-clean", lambda: self._clean(left))
        return folder.name

    def _clean(self, left: list[Place]) -> None:
        for path in left:
            commit.discard(path)
            logger.info("removed %s, left behind by a save or a deletion that did not end", path)

    def _finish(self, ranks: Ranks, job: Save, write_tensors: WriteTensors) -> None:
        """From the staging folder to the committed one; collective."""
        try:
            files = write(ranks, job.what, job.folder, job.layout, job.collected.parts.per_rank, write_tensors)
            size = ranks.first(job.what, lambda: self._commit(job, files, ranks.world))
        except BaseException:
            if ranks.rank == 0:
                commit.discard(job.folder)
            raise
        if ranks.rank == 0:
            self._saved(job, size)
            if self._mirror is not None:
                self._mirror.wake()

    def _commit(self, job: Save, files: dict[str, FileRecord], world: int) -> int:
        commit.reached("all ranks written")
        files = files | write_shared(
            job.folder, job.step, world, job.hosts, job.layout.index, job.tree, job.collected.meta
        )
        assert self._lock is not None
        self._lock.check()
        commit.commit(self.dir, job.folder, job.step, files, temporary=job.temporary)
        return sum(record.size for record in files.values())

    def _saved(self, job: Save, size: int) -> None:
        """After the commit, on rank 0. The checkpoint exists: what fails here is told, and is no reason to stop."""
        seconds = time.perf_counter() - job.started
        try:
            self._damage.tell(job.step, False)
            found = commit.committed(self.dir)
            later = [step for step in found if step > job.step and not self._damage(step)]
            if later:
                logger.warning(
                    "step %d is saved, but a restore takes step %d, which is in %s too: to go on from an earlier step, "
                    "remove the later ones first (kforge-ckpt rm), or save to another folder",
                    job.step,
                    later[-1],
                    self.dir,
                )
            self._tell("checkpoint_saved", step=job.step, seconds=seconds, bytes=size, path=str(found[job.step]))
            commit.point_latest(self.dir, found[max([job.step, *later])])
            aside = self._put_aside(found, job.step)
        except (OSError, CheckpointError) as error:
            logger.warning("step %d is committed, but tidying up %s failed: %s", job.step, self.dir, error)
            return
        if aside:
            self._tidying.start("ckpt-delete", lambda: self._delete(aside))

    def _put_aside(self, found: dict[int, Place], saved: int) -> list[tuple[int, Place]]:
        """Take what no rule keeps away from readers; `_delete` does the rest."""
        temporary = [step for step, folder in found.items() if commit.is_temporary(folder)]
        scores = self._scores() if self.keep.best else None
        waiting = set() if self._mirror is None else self._mirror.waiting(found)
        protect = {saved, *waiting}
        old = self.keep.expendable(found, temporary=temporary, scores=scores, protect=protect, damaged=self._damage)
        return [(step, commit.put_aside(self.dir, found[step])) for step in old]

    def _delete(self, aside: list[tuple[int, Place]]) -> None:
        for step, folder in aside:
            try:
                commit.remove(folder)
            except (OSError, CheckpointError) as error:
                logger.warning("%s, the deleted step %d, was not removed: %s", folder, step, error)
            else:
                self._tell("checkpoint_deleted", step=step, path=str(folder))

    # How the bytes of tensors get to the file.

    def _direct(self, job: Save) -> WriteTensors:
        """From where they lie: from a device through a few blocks, copied to while those before them are written."""
        if any(tensor.is_cuda for tensor in job.collected.parts.tensors.values()):
            return self._staged(job, self._copy(job))

        def write_now(number: int, path: Place) -> FileRecord:
            file = job.layout.files[number]
            return write_tensors(path, file.specs, file.pieces(job.collected.parts.tensors))

        return write_now

    def _copy(self, job: Save) -> Staging:
        """Begin to copy what this rank writes."""
        for parts in job.collected.parts.per_rank.values():
            parts.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.tensors.items()}
        pieces = [piece for file in job.layout.files for piece in file.pieces(job.collected.parts.tensors)]
        device = next((piece.device for piece in pieces if piece.is_cuda), None)
        files = [len(file.items) for file in job.layout.files]
        return Staging(pieces, self._memory_for(pieces), device, files=files)

    def _memory_for(self, pieces: Sequence[torch.Tensor]) -> HostMemory:
        if self._memory is None:
            shared = self.writer == "process"
            limit = DIRECT_BYTES if self.mode == "sync" else self.staging_bytes
            self._memory = HostMemory(limit, pinned=any(piece.is_cuda for piece in pieces), shared=shared)
        return self._memory

    def _staged(self, job: Save, staging: Staging) -> WriteTensors:
        """From where they were copied to."""

        def write_later(number: int, path: Place) -> FileRecord:
            try:
                head, blocks = header_of(job.layout.files[number].specs, path.name), staging.blocks(number)
                if self.writer == "thread":
                    return write_file(path, chain([head], (block.wait() for block in blocks)))
                assert self._memory is not None and self._memory.handle is not None
                process = self._processes.get(number)
                if process is None or not process.alive:
                    process = self._processes[number] = WriterProcess(self._memory.handle)
                assert isinstance(path, Path)
                return process.write_file(path, head, blocks)
            except BaseException:
                staging.stop()  # nobody will take the blocks of this file any more
                raise

        return write_later

    # Restoring.

    def restore(
        self,
        states: Mapping[str, Stateful],
        step: int | None = None,
        *,
        verify: Literal["fast", "full"] = "fast",
        fit: Fit | None = None,
        accept: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> int | None:
        """Restore ``states`` from the newest committed checkpoint, or from that of ``step``; returns its step.

        Objects without tensors are given their states first; if one of them does not take it, all are given back what
        they had. Then tensors are filled in place, from whatever layout they were saved in, and the ``load_state_dict``
        of their objects is called, `RngState` last. Names saved but not asked for are left alone. Returns None, and
        changes nothing, when ``step`` is None and there is no checkpoint. A newest one that is damaged is told of, and
        the one before it taken.

        ``verify="fast"`` compares the sizes of all files and the checksums of the small ones, ``"full"`` reads
        everything once more for its checksum. ``fit`` says in what the checkpoint may differ from the tensors to fill;
        then tensors alone are filled, no ``load_state_dict`` is called, and what was done is logged. ``accept`` is
        called on all ranks with the step and the meta data of a checkpoint that is whole, before anything is changed;
        it may raise.

        Raises on all ranks, before anything is changed: StateMismatchError naming the tensors that are missing, too
        many, of another shape or dtype, or what of an optimizer's groups and options differs; DamagedCheckpointError
        naming the file; CheckpointError for a ``step`` that is not there, and with what an object says that does not
        take its state. Only where reading fails midway, or an object with tensors does not take its state after all,
        is the error that of a restore "in part".
        """
        if verify not in ("fast", "full"):
            raise ValueError(f"verify = {verify!r} does not exist; there are 'fast' and 'full'")
        self.staged()  # a save that is still copying tensors would take what is restored into them
        ranks = self._ranks()
        what = f"nothing was restored from {self.dir}"
        found = ranks.first(what, lambda: self._choose(step))
        for chosen, away, name in found:
            folder = self._root(away) / name
            try:
                self._restore(ranks, states, chosen, folder, verify == "full", fit or Fit(), accept)
            except DamagedCheckpointError as error:
                (self._mirror.damage if away and self._mirror is not None else self._damage).tell(chosen, True)
                if (chosen, away, name) == found[-1]:
                    raise
                if ranks.rank == 0:
                    logger.error("%s; trying the one before it", error)
            else:
                return chosen
        return None

    def _restore(
        self,
        ranks: Ranks,
        states: Mapping[str, Stateful],
        step: int,
        folder: Place,
        full: bool,
        fit: Fit,
        accept: Callable[[int, dict[str, Any]], None] | None,
    ) -> None:
        started = time.perf_counter()
        what = f"{folder} was not restored"

        def opened() -> tuple[Saved, dict[str, Any]]:
            saved = Saved(folder, self.threads)
            saved.contents.check(ranks.rank, ranks.world, full=full)
            return saved, read_meta(saved.contents)

        saved, meta = ranks.all(what, opened)
        if accept is not None:
            accept(step, meta)
        with ExitStack() as stack:
            ranks.all(what, lambda: enter_forms(states, stack))
            plan = ranks.all(what, lambda: Plan(saved, states, stack, fit))
            plan.compare(ranks, what)
            ready = ranks.all(what, lambda: plan.ready(ranks))
            with plan.handed_first(ranks, what, ready):
                plan.fill(ranks, f"{folder} was restored in part")
            ranks.all(f"{folder} was restored in part", lambda: plan.hand_over(ready))
        if ranks.rank == 0:
            for line in fit.told(plan.stored, plan.wanted, plan.unclaimed):
                logger.info("%s", line)
            self._tell("checkpoint_restored", step=step, seconds=time.perf_counter() - started, path=str(folder))

    def _choose(self, step: int | None) -> list[tuple[int, bool, str]]:
        """The checkpoint to restore, and those to try after it where it is damaged, as `_found`."""
        found = self._found()
        if step is None:
            return found
        steps = sorted({one[0] for one in found})
        if step not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
            raise CheckpointError(f"no committed checkpoint of step {step} in {self.dir}; {there}")
        return [one for one in found if one[0] == step]

    # Both.

    def _ranks(self) -> Ranks:
        if self._ranks_now is None or self._ranks_now.stale:
            self._ranks_now, self._ranks_then, self._agreement = Ranks(), None, Agreement(self.threads)
        return self._ranks_now

    def _ranks_beside(self) -> Ranks:
        """The same ranks, for the messages of a save in the background."""
        if self._ranks_then is None:
            self._ranks_then = Ranks(own_group=True)
        return self._ranks_then

    def _tell(self, kind: str, **values: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, values)
        else:
            logger.info("%s %s", kind.replace("_", " "), " ".join(f"{key}={value}" for key, value in values.items()))
