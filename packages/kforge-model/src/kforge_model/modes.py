"""A model looked at rather than trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kforge_model.losses import IGNORE
from kforge_model.rows import Rows


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; the mode of every submodule as before after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def run_for_hooks(model: nn.Module, x: Tensor, rows: Rows | None) -> None:
    """One forward pass in eval mode whose result nobody wants: with labels that score nothing, so that the head makes
    its logits a part at a time if at all."""
    with evaluating(model):
        model(x, rows, torch.full(x.shape[:2], IGNORE, device=x.device), 1.0)
