"""Gradients of linear weights that are added to their float32 sums inside of the product that makes them.

With x [M,K], W [N,K] and g [M,N] in bf16, and the sum S [N,K] in float32, which is W's ``.grad``:

    y = x Wᵀ              dx = g W              S ← S + gᵀ x

`sums` waits for a gradient in bf16 and adds it: 2 bytes a weight written by the product, 10 moved by the addition. Here
the product reads and writes the sum, 8 bytes; what a microbatch gives is not rounded to bf16 before it is added.

Autograd is told that the weight has no gradient, so who else uses a weight has its part added by `sums`, and hooks on
the weight or `torch.autograd.grad` see that part alone. The backward is an operator, which torch.compile leaves as it
is. It finds the sum by the address of the weight, as equal blocks share one graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kforge_parallel.fp8 import is_linear

_weights: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Address -> weight."""
_numbers = itertools.count(1)


def sum_in_products(model: nn.Module) -> list[str]:
    """Let linear modules of ``model`` add the gradients of their weights to ``.grad`` in float32, in place. `sums` has
    the model already, whose weights are where they will be.

    Names of the modules that do: their weights are in bf16, whole and contiguous, learn, and belong to one module; they
    multiply in a plain way (no FP8, no other forward, no parametrization).
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    names = []
    for name, module in model.named_modules():
        if not is_linear(module) or "forward" in vars(module):
            continue
        weight = module._parameters.get("weight")
        if weight is None or not weight.requires_grad or owners[id(weight)] > 1:
            continue
        plain = type(weight) is nn.Parameter and weight.is_contiguous() and weight.numel() > 0
        if plain and weight.dtype == torch.bfloat16:
            _weights[weight.data_ptr()] = weight
            vars(module)["forward"] = MethodType(_forward, module)
            names.append(name)
    return names


def _forward(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    if not torch.is_grad_enabled():
        y = F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
    else:
        y = Linear.apply(x, weight, None if bias is None else bias.flatten(), _number())  # type: ignore[no-untyped-call]
    return y.unflatten(-1, weight.shape[:-1]) if weight.ndim > 2 else y


def _number() -> int:
    """Of this use of a weight: one graph may use it twice, with the same x and g, and of two equal calls of an operator
    the compiler makes one."""
    return _next() if torch.compiler.is_compiling() else 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next() -> int:
    return next(_numbers)


class Linear(torch.autograd.Function):
    """x [..., K], weight [..., K] of N rows in all, bias [N] or None -> y [..., N]; as F.linear. number: `_number`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number = number
        return F.linear(x, weight.flatten(0, -2), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (g,) = gradients
        dx = None
        if ctx.needs_input_grad[0]:
            dx = linear_backward(g, x, weight, ctx.number)
        else:
            weight_backward(g, x, weight, ctx.number)
        bias = _rows(g).sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, bias, None


# Neither says that it changes anything: the sum is no argument. The first is kept by who reads dx, the second by being
# known to have an effect.


@torch.library.custom_op("kforge_parallel::linear_backward", mutates_args=())
def linear_backward(g: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    """dx [..., K] of y = x Wᵀ, where g [..., N] is the gradient of y; and gᵀ x is added to the ``.grad`` of W.

    Raises RuntimeError for a weight that `sum_in_products` has not seen at this place."""
    _add(g, x, weight)
    return (_rows(g) @ weight.flatten(0, -2)).view(x.shape)


@linear_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, number: int) -> Tensor:
    return g.new_empty(x.shape)


@torch.library.custom_op("kforge_parallel::weight_backward", mutates_args=())
def weight_backward(g: Tensor, x: Tensor, weight: Tensor, number: int) -> None:
    """As `linear_backward`, of an x that has no gradient."""
    _add(g, x, weight)


@weight_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, number: int) -> None:
    pass


for _operator in (torch.ops.kforge_parallel.linear_backward, torch.ops.kforge_parallel.weight_backward):
    torch.fx.has_side_effect(_operator.default)


@torch.no_grad()
def _add(g: Tensor, x: Tensor, weight: Tensor) -> None:
    owner = _weights.get(weight.data_ptr())
    if owner is None or owner.shape != weight.shape:
        raise RuntimeError(
            f"a weight {list(weight.shape)} on {weight.device} is not where it was when `parallelize` returned, so "
            "that the sum of its gradients is not found; copy or move a model before `parallelize`, not after"
        )
    total = owner.grad
    first = total is None
    if total is None:
        total = torch.empty_like(weight, dtype=torch.float32)
    total = total.to(torch.float32).contiguous()  # as it is, unless somebody else has set it
    add_product(_rows(total), _rows(g).t(), _rows(x), first=first)
    owner.grad = total


def _rows(x: Tensor) -> Tensor:
    """As a matrix: [..., K] -> [M, K]."""
    return x.reshape(-1, x.shape[-1])


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total [N,K] ← total + a [N,M] @ b [M,K], of float32 and bf16; first: total ← a @ b. In place, and in one kernel
    on CUDA; elsewhere in float32 throughout, slowly, for tests."""
    if total.device.type == "cuda":
        torch.addmm(total, a, b, beta=0 if first else 1, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a.float(), b.float(), beta=0 if first else 1, out=total)
