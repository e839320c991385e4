"""An event: one thing that happened in a run, as plain data that fits on one line of JSON.

Kinds that kforge-train writes, and that the console and the report know; any other kind is kept and shown too:

==========  ==================================================================================================
start       config, versions, world; written by every process that starts the run
resume      step: the checkpoint that was loaded; everything later that was written before is void
step        loss, grad_norm, lr, tokens_per_s, step_s, mfu, mfu_palm, tokens_total, skipped, peak_memory_bytes
eval        loss (nats a token), bits_per_byte, perplexity, tokens
checkpoint  seconds; background: it is still being written
skip        reason, ranks: a step that changed no weight
stop, end   how the run ended
==========  ==================================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    ``values`` is kept as given; `to_json` makes plain data of it: tensors and NumPy values become numbers and lists
    (a device tensor waits for its device), tuples lists, dataclasses objects, keys strings, and whatever else its
    ``str``.
    """

    kind: str
    """What happened; see the table above."""
    step: int
    """Optimizer steps done when it happened."""
    time: float
    """Seconds since 1970."""
    rank: int = 0
    """The process that says so."""
    values: dict[str, Any] = field(default_factory=dict)
    """Numbers, strings, and lists and dicts of such."""

    def to_json(self) -> str:
        """One line of valid JSON in ASCII, without its newline.

        JSON has no NaN: numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity", which
        Python's ``float``, JavaScript's ``Number`` and pandas all read. `from_json` turns them back into numbers.
        """
        line = {"kind": self.kind, "step": int(self.step), "time": float(self.time), "rank": int(self.rank)}
        return json.dumps({**line, "values": plain(self.values)}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Event:
        """The inverse of `to_json`. Raises ValueError for a line that is not an event, such as half of one."""
        data = json.loads(line)
        try:
            return cls(
                kind=str(data["kind"]),
                step=int(data["step"]),
                time=float(data["time"]),
                rank=int(data["rank"]),
                values=dict(_numbers_back(data["values"])),
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an event: {line[:80]!r}") from error


def plain(value: Any) -> Any:
    """``value`` as what JSON can hold: see `Event` and `Event.to_json` for the rules."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)  # an IntEnum is its number
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and scalars; a 0-dim one gives a number
        return plain(value.tolist())
    return str(value)


def _numbers_back(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers_back(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers_back(item) for item in value]
    return value
