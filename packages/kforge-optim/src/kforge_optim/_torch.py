"""The private names of torch that this package uses, each with the public thing it stands in for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def foreach_mul_(targets: Sequence[Tensor], factor: Tensor) -> None:
    """``target.mul_(factor)`` for each, in one launch; ``factor`` is 0-dim. Stands in for that loop."""
    torch._foreach_mul_(list(targets), factor)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in few launches. Stands in for that loop."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_add_(targets: Sequence[Tensor], value: Tensor) -> None:
    """``target.add_(value)`` for each, in one launch; all are 0-dim. Stands in for that loop."""
    torch._foreach_add_(list(targets), [value] * len(targets))


def foreach_norm(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each, accumulated in ``dtype``, in one launch. Stands in for a loop over
    ``torch.linalg.vector_norm``; the public ``torch.nn.utils.get_total_norm`` accumulates bfloat16 in bfloat16."""
    return list(torch._foreach_norm(list(tensors), p, dtype=dtype))


def sharded_dim(placement: Placement) -> int | None:
    """The dimension of the tensor that ``placement`` cuts, None for Replicate. Stands in for ``isinstance`` of
    ``Shard``, which ``_StridedShard`` is in some versions of torch only."""
    return getattr(placement, "dim", None)


def stacked(placement: Placement) -> Placement:
    """The placement of a stack of tensors (a new dimension 0) whose members each have ``placement``.

    Stands in for a constructor that copies a placement with another dim: ``_StridedShard`` (what FSDP makes of a
    dimension that tensor parallelism shards too) has no public name.
    """
    if isinstance(placement, Replicate):
        return placement
    factor = getattr(placement, "split_factor", None)
    if factor is not None:
        from torch.distributed.tensor.placement_types import _StridedShard

        return _StridedShard(placement.dim + 1, split_factor=factor)  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    raise ValueError(f"a parameter cannot have placement {placement}; Replicate and Shard can be optimized")


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """The index of the first element of this rank's shard along each dimension of the whole tensor.

    Stands in for a public ``DTensor.local_offset()``: the box is computed by
    ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``, as DCP does for its own plans.
    Raises ValueError for a shard that is no box of the whole.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(tensor.to_local().shape) != tuple(shape):
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} holds "
            f"{tuple(tensor.to_local().shape)} on this rank where {tuple(shape)} was computed: no box of the whole"
        )
    return tuple(offset)
