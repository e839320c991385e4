"""A look at one rank of any layout from one process: the model is built as that rank would hold it, on the meta device,
in a group in which nothing is sent. What a layout or a plan cannot have shows here, and not when a thousand GPUs wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from kforge_parallel._torch import join_fake_world, local_tensor
from kforge_parallel.axes import AXES, places, product_text
from kforge_parallel.build import built_by, parallelize
from kforge_parallel.config import ParallelConfig
from kforge_parallel.estimate import gb
from kforge_parallel.layout import check_layout
from kforge_parallel.mesh import build_mesh
from kforge_parallel.shape import WANTED, parameters_of, sizes_of
from kforge_parallel.weight_bytes import Model, held_shapes, hold
from kforge_parallel.work import Work, storage_bytes
from kforge_parallel.world import World


@dataclass(frozen=True)
class RankCheck:
    """What one rank of a layout holds; ``str()`` lists it."""

    rank: int
    axes: dict[str, int]
    """Sizes of all axes."""
    place: dict[str, int]
    """Where the rank stands on each axis."""
    shapes: dict[str, tuple[int, ...]]
    """Name of a parameter that the rank holds -> the shape of its part, which may be empty."""
    whole: dict[str, tuple[int, ...]]
    """The same name -> the shape of the whole."""
    parameters: int
    """Bytes of all these parts."""

    def __str__(self) -> str:
        axes = [axis for axis in AXES if self.axes[axis] > 1]
        axes += ["expert_shard", "ep"] if self.axes["ep"] > 1 else []
        place = ", ".join(f"{axis} {self.place[axis]}" for axis in axes)
        head = f"rank {self.rank} of {product_text(self.axes)}" + (f" ({place})" if place else "")
        width = max(map(len, self.shapes), default=0)
        lines = [
            f"  {name:<{width}}  {_by(shape)}" + ("" if shape == self.whole[name] else f" of {_by(self.whole[name])}")
            for name, shape in self.shapes.items()
        ]
        return "\n".join([f"{head}: {gb(self.parameters)} of weights in {len(lines)} parameters", *lines])


def _by(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "1"


def check_rank(
    build: Callable[[], nn.Module],
    config: ParallelConfig,
    world_size: int,
    rank: int,
    *,
    plan: Mapping[str, str] | None = None,
    blocks: str | None = None,
) -> RankCheck:
    """Build rank ``rank`` of ``world_size`` and check that it holds what estimates count, parameter by parameter.

    build, plan, blocks: as of `parallelize`. No memory is taken for weights and nothing is contacted; the process must
    be in no process group, and is in none afterwards.

    Raises ValueError for a rank that there is not and as `check_layout` and `parallelize` do, and RuntimeError where
    what is there is not what estimates count, or where the process is in a group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already; look at other worlds from one that is not")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist in a world of {world_size}; use one from 0 to {world_size - 1}")
    config = replace(config, device="cpu")
    with torch.device("meta"):
        whole = built_by(build)
    axes = check_layout(config, world_size, getattr(whole, "shape", None))
    listed = parameters_of(whole, blocks=blocks, plan=plan)
    join_fake_world(rank, world_size)
    try:
        mesh = build_mesh(config, World("fake", rank, world_size, 0, 1, "127.0.0.1", 0), torch.device("cpu"))
        model = parallelize(build, mesh, config, gradients="sum", blocks=blocks, plan=plan, allocate=False)
    finally:
        dist.destroy_process_group()
    found = {name: tuple(local_tensor(p.detach()).shape) for name, p in model.named_parameters()}
    shape: Mapping[str, int] = getattr(whole, "shape", {})
    here = [p for p in listed if p.name in found]
    counted = held_shapes(here, axes, shape.get("n_kv_heads", 1), rank)
    for name, part in counted.items():
        if found[name] != part:
            raise RuntimeError(
                f"rank {rank} holds {name} as {found[name]}, and estimates count {part}; this is a fault of kforge"
            )
    size = storage_bytes(config) * sum(math.prod(part) for part in found.values())
    if all(key in shape for key in WANTED):
        told = hold(Model(sizes_of(shape), listed), config, axes, Work(row_tokens=1), rank).parameters
        if told != size:
            raise RuntimeError(
                f"rank {rank} holds {size:,} bytes of weights, and estimates count {told:,}; this is a fault of kforge"
            )
    return RankCheck(rank, axes, places(rank, axes), found, {p.name: p.shape for p in here}, size)
