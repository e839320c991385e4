"""Before the first step, all ranks say what they are about to run; one that differs is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kforge_train.errors import ConfigError

CHUNK = 1 << 24
MULTIPLIER = -7046029254386353131
"""2^64 over the golden ratio, odd, as a signed number: spreads small differences over all bits."""


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def on_first_rank(act: Callable[[], None]) -> None:
    """Let rank 0 do something that may be refused; its ConfigError is raised on every rank."""
    first, told = True, [""]
    if dist.is_initialized() and dist.get_world_size() > 1:
        first = dist.get_rank() == 0
    if first:
        try:
            act()
        except ConfigError as error:
            told = [str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise ConfigError(told[0])


def check_agreement(facts: dict[str, Any]) -> None:
    """Compare ``facts`` over all ranks. Raises RuntimeError, on every rank alike, that names fact and ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: digest(value) for name, value in facts.items()})
    for name in facts:
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]
        if odd:
            raise RuntimeError(
                f"ranks {odd} have another {name} than rank 0 ({everyone[odd[0]][name]} and {everyone[0][name]}); "
                "start every process with the same command, environment and files"
            )


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


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters that several ranks hold alike: replicas, and what tensor parallelism leaves whole.

    Raises RuntimeError, on every rank alike, that names ranks whose bits differ from those of the first with the same
    piece. Collective; waits for the device.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    pieces: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        local, piece = parameter.detach(), "whole"
        if isinstance(parameter, DTensor):
            mesh, local = parameter.device_mesh, parameter.to_local()
            dims = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), parameter.placements, strict=True)
            piece = ", ".join(f"{dim} {at}" for dim, at, how in dims if not how.is_replicate()) or "whole"
        pieces.setdefault(piece, []).append((name, bits_digest(local)))
    mine = {
        piece: digest([[name for name, _ in found], torch.stack([value for _, value in found]).tolist()])
        for piece, found in pieces.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for piece in sorted({piece for theirs in everyone for piece in theirs}):
        holders = [rank for rank, theirs in enumerate(everyone) if piece in theirs]
        odd = [rank for rank in holders if everyone[rank][piece] != everyone[holders[0]][piece]]
        if odd:
            raise RuntimeError(
                f"ranks {odd} hold other values than rank {holders[0]} of the same parameters ({piece}): they would "
                "train apart. Initial values must not depend on the rank, and a checkpoint must be whole on all"
            )
