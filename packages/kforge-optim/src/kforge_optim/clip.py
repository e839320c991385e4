"""One gradient norm over all ranks, and the factor that clips it; both stay on the device.

Gradients are sums over ranks already, and lie as DTensors on any mix of meshes, or as plain tensors that every rank
holds alike. Instead of reducing over each mesh, every rank adds what it holds, weighted by one over the number of
ranks that hold the same piece, and a single all-reduce over all ranks makes the sum::

    norm^p = Σ_ranks Σ_tensors  |local gradient|^p · distinct shards · stages / (world · stages that hold it)

``world / stages`` ranks hold a tensor when each of the ``stages`` equal groups of ranks (pipeline stages) owns other
parameters; cut into ``distinct shards`` pieces, each piece lies on world / stages / shards of them. A plain tensor is
one piece. Each tensor is summed up in float32 at least, the tensors in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_optim._torch import foreach_norm
from kforge_optim.groups import clean_name
from kforge_optim.sharding import distinct_shards, local_gradient


@torch.no_grad()
def total_norm(
    parameters: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    *,
    norm_type: float = 2.0,
    stages: int = 1,
    stages_holding: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The norm of all gradients together, the same bits on every rank; every rank of the group must call it.

    parameters: a module, its parameters, or (name, parameter) pairs. ``.grad`` of each is read; one without a
        gradient is skipped; a tied one counts once. DTensors may lie on different meshes. A gradient that is
        ``Partial`` is first reduced to its parameter's placement, in place of the old ``.grad``.
    norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
    stages: how many equal groups of ranks own different parameters (pipeline stages); 1 when all own the same.
    stages_holding: name -> number of stages that hold a copy of this parameter (an embedding tied to the head of the
        last stage: 2), so that it counts once; needs names.
    group: the ranks that share the work; default: all.
    device: where the result lies when there is no parameter to tell; default: CPU.

    Returns a 0-dim tensor, float32 or the widest dtype of the parameters, on their device. Without a process group, or
    with one rank, there is no communication. inf and NaN in a gradient come through. Nothing waits for the device.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type = {norm_type} must be above 0")
    named = _unique(parameters)
    world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if stages < 1 or world % stages:
        raise ValueError(f"stages = {stages} does not divide the {world} ranks into equal groups")
    dtype = torch.float32
    # (share, dtype, device) -> gradients; a share is one over the number of ranks with the same piece.
    batches: dict[tuple[float, torch.dtype, torch.device], list[Tensor]] = {}
    for name, parameter in named:
        dtype = torch.promote_types(dtype, parameter.dtype)
        device = parameter.device if device is None else device
        if parameter.grad is None:
            continue
        holding = (stages_holding or {}).get(name, 1)
        share = distinct_shards(parameter) * stages / (world * holding)
        grad = local_gradient(parameter)
        if grad.numel():  # an uneven shard may be empty, and the largest of nothing is not defined
            batches.setdefault((share, grad.dtype, grad.device), []).append(grad)
    largest = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (share, grad_dtype, _), grads in batches.items():
        accumulated_in = torch.promote_types(grad_dtype, torch.float32)
        norms = torch.stack(foreach_norm(grads, norm_type, accumulated_in)).to(total)
        total = torch.maximum(total, norms.max()) if largest else total + share * (norms**norm_type).sum()
    if world > 1 and largest:
        # What the largest of a number and a NaN is depends on the order, so that there is a NaN travels beside it.
        nan = total.isnan()
        both = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), nan.to(total)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        total = torch.where(both[1] > 0, math.nan, both[0])
    elif world > 1:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    if not largest:
        total = total ** (1.0 / norm_type)
    return total.to(dtype)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most ``max_norm``: min(1, max_norm / (norm + 1e-6)).

    The rule of ``torch.nn.utils.clip_grad_norm_``. ``max_norm`` 0 clips nothing: 1. A ``norm`` that is inf or NaN
    gives 1 as well: no factor can mend such gradients, and whether the step is taken is the gate's matter, not the
    clip's. Returns a 0-dim tensor like ``norm``.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_norm = {max_norm} must not be negative; 0 means no clipping")
    one = torch.ones_like(norm)
    if max_norm == 0:
        return one
    return torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1.0), one)


def _unique(
    parameters: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[str, nn.Parameter]]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for item in parameters:
        name, parameter = item if isinstance(item, tuple) else ("", item)
        unique.setdefault(id(parameter), (clean_name(name), parameter))
    return list(unique.values())
