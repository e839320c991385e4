"""The forward and backward of one optimizer step, and the count of tokens that its loss is a mean over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_model import Rows
from kforge_parallel import Mesh, Pipeline, set_last_microbatch, shard_rows

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

    copies: Mapping[str, int] = MappingProxyType({})
    """Name of a parameter that several ranks of a pipeline have alike -> how many."""

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

    @torch.no_grad()
    def nll_sums(self, batches: list[Batch]) -> Tensor:
        """The nll of each batch as this rank has it (`shard_rows`), summed over its tokens: float64 [batches]. It is
        this rank's part, as a loss is."""
        one = torch.ones((), dtype=torch.float64, device=self.mesh.device)
        sums = [self._nll(batch, one).sum(dtype=torch.float64) for batch in batches]
        return torch.stack(sums) / self.mesh.copies

    def _nll(self, batch: Batch, scale: Tensor) -> Tensor:
        _, nll = self.model(batch["input_ids"], rows_of(batch), labels=batch["labels"], scale=scale)
        return nll  # type: ignore[no-any-return]


class PipelineEngine(PlainEngine):
    """The same for a model in stages: its microbatches are under way together, and the loss is where the last stage
    is; the ranks of the others have a part of 0."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model, mesh)
        self.pipeline = Pipeline(model, mesh)
        self.copies = self.pipeline.copies
        self.dim = int(model.shape["dim"])  # type: ignore[index, operator]

    def forward_backward(self, window: list[Batch], scale: Tensor) -> Tensor:
        """As `PlainEngine.forward_backward`."""
        window = [shard_rows(batch, self.mesh) for batch in window]
        parts: list[Tensor] = []

        def call(stage: nn.Module, x: Tensor | None, number: int) -> Tensor:
            result = self._stage(stage, x, window[number], scale)
            if isinstance(result, Tensor):
                return result
            loss, nll = result
            parts.append((nll.detach() * scale).sum())
            return loss

        self.pipeline.train(call, self._shapes(window))
        return self._part(parts).sum()

    @torch.no_grad()
    def nll_sums(self, batches: list[Batch]) -> Tensor:
        """As `PlainEngine.nll_sums`."""
        one = torch.ones((), dtype=torch.float64, device=self.mesh.device)

        def call(stage: nn.Module, x: Tensor | None, number: int) -> Tensor:
            result = self._stage(stage, x, batches[number], one)
            return result if isinstance(result, Tensor) else result[1].sum(dtype=torch.float64)

        return self._part(self.pipeline.forward(call, self._shapes(batches)))

    def _stage(self, stage: nn.Module, x: Tensor | None, batch: Batch, scale: Tensor) -> Any:
        """What a stage makes of a microbatch: hidden states, or (loss, nll) at the end. Every stage knows labels, scale
        and ids, for losses inside of it."""
        ids, labels = batch["input_ids"], batch["labels"]
        if x is None:
            return stage(ids, rows_of(batch), labels=labels, scale=scale)
        return stage(x, rows_of(batch), labels=labels, scale=scale, ids=ids)

    def _shapes(self, window: list[Batch]) -> list[tuple[int, ...]]:
        return [self.pipeline.hidden_shape(batch["input_ids"], self.dim) for batch in window]

    def _part(self, sums: list[Tensor]) -> Tensor:
        """Sums over the tokens of microbatches as this rank's part of them."""
        if not self.pipeline.has_last:
            return torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        return torch.stack(sums).to(torch.float64) * (self.mesh.pp_size / self.mesh.copies)


def build_engine(model: nn.Module, mesh: Mesh, *, reduce_each: bool = False) -> PlainEngine:
    """The engine for a model that `parallelize` has spread over ``mesh``."""
    return PipelineEngine(model, mesh) if mesh.pp_size > 1 else PlainEngine(model, mesh, reduce_each=reduce_each)
