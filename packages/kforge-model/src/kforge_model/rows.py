"""What attention needs to know of a microbatch: where each token stands, and which document it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kforge_model.inputs import INDEX_DTYPES, at_hand


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
    columns: Tensor | None = None
    """[S] int64: which column of its row each token is, where these are a part of the rows (context parallelism). The
    core that takes the place of the model's reads it, and ``whole``."""
    whole: Rows | None = None
    """The rows that these are a part of."""

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
        if not lengths:
            raise ValueError("lengths = [] holds no row; give the lengths of at least one")
        totals = {sum(row) for row in lengths}
        if len(totals) != 1:
            raise ValueError(f"rows of {sorted(totals)} tokens do not make a rectangle; pad or cut the documents")
        if any(length < 1 for row in lengths for length in row) or not all(lengths):
            raise ValueError(f"lengths = {lengths} holds an empty document or row; leave it out")
        positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
        documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
        ends = torch.tensor([0, *(length for row in lengths for length in row)]).cumsum(0)
        return cls(
            position_ids=torch.stack(positions).to(device),
            cu_seqlens=ends.to(device=device, dtype=torch.int32),
            max_seqlen=max(length for row in lengths for length in row),
            doc_ids=torch.stack(documents).to(device),
        )


def check_rows(rows: Rows) -> None:
    """Raise ValueError for rows whose documents no kernel, or not every kernel, could tell apart.

    Shapes and dtypes always; what stands in ``cu_seqlens`` and ``doc_ids`` where it can be read without waiting for a
    device, on the CPU.
    """
    if getattr(rows, "columns", None) is not None:
        raise ValueError(
            "rows with columns are a part of the rows, and this attention core wants them whole; build the model with "
            "parallel.cp, which puts another core in its place, or give it rows without columns"
        )
    shape, docs, ends = tuple(rows.position_ids.shape), rows.doc_ids, rows.cu_seqlens
    if rows.position_ids.dtype not in INDEX_DTYPES:
        raise ValueError(f"position_ids came as {rows.position_ids.dtype}, and must be int64 (or int32)")
    if docs is not None and tuple(docs.shape) != shape:
        raise ValueError(f"doc_ids of shape {tuple(docs.shape)} do not fit position_ids {shape}: one for each token")
    if ends is not None and (ends.ndim != 1 or ends.dtype != torch.int32 or len(ends) < 1):
        raise ValueError(
            f"cu_seqlens came as {ends.dtype} of shape {tuple(ends.shape)}, and must be int32 [documents + 1]: where "
            "documents begin in the flattened microbatch, and its end"
        )
    begins = None  # [B,S] of whether a document begins at a token
    if docs is not None and at_hand(docs):
        steps = docs.diff(dim=1)
        if bool((steps < 0).any()):
            raise ValueError("doc_ids fall along a row; a document is one run of tokens, so number them as they come")
        begins = torch.cat((torch.ones_like(docs[:, :1], dtype=torch.bool), steps > 0), dim=1)
    if ends is not None and at_hand(ends):
        _check_ends(ends, rows.max_seqlen, shape, begins)


def _check_ends(ends: Tensor, max_seqlen: int, shape: tuple[int, ...], begins: Tensor | None) -> None:
    """`check_rows` for cu_seqlens that can be read. begins: what doc_ids say."""
    tokens, lengths = shape[0] * shape[1], ends.diff()
    first, last, falls = int(ends[0]), int(ends[-1]), bool((lengths < 0).any())
    if first != 0 or last != tokens or falls:
        raise ValueError(
            f"cu_seqlens begin with {first} and end with {last}{', and fall between' if falls else ''}; they must rise "
            f"from 0 to {tokens}, the tokens of the microbatch"
        )
    if not tokens:
        return
    if max_seqlen < (longest := int(lengths.max())):
        raise ValueError(f"max_seqlen = {max_seqlen} is below the longest document, {longest} tokens; set it to that")
    said = torch.zeros(tokens + 1, dtype=torch.bool).index_fill_(0, ends.to(torch.int64), True)[:tokens].view(shape)
    if not bool(said[:, 0].all()):
        row = int((~said[:, 0]).nonzero()[0])
        raise ValueError(
            f"cu_seqlens have a document that crosses from row {row - 1} into row {row}; let one begin at token "
            f"{row * shape[1]}, where the row does"
        )
    if begins is not None and not torch.equal(begins, said):
        raise ValueError(
            "cu_seqlens and doc_ids cut the rows into different documents, and some kernels read the one, some the "
            "other; make them agree, or leave one out"
        )
