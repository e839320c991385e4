"""act(gate) * up of two halves that lie in one tensor, as one product made them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_HAS_TRITON = find_spec("triton") is not None


def gated(pair: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """pair [..., 2, F], gate and up -> [..., F].

    With silu on CUDA, in bf16 or fp16, the gradients of both halves are made in one pass where Triton is installed. The
    compiler's own kernel makes each half apart, and reads everything twice.
    """
    narrow = pair.dtype in (torch.bfloat16, torch.float16)
    if activation is F.silu and pair.is_cuda and narrow and _HAS_TRITON:
        out: Tensor = SwiGLU.apply(pair)  # type: ignore[no-untyped-call]
        return out
    gate, up = pair.unbind(-2)
    return activation(gate) * up


def _swiglu_backward(grad: Tensor, pair: Tensor) -> Tensor:
    from kforge_model import swiglu_kernel

    return swiglu_kernel.swiglu_backward(grad, pair)


swiglu_backward = torch.library.custom_op(
    "kforge_model::swiglu_backward",
    _swiglu_backward,
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor pair) -> Tensor",
)
"""`swiglu_kernel` as an operator that torch.compile calls between its own kernels."""


@swiglu_backward.register_fake
def _(grad: Tensor, pair: Tensor) -> Tensor:
    return torch.empty_like(pair, memory_format=torch.contiguous_format)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, with `swiglu_kernel` for its gradient."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor) -> Tensor:
        ctx.save_for_backward(pair)
        gate, up = pair.unbind(-2)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (pair,) = ctx.saved_tensors
        return swiglu_backward(gradients[0], pair)
