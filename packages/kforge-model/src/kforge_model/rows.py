"""What attention needs to know of a microbatch: where each token stands, and which document it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one microbatch, [B,S] tokens. Any object with these attributes serves as well.

    Packed rows hold several documents, which must not see one another: both ``cu_seqlens`` and ``doc_ids`` are set
    (either alone is enough, ``cu_seqlens`` being what the variable-length kernels read). Plain rows have neither:
    every token sees all before it in its row.
    """

    position_ids: Tensor
    """[B,S] int64: place of each token in its document, from 0. RoPE rotates by it."""
    cu_seqlens: Tensor | None = None
    """[N+1] int32: where documents begin in the flattened microbatch, from 0 to B*S; a document never crosses rows.
    The last value may be repeated to pad the tensor to a fixed length."""
    max_seqlen: int = 0
    """Length of the longest document in tokens, or anything above. Read with cu_seqlens only."""
    doc_ids: Tensor | None = None
    """[B,S] int64: number of each token's document inside its row."""
    scale: Tensor | None = None
    """Weight of a token in the loss, one or [B,S], for losses that are made inside of the model. `Transformer.forward`
    puts the one there that it is given."""

    @classmethod
    def plain(cls, batch: int, seq: int, device: torch.device | str | None = None, *, first_position: int = 0) -> Rows:
        """Rows of one document each; the positions start at first_position (above 0 when decoding with a cache)."""
        positions = torch.arange(first_position, first_position + seq, device=device)
        return cls(position_ids=positions.expand(batch, seq), max_seqlen=seq)

    @classmethod
    def packed(cls, lengths: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Rows:
        """Rows of documents of the given lengths in tokens: ``[[3, 5], [8]]`` is two rows of eight tokens.

        Raises ValueError when rows differ in total length or a document is empty.
        """
        totals = {sum(row) for row in lengths}
        if len(totals) != 1:
            raise ValueError(f"rows of {sorted(totals)} tokens do not make a rectangle; pad or cut the documents")
        if any(length < 1 for row in lengths for length in row):
            raise ValueError(f"lengths = {lengths} holds an empty document; leave it out")
        positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
        documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
        ends = torch.tensor([0, *(length for row in lengths for length in row)]).cumsum(0)
        return cls(
            position_ids=torch.stack(positions).to(device),
            cu_seqlens=ends.to(device=device, dtype=torch.int32),
            max_seqlen=max(length for row in lengths for length in row),
            doc_ids=torch.stack(documents).to(device),
        )
