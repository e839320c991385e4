"""Linear modules that multiply in FP8: the output, the gradient of the input and, tensorwise, that of the weight.

With x [M,K], W [N,K] and g [M,N], and q(·) a tensor rounded to 8 bits under a scale:

                 y = x Wᵀ              dx = g W               dW = gᵀ x            scales
    tensorwise   q(x) q(W)ᵀ            q(g) q(W)              q(g)ᵀ q(x)           one a tensor
    rowwise      q(x) q(W)ᵀ            q(g) q(W)              gᵀ x in bf16         one a row, along what is summed over

Operands are e4m3 (3 bits of mantissa, up to 448). Tensorwise gradients are e5m2 (2 bits, up to 57344): one scale has to
hold the gradients of all tokens, and those differ by more than e4m3's range (Micikevicius et al. 2022, FP8 Formats for
Deep Learning, 3). Rowwise each token has a scale of its own, and e4m3 is the more exact. dW sums over tokens, so there
a scale for each of them cannot be taken out of the sum; it stays in bf16, as in torchao's `rowwise_with_gw_hp`, which
is also where large gradients of few tokens do most harm.

A scale is the greatest power of two under which the largest value still fits, from the tensor as it is (current
scaling), in fp32, on the device. Multiplying by a power of two is exact, so a value rounds to the same 8 bits whatever
it shares a scale with, unless it is so small that it leaves the normal range (below 2⁻¹⁴ of the largest, e4m3): ranks
that hold parts of a tensor agree with one that holds all of it. inf or NaN make the whole tensor (rowwise: the row)
NaN: seen, not clipped away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kforge_parallel._torch import scaled_mm, tree_map_only

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 8, E5M2: 15}
"""The largest value of a format is 1.75 · 2^TOP: 448 and 57344."""
SMALLEST = 2.0**-100
"""What a scale takes for the largest value at the least, so that it and its inverse are numbers of fp32."""
MULTIPLE = 16
"""Of which both sizes of a weight must be multiples: rows of 16 bytes are what FP8 tensor cores read."""
CUT_ALONG = {"colwise": 0, "colwise_kv": 0, "colwise_qkv": 0, "vocab_loss": 0, "packed_colwise": 1, "rowwise": 1}
"""Word of a plan -> along which dimension it cuts a weight."""


# ------------------------------------------------------------------------------------------------------------ numbers


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """max |x| in float32: 0-dim, or along ``dim``, which stays with size 1. NaN where there is one."""
    if torch.compiler.is_compiling():  # one reduction, where aminmax becomes two, each with its own reading of x
        size = x.abs()
        return (size.amax() if dim is None else size.amax(dim, keepdim=True)).float()
    low, high = torch.aminmax(x) if dim is None else torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(high.float(), -low.float())


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The greatest power of two s with s · amax ≤ the largest value of ``dtype``; float32, of the shape of ``amax``.
    NaN where amax is inf or NaN. Worked out on the bits, which no device rounds."""
    bits = amax.clamp(min=SMALLEST).view(torch.int32)
    # amax = 1.m · 2^(e - 127) and s = 2^(TOP + 127 - e), half of it where 1.m > 1.75
    e, above = bits >> 23, ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    scale = ((TOP[dtype] + 2 * 127 - e - above) << 23).view(torch.float32)
    return torch.where(amax < math.inf, scale, math.nan)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale · x rounded to ``dtype``."""
    return (x.float() * scale).to(dtype)


def quantize(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """(q, unit): x ≈ q · unit with q of ``dtype``, and one unit (float32) for the tensor or for each slice along
    ``dim``."""
    scale = scale_for(largest(x, dim), dtype)
    return cast(x, scale, dtype), 1 / scale


def product(a: Tensor, a_unit: Tensor, b: Tensor, b_unit: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """(a · a_unit) [M,K] @ (b · b_unit) [K,N] in ``dtype``, of 8-bit a and b. Units are 0-dim, or [M,1] and [1,N].

    fast: let tensor cores sum up in fewer bits, as is usual in forward and not in backward. On the CPU the product of
    what the bits stand for, in float32 (float64 where ``dtype`` is that).
    """
    if a.device.type == "cpu":
        wide = torch.promote_types(dtype, torch.float32)
        return ((a.to(wide) * a_unit) @ (b.to(wide) * b_unit)).to(dtype)
    if missing := -a.shape[1] % MULTIPLE:  # tokens, where they are what is summed over: zeros add nothing
        a, b = (
            F.pad(t.view(torch.uint8), pad).view(t.dtype) for t, pad in ((a, (0, missing)), (b, (0, 0, 0, missing)))
        )
    a, b = a.contiguous(), b.t().contiguous().t()  # the one layout that Hopper multiplies
    if a_unit.ndim:
        a_unit, b_unit = a_unit.contiguous(), b_unit.contiguous()
    return scaled_mm(a, a_unit, b, b_unit, dtype, fast)


# ------------------------------------------------------------------------------------------------------------ products


class Fp8Weight(Tensor):
    """A weight that came in 8 bits: ``bits`` (e4m3) of its shape and a 0-dim ``unit``; to others a tensor of ``dtype``.

    Views keep the bits; whatever else is done with it is done with the values that the bits stand for.
    """

    bits: Tensor
    unit: Tensor

    @staticmethod
    def __new__(cls, bits: Tensor, unit: Tensor, dtype: torch.dtype) -> Fp8Weight:
        made: Fp8Weight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, bits.shape, strides=bits.stride(), dtype=dtype, device=bits.device
        )
        return made

    def __init__(self, bits: Tensor, unit: Tensor, dtype: torch.dtype) -> None:
        self.bits, self.unit = bits, unit

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["bits", "unit"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Fp8Weight:
        return Fp8Weight(inner["bits"], inner["unit"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        """Without values: torch.compile of torch 2.11 prints what it traces."""
        return f"Fp8Weight({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The values, in the dtype that it shows."""
        return (self.bits.float() * self.unit).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _VIEWS:
            (weight, *more) = args
            return Fp8Weight(func(weight.bits, *more, **kwargs), weight.unit, weight.dtype)
        plain = partial(tree_map_only, Fp8Weight, Fp8Weight.dequantize)
        return func(*plain(args), **plain(kwargs))


