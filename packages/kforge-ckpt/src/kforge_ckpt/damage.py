"""Which checkpoints of a folder are damaged, as far as it is known: no rule counts them, and `latest` names none."""

from __future__ import annotations

from kforge_ckpt import commit
from kforge_ckpt.errors import DamagedCheckpointError
from kforge_ckpt.files import Place


class Damage:
    """What is known of the committed checkpoints of ``root``: what was told of them, and of others whether their files
    are there, as long as the manifest says. Each is looked at once, when it is first asked about."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._known: dict[int, bool] = {}

    def __call__(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is damaged; if it is looked at for this, that is told in the log. Raises
        CheckpointError where it cannot be looked at; an object store may be away."""
        if step not in self._known:
            folder = commit.committed(self._root).get(step)
            if folder is None:
                return True  # gone meanwhile: nothing to count on
            try:
                commit.Contents(folder).check()
            except DamagedCheckpointError as error:
                commit.logger.error("step %d is damaged, and not counted among those that are kept: %s", step, error)
                self._known[step] = True
            else:
                self._known[step] = False
        return self._known[step]

    def known(self, step: int) -> bool:
        """Whether it is known to be damaged, without a look at it."""
        return self._known.get(step, False)

    def tell(self, step: int, damaged: bool) -> None:
        """A restore, or a copy, found it damaged; or it was saved just now, and is whole."""
        self._known[step] = damaged
