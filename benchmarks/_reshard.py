"""A checkpoint of one number of processes, and going on from it on another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from _rows import Row
from ckpt_train import state_bytes

SAVED_AT, STEPS = 2, 4


def run(row: Row, tokens: str, run_dir: str, saved: Path, load: bool) -> dict[str, Any]:
    """Train `STEPS` steps and save after `SAVED_AT` of them, or go on from there: seconds of that, and the losses after
    it, which are rank 0's to tell."""
    from kforge_metrics import read_events
    from kforge_resilience import exitcodes
    from kforge_train.build import build
    from kforge_train.resolve import resolve_config
    from kforge_train.trainer import Trainer

    changed = {"train.steps": STEPS, "metrics.every_steps": 1, "ckpt.mode": "sync", "ckpt.dir": str(saved)}
    changed["ckpt.every_steps"] = 0 if load else SAVED_AT
    config = resolve_config(row.preset, {**row.overrides(tokens, run_dir), **changed}).config
    seconds = {}

    class Timed(Trainer):
        def restore(self) -> None:
            before = time.perf_counter()
            super().restore()
            seconds["load"] = time.perf_counter() - before
            if self.next_step != (SAVED_AT if load else 0):
                raise RuntimeError(f"training starts after step {self.next_step}")

        def save(self, *, temporary: bool = False) -> None:
            if self.next_step < STEPS:  # the last one is not asked for
                before = time.perf_counter()
                super().save(temporary=temporary)
                seconds["save"] = time.perf_counter() - before

    with build(config) as parts:
        rank = parts.mesh.rank
        code = Timed(parts).run()
        if code != exitcodes.OK:
            raise RuntimeError(f"the run ended with exit code {code}")
    found: dict[str, Any] = {"seconds": seconds["load" if load else "save"], "bytes": state_bytes(saved)}
    if not rank:
        logged = [event for event in read_events(Path(run_dir, "events.jsonl")) if event.kind == "step"]
        found["losses"] = [event.values["loss"] for event in logged if event.step > SAVED_AT]
    return found
