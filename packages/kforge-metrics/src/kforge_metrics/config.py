"""What is written down of a run, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Events and where they go."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    every_steps: int = 10
    """Steps between two log lines. Values in between are averaged over the interval; nothing waits for the device."""
    console: bool = True
    """Progress and log lines on the console of rank 0."""
    jsonl: bool = True
    """Every event as a line of `events.jsonl` in the run's folder."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"metrics.every_steps = {self.every_steps} must be at least 1 step")
