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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_optim._torch import foreach_norm
from kforge_optim.groups import Group, clean_name
from kforge_optim.scalars import on_device
from kforge_optim.sharding import distinct_shards, local_gradient

Parameters = nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]
"""A module, its parameters, or (name, parameter) pairs."""


@overload
def total_norm(
    parameters: Parameters,
    *,
    norm_type: float = 2.0,
    stages: int = 1,
    stages_holding: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    also: None = None,
) -> Tensor: ...


@overload
def total_norm(
    parameters: Parameters,
    *,
    norm_type: float = 2.0,
    stages: int = 1,
    stages_holding: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    also: Sequence[Group],
) -> tuple[Tensor, dict[str, Tensor]]: ...


@torch.no_grad()
def total_norm(
    parameters: Parameters,
    *,
    norm_type: float = 2.0,
    stages: int = 1,
    stages_holding: Mapping[str, int] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    also: Sequence[Group] | None = None,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
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
    also: groups of parameters whose norms are wanted too (``optimizer.groups``). They come out of the same pass and the
        same all-reduce, so all ranks must name the same groups in the same order; one may be empty on some of them.

    Returns a 0-dim tensor, float32 or the widest dtype of the parameters, on their device; with ``also`` that and a
    dict of such tensors, group name -> norm. Without a process group, or with one rank, there is no communication.
    inf and NaN in a gradient come through. Nothing waits for the device.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type = {norm_type} must be above 0")
    named = _unique(parameters)
    world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if stages < 1 or world % stages:
        raise ValueError(f"stages = {stages} does not divide the {world} ranks into equal groups")
    # Each gradient adds to one row: that of its group, or the last one, of no group.
    rows = 1 + len(also or ())
    row_of = {id(p): row for row, one in enumerate(also or ()) for p in one.parameters.values()}
    named.sort(key=lambda item: row_of.get(id(item[1]), rows - 1))  # the rows of a batch lie side by side
    dtype = torch.float32
    # (share, dtype, device) -> rows and gradients; a share is one over the number of ranks with the same piece.
    batches: dict[tuple[float, torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for name, parameter in named:
        dtype = torch.promote_types(dtype, parameter.dtype)
        device = parameter.device if device is None else device
        if parameter.grad is None:
            continue
        holding = (stages_holding or {}).get(name, 1)
        share = distinct_shards(parameter) * stages / (world * holding)
        grad = local_gradient(parameter)
        if grad.numel():  # an uneven shard may be empty, and the largest of nothing is not defined
            item = (row_of.get(id(parameter), rows - 1), grad)
            batches.setdefault((share, grad.dtype, grad.device), []).append(item)
    largest = math.isinf(norm_type)
    nothing = torch.zeros(1, dtype=torch.float64, device=device)
    parts: list[list[Tensor]] = [[nothing] for _ in range(rows)]
    for (share, grad_dtype, _), items in batches.items():
        accumulated_in = torch.promote_types(grad_dtype, torch.float32)
        norms = torch.stack(foreach_norm([grad for _, grad in items], norm_type, accumulated_in)).to(nothing)
        values = norms if largest else share * norms**norm_type
        sizes = Counter(row for row, _ in items)
        for row, part in zip(sizes, values.split(list(sizes.values())), strict=True):
            parts[row].append(part)
    by_row = torch.stack([torch.cat(part).max() if largest else torch.cat(part).sum() for part in parts])
    total = by_row.max() if largest else by_row.sum()
    found = torch.cat([total[None], by_row[:-1]])
    if world > 1 and largest:
        # What the largest of a number and a NaN is depends on the order, so that there is a NaN travels beside it.
        nan = found.isnan()
        both = torch.stack([found.nan_to_num(nan=0.0, posinf=math.inf), nan.to(found)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        found = torch.where(both[1] > 0, math.nan, both[0])
    elif world > 1:
        dist.all_reduce(found, op=dist.ReduceOp.SUM, group=group)
    if not largest:
        found = found ** (1.0 / norm_type)
    norm, *others = found.to(dtype).unbind()
    return norm if also is None else (norm, {one.name: other for one, other in zip(also, others, strict=True)})


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


@torch.no_grad()
def clip_values_(parameters: Parameters, max_value: float, *, scale: Tensor | None = None) -> None:
    """Bring every element of the gradients into [-max_value, max_value], in place.

    It is done to what lies on this rank, without communication, and nothing waits for the device; 0 clips nothing, and
    does not look at the gradients. An element that is inf becomes ``max_value`` and NaN stays, so take `total_norm`,
    which tells whether all are finite, before.

    parameters: as for `total_norm`. scale: what the gradients are multiplied by, 0-dim on their device (a loss scale);
    the bounds are multiplied by it, too.
    """
    if not max_value >= 0:
        raise ValueError(f"clip_value = {max_value} must not be negative; 0 means no clipping")
    if max_value == 0:
        return
    for _, parameter in _unique(parameters):
        if parameter.grad is not None:
            grad = local_gradient(parameter)
            if scale is None:
                grad.clamp_(-max_value, max_value)
            else:
                bound = max_value * on_device(scale.detach(), grad.device).to(grad.dtype)
                grad.clamp_(-bound, bound)


def _unique(parameters: Parameters) -> list[tuple[str, nn.Parameter]]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for item in parameters:
        name, parameter = item if isinstance(item, tuple) else ("", item)
        unique.setdefault(id(parameter), (clean_name(name), parameter))
    return list(unique.values())
