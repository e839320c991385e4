"""What differs between torch versions or has no public name, each with the public thing it stands in for."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch 2.11 takes fewer key/value heads without being told; from 2.12 on the flag is needed.
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention inside each segment of a flattened batch: q [T,H,Dh], k and v [T,KV,Dh] -> [T,H,Dh]. With
    ``window``, a token sees itself and the window - 1 before it.

    Stands in for ``torch.nn.attention.varlen.varlen_attn``, whose signature changed between 2.11 and 2.13. In both,
    a right side of 0 in the window is what makes it causal. CUDA, bf16 or fp16 only.
    """
    grouped = _GQA if q.shape[1] != k.shape[1] else {}
    sides = (-1 if window is None else window - 1, 0)
    ends = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = varlen_attn(q, k, v, *ends, scale=scale, window_size=sides, **grouped)
    assert isinstance(out, Tensor)
    return out


def local_box(tensor: DTensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's shard of a DTensor, and the index of its first element along each dimension of the whole tensor.

    Stands in for a public ``DTensor.local_offset()``: the box is computed by
    ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``, as DCP does for its own plans.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(local.shape) != tuple(shape):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} holds {tuple(local.shape)} "
            f"on this rank where {tuple(shape)} was computed: its local part is no box of the whole"
        )
    return local, tuple(offset)


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, begun: bool = True) -> None:
    """``total += a @ b`` where the product is not rounded to a's dtype first if the device can avoid it. Not begun:
    ``total = a @ b``, whatever lay there.

    total [M,N] fp32 or wider, a [M,K], b [K,N]. ``torch.addmm(..., out_dtype=)`` is public but exists on CUDA only;
    elsewhere each product is rounded once to a's dtype and the sum over chunks stays wide.
    """
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=int(begun), out=total)  # with beta 0 the total is not read, be it NaN
    elif a.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, a, b, beta=int(begun), out_dtype=torch.float32, out=total)
    elif begun:
        total.add_(a @ b)
    else:
        total.copy_(a @ b)


def is_transformed(tensor: Tensor) -> bool:
    """Whether torch.func (vmap, grad, …) has wrapped the tensor, so that it has no values of its own.

    Stands in for a public question; torch's own code asks ``torch._C._functorch``.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
