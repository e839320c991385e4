"""What the ranks of a job must agree on: one failing rank is everyone's failure, and nobody waits for it in vain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError, StateMismatchError, UnsupportedStateError

T = TypeVar("T")
Told = tuple[str, str]
"""The kind and the text of an error."""
# The kinds that travel between ranks by name, the most telling first.
_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (UnsupportedStateError, StateMismatchError, DamagedCheckpointError, CheckpointError)
}


class Ranks:
    """The ranks that save and restore together: those of the default process group, or this process alone.

    Messages are small and go over gloo. Where the default group has only NCCL, a gloo group of the same ranks is
    made, by all of them, at the first use.
    """

    def __init__(self, *, own_group: bool = False) -> None:
        """own_group: make a group in any case, for another thread's messages."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world = 0, 1
        self.joined = dist.is_available() and dist.is_initialized()
        if self.joined:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            if own_group or "gloo" not in str(dist.get_backend_config()):
                self.group = dist.new_group(backend="gloo")
        self._default = dist.group.WORLD if self.joined else None

    @property
    def stale(self) -> bool:
        """The default process group is not the one of before: it was made or destroyed since."""
        now = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        return now is not self._default

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def all(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and return its result; if it fails on any of them, raise on all of them."""
        result, told, error = self.attempt(work)
        self.raise_if_any(what, self.gather(told), error)
        return cast(T, result)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and return its result everywhere; if it fails, raise on all ranks."""
        result, told, error = self.attempt(work) if self.rank == 0 else (None, None, None)
        result, told = self.broadcast((result, told))
        self.raise_if_any(what, [told], error)
        return cast(T, result)

    def attempt(self, work: Callable[[], T]) -> tuple[T | None, Told | None, Exception | None]:
        """Do ``work`` on this rank: its result, what other ranks are told of its failure, and the failure itself."""
        try:
            return work(), None, None
        except Exception as error:
            return None, (type(error).__name__, str(error)), error

    def raise_if_any(self, what: str, told: list[Told | None], own: Exception | None) -> None:
        """Raise one error on all ranks when any of them, in order, was ``told`` of a failure."""
        failed = {rank: name_text for rank, name_text in enumerate(told) if name_text is not None}
        if failed:
            raise combine(what, failed, self.world) from own


def combine(what: str, failed: dict[int, tuple[str, str]], world: int) -> CheckpointError:
    """One error from those of the ranks: ``rank -> (kind, text)``; the same text of several ranks is said once."""
    names = {name for name, _ in failed.values()}
    kind = next((_KINDS[name] for name in _KINDS if name in names), CheckpointError)
    by_text: dict[str, list[int]] = {}
    for rank, (name, text) in failed.items():
        by_text.setdefault(text if name in _KINDS else f"{name}: {text}", []).append(rank)
    lines = [
        text if world == 1 else f"rank {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}: {text}"
        for text, ranks in by_text.items()
    ]
    return kind(f"{what}: " + "\n".join(lines))


@contextmanager
def plain_errors(what: str, world: int) -> Iterator[None]:
    """Around calls of torch.distributed.checkpoint, whose CheckpointException is no Exception and slips by handlers.

    It is raised on all ranks with the failures of each; here it becomes the error that says the same.
    """
    try:
        with warnings.catch_warnings():  # that there is no process group is known, and fine
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        for cause in causes.values():
            if not isinstance(cause, Exception):  # KeyboardInterrupt and its like stay what they are
                raise cause from None
        told = {rank: (type(cause).__name__, str(cause)) for rank, cause in causes.items()}
        raise combine(what, told, world) from next(iter(causes.values()))
