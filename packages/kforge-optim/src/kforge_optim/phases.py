"""Values that move in phases: each phase leads from one value to another over so many steps, along a named shape.

A shape maps the progress p in [0, 1] through a phase to what is left of the way, 1 at its start and 0 at its end::

    value = to + (from - to) · shape(p)        p = (step - first step of the phase) / steps of the phase

so a phase starts at ``from``, and ``to`` is reached where the next one starts. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHAPES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda p, power: 1.0 - p,
    "cosine": lambda p, power: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p, power: 1.0 - math.sqrt(p),
    "polynomial": lambda p, power: (1.0 - p) ** power,
    "rex": lambda p, power: (1.0 - p) / (0.5 + 0.5 * (1.0 - p)),
}
"""Name -> (progress p, power) -> what is left. Only ``polynomial`` looks at the power.

cosine: Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, one cycle. 1-sqrt: Hägele et al. 2024, arXiv
2405.18392, section 3. rex: Chen et al. 2021, arXiv 2107.04197, table 2 (reflected exponential)."""

_KEYS = ("steps", "until", "schedule", "from", "to", "power")


@dataclass(frozen=True)
class Phase:
    """From ``start`` to ``end`` (steps from 0; the end is not part of it) a value moves from ``first`` to ``last``."""

    start: int
    end: int
    shape: str
    """A name of `SHAPES`, or ``constant``."""
    first: float
    last: float
    power: float


def check_shape(what: str, name: str) -> None:
    """Raises ValueError unless ``name`` is a shape; ``what`` says where it was written."""
    if name not in SHAPES:
        raise ValueError(f"{what} = {name!r} is no shape of a descent; known are {', '.join(SHAPES)}")


def read_phases(
    what: str,
    values: Sequence[Mapping[str, Any]],
    *,
    start: int = 0,
    total: int | None = None,
    before: float | None = 1.0,
    default_to: float | None = None,
    power: float = 2.0,
    below_one: bool = False,
) -> list[Phase]:
    """What a config says in a list of tables, as phases that follow one another from step ``start``.

    A table has ``steps`` (its length) or ``until`` (the step at which it ends, from 0), of which the last one may have
    neither: it ends at ``total``. ``schedule``: ``constant`` (the default) or a shape. ``from``: the value it starts
    at, by default that at which the phase before ended, ``before`` for the first. ``to``: the value it ends at, by
    default ``default_to``; a constant one has none. ``power``: of ``polynomial``.

    what: how the list is called in errors. total: steps that there are; None: not known yet. below_one: values of 1 are
    none.
    Raises ValueError that names the table and the key for whatever cannot be.
    """
    phases: list[Phase] = []
    for i, value in enumerate(values):
        name = f"{what}[{i}]"
        unknown = [key for key in value if key not in _KEYS]
        if unknown:
            raise ValueError(f"{name} has no key {unknown[0]!r}; a phase has {', '.join(_KEYS)}")
        begin = phases[-1].end if phases else start
        shape = value.get("schedule", "constant")
        if shape != "constant" and shape not in SHAPES:
            known = ", ".join(["constant", *SHAPES])
            raise ValueError(f"{name}.schedule = {shape!r} is no shape of a phase; known are {known}")
        end = _end(name, value, begin, total, last=i == len(values) - 1)
        first = value.get("from", phases[-1].last if phases else before)
        if first is None:
            raise ValueError(f"{name}.from is missing; the first phase must say the value that it starts at")
        if shape == "constant" and "to" in value:
            raise ValueError(f"{name}.to = {value['to']} means nothing to a constant phase; give it a schedule")
        if "power" in value and shape != "polynomial":
            raise ValueError(f"{name}.power = {value['power']} means nothing to schedule {shape!r}, only to polynomial")
        last = first if shape == "constant" else value.get("to", default_to)
        if last is None:
            raise ValueError(f"{name}.to is missing; say the value that the phase ends at")
        exponent = value.get("power", power)
        for key, number in (("from", first), ("to", last)):
            if not _is_number(number) or not 0.0 <= number <= 1.0 or (below_one and number == 1.0):
                raise ValueError(f"{name}.{key} = {number!r} must be a number in [0, 1{')' if below_one else ']'}")
        if not _is_number(exponent) or not exponent > 0:
            raise ValueError(f"{name}.power = {exponent!r} must be a number above 0")
        phases.append(Phase(begin, end, shape, float(first), float(last), float(exponent)))
    return phases


def value_at(phases: Sequence[Phase], step: int) -> float:
    """The value at a step (from 0) at or after the start of the first phase; past the end that of the last phase."""
    for phase in phases:
        if step < phase.end:
            if phase.shape == "constant":
                return phase.first
            left = SHAPES[phase.shape]((step - phase.start) / (phase.end - phase.start), phase.power)
            return phase.last + (phase.first - phase.last) * left
    return phases[-1].last


def _end(name: str, value: Mapping[str, Any], begin: int, total: int | None, *, last: bool) -> int:
    """The step at which a phase that begins at ``begin`` ends."""
    given = [key for key in ("steps", "until") if key in value]
    for key in given:
        if not isinstance(value[key], int) or isinstance(value[key], bool):
            raise ValueError(f"{name}.{key} = {value[key]!r} must be a whole number of steps")
    if len(given) == 2:
        raise ValueError(f"{name} has steps = {value['steps']} and until = {value['until']}; say one of them")
    if not given:
        if not last:
            raise ValueError(f"{name} says neither steps nor until; only the last phase may, it goes on to the end")
        if total is None:
            return begin + 1  # only checked, not used
        if begin >= total:
            raise ValueError(
                f"{name} would begin at step {begin}, but there are {total} steps; shorten what comes before"
            )
        return total
    end: int = begin + value["steps"] if "steps" in value else value["until"]
    if end <= begin:
        fix = f"use until of at least {begin + 1}" if "until" in value else "use at least 1"
        raise ValueError(f"{name}.{given[0]} = {value[given[0]]} leaves no step from step {begin} on; {fix}")
    if total is not None and end > total:
        raise ValueError(
            f"{name}.{given[0]} = {value[given[0]]} ends at step {end}, but the schedule has {total} steps; shorten "
            f"it, or set optim.schedule_steps to {end}"
        )
    return end


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_scales(values: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    """(first step, factor of the rate) of each table of optim.lr_scales. ValueError that names what cannot be."""
    scales: list[tuple[int, float]] = []
    for i, table in enumerate(values):
        name = f"optim.lr_scales[{i}]"
        if set(table) != {"step", "scale"}:
            raise ValueError(f"{name} has {', '.join(table) or 'nothing'}; it takes step and scale")
        step, scale = table["step"], table["scale"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise ValueError(f"{name}.step = {step!r} must be a step of at least 1")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ValueError(f"{name}.scale = {scale!r} must be a number above 0")
        if scales and step <= scales[-1][0]:
            raise ValueError(f"{name}.step = {step} does not come after the one before, {scales[-1][0]}")
        scales.append((step, float(scale)))
    return tuple(scales)
