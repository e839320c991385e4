"""Committed checkpoints copied to another place, in order, beside the run that saves them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from kforge_ckpt import commit
from kforge_ckpt.damage import Damage
from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError
from kforge_ckpt.files import Block, Place, entries, write_file
from kforge_ckpt.lease import Lease
from kforge_ckpt.lock import FolderLock, lock
from kforge_ckpt.remote import RemotePath
from kforge_ckpt.retention import SCORES, Retention, Scores, mended_scores, read_scores, write_scores

BLOCK_BYTES = 2**24


def copy_into(source: Place, root: Place, held: FolderLock | Lease) -> Place:
    """Copy a committed checkpoint, by the same commit; each byte is compared with its checksum on the way.

    In an object store the folder is named for the checksum of the manifest: a copy that did not end is gone on with,
    file by file. Raises CheckpointError when the step is there already, DamagedCheckpointError for what is not as it
    was written.
    """
    contents = commit.Contents(source)
    if contents.step in commit.committed(root):
        raise CheckpointError(f"{root} holds a checkpoint of step {contents.step} already")
    remote = isinstance(root, RemotePath)
    folder = root / _name(source) if remote else commit.stage(root, contents.step)
    there = entries(folder)
    try:
        for name, record in contents.files.items():
            if there.get(name) == record.size:  # an object is there as a whole
                continue
            if write_file(folder / name, _blocks(source / name)) != record:
                raise DamagedCheckpointError(f"{source / name} is damaged: its checksum is not that of the manifest")
        held.check()
        temporary = commit.is_temporary(source)
        return commit.commit(root, folder, contents.step, contents.files, temporary=temporary)
    except BaseException as error:
        if not remote or isinstance(error, DamagedCheckpointError):
            commit.discard(folder)
        raise


def _name(source: Place) -> str:
    contents = commit.Contents(source)
    return f"{commit.folder_name(contents.step)}-{contents.checksum}"


def _blocks(path: Place) -> Iterator[Block]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


class Mirror:
    """Copies what is committed in ``root`` to ``target``, the oldest first, on a thread that ends when nothing is left,
    and deletes there what ``keep`` does not keep. A process does not end before that.

    ``damage_here`` is of ``root``, `damage` of ``target``.
    """

    def __init__(
        self, root: Place, target: Place, keep: Retention, tell: Callable[..., None], damage_here: Damage
    ) -> None:
        self.root = root
        self.target = target
        self.keep = keep
        self._tell = tell
        self.damage = Damage(target)
        self._damage_here = damage_here
        self._settled: set[int] = set()
        self._held: FolderLock | Lease | None = None
        self._guard = threading.Lock()
        self._again = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def wake(self) -> None:
        """Begin, or look again: something may have been committed."""
        with self._guard:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-mirror", daemon=False)
                self._thread.start()

    def waiting(self, steps: Iterable[int]) -> set[int]:
        """Those of ``steps`` that must not be deleted yet: they are not known to be copied."""
        return set(steps) - self._settled

    def close(self) -> None:
        """Copy what is left, and let go of the target. Raises what the last attempt failed with."""
        self.wake()
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._held is not None:
            self._held.release()
            self._held = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"checkpoints of {self.root} were not copied to {self.target}: {error}") from None

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._copy_all()
                self._error = None
            except Exception as error:
                self._error = error
                commit.logger.error("checkpoints are saved, but not copied to %s: %s", self.target, error)

    def _copy_all(self) -> None:
        if self._held is None:
            self._held = lock(self.target)
            ours = {_name(folder) for folder in commit.committed(self.root).values()}
            for left in commit.leftovers(self.target):
                if left.name not in ours:
                    commit.discard(left)
        while (step := self._next()) is not None:
            source = commit.committed(self.root)[step]
            try:
                folder = copy_into(source, self.target, self._held)
            except DamagedCheckpointError as error:
                commit.logger.error("step %d is not copied: %s", step, error)
                self._damage_here.tell(step, True)
            else:
                self.damage.tell(step, False)
                self._tell("checkpoint_copied", step=step, path=str(folder))
                self._tidy(step)

    def _next(self) -> int | None:
        """The oldest step that is here, whole, and not there, of those that would be kept there."""
        here, there = commit.committed(self.root), commit.committed(self.target)
        passing = [step for step, folder in here.items() if commit.is_temporary(folder)]

        def damaged(step: int) -> bool:
            return self.damage(step) if step in there else self._damage_here(step)

        old = self._old({*here, *there}, passing, [], damaged)
        self._settled = {step for step in here if step in there or step in old or self._damage_here.known(step)}
        return min(here.keys() - self._settled, default=None)

    def _old(
        self, steps: Iterable[int], passing: list[int], protect: list[int], damaged: Callable[[int], bool]
    ) -> list[int]:
        scores = self._scores() if self.keep.best else {}
        if scores is None:
            return []
        return self.keep.expendable(steps, temporary=passing, scores=scores, protect=protect, damaged=damaged)

    def _scores(self) -> Scores | None:
        """The scores of here, and of steps that this host has not (it was bare, say) those of there. None, told of,
        where those of here are damaged: then no copy is deleted, nor are scores copied."""
        there = mended_scores(self.target, commit.committed(self.target))
        try:
            here = read_scores(self.root)
        except DamagedCheckpointError as error:
            commit.logger.error("%s; no copy in %s is deleted", error, self.target)
            return None
        return there | {step: values for step, values in here.items() if values is not None or step not in there}

    def _tidy(self, step: int) -> None:
        there = commit.committed(self.target)
        commit.point_latest(self.target, there[max(there)])
        if SCORES in entries(self.root) and (scores := self._scores()) is not None:
            write_scores(self.target, scores)
        passing = [step for step, folder in there.items() if commit.is_temporary(folder)]
        for old in self._old(there, passing, [step], self.damage):
            commit.remove(commit.put_aside(self.target, there[old]))
