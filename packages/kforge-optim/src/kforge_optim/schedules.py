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
from collections.abc import Callable

from kforge_optim.config import OptimConfig
from kforge_optim.registry import Registry

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
    return _descend(step, total, warmup, total - warmup if decay is None else decay, floor, lambda p: 1.0 - p)


def cosine(step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> float:
    """Warm-up, then half a cosine from the peak to ``floor`` (Loshchilov and Hutter 2017, equation 5, one cycle).

    ``decay`` None: over all steps after warm-up; else the peak is held until ``decay`` steps are left.
    """
    decay = total - warmup if decay is None else decay
    return _descend(step, total, warmup, decay, floor, lambda p: 0.5 * (1.0 + math.cos(math.pi * p)))


def wsd(step: int, *, total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> float:
    """Warm-up, stable, decay (Hu et al. 2024, section 4): flat, then a straight line over the last ``decay`` steps.

    ``decay`` None: a fifth of all steps, or what warm-up leaves of it.
    """
    decay = min(total // 5, total - warmup) if decay is None else decay
    return _descend(step, total, warmup, decay, floor, lambda p: 1.0 - p)


def _descend(step: int, total: int, warmup: int, decay: int, floor: float, shape: Callable[[float], float]) -> float:
    _check(step, total, warmup, decay)
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"optim.min_lr_ratio = {floor} must lie in [0, 1]")
    if step >= total:
        return floor
    if step < warmup:
        return (step + 1) / warmup
    if step < total - decay:
        return 1.0
    return floor + (1.0 - floor) * shape((step - (total - decay)) / decay)


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


def _without_decay(config: OptimConfig) -> None:
    if config.decay_steps is not None:
        raise ValueError(
            f"optim.decay_steps = {config.decay_steps} means nothing to schedule {config.schedule!r}, which never "
            "descends; leave it out, or use cosine, linear or wsd"
        )


def _descending(function: Callable[..., float]) -> ScheduleBuilder:
    def build(config: OptimConfig, total_steps: int) -> Schedule:
        def schedule(step: int) -> float:
            return function(
                step,
                total=total_steps,
                warmup=config.warmup_steps,
                decay=config.decay_steps,
                floor=config.min_lr_ratio,
            )

        return schedule

    return build


register_schedule("cosine")(_descending(cosine))
register_schedule("linear")(_descending(linear))
register_schedule("wsd")(_descending(wsd))


@register_schedule("constant")
def _build_constant(config: OptimConfig, total_steps: int) -> Schedule:
    _without_decay(config)
    return lambda step: constant(step, total=total_steps, warmup=config.warmup_steps)


@register_schedule("none")
def _build_none(config: OptimConfig, total_steps: int) -> Schedule:
    _without_decay(config)
    if config.warmup_steps:
        raise ValueError(
            f"optim.warmup_steps = {config.warmup_steps} means nothing to schedule 'none', which has no warm-up; "
            "use schedule = 'constant'"
        )
    return lambda step: constant(step, total=total_steps)


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule that ``config`` names, as a function of the step.

    ``total_steps`` is the horizon, in optimizer steps; the schedule answers for any step from 0, also past the end.

    Raises ValueError for an unknown name (listing the known ones) and for lengths that do not fit, here and not in
    the middle of a run.
    """
    schedule = SCHEDULES.get(config.schedule)(config, total_steps)
    schedule(0)  # the checks of lengths
    return schedule
