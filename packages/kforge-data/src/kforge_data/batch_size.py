"""How many rows a step has: a pure function of its number. Standard library only.

A batch that grows over the first steps is cut from the same sequence of rows as one that does not. The number of a step
alone says its rows, so that a resume has nothing to remember of the phases but that they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KEYS = ("steps", "tokens", "rows")


@dataclass(frozen=True)
class BatchSize:
    """``global_rows`` rows a step, after phases of (steps, rows a step) that come one after the other from step 0.

    ValueError for a phase without a step or without a row.
    """

    global_rows: int
    phases: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for i, (steps, rows) in enumerate(self.phases):
            if steps < 1 or rows < 1:
                raise ValueError(f"batch_phases[{i}] has {steps} steps of {rows} rows; both must be at least 1")

    def at(self, step: int) -> int:
        """Rows of step number ``step``, from 0."""
        for steps, rows in self.phases:
            if step < steps:
                return rows
            step -= steps
        return self.global_rows

    def before(self, step: int) -> int:
        """Rows of all steps before ``step``."""
        total = 0
        for steps, rows in self.phases:
            total += min(step, steps) * rows
            step = max(0, step - steps)
        return total + step * self.global_rows

    def step_at(self, rows: int) -> int:
        """The first step before which at least so many rows come."""
        step = 0
        for steps, each in self.phases:
            if rows <= steps * each:
                return step + -(-rows // each)
            step, rows = step + steps, rows - steps * each
        return step + -(-rows // self.global_rows)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every number of rows that a step has, and what it is called in errors."""
        for i, (_, rows) in enumerate(self.phases):
            yield f"batch_phases[{i}].rows", rows
        yield "global_rows", self.global_rows


def read_batch_phases(values: Sequence[Mapping[str, Any]], row_tokens: int) -> tuple[tuple[int, int], ...]:
    """What a config says in a list of tables, as (steps, rows a step): each has ``rows``, and ``steps`` or ``tokens``,
    which are rounded up to whole steps. ValueError that names the table and the key for whatever cannot be."""
    phases = []
    for i, value in enumerate(values):
        name = f"data.batch_phases[{i}]"
        for key, number in value.items():
            if key not in _KEYS:
                raise ValueError(f"{name} has no key {key!r}; a phase has {', '.join(_KEYS)}")
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}.{key} = {number!r} must be a whole number of at least 1")
        if "rows" not in value:
            raise ValueError(f"{name}.rows is missing: the rows of one step over all processes")
        if ("steps" in value) == ("tokens" in value):
            raise ValueError(f"{name} must say how long it is, in steps or in tokens, one of the two")
        tokens = value["rows"] * row_tokens
        phases.append((value["steps"] if "steps" in value else -(-value["tokens"] // tokens), value["rows"]))
    return tuple(phases)