_aten = torch.ops.aten
_VIEWS = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unsqueeze.default,
    _aten.t.default,
    _aten.transpose.int,
}


class Tensorwise(torch.autograd.Function):
    """x [..., K], weight [..., K] of N rows in all -> y [..., N], all three products in FP8. bits, unit: those of the
    weight, where they are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bits: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
        x8, x_unit = quantize(x.flatten(0, -2), E4M3)
        if bits is not None and unit is not None:
            w8, w_unit = bits, unit
        elif isinstance(weight, Fp8Weight):
            w8, w_unit = weight.bits, weight.unit
        else:
            w8, w_unit = quantize(weight, E4M3)
        w8 = w8.flatten(0, -2)
        ctx.save_for_backward(x8, x_unit, w8, w_unit)
        ctx.shapes, ctx.dtypes = (x.shape, weight.shape), (x.dtype, weight.dtype)
        return product(x8, x_unit, w8.t(), w_unit, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_unit, w8, w_unit = ctx.saved_tensors
        g8, g_unit = quantize(gradients[0].flatten(0, -2), E5M2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(g8, g_unit, w8, w_unit, ctx.dtypes[0]).view(ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            dw = product(g8.t(), g_unit, x8, x_unit, ctx.dtypes[1]).view(ctx.shapes[1])
        return dx, dw, None, None


class Rowwise(torch.autograd.Function):
    """x [..., K], weight [..., K] of N rows in all -> y [..., N]; y and dx in FP8, the gradient of the weight not.
    bits, unit: of the weight [N,K] with a scale a row, and ``columns`` with a scale a column, where they are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bits: Tensor | None = None,
        unit: Tensor | None = None,
        columns: Tensor | None = None,
        columns_unit: Tensor | None = None,
    ) -> Tensor:
        x8, x_unit = quantize(x.flatten(0, -2), E4M3, dim=1)
        if bits is not None and unit is not None:
            w8, w_unit = bits, unit
        else:
            w8, w_unit = quantize(weight.flatten(0, -2), E4M3, dim=1)
        ctx.save_for_backward(x, weight, columns, columns_unit)
        return product(x8, x_unit, w8.t(), w_unit.t(), x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w8, w_unit = ctx.saved_tensors
        g = gradients[0].flatten(0, -2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            g8, g_unit = quantize(g, E4M3, dim=1)
            if w8 is None:
                w8, w_unit = quantize(weight.flatten(0, -2), E4M3, dim=0)
            dx = product(g8, g_unit, w8, w_unit, x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = (g.t() @ x.flatten(0, -2)).to(weight.dtype).view(weight.shape)
        return dx, dw, None, None, None, None


PRODUCTS: dict[str, type[torch.autograd.Function]] = {"tensorwise": Tensorwise, "rowwise": Rowwise}
KEPT = {
    "tensorwise": ("fp8_bits", "fp8_unit"),
    "rowwise": ("fp8_bits", "fp8_unit", "fp8_columns", "fp8_columns_unit"),
}
"""Attributes of a module whose weight is kept in 8 bits, in the order in which its product takes them."""


# ------------------------------------------------------------------------------------------------------------ modules


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes y = x Wᵀ + b: an nn.Linear with its own forward, or a class with ``is_linear = True``,
    whose weight and bias may have more dimensions before the features, which its output then has, too."""
    return type(module).forward is nn.Linear.forward or getattr(type(module), "is_linear", False)


def multiply_in_fp8(
    model: nn.Module, mode: str, skip: tuple[str, ...], words: Mapping[str, str] | None = None, tp: int = 1
) -> dict[str, str]:
    """Make the linear modules of ``model`` multiply in FP8, in place; names and parameters stay as they are.

    mode: "tensorwise" or "rowwise". skip: patterns (``fnmatch``) of names of modules that stay as they are. words: how
    the plan cuts each parameter over ``tp`` ranks: what is left on a rank must fit, too.

    Returns the name of every linear module -> "" where it multiplies in FP8 now, else why not.
    """
    owners = Counter(
        id(parameter) for m in model.modules() for parameter in m._parameters.values() if parameter is not None
    )
    reasons = {}
    for name, module in model.named_modules():
        if is_linear(module):
            weight = module.get_parameter("weight")
            word = (words or {}).get(f"{name}.weight", "")
            reasons[name] = _reason(name, weight, skip, word, tp, owners[id(weight)])
            if not reasons[name]:
                vars(module).update(fp8=mode, forward=MethodType(_forward, module))
    return reasons


def other_matrices(model: nn.Module, skip: tuple[str, ...]) -> dict[str, str]:
    """Name of every module with a matrix of its own that is neither linear nor an embedding -> why it stays as it is: a
    head that makes the loss, a router."""
    found = {}
    for name, module in model.named_modules():
        matrix = any(parameter is not None and parameter.ndim > 1 for parameter in module._parameters.values())
        if matrix and not is_linear(module) and not isinstance(module, nn.Embedding):
            match = next((pattern for pattern in skip if fnmatchcase(name, pattern)), None)
            found[name] = f"fp8_skip has {match}" if match else f"{type(module).__name__} is no linear module"
    return found


def _reason(name: str, weight: Tensor, skip: tuple[str, ...], word: str, tp: int, owners: int) -> str:
    """Why a weight stays as it is; "" where nothing speaks against FP8."""
    if match := next((pattern for pattern in skip if fnmatchcase(name, pattern)), None):
        return f"fp8_skip has {match}"
    if owners > 1:
        return "the weight is shared with another module"
    shape = list(weight.shape)
    if (dim := CUT_ALONG.get(word)) is not None:
        if shape[dim] % tp == 0:
            shape[dim] //= tp
        else:  # several ranks share a key/value head, and each has whole heads
            shape[:-2] = [1] * (len(shape) - 2)
    if math.prod(shape[:-1]) % MULTIPLE or shape[-1] % MULTIPLE:
        part = "" if list(weight.shape) == shape else f", {shape} on a rank,"
        return f"{list(weight.shape)}{part} has a size that is no multiple of {MULTIPLE}"
    return ""


def _forward(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    kept = tuple(getattr(module, name) for name in KEPT[module.fp8]) if hasattr(module, "fp8_bits") else ()
    y: Tensor = PRODUCTS[module.fp8].apply(x, weight, *kept)  # type: ignore[no-untyped-call]
    if bias is not None:
        y = y + bias.flatten().to(y.dtype)
    return y.unflatten(-1, weight.shape[:-1]) if weight.ndim > 2 else y


def described(reasons: Mapping[str, str]) -> str:
    """What `multiply_in_fp8` returned, for people: modules that differ in numbers only are counted together."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, reason in reasons.items():
        counts[".".join("*" if part.isdigit() else part for part in name.split(".")), reason] += 1
    lines = [
        f"{name}{f' ({count})' if count > 1 else ''}: {reason or 'fp8'}" for (name, reason), count in counts.items()
    ]
    return "; ".join(lines) or "there is no linear module"


def check_device(mode: str, device: torch.device) -> None:
    """Raise ValueError for a device that cannot multiply in FP8. The CPU can, slowly: for tests."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"parallel.fp8 = {mode} needs a GPU of compute capability 8.9 or above (Ada, Hopper or later), and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; set parallel.fp8 to none"
        )
