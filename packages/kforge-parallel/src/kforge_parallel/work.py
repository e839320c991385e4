"""What a step is made of, for estimates: rows, microbatches, and what the optimizer keeps. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from kforge_parallel.config import ParallelConfig

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
"""Bytes of an element of ``parallel.precision``."""
OPTIMIZERS = ("adamw", "lion", "cautious_lion", "muon", "schedule_free", "none")
"""Whose state is known here; none: a state of no bytes."""
MOMENTS = ("fp32", "bf16", "int8")
OF_ADAMW = ("adamw", "muon")
"""Optimizers of which AdamW has a part, and so moments that can be kept in several ways."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step is made of, beside model and layout."""

    row_tokens: int
    """Tokens of a row."""
    microbatch_rows: int = 1
    """Rows that a data rank computes at a time."""
    microbatches: int = 1
    """Of each data rank in a step."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    moments: str = "fp32"
    """How AdamW keeps its moments: fp32, bf16 or int8 (`MOMENTS`)."""
    row_variance: bool = False
    """Whether muon keeps a second moment of each row."""
    ema: bool = False
    """Whether an average of the weights is kept beside them, on the device."""

    def __post_init__(self) -> None:
        for name in ("row_tokens", "microbatch_rows", "microbatches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r} must be a whole number of at least 1")
        for name, known in (("optimizer", OPTIMIZERS), ("moments", MOMENTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: of its state nothing is known; use one of {', '.join(known)}"
                )
        if self.moments != "fp32" and self.optimizer not in OF_ADAMW:
            raise ValueError(
                f"moments = {self.moments!r} is how AdamW keeps its moments, and optimizer = {self.optimizer!r} has "
                f"none of them; leave moments out, or use optimizer {' or '.join(OF_ADAMW)}"
            )
        if self.row_variance and self.optimizer != "muon":
            raise ValueError(
                f"row_variance = true is a moment of muon, and optimizer = {self.optimizer!r}; leave it out"
            )


def storage_bytes(config: ParallelConfig) -> int:
    """Bytes of an element of a stored weight."""
    return 2 if config.storage != "fp32" else max(4, COMPUTE_BYTES[config.precision])
