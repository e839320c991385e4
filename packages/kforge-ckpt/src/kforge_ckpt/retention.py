"""Which checkpoints are kept: each rule says what it keeps, and what no rule keeps is deleted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kforge_ckpt.files import Place, replace_file

SCORES = "scores.json"
"""Beside the checkpoints: step -> metric -> value."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules by which checkpoints are kept. The highest step is kept always. Raises ValueError for numbers that cannot
    be."""

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
        scores: Mapping[int, Mapping[str, float]] | None = None,
        protect: Iterable[int] = (),
    ) -> list[int]:
        """Of the ``steps`` that are there, those that may be deleted, ascending.

        temporary: steps of them that are of use until there is a higher one, unless a rule keeps them.
        scores: step -> metric -> value, for the best ones; of equal ones the later. protect: kept whatever the rules.
        """
        ordered = sorted(set(steps))
        passing = set(temporary)
        kept = {*ordered[-1:], *[step for step in ordered if step not in passing][-self.last :], *protect, *self.steps}
        kept.update(step for step in ordered if self.every and step % self.every == 0)
        kept.update(step for step in ordered if self._doubles(step))
        if self.best:
            kept.update(self._best(ordered, scores or {}))
        return [step for step in ordered if step not in kept]

    def _doubles(self, step: int) -> bool:
        if not self.doubling_from or step % self.doubling_from:
            return False
        times = step // self.doubling_from
        return times > 0 and times & (times - 1) == 0

    def _best(self, ordered: list[int], scores: Mapping[int, Mapping[str, float]]) -> list[int]:
        scored = [(scores[step][self.metric], step) for step in ordered if self.metric in scores.get(step, {})]
        known = [(value if self.highest else -value, step) for value, step in scored if not math.isnan(value)]
        return [step for _, step in sorted(known)[-self.best :]]


def read_scores(root: Place) -> dict[int, dict[str, float]]:
    """The scores of a folder of checkpoints; none where there is no file, or one that is not ours."""
    try:
        content = json.loads((root / SCORES).read_bytes())
        return {int(step): {str(k): float(v) for k, v in values.items()} for step, values in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_scores(root: Place, scores: Mapping[int, Mapping[str, float]]) -> None:
    """Replace the file of scores, at once."""
    text = json.dumps({str(step): dict(scores[step]) for step in sorted(scores)}, indent=1) + "\n"
    replace_file(root / SCORES, text.encode())
