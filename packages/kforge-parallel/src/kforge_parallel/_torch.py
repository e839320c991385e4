"""What differs between torch versions or has no public name, each with the public thing it stands in for."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these two and warns of the old names, which are the only ones that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def set_group_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    """Stands in for ``new_group(timeout=...)``: meshes take none for their groups, and groups get no other later."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place. Autograd counts it to find saved tensors that were overwritten;
    stands in for a public ``Tensor.version``."""
    return int(tensor._version)


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> buffer, of those that a checkpoint holds. Stands in for a public ``named_buffers(persistent=True)``:
    ``state_dict`` would run the hooks of all modules."""
    return {
        f"{owner}.{name}".lstrip("."): buffer
        for owner, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention inside each segment: q [T,H,Dh], k and v [U,KV,Dh] -> [T,H,Dh]; a segment's last query is at its last
    key, and sees no key after itself. CUDA, bf16 or fp16 only.

    Stands in for ``torch.nn.attention.varlen.varlen_attn``, which takes fewer key/value heads without being told in
    torch 2.11, and from 2.12 on wants a flag. A right side of 0 in the window is what makes it causal.
    """
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True
    sides = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, scale=scale, window_size=sides, **more)
    assert isinstance(out, Tensor)
    return out
