"""What is done when something goes wrong, as plain data. Standard library only."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
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
        check_signal_names(self.stop_signals, "resilience.stop_signals")
        if self.nonfinite not in ("skip", "abort"):
            raise ValueError(f"resilience.nonfinite = {self.nonfinite!r} is neither 'skip' nor 'abort'")
        if self.max_skipped_in_a_row < 0:
            raise ValueError(
                f"resilience.max_skipped_in_a_row = {self.max_skipped_in_a_row} must be 0 (no limit) or more steps"
            )


def check_signal_names(names: Iterable[str], where: str) -> None:
    """Raise ValueError for a name that is no signal of this system, or one that no process can catch.

    ``where`` names the setting in the message.
    """
    known = {s.name for s in signal.Signals}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name).upper(), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "write it as in SIGTERM"
            raise ValueError(f"{where}: {name!r} is not a signal of this system; {hint}")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{where}: {name} cannot be caught by a process; use SIGTERM")
