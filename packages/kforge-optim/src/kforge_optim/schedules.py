"""How the learning rate moves: each schedule is a pure function of the step, so a resume cannot be off by one.

A factor in [0, 1] multiplies the peak rate. Steps count from 0. All schedules share one time axis::

    0 ........ warmup ........ total - decay ........ total ........
    rises      flat            descends               stays at floor

* Step s of the warm-up has factor (s + 1) / warmup: the first step moves already, the last one has the peak.
* Step s of the descent has progress (s - (total - decay)) / decay: the descent starts at the peak, and the floor is
  reached as the run ends, so no step of the run is spent at a rate of 0.
* A step at or after ``total`` has the floor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kforge_optim.config import OptimConfig
from kforge_optim.phases import SHAPES, check_shape, read_phases, read_scales, value_at
from kforge_optim.registry import Registry

if TYPE_CHECKING:
    from kforge_optim.groups import Group

T = TypeVar("T")

Schedule = Callable[[int], float]
"""Step (from 0) -> factor of the peak rate, in [0, 1]."""

ScheduleBuilder = Callable[[OptimConfig, int], Schedule]
"""(config, total_steps) -> schedule: what is registered by name. Refuses impossible lengths with ValueError."""

SCHEDULES: Registry[ScheduleBuilder] = Registry("schedule", "kforge.schedules")
register_schedule = SCHEDULES.register
"""Decorator: ``@register_schedule("mine")`` over a function ``(config, total_steps) -> (step -> factor)``."""


def constant(step: int, *, total: int, warmup: int = 0) -> float:
    """Warm-up, then the peak rate for ever."""
    _check(step, total, warmup, 0)
    return (step + 1) / warmup if step < warmup else 1.0


def linear(step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> float:
    """Warm-up, then a straight line from the peak to ``floor``; ``decay`` None: over all steps after warm-up."""
    return _descend(step, total, warmup, total - warmup if decay is None else decay, floor, "linear")


def cosine(step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> float:
    """Warm-up, then half a cosine from the peak to ``floor`` (Loshchilov and Hutter 2017, equation 5, one cycle).

    ``decay`` None: over all steps after warm-up; else the peak is held until ``decay`` steps are left.
    """
    return _descend(step, total, warmup, total - warmup if decay is None else decay, floor, "cosine")


def polynomial(
    step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1, power: float = 2.0
) -> float:
    """Warm-up, then (1 - p)^power of the way from ``floor`` to the peak; ``power`` 1 is `linear`."""
    decay = total - warmup if decay is None else decay
    return _descend(step, total, warmup, decay, floor, "polynomial", power)


def rex(step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> float:
    """Warm-up, then the reflected exponential (1 - p) / (1/2 + (1 - p)/2) of Chen et al. 2021 (arXiv 2107.04197).

    It stays near the peak for longer than a line, and falls faster at the end.
    """
    return _descend(step, total, warmup, total - warmup if decay is None else decay, floor, "rex")


def wsd(
    step: int,
    *,
    total: int,
    warmup: int = 0,
    decay: int | None = None,
    floor: float = 0.1,
    shape: str = "linear",
    power: float = 2.0,
) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, section 4): flat, then down over the last ``decay`` steps.

    ``decay`` None: a fifth of all steps, or what warm-up leaves of it. ``shape``: linear, cosine, 1-sqrt (Hägele et
    al. 2024, arXiv 2405.18392), polynomial or rex.
    """
    decay = min(total // 5, total - warmup) if decay is None else decay
    return _descend(step, total, warmup, decay, floor, shape, power)


def inverse_sqrt(
    step: int,
    *,
    total: int,
    warmup: int = 0,
    decay: int = 0,
    floor: float = 0.1,
    shape: str = "linear",
    power: float = 2.0,
) -> float:
    """Warm-up, then √(warmup / step), not below ``floor`` (Vaswani et al. 2017, equation 3, over its peak).

    Without warm-up it is √(1 / (step + 1)). The last ``decay`` steps go from where it stands then to ``floor``, along
    ``shape`` (Zhai et al. 2022, arXiv 2106.04560, section 3.5); without them it stays where it is at ``total``.
    """
    _check(step, total, warmup, decay)
    _check_floor(floor)
    if step < warmup:
        return (step + 1) / warmup

    def body(at: int) -> float:
        scale = max(warmup, 1)
        return max(floor, math.sqrt(scale / (at - warmup + scale)))

    if step < total - decay or decay == 0:
        return body(min(step, total))
    return _cooled(step, total - decay, decay, body(total - decay), floor, shape, power)


def _descend(step: int, total: int, warmup: int, decay: int, floor: float, shape: str, power: float = 1.0) -> float:
    _check(step, total, warmup, decay)
    _check_floor(floor)
    if step >= total:
        return floor
    if step < warmup:
        return (step + 1) / warmup
    if step < total - decay:
        return 1.0
    return _cooled(step, total - decay, decay, 1.0, floor, shape, power)


def _cooled(step: int, start: int, decay: int, peak: float, floor: float, shape: str, power: float) -> float:
    """From ``peak`` at step ``start`` down to ``floor``, ``decay`` steps later, and there for ever."""
    check_shape("optim.decay_shape", shape)
    if step >= start + decay:
        return floor
    return floor + (peak - floor) * SHAPES[shape]((step - start) / decay, power)


def _check_floor(floor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"optim.min_lr_ratio = {floor} must lie in [0, 1]")


def _check(step: int, total: int, warmup: int, decay: int) -> None:
    if step < 0:
        raise ValueError(f"step = {step} must not be negative")
    if total < 1:
        raise ValueError(f"total steps = {total} must be at least 1")
    if warmup < 0:
        raise ValueError(f"optim.warmup_steps = {warmup} must not be negative")
    if warmup > total:
        raise ValueError(
            f"optim.warmup_steps = {warmup} is longer than the run of {total} steps, so the peak rate would never be "
            f"reached; use at most {total}"
        )
    if decay < 0:
        raise ValueError(f"optim.decay_steps = {decay} must not be negative")
    if warmup + decay > total:
        raise ValueError(
            f"optim.warmup_steps = {warmup} and optim.decay_steps = {decay} do not fit into {total} steps; "
            f"use decay_steps of at most {total - warmup}"
        )


def _takes(config: OptimConfig, *fields: str) -> None:
    """Raises ValueError where one of the fields that only some schedules read is set, and is not among ``fields``."""
    hints = {
        "decay_steps": "it never descends; leave it out, or use cosine, linear or wsd",
        "decay_shape": "use wsd, inverse_sqrt or optim.decay_from",
        "decay_power": "use polynomial",
        "warmup_steps": "it has no warm-up; use schedule = 'constant'",
        "phases": "use schedule = 'phases'",
    }
    for name, hint in hints.items():
        value = getattr(config, name)
        straight = name == "decay_power" and "decay_shape" in fields and config.decay_shape != "polynomial"
        if (name not in fields or straight) and value != getattr(_PLAIN, name):
            raise ValueError(f"optim.{name} = {value} means nothing to schedule {config.schedule!r}: {hint}")


_PLAIN = OptimConfig()


def _descending(function: Callable[..., float], *extra: str) -> ScheduleBuilder:
    """The builder of a schedule that takes warm-up, descent and floor; ``extra``: further fields that it reads."""

    def build(config: OptimConfig, total_steps: int) -> Schedule:
        _takes(config, "warmup_steps", "decay_steps", *extra)
        more = {name.removeprefix("decay_"): getattr(config, name) for name in extra}
        if config.decay_steps is not None or function is not inverse_sqrt:
            more["decay"] = config.decay_steps

        def schedule(step: int) -> float:
            return function(step, total=total_steps, warmup=config.warmup_steps, floor=config.min_lr_ratio, **more)

        return schedule

    return build


register_schedule("cosine")(_descending(cosine))
register_schedule("linear")(_descending(linear))
register_schedule("rex")(_descending(rex))
register_schedule("polynomial")(_descending(polynomial, "decay_power"))
register_schedule("wsd")(_descending(wsd, "decay_shape", "decay_power"))
register_schedule("inverse_sqrt")(_descending(inverse_sqrt, "decay_shape", "decay_power"))


@register_schedule("constant")
def _build_constant(config: OptimConfig, total_steps: int) -> Schedule:
    _takes(config, "warmup_steps")
    return lambda step: constant(step, total=total_steps, warmup=config.warmup_steps)


@register_schedule("none")
def _build_none(config: OptimConfig, total_steps: int) -> Schedule:
    _takes(config)
    return lambda step: constant(step, total=total_steps)


@register_schedule("phases")
def _build_phases(config: OptimConfig, total_steps: int) -> Schedule:
    _takes(config, "warmup_steps", "decay_power", "phases")
    if not config.phases:
        raise ValueError(
            "schedule = 'phases' wants optim.phases, a list of phases as {steps = 100, schedule = 'linear'}"
        )
    warmup = config.warmup_steps
    constant(0, total=total_steps, warmup=warmup)  # the checks of lengths
    phases = read_phases(
        "optim.phases",
        config.phases,
        start=warmup,
        total=total_steps,
        default_to=config.min_lr_ratio,
        power=config.decay_power,
    )

    def schedule(step: int) -> float:
        _check(step, total_steps, warmup, 0)
        return phases[0].first * (step + 1) / warmup if step < warmup else value_at(phases, step)

    return schedule


_COME_DOWN = ("cosine", "linear", "polynomial", "rex", "phases")


def _decay_from(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule that ``config`` names, as if it never came down, until `decay_from`; then the cool-down."""
    start, decay, floor = config.decay_from, config.decay_steps, config.min_lr_ratio
    assert start is not None
    if config.schedule in _COME_DOWN:
        raise ValueError(
            f"optim.decay_from = {start} is for schedules that go on until they are cooled down: wsd, constant, "
            f"inverse_sqrt; {config.schedule!r} comes down by itself"
        )
    if decay is None or decay < 1:
        raise ValueError(
            f"optim.decay_from = {start} wants optim.decay_steps, the steps that the cool-down takes, not {decay}"
        )
    _takes(config, "warmup_steps", "decay_steps", "decay_shape", "decay_power")
    if config.schedule_steps is not None:
        raise ValueError(
            f"optim.schedule_steps = {config.schedule_steps} means nothing beside optim.decay_from = {start}: the "
            f"schedule ends after step {start} + optim.decay_steps; leave it out"
        )
    if config.warmup_steps > start:
        raise ValueError(
            f"optim.decay_from = {start} lies in the warm-up of {config.warmup_steps} steps; use at least that step"
        )
    name = "constant" if config.schedule == "wsd" else config.schedule
    plain = replace(config, schedule=name, decay_from=None, decay_steps=None, decay_shape="linear", decay_power=2.0)
    body = SCHEDULES.get(name)(plain, max(start + decay, total_steps))
    peak = body(start)

    def schedule(step: int) -> float:
        if step < start:
            return body(step)
        return _cooled(step, start, decay, peak, min(floor, peak), config.decay_shape, config.decay_power)

    return schedule


def horizon(config: OptimConfig, total_steps: int) -> int:
    """The step at which the schedules of ``config`` have come to their end, in a run of ``total_steps``."""
    if config.decay_from is not None:
        return config.decay_from + (config.decay_steps or 0)
    return config.schedule_steps or total_steps


def build_momentum_schedule(config: OptimConfig, total_steps: int) -> Schedule | None:
    """The momentum of each step, by ``config.momentum_phases``; None where it does not move.

    Raises ValueError for phases that do not fit.
    """
    if not config.momentum_phases:
        return None
    total = horizon(config, total_steps)
    phases = read_phases("optim.momentum_phases", config.momentum_phases, total=total, before=None)
    return lambda step: value_at(phases, step)


def build_weight_decay_schedule(config: OptimConfig, total_steps: int) -> Schedule | None:
    """The factor of weight decay in each step, by ``config.weight_decay_phases``; None where it does not move.

    Raises ValueError for phases that do not fit.
    """
    if not config.weight_decay_phases:
        return None
    total = horizon(config, total_steps)
    phases = read_phases("optim.weight_decay_phases", config.weight_decay_phases, total=total)
    return lambda step: value_at(phases, step)


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule that ``config`` names, as a function of the step.

    ``total_steps``: optimizer steps of the run, which are the schedule's horizon unless ``config.schedule_steps`` is.
    The schedule answers for any step from 0, also past the end.

    Raises ValueError for an unknown name (listing the known ones), for lengths that do not fit, for fields that mean
    nothing to the schedule and for a first step whose rate would be 0: here, and not in the middle of a run.
    """
    if config.warmup_tokens:
        raise ValueError(
            f"optim.warmup_tokens = {config.warmup_tokens} is a number of tokens, and how many a step has is not known "
            "here; use config.in_steps(tokens_per_step)"
        )
    if config.decay_from is not None:
        schedule = _decay_from(config, total_steps)
    else:
        schedule = SCHEDULES.get(config.schedule)(config, horizon(config, total_steps))
    first = schedule(0)  # and the checks of lengths
    if not 0.0 < first < math.inf:
        raise ValueError(
            f"schedule {config.schedule!r} gives the first step a factor of {first}, with which it would be spent for "
            "nothing; let it begin above 0, or warm up with optim.warmup_steps"
        )
    scales = read_scales(config.lr_scales)
    return partial(_scaled, schedule, scales) if scales else schedule


def _scaled(schedule: Schedule, scales: Sequence[tuple[int, float]], step: int) -> float:
    return schedule(step) * [1.0, *(scale for first, scale in scales if first <= step)][-1]


def curves(config: OptimConfig, total_steps: int, groups: Sequence[Group] = ()) -> dict[str, dict[str, Schedule]]:
    """What of ``config`` moves, as functions of the step: quantity -> whose it is -> its value. The quantities are
    ``learning rate`` and, where they have phases, ``momentum``, of the optimizer ``config.name``, and ``weight decay``.

    groups: those of an `Optimizer` of ``config``, each with its rate and decay; what is alike has one entry. Without
    them there is one, of ``config.lr`` and ``config.weight_decay``.

    Raises ValueError as `build_schedule` does.
    """
    rate = build_schedule(config, total_steps)
    momentum = build_momentum_schedule(config, total_steps)
    decay = build_weight_decay_schedule(config, total_steps)
    rates = _alike((group.name, (group.lr, group.schedule or rate)) for group in groups)
    decays = _alike((group.name, group.weight_decay) for group in groups)
    found: dict[str, dict[str, Schedule]] = {
        "learning rate": {
            whose: partial(_times, peak, schedule)
            for whose, (peak, schedule) in rates.items() or [("all", (config.lr, rate))]
        }
    }
    if momentum is not None:
        found["momentum"] = {config.name: momentum}
    if decay is not None:
        found["weight decay"] = {
            whose: partial(_times, peak, decay) for whose, peak in decays.items() or [("all", config.weight_decay)]
        }
    return found


def _times(peak: float, schedule: Schedule, step: int) -> float:
    return peak * schedule(step)


def _alike(values: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Values by name -> each value once, under the names that have it."""
    names: dict[T, list[str]] = {}
    for name, value in values:
        names.setdefault(value, []).append(name)
    labels = {
        value: ", ".join(having[:2]) + f" and {len(having) - 2} more" * (len(having) > 2)
        for value, having in names.items()
    }
    return {"all" if len(names) == 1 else label: value for value, label in labels.items()}


def plot(config: OptimConfig, total_steps: int, path: str | os.PathLike[str], groups: Sequence[Group] = ()) -> None:
    """Draw the `curves` of a run of ``total_steps`` over its steps, a quantity below the other, as a picture at
    ``path``.

    The name's ending says the format (png, svg, pdf). Raises ValueError as `build_schedule` does, and ImportError with
    the name of the extra without matplotlib.
    """
    found = curves(config, total_steps, groups)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'kforge-optim[plot]'") from error
    steps = sorted({*range(0, total_steps, max(1, total_steps // 2000)), total_steps - 1})
    figure = Figure(figsize=(7.0, 0.8 + 2.2 * len(found)), dpi=150, layout="constrained")
    column = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
    for axes, (quantity, lines) in zip(column, found.items(), strict=True):
        for whose, curve in lines.items():
            axes.plot(steps, [curve(step) for step in steps], label=whose)
        if len(lines) > 1:
            axes.legend(fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(quantity)
        axes.grid(True, alpha=0.3)
    column[-1].set_xlabel("optimizer step")
    column[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{config.schedule}, {total_steps} steps")
    figure.savefig(path)
