"""Which checkpoints are kept: each rule says what it keeps, and what no rule keeps is deleted."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError
from kforge_ckpt.files import Place, replace_file
from kforge_ckpt.retrying import logger

SCORES = "scores.json"
"""Beside the checkpoints: step -> metric -> value; null in their place for a step whose scores were lost."""

Scores = dict[int, dict[str, float] | None]
"""Step -> metric -> value, or None for a step whose scores were lost."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules by which checkpoints are kept. The highest step is kept always, and the highest that is not damaged. Raises
    ValueError for numbers that cannot be."""

    last: int = 3
    """How many of the highest steps; at least 1. Temporary ones do not count."""
    every: int = 0
    """Multiples of this step, step 0 among them; 0: none for its number."""
    steps: tuple[int, ...] = ()
    """These steps."""
    doubling_from: int = 0
    """This step times 1, 2, 4, 8, …: dense early, sparse late; 0: none."""
    best: int = 0
    """How many of those with the best score; 0: none for its score."""
    metric: str = "loss"
    """The score that counts."""
    highest: bool = False
    """Whether the best score is the highest one; else the lowest."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep_last = {self.last} must be at least 1: the newest checkpoint is never deleted")
        for name, value in (("every", self.every), ("doubling_from", self.doubling_from), ("best", self.best)):
            if value < 0:
                raise ValueError(f"keep_{name} = {value} must be 0 (off) or more")
        if min(self.steps, default=0) < 0:
            raise ValueError(f"keep_steps = {list(self.steps)} must be steps from 0 on")

    def expendable(
        self,
        steps: Iterable[int],
        *,
        temporary: Iterable[int] = (),
        scores: Mapping[int, Mapping[str, float] | None] | None = None,
        protect: Iterable[int] = (),
        damaged: Callable[[int], bool] = lambda step: False,
    ) -> list[int]:
        """Of the ``steps`` that are there, those that may be deleted, ascending.

        temporary: steps of them that are of use until there is a higher one, unless a rule keeps them.
        scores: step -> metric -> value, for the best ones; of equal ones the later, and those
            whose scores were lost, which may be among the best. protect: kept whatever the rules.
        damaged: whether a step is. It is kept as if it were not, but where a rule counts, others are kept in its stead.
        """
        ordered = sorted(set(steps))
        passing = set(temporary)
        lasting = [step for step in reversed(ordered) if step not in passing]
        kept = {*ordered[-1:], *protect, *self.steps}
        kept.update(_first(1, reversed(ordered), damaged))
        kept.update(_first(self.last, lasting, damaged))
        kept.update(step for step in ordered if self.every and step % self.every == 0)
        kept.update(step for step in ordered if self._doubles(step))
        if self.best:
            kept.update(self._best(ordered, scores or {}, damaged))
        return [step for step in ordered if step not in kept]

    def _doubles(self, step: int) -> bool:
        if not self.doubling_from or step % self.doubling_from:
            return False
        times = step // self.doubling_from
        return times > 0 and times & (times - 1) == 0

    def _best(
        self, ordered: list[int], scores: Mapping[int, Mapping[str, float] | None], damaged: Callable[[int], bool]
    ) -> list[int]:
        lost = [step for step in ordered if scores.get(step, {}) is None]
        told = [(values[self.metric], step) for step in ordered if self.metric in (values := scores.get(step) or {})]
        known = [(value if self.highest else -value, step) for value, step in told if not math.isnan(value)]
        return [*lost, *_first(self.best, [step for _, step in sorted(known, reverse=True)], damaged)]


def _first(count: int, steps: Iterable[int], damaged: Callable[[int], bool]) -> list[int]:
    """The first ``count`` of ``steps`` that are not damaged, and the damaged ones before and between them."""
    found: list[int] = []
    for step in steps:
        if not count:
            break
        found.append(step)
        count -= not damaged(step)
    return found


def read_scores(root: Place) -> Scores:
    """The scores of a folder of checkpoints; none where there is no file. Raises DamagedCheckpointError for a file that
    is not ours: it says nothing about which are the best. CheckpointError for one that cannot be read."""
    path = root / SCORES
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return {
            int(step): None if values is None else {str(k): float(v) for k, v in values.items()}
            for step, values in json.loads(data).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} does not hold scores: {error!r}") from error


def mended_scores(root: Place, steps: Iterable[int]) -> Scores:
    """As `read_scores`; of a damaged file it is told, and it is put by. Then the scores of all ``steps``, those that
    are committed, count as lost, on the disk too, so that none of them is deleted for its score."""
    try:
        return read_scores(root)
    except DamagedCheckpointError as error:
        aside = root / f"{SCORES}.damaged-{secrets.token_hex(4)}"
        replace_file(aside, (root / SCORES).read_bytes())
        lost: Scores = dict.fromkeys(sorted(steps))
        write_scores(root, lost)
        logger.error(
            "%s. It is now %s. Which checkpoints are the best is not known: those of steps %s are kept until they are "
            "scored again, or deleted with kforge-ckpt rm",
            error,
            aside,
            ", ".join(map(str, lost)) or "(none)",
        )
        return lost


def write_scores(root: Place, scores: Mapping[int, Mapping[str, float] | None]) -> None:
    """Replace the file of scores, at once."""
    content = {str(step): None if (values := scores[step]) is None else dict(values) for step in sorted(scores)}
    replace_file(root / SCORES, (json.dumps(content, indent=1) + "\n").encode())
