"""When the run is saved and what is kept, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Checkpoints of the run."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    dir: str = ""
    """Folder of the checkpoints. Empty: `checkpoints` in the run's folder."""
    every_steps: int = 1000
    """Save after each so many steps. 0: only at the end and when asked to stop."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept; at least 1."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted. 0: none is kept for its number."""
    resume: bool = True
    """Go on from the newest committed checkpoint in `dir`. False: start afresh; a folder that already holds
    checkpoints is then an error."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"ckpt.keep_last = {self.keep_last} must be at least 1: the newest is never deleted")
        for name in ("every_steps", "keep_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"ckpt.{name} = {getattr(self, name)} must be 0 (off) or more steps")
