"""The resolved config for eyes (TOML, with the origin of each value behind it) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kforge_optim.config import OptimConfig
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


def rates(config: OptimConfig, total_steps: int, groups: Sequence[Group]) -> str:
    """What moves in a run, at its first and last step, as warm-up ends, and at each tenth: a line a step, from 0."""
    from kforge_optim.schedules import curves

    found = {
        quantity if len(lines) == 1 else f"{quantity}: {whose}": curve
        for quantity, lines in curves(config, total_steps, groups).items()
        for whose, curve in lines.items()
    }
    tenths = {total_steps * tenth // 10 for tenth in range(10)}
    steps = sorted({*tenths, min(config.warmup_steps, total_steps - 1), total_steps - 1})
    widths = {name: max(16, len(name) + 2) for name in found}
    lines = [f"{'step':>16}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
    for step in steps:
        cells = (f"{curve(step):>{widths[name]}.4g}" for name, curve in found.items())
        lines.append(f"{step:>16}" + "".join(cells))
    return "\n".join(lines) + "\n"
