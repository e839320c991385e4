"""The axes over which a job is spread, checked before a process group exists."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kforge_parallel.config import ParallelConfig
from kforge_parallel.world import World

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """One process's view of the job: who it is, where it computes, and its groups."""

    world: World
    """Who this process is."""
    device: torch.device
    """Where its part of the model lives."""
    axes: dict[str, int]
    """Size of every axis, in order from the slowest to the fastest."""
    device_mesh: DeviceMesh
    """The torch mesh, with the one dimension ``dp_shard``."""

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this process reads."""
        return self.device_mesh.get_local_rank("dp_shard")

    @property
    def data_size(self) -> int:
        """Number of parts that the global batch is cut into."""
        return self.axes["dp_replicate"] * self.axes["dp_shard"]

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over."""
        return self.device_mesh["dp_shard"]

    def __str__(self) -> str:
        shape = " × ".join(f"{name} {size}" for name, size in self.axes.items() if size > 1) or "one process"
        return f"{shape} on {self.device.type} ({self.world.source})"


def resolve_axes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Sizes of all axes for ``world_size`` processes, -1 filled in. Raises ValueError when they do not fit."""
    sizes = {name: getattr(config, name) for name in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if world_size % fixed:
            raise ValueError(
                f"{world_size} processes cannot be divided by the other axes, whose product is {fixed}; "
                "start a multiple of that, or make an axis smaller"
            )
        return {name: world_size // fixed if size == -1 else size for name, size in sizes.items()}
    if fixed != world_size:
        product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"
        raise ValueError(
            f"the mesh ({product}) wants {fixed} processes, but {world_size} are running; "
            f"start {fixed}, or set parallel.dp_shard = -1 to take all that are left"
        )
    return sizes


def build_mesh(config: ParallelConfig, world: World, device: torch.device) -> Mesh:
    """Lay the axes over the process group that exists."""
    axes = resolve_axes(config, world.size)
    device_mesh = init_device_mesh(device.type, (axes["dp_shard"],), mesh_dim_names=("dp_shard",))
    return Mesh(world, device, axes, device_mesh)
