"""What is done when something goes wrong, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Signals and bad steps."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """Signals that ask for a checkpoint and a clean exit. One process that gets one is enough."""
    nonfinite: Literal["skip", "abort"] = "skip"
    """What a loss or gradient norm that is not finite on any rank does: the step is skipped on all ranks, weights
    untouched; abort also ends the run with exit code 76."""
    max_skipped_in_a_row: int = 10
    """So many skipped steps one after the other end the run with exit code 76. 0: no limit."""

    def __post_init__(self) -> None:
        if self.max_skipped_in_a_row < 0:
            raise ValueError(
                f"resilience.max_skipped_in_a_row = {self.max_skipped_in_a_row} must be 0 (no limit) or more steps"
            )
