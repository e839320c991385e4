"""One process's place on the axes of a layout, and torch's meshes for its groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kforge_parallel.axes import AXES as AXES
from kforge_parallel.axes import EXPERT_AXES as EXPERT_AXES
from kforge_parallel.axes import expert_shard, product_text
from kforge_parallel.axes import resolve_axes as resolve_axes
from kforge_parallel.config import ParallelConfig
from kforge_parallel.world import World


@dataclass(frozen=True)
class Mesh:
    """One process's view of the job: who it is, where it computes, and its groups."""

    world: World
    """Who this process is."""
    device: torch.device
    """Where its part of the model lives."""
    axes: dict[str, int]
    """Size of every axis, in order from the slowest to the fastest; ``ep``, which lies over others, last."""
    device_mesh: DeviceMesh
    """The dense root: dimensions pp, dp_replicate, dp_shard (of size dp_shard · cp, as FSDP2 shards over both), tp."""
    expert_mesh: DeviceMesh | None = None
    """The expert root: dimensions pp, dp_replicate, expert_shard, ep. None where ep is 1."""
    config: ParallelConfig = field(default_factory=ParallelConfig)
    """What `launch` was given; `parallelize` goes by it unless it is told otherwise."""
    cp_group: dist.ProcessGroup | None = None
    """The ranks that have the other parts of this one's rows, in order of their parts. None where cp is 1."""

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
        """Which part of the global batch this process reads; equal on ranks that differ in pp, cp or tp only."""
        shard = self.device_mesh.get_local_rank("dp_shard") // self.axes["cp"]
        return self.device_mesh.get_local_rank("dp_replicate") * self.axes["dp_shard"] + shard

    @property
    def data_size(self) -> int:
        """Number of parts that the global batch is cut into."""
        return self.axes["dp_replicate"] * self.axes["dp_shard"]

    @property
    def copies(self) -> int:
        """How many ranks have the same tokens: a sum over all ranks counts everything this many times. Ranks that
        differ in cp have other tokens of the same rows."""
        return self.size // (self.data_size * self.cp_size)

    @property
    def cp_size(self) -> int:
        """Number of parts that each row is cut into."""
        return self.axes["cp"]

    @property
    def cp_rank(self) -> int:
        """Which part of each row this process has."""
        return self.device_mesh.get_local_rank("dp_shard") % self.axes["cp"]

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for FSDP2: 1-D to shard over, 2-D (dp_replicate, dp_shard) where there are replicas (HSDP)."""
        if self.axes["dp_replicate"] > 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return self.device_mesh["dp_shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The mesh for FSDP2 of experts that ep deals out, 1-D or 2-D as `fsdp`; only where ep is above 1."""
        assert self.expert_mesh is not None
        if self.axes["dp_replicate"] > 1:
            return self.expert_mesh["dp_replicate", "expert_shard"]
        return self.expert_mesh["expert_shard"]

    def replicas(self, *, experts: bool = False) -> dist.ProcessGroup:
        """The ranks that hold the same parts of the weights as this one, or of the experts that ep deals out."""
        root = self.expert_mesh if experts else self.device_mesh
        assert root is not None
        return root["dp_replicate"].get_group()

    @property
    def pp(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that have the other stages of this one's pipeline; of size 1 where pp is 1."""
        return self.device_mesh["pp"]

    @property
    def pp_size(self) -> int:
        """Number of ranks that split the blocks."""
        return self.axes["pp"]

    @property
    def pp_rank(self) -> int:
        """Place of this process in its pipeline."""
        return self.device_mesh.get_local_rank("pp")

    @property
    def tp(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that split each matrix with this one; of size 1 where tp is 1."""
        return self.device_mesh["tp"]

    @property
    def tp_size(self) -> int:
        """Number of ranks that split each matrix."""
        return self.axes["tp"]

    @property
    def tp_rank(self) -> int:
        """Which part of each matrix this process holds."""
        return self.device_mesh.get_local_rank("tp")

    def __str__(self) -> str:
        return f"{product_text(self.axes)} on {self.device.type} ({self.world.source})"


def build_mesh(config: ParallelConfig, world: World, device: torch.device) -> Mesh:
    """Lay the axes over the process group that exists. Collective: every rank makes the same groups in one order."""
    axes = resolve_axes(config, world.size)
    outer = (axes["pp"], axes["dp_replicate"])
    dense = init_device_mesh(
        device.type,
        (*outer, axes["dp_shard"] * axes["cp"], axes["tp"]),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"),
    )
    expert = None
    if axes["ep"] > 1:
        expert = init_device_mesh(device.type, (*outer, expert_shard(axes), axes["ep"]), mesh_dim_names=EXPERT_AXES)
    row = None
    if axes["cp"] > 1:
        ranks = torch.arange(world.size).view(-1, axes["cp"], axes["tp"]).transpose(1, 2).flatten(0, 1)
        row, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return Mesh(world, device, axes, dense, expert, config, row)
