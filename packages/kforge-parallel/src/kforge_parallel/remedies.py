"""What would make a model fit where no layout does: each is planned anew, and told only where it helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kforge_parallel.config import ParallelConfig
from kforge_parallel.planner import FREE, LayoutPlan
from kforge_parallel.work import OF_ADAMW, Work

TIMES, MOST = (2, 4, 8, 16, 32, 64), 1024
"""So many times the devices are looked at, and no more devices than that."""


def remedies(
    plan: LayoutPlan, replan: Callable[..., LayoutPlan], gpus: int, config: ParallelConfig, work: Work
) -> Iterator[str]:
    """Of a plan without a fitting layout: changes that have one, a line each.

    replan: plans with other ``gpus``, ``config`` or ``work``, all else being as it was.
    """
    if plan.beyond:
        nearest = plan.beyond[0][0]
        size = math.ceil(nearest.estimate.peak / (1 - FREE) / 1e9)
        yield f"{size} GB a device: {nearest.name}, recompute = {nearest.config.recompute}"
    for times in (n for n in TIMES if n * gpus <= MOST):
        if found := _best(replan, gpus=times * gpus):
            yield f"{times * gpus} devices: {found}"
            break
    lean: dict[str, Any] = {}
    if config.precision == "bf16" and config.storage == "fp32":
        lean["config"] = replace(config, storage="split")
    if work.optimizer in OF_ADAMW and work.moments == "fp32":
        lean["work"] = replace(work, moments="bf16")
    if lean and (found := _best(replan, **lean)):
        said = ("storage = split", "config"), ("moments = bf16", "work")
        yield f"{' and '.join(text for text, kind in said if kind in lean)}: {found}"
    for field, where in (("offload_activations", "activations"), ("cpu_offload", "weights and the optimizer's state")):
        if found := _best(replan, config=replace(config, **{field: True})):  # type: ignore[arg-type]
            yield f"parallel.{field} = true ({where} in host memory): {found}"


def _best(replan: Callable[..., LayoutPlan], **changes: Any) -> str:
    """The fastest layout, for people; "" where none fits."""
    try:
        fitting = replan(**changes).fitting
    except ValueError:  # what cannot be together
        return ""
    return f"{fitting[0].name}, recompute = {fitting[0].config.recompute}" if fitting else ""
