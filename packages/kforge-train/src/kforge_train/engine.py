"""The forward and backward of one optimizer step, and the count of tokens that its loss is a mean over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kforge_model import Rows
from kforge_parallel import Mesh, set_last_microbatch, shard_rows

Batch = dict[str, Any]


def rows_of(batch: Batch) -> Rows:
    """What the model is told about a microbatch beside its ids: positions and document boundaries. Of a part that
    `shard_rows` made, also where it lies in the whole."""
    if "whole" in batch:
        return Rows(
            position_ids=batch["position_ids"],
            doc_ids=batch["doc_ids"],
            columns=batch["columns"],
            whole=rows_of(batch["whole"]),
        )
    return Rows(
        position_ids=batch["position_ids"],
        cu_seqlens=batch["cu_seqlens"],
        max_seqlen=batch["max_seqlen"],
        doc_ids=batch["doc_ids"],
    )


class PlainEngine:
    """Runs the microbatches of a window one after the other; gradients are reduced in the last backward, or in each."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, reduce_each: bool = False) -> None:
        self.model = model
        self.mesh = mesh
        self.reduce_each = reduce_each

    def scored_tokens(self, window: list[Batch]) -> torch.Tensor:
        """Labels that count, summed over the window and over every data and context rank: float64 device scalar."""
        parts = [shard_rows(batch, self.mesh) for batch in window]
        count = torch.stack([(part["labels"] != -100).sum() for part in parts]).sum()
        if self.mesh.size > 1:
            dist.all_reduce(count)
        return count.to(torch.float64) / self.mesh.copies

    def forward_backward(self, window: list[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of the window to ``.grad``; return this rank's part of the loss, a device scalar: the mean
        nll, without what is trained on beside it (z-loss, smoothing, further tokens).

        ``scale`` is 1 / scored tokens of the global window, so that the parts of all ranks add up to the mean; ranks
        that have the same tokens share their part evenly.
        """
        parts = []
        for i, batch in enumerate(window):
            set_last_microbatch(self.model, self.reduce_each or i == len(window) - 1)
            batch = shard_rows(batch, self.mesh)
            loss, nll = self.model(batch["input_ids"], rows_of(batch), labels=batch["labels"], scale=scale)
            loss.backward()
            parts.append((nll * scale).sum())
        return torch.stack(parts).sum() / self.mesh.copies
