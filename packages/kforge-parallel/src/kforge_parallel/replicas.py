"""Do ranks that hold the same values hold the same bits, and do those that hold different parts hold different ones?

Replicas that differ train apart, and shards that are all filled with the same numbers are a smaller model than was
asked for. Neither shows in a loss.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kforge_parallel._torch import persistent_buffers

CHUNK = 1 << 24
MULTIPLIER = -7046029254386353131
"""2^64 over the golden ratio, odd, as a signed number: spreads small differences over all bits."""


@torch.no_grad()
def bits_digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with any bit of a tensor and with the order of its elements: 0-dim int64, on its device."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device)
        total += ((part + 1) * (2 * place + 1) * MULTIPLIER).sum()  # wraps around
    return total


@torch.no_grad()
def check_replicas(model: nn.Module, *, drawn: bool = True) -> None:
    """Compare the parameters of all ranks, and the floating-point buffers that a checkpoint holds (the bias of a
    router, say). Does nothing on one rank. Collective; waits for the device.

    Raises RuntimeError, on every rank alike, when ranks that hold the same piece (replicas, or what tensor parallelism
    leaves whole) differ in a bit, naming the ranks; and when all pieces of a parameter are filled with the same numbers
    that are not all one number, naming the parameter. ``drawn=False`` leaves the second out, for values that come from
    training: steps of equal size (Lion's, say) make small pieces alike by chance.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    pieces: dict[str, list[int]] = {}
    names: list[str] = []
    digests: list[torch.Tensor] = []
    varied: list[bool] = []
    buffers = {name: buffer for name, buffer in persistent_buffers(model).items() if buffer.is_floating_point()}
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        local, piece = tensor.detach(), ""
        if isinstance(tensor, DTensor):
            mesh, local = tensor.device_mesh, tensor.to_local()
            dims = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
            piece = ", ".join(f"{dim} {at}" for dim, at, how in dims if not how.is_replicate() and mesh[dim].size() > 1)
        pieces.setdefault(piece or "whole", []).append(len(names))
        names.append(name)
        digest = bits_digest(local)
        digests.append(digest.to(digests[0].device) if digests else digest)  # offloaded parameters, buffers on CUDA
        varied.append(drawn and bool(piece) and local.numel() > 0 and bool(local.min() < local.max()))
    if not names:
        return
    mine = torch.stack(digests)
    # Ranks that have other parameters (the stages of a pipeline) are not compared with one another.
    _same_pieces({(piece, _sha([names[i] for i in held])): _sha(mine[held].tolist()) for piece, held in pieces.items()})
    if not drawn:
        return
    places = _places_of_all(names)
    own = torch.tensor([places[name] for name in names], device=mine.device)
    bounds = torch.iinfo(torch.int64)
    low = torch.full((len(places),), bounds.max, device=mine.device).index_copy_(0, own, mine)
    high = torch.full((len(places),), bounds.min, device=mine.device).index_copy_(0, own, mine)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    same = (low == high)[own].tolist()
    alike = [name for name, equal, here in zip(names, same, varied, strict=True) if equal and here]
    if alike:
        raise RuntimeError(
            f"every rank holds the same numbers in its part of {', '.join(alike[:6])}{' …' if len(alike) > 6 else ''}: "
            "they were drawn as if each part were the whole. Draw the whole tensor on every rank and keep a part "
            "(distribute_tensor), or let numbers depend on the place in the whole"
        )


def _sha(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _places_of_all(names: list[str]) -> dict[str, int]:
    """The names of all ranks, numbered alike on all."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    return {name: i for i, name in enumerate(dict.fromkeys(name for theirs in everyone for name in theirs))}


def _same_pieces(mine: dict[tuple[str, str], str]) -> None:
    """mine: a piece, and which parameters there are of it -> digest of its values."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for piece in sorted({piece for theirs in everyone for piece in theirs}):
        holders = [rank for rank, theirs in enumerate(everyone) if piece in theirs]
        odd = [rank for rank in holders if everyone[rank][piece] != everyone[holders[0]][piece]]
        if odd:
            raise RuntimeError(
                f"ranks {odd} hold other values than rank {holders[0]} of the same parameters ({piece[0]}): they would "
                "train apart. Initial values must not depend on the rank, and a checkpoint must be whole on all"
            )
