"""Shards of DTensors: what of a tensor lies on this rank, and how values get from one layout to another."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from kforge_optim._torch import laid_out, sharded_dim, split_factor

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: the first index and the one after the last, a dimension each."""


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor (it shares memory), or the plain tensor itself; never part of a graph."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
        wait = getattr(tensor, "wait", None)  # the result of a collective still in flight
        if wait is not None:
            tensor = wait()
    return tensor


@torch.no_grad()
def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of ``parameter.grad``, laid out as the parameter is, in the gradient's own dtype.

    A gradient whose placement differs from the parameter's (``Partial`` under sequence parallelism, say) is
    redistributed first, a collective over the parameter's mesh, and put back into ``.grad``: whoever asks next gets
    it for nothing. Raises ValueError for a sparse gradient and for one on another mesh.
    """
    grad = parameter.grad
    if grad is None:
        raise ValueError("the parameter has no gradient")
    if grad.is_sparse:
        raise ValueError("sparse gradients are not supported; make the embedding with sparse=False")
    if isinstance(parameter, DTensor) != isinstance(grad, DTensor):
        raise ValueError("a parameter and its gradient must both be DTensors or both be plain tensors")
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        if grad.device_mesh != parameter.device_mesh:
            raise ValueError(f"a gradient lies on mesh {grad.device_mesh}, its parameter on {parameter.device_mesh}")
        if grad.placements != parameter.placements:
            grad = grad.redistribute(parameter.device_mesh, parameter.placements)
            parameter.grad = grad
    return local(grad)


def same_strides(one: Tensor, other: Tensor) -> bool:
    """Whether element i of the memory of ``one`` and of ``other``, tensors of one shape, is the same element."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return one.numel() == 0 or all(mine == theirs for size, mine, theirs in pairs if size > 1)


def distinct_shards(tensor: Tensor) -> int:
    """Into how many different pieces the mesh cuts ``tensor``; 1 for a plain or replicated one."""
    shards = 1
    if isinstance(tensor, DTensor):
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if not isinstance(placement, Replicate):
                shards *= size
    return shards


def shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    *,
    together: Collection[int] = (),
) -> Box:
    """Which part of a whole tensor of ``shape`` the rank at ``coordinate`` of the mesh holds: a range a dimension.

    With mesh dimensions ``together``, what the ranks along these hold in all. Each mesh dimension cuts as
    ``torch.chunk`` does, in their order; a strided one (what FSDP makes of a dimension that tensor parallelism cuts
    too) after those behind it. Raises ValueError for a strided shard that is no range: one whose ``split_factor`` is
    not the number of pieces which those behind it make.
    """
    box = [(0, size) for size in shape]
    for dim in range(len(shape)):
        cutters = [at for at, placement in enumerate(placements) if sharded_dim(placement) == dim]
        strided = [at for at in cutters if split_factor(placements[at]) > 1]
        for at in strided:
            behind = math.prod(mesh_shape[other] for other in cutters if other > at)
            if split_factor(placements[at]) != behind:
                raise ValueError(
                    f"{placements[at]} on dimension {at} of a mesh {tuple(mesh_shape)} is no range of its tensor, as "
                    f"those behind it make {behind} pieces; cut it with FSDP over tensor parallelism"
                )
        for at in [*(at for at in cutters if at not in strided), *reversed(strided)]:
            if at not in together:
                box[dim] = _chunk(box[dim], mesh_shape[at], coordinate[at])
    return tuple(box)


def _chunk(whole: tuple[int, int], pieces: int, at: int) -> tuple[int, int]:
    first, stop = whole
    size = -(-(stop - first) // pieces)
    return min(first + at * size, stop), min(first + (at + 1) * size, stop)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What of a plain ``whole`` belongs to this rank's shard of ``like``; a dimension of length 1 belongs to all."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    box = shard_box(like.shape, mesh.shape, like.placements, mesh.get_coordinate() or ())
    return whole[tuple(slice(None) if size == 1 else slice(*at) for size, at in zip(whole.shape, box, strict=True))]


def gathered(tensor: DTensor) -> Tensor:
    """The whole tensor on every rank.

    One mesh dimension after the other, from the slowest: asked for all at once, torch does the same where several cut
    one dimension, and warns of it on each rank.
    """
    placements = list(tensor.placements)
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return local(tensor)


def local_part(source: Tensor, like: Tensor) -> Tensor:
    """What of ``source`` this rank holds once it is laid out as ``like``; either may be a DTensor, of any layout.

    A plain ``source`` holds the whole tensor, not a shard. Raises ValueError when the whole shapes differ. The result
    may share memory with ``source``.
    """
    if like.shape != source.shape:
        raise ValueError(f"a tensor of shape {tuple(source.shape)} does not fit into {tuple(like.shape)}")
    if source.dtype == torch.int16:
        # Neither gloo nor NCCL sends int16; moving copies bits only, so they travel as what both send.
        return local_part(_with_dtype(source, torch.bfloat16), like).view(torch.int16)
    if isinstance(like, DTensor):
        mesh, placements = like.device_mesh, like.placements
        if isinstance(source, DTensor) and source.device_mesh != mesh:
            source = gathered(source)
        if not isinstance(source, DTensor):
            # Every rank has the whole tensor, so nothing is sent: each keeps its own shard.
            source = distribute_tensor(source.to(like.device), mesh, placements, src_data_rank=None)
        source = source.redistribute(mesh, placements)
    elif isinstance(source, DTensor):
        source = gathered(source)
    return local(source)


def _with_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a tensor or DTensor read as another dtype of the same width."""
    return like_layout(local(tensor).view(dtype), tensor)


def like_layout(values: Tensor, like: Tensor) -> Tensor:
    """This rank's ``values`` as a tensor laid out as ``like``: a DTensor if that is one. Nothing is sent or moved."""
    if not isinstance(like, DTensor):
        return values
    return laid_out(values, like.device_mesh, like.placements, like.shape, like.stride())


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy the values of ``source`` into ``target``, in place, whatever the layout of either; see `local_part`."""
    if target is not source:
        local(target).copy_(local_part(source, target))


def drop_gathered(model: nn.Module) -> None:
    """Let go of weights that FSDP2 has gathered and kept, as it does with a root module's after a forward without a
    backward: after a change of the shards they are old. Nothing is sent."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
