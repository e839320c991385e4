"""The batch: a plain dict of tensors, made from packed rows and put on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kforge_data.masks import apply
from kforge_data.packing import pack_rows
from kforge_data.sources import merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kforge_data.buffers import Allocate
    from kforge_data.masks import Transform
    from kforge_data.sources import RowBlock, Source

Batch = dict[str, Any]
"""One microbatch of B rows of S tokens:

    input_ids, labels, position_ids   int64 [B, S]; labels are shifted, -100 where not scored
    doc_ids                           int64 [B, S], number of the document in its row; None: rows are one text
    cu_seqlens                        int32 [N+1] over the B*S tokens, padded with its last value; None likewise
    max_seqlen                        int
    source_ids                        int16 [B, S]
    row_ids                           NumPy int64 [B], stays on the host; -1 for a row of padding
"""

PADDING_ROW = -1


def cu_seqlens_length(source: Source, *, row_tokens: int, microbatch_rows: int) -> int:
    """The fixed length of `cu_seqlens`: room for the most documents that this many rows of the source can hold."""
    return microbatch_rows * source.max_documents(row_tokens) + 1


def make_batch(
    source: Source,
    row_ids: NDArray[np.int64],
    *,
    row_tokens: int,
    isolate_documents: bool,
    cu_length: int | None,
    pin: bool = False,
    transforms: Sequence[Transform] = (),
    allocate: Allocate = np.empty,
) -> Batch:
    """Read and pack rows [B] into a batch on the host; ids of -1, which must come last, give rows of padding.
    ``transforms`` change the raw rows in between, and ``allocate`` gives the memory of the batch."""
    real = row_ids[row_ids != PADDING_ROW] if row_ids[-1] == PADDING_ROW else row_ids
    block = apply(transforms, source.read_rows(real, row_tokens)) if real.size else merged([], 0, row_tokens)
    return pack_batch(
        block.padded(len(row_ids)),
        row_ids,
        isolate_documents=isolate_documents,
        cu_length=cu_length,
        pin=pin,
        allocate=allocate,
    )


def pack_batch(
    block: RowBlock,
    row_ids: NDArray[np.int64],
    *,
    isolate_documents: bool,
    cu_length: int | None,
    pin: bool = False,
    allocate: Allocate = np.empty,
) -> Batch:
    """The batch of raw rows [B]. Where the lanes of its rows stand after it is ``lane_states``, which a `Loader` takes
    out again."""
    packed = pack_rows(block, isolate_documents=isolate_documents, cu_length=cu_length, allocate=allocate)
    source_ids: NDArray[np.int16] = allocate(packed.input_ids.shape, np.int16)
    source_ids[:] = block.source_ids[:, None]
    arrays = {
        "input_ids": packed.input_ids,
        "labels": packed.labels,
        "position_ids": packed.position_ids,
        "doc_ids": packed.doc_ids,
        "cu_seqlens": packed.cu_seqlens,
        "source_ids": source_ids,
    }
    batch: Batch = {}
    for name, array in arrays.items():
        tensor = None if array is None else torch.from_numpy(array)
        batch[name] = tensor.pin_memory() if pin and tensor is not None else tensor
    batch["max_seqlen"] = packed.max_seqlen
    batch["row_ids"] = row_ids
    if block.resume is not None:
        batch["lane_states"] = block.resume
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`. Copies from pinned memory do not wait; row_ids stays on the host."""
    if device.type == "cpu":
        return batch
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
