"""The private names of torch that this package uses, each with the public thing it stands in for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def foreach_mul_(targets: Sequence[Tensor], factor: Tensor) -> None:
    """``target.mul_(factor)`` for each, in one launch; ``factor`` is 0-dim. Stands in for that loop."""
    torch._foreach_mul_(list(targets), factor)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair, in few launches. Stands in for that loop."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def foreach_add_(targets: Sequence[Tensor], value: Tensor) -> None:
    """``target.add_(value)`` for each, in one launch; all are 0-dim. Stands in for that loop."""
    torch._foreach_add_(list(targets), [value] * len(targets))


def foreach_lerp(starts: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """``start.lerp(end, weight)`` of each, in one launch. Stands in for that loop."""
    return list(torch._foreach_lerp(list(starts), list(ends), weight))


def foreach_sign_(targets: Sequence[Tensor]) -> None:
    """``target.sign_()`` for each, in one launch. Stands in for that loop."""
    torch._foreach_sign_(list(targets))


def foreach_norm(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each, accumulated in ``dtype``, in one launch. Stands in for a loop over
    ``torch.linalg.vector_norm``; the public ``torch.nn.utils.get_total_norm`` accumulates bfloat16 in bfloat16."""
    return list(torch._foreach_norm(list(tensors), p, dtype=dtype))


def laid_out(
    values: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """This rank's ``values``, wherever they lie, as its part of a DTensor of ``shape``. Stands in for
    ``DTensor.from_local``, which moves them to the device of the mesh."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, values.dtype))
    return DTensor(values, spec, requires_grad=False)


def sharded_dim(placement: Placement) -> int | None:
    """The dimension of the tensor that ``placement`` cuts, None for Replicate. Stands in for ``isinstance`` of
    ``Shard``, which ``_StridedShard`` is in some versions of torch only."""
    return getattr(placement, "dim", None)


def split_factor(placement: Placement) -> int:
    """How many pieces the mesh dimensions behind a strided shard make of the dimension that it cuts; 1 where it is not
    strided. Stands in for a public name of ``_StridedShard``, what FSDP makes of a dimension that tensor parallelism
    shards too."""
    return getattr(placement, "split_factor", 1)


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """The index of the first element of this rank's shard along each dimension of the whole tensor.

    Stands in for a public ``DTensor.local_offset()``: the box is computed by
    ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``, as DCP does for its own plans.
    Raises ValueError for a shard that is no box of the whole.
    """
    offset, shape = _box(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(tensor.to_local().shape) != shape:
        raise ValueError(
            f"a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements} holds "
            f"{tuple(tensor.to_local().shape)} on this rank where {shape} was computed: no box of the whole"
        )
    return offset


@lru_cache(maxsize=4096)
def _box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's part; asked for in each step, so remembered."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(offset), tuple(local_shape)
