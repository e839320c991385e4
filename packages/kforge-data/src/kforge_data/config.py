"""What is read, and how it is cut into rows and batches, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kforge_data.batch_size import BatchSize, read_batch_phases


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A folder of token shards, and the batch made of it at each optimizer step."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    train: str = ""
    """Folder of token shards to train on, as `kforge-data tokenize` writes it."""
    heldout: str = ""
    """Folder of token shards to evaluate on. Empty: no evaluation."""
    tokenizer: str = ""
    """The tokenizer.json that made the shards; used to print text and checked by fingerprint. Empty: not needed."""
    row_tokens: int = 512
    """Length of a row, in tokens."""
    global_rows: int = 32
    """Rows of one optimizer step over all processes."""
    batch_phases: tuple[dict[str, Any], ...] = ()
    """Steps of other sizes that come first, one phase after the other, each with `rows` and its length in `steps` or in
    `tokens` (rounded up to whole steps), as [{tokens = 1000000, rows = 8}, {steps = 500, rows = 16}]; then global_rows.
    Rows come in the same order as ever. Empty: all steps have global_rows."""
    microbatch_rows: int | None = None
    """Rows that one process sees in one forward pass. None: all that it has in a step (no accumulation)."""
    seed: int = 1
    """Chooses the order of rows. The order is a function of this seed and the position, of nothing else."""
    shuffle: bool = True
    """Visit the rows of each epoch in a pseudo-random order; False: in the order in which they lie."""
    isolate_documents: bool = True
    """Positions restart and attention stops at document boundaries. False: a row is one text to attention. A label
    never crosses a boundary either way."""
    workers: int = 1
    """Threads that read ahead. 0: rows are read when asked for. The order does not depend on it."""

    def __post_init__(self) -> None:
        for name in ("row_tokens", "global_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} = {getattr(self, name)} must be at least 1")
        if self.microbatch_rows is not None and self.microbatch_rows < 1:
            raise ValueError(f"data.microbatch_rows = {self.microbatch_rows} must be at least 1")
        if self.workers < 0:
            raise ValueError(f"data.workers = {self.workers} must be 0 (no read-ahead) or more")
        read_batch_phases(self.batch_phases, self.row_tokens)

    def batch_size(self) -> BatchSize:
        """Rows of each step."""
        return BatchSize(self.global_rows, read_batch_phases(self.batch_phases, self.row_tokens))
