"""The resolved config for eyes (TOML, with the origin of each value behind it) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from kforge_train.config import JobConfig, optim_config
from kforge_train.resolve import Resolved
from kforge_train.toml import to_toml

if TYPE_CHECKING:
    from kforge_optim import Group


def as_text(resolved: Resolved) -> str:
    """TOML that can be used as a file again; behind each value stands where it came from."""
    return to_toml(resolved.config, comments=resolved.origin)


def as_json(resolved: Resolved) -> str:
    """`{"config": {section: {key: value}}, "origin": {path: text}}`."""
    return json.dumps({"config": dataclasses.asdict(resolved.config), "origin": resolved.origin}, indent=2)


def rates(config: JobConfig, groups: Sequence[Group]) -> str:
    """What moves in a run, at its first and last step, as warm-up and phases end, and at each tenth: a
    line a step, from 0."""
    from kforge_optim.schedules import curves

    optim, batch, total_steps = optim_config(config), config.data.batch_size(), config.train.steps
    found: dict[str, Callable[[int], float]] = {
        quantity if len(lines) == 1 else f"{quantity}: {whose}": curve
        for quantity, lines in curves(optim, total_steps, groups).items()
        for whose, curve in lines.items()
    }
    if batch.phases:
        found["rows"] = batch.at
    lengths = config.data.row_lengths()
    if len(lengths) > 1:
        found["tokens of a row"] = config.data.row_tokens_at
    tenths = {total_steps * tenth // 10 for tenth in range(10)}
    ends = {optim.warmup_steps, *accumulate(steps for steps, _ in batch.phases)}
    ends |= {first for first, _ in lengths} | {table["step"] for table in optim.lr_scales}
    steps = sorted({*tenths, *(min(end, total_steps - 1) for end in ends), total_steps - 1})
    widths = {name: max(16, len(name) + 2) for name in found}
    lines = [f"{'step':>16}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
    for step in steps:
        values = {name: curve(step) for name, curve in found.items()}
        texts = {name: str(value) if isinstance(value, int) else f"{value:.4g}" for name, value in values.items()}
        lines.append(f"{step:>16}" + "".join(f"{text:>{widths[name]}}" for name, text in texts.items()))
    return "\n".join(lines) + "\n"
