"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterable


def expendable(steps: Iterable[int], *, keep_last: int, keep_every: int = 0, protect: Iterable[int] = ()) -> list[int]:
    """The steps that may be deleted, ascending.

    Kept are the ``keep_last`` highest, every multiple of ``keep_every`` (0: none for its number; step 0 is a
    multiple) and those in ``protect``. The highest step is kept always.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last = {keep_last} must be at least 1: the newest checkpoint is never deleted")
    if keep_every < 0:
        raise ValueError(f"keep_every = {keep_every} must be 0 (off) or a number of steps")
    ordered = sorted(set(steps))
    kept = {*ordered[-keep_last:], *protect}
    if keep_every:
        kept.update(step for step in ordered if step % keep_every == 0)
    return [step for step in ordered if step not in kept]
