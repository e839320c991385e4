"""Gradients of several microbatches, summed in float32, of a model that FSDP2 does not wrap.

Autograd adds what a backward gives to ``.grad`` in two passes where their dtypes differ: one that widens the new
gradient, one that adds it, 18 bytes a parameter for bf16. Here it is one, of 10 bytes, in a Triton kernel where there
is Triton; the sums have the same bits. ``.grad`` is float32 after every backward, as to whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn


def sum_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ``.grad`` of every parameter be a sum in ``dtype``, whatever a backward gives."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            Sum(parameter, dtype)


class Sum:
    """``.grad`` of one parameter.

    Just before a backward adds to it, the sum so far is put aside, so that autograd leaves the new gradient as it is;
    just after, it is added, and the sum put back. A parameter that takes no part in a backward keeps its sum.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: Tensor | None = None
        self.add = _adder(parameter.device)
        parameter.grad_dtype = None  # any
        parameter.register_hook(partial(self.before, parameter))
        parameter.register_post_accumulate_grad_hook(self.after)

    def before(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd tells of none, too, and then nothing comes after
            self.total, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def after(self, parameter: nn.Parameter) -> None:
        gradient, total = parameter.grad, self.total
        assert gradient is not None
        self.total = None
        if total is None and gradient.dtype == self.dtype:
            return
        parameter.grad = self.add(total, gradient, self.dtype)


def plain_add(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """total + gradient in ``total``; None: the gradient in ``dtype``."""
    return gradient.to(dtype) if total is None else total.add_(gradient)


def _adder(device: torch.device) -> Callable[[Tensor | None, Tensor, torch.dtype], Tensor]:
    if device.type == "cuda" and find_spec("triton") is not None:
        add: Callable[[Tensor | None, Tensor, torch.dtype], Tensor] = import_module("kforge_parallel.sum_kernel").add
        return add
    return plain_add
