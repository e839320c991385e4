"""The head: the output projection and the loss in one module, so that the logits need never be whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_model.losses import LossOptions, all_logits, softcapped
from kforge_model.losses import linear_cross_entropy as linear_cross_entropy
from kforge_model.registry import LOSSES


class HeadLoss(nn.Module):
    """The output projection and the loss, the only reader of ``weight`` [R,D]: the end of the model, one FSDP unit.

    With ``group`` set, whoever spreads the model gives it this rank's rows of the weight, from ``vocab_start`` on.
    """

    group: dist.ProcessGroup | None
    """Ranks over which the vocabulary is cut, in equal parts. None: it is whole."""
    vocab_start: int
    """First row of this rank's part."""

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        chunk_tokens: int = 2048,
        *,
        rows: int | None = None,
        loss: str = "linear_cross_entropy",
        softcap: float = 0.0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """vocab_size: tokens of the whole vocabulary. rows: of the weight, those beyond vocab_size being padding;
        None: vocab_size. loss: a name of the registry ``LOSSES``. logit_scale: factor on the hidden states, and so on
        the logits before the soft-cap. options: for a loss of the user's own. The rest: see ``LossOptions``.

        Raises ValueError for an unknown loss, with the names of the known ones, and for values out of range.
        """
        super().__init__()
        rows = vocab_size if rows is None else rows
        if rows < vocab_size:
            raise ValueError(f"rows = {rows} of the head are fewer than vocab_size = {vocab_size}")
        LOSSES.get(loss)
        self.vocab_size = vocab_size
        self.chunk_tokens = chunk_tokens
        self.loss = loss
        self.softcap = softcap
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.options = {} if options is None else options
        self.group = None
        self.vocab_start = 0
        self.loss_options()
        self.weight = nn.Parameter(torch.empty(rows, dim))

    def loss_options(self) -> LossOptions:
        """What the loss is told, as the attributes now stand."""
        return LossOptions(
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            group=self.group,
            vocab_start=self.vocab_start,
            extra=self.options,
        )

    def forward(self, hidden: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None) -> Any:
        """hidden [B,S,D] -> logits [B,S,V]; with labels [B,S] and a scale (one, or one a token), (loss, nll [B,S]).

        Logits are scaled and soft-capped, and without padding. ``linear_cross_entropy`` says what loss and nll are.
        Raises ValueError when labels come without a scale.
        """
        if self.logit_scale != 1:
            hidden = hidden * self.logit_scale
        options = self.loss_options()
        if labels is None:
            return softcapped(all_logits(hidden, self.weight, options), self.softcap)
        if scale is None:
            raise ValueError(
                "labels need a scale, which only the caller knows: 1 / scored tokens of the whole global batch "
                "(all microbatches of all ranks)"
            )
        return LOSSES.get(self.loss)(hidden, self.weight, labels, scale, options=options)

    def extra_repr(self) -> str:
        rows, dim = self.weight.shape
        padded = f", rows={rows}" if rows != self.vocab_size else ""
        return f"{dim}, {self.vocab_size}{padded}, loss={self.loss}, chunk_tokens={self.chunk_tokens}"
