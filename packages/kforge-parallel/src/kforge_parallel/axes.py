"""The axes of a layout as numbers: their sizes, and which rank stands where. Standard library only.

Ranks are laid out row by row over two arrangements of the same processes, each with its last axis fastest:

- the dense root (pp, dp_replicate, dp_shard, cp, tp), where everything but experts lives;
- the expert root (pp, dp_replicate, expert_shard, ep), where experts live. ``ep`` takes the ranks that differ in tp
  first, then cp, then dp_shard; what it leaves, expert_shard = dp_shard · cp · tp / ep, shards each expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kforge_parallel.config import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dense root, from the slowest to the fastest axis."""
EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep")
"""The expert root, from the slowest to the fastest axis."""


def resolve_axes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Sizes of all six axes for ``world_size`` processes, -1 filled in. Raises ValueError when they do not fit."""
    if world_size < 1:
        raise ValueError(f"a layout wants at least one process, not {world_size}")
    sizes = {name: getattr(config, name) for name in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if world_size % fixed:
            raise ValueError(
                f"{count_text(world_size)} cannot be divided by the other axes, whose product is {fixed} "
                f"({product_text(sizes)}); {_start(fixed, world_size, 'a multiple of ')}, or make an axis smaller"
            )
        sizes = {name: world_size // fixed if size == -1 else size for name, size in sizes.items()}
    elif fixed != world_size:
        raise ValueError(
            f"the mesh ({product_text(sizes)}) wants {count_text(fixed)}, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running; {_start(fixed, world_size)}, or set parallel.dp_shard = -1 "
            "to take all that are left"
        )
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    if inner % config.ep:
        raise ValueError(
            f"parallel.ep = {config.ep} does not divide the {count_text(inner)} of dp_shard {sizes['dp_shard']} × "
            f"cp {sizes['cp']} × tp {sizes['tp']} that it is laid over; set parallel.ep to a divisor of {inner}"
        )
    return {**sizes, "ep": config.ep}


def expert_shard(axes: dict[str, int]) -> int:
    """Ranks that share the parameters of one expert inside a replica: what ``ep`` leaves of the inner axes."""
    return axes["dp_shard"] * axes["cp"] * axes["tp"] // axes["ep"]


def places(rank: int, axes: dict[str, int]) -> dict[str, int]:
    """Where a rank stands on each axis of both roots, ``expert_shard`` and ``ep`` on the second."""
    found = {}
    experts = {**axes, "expert_shard": expert_shard(axes)}
    for root in (AXES, EXPERT_AXES):
        left = rank
        for name in reversed(root):
            left, found[name] = divmod(left, experts[name])
    return found


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Along which dimension FSDP shards a parameter: the first; of a stack of matrices [parts, …] whose parts cannot be
    dealt out evenly, the first other one that can."""
    if len(shape) > 2 and shape[0] % shards:
        for dim in range(1, len(shape)):
            if shape[dim] % shards == 0:
                return dim
    return 0


def _start(wanted: int, world_size: int, before: str = "") -> str:
    """What to do for ``wanted`` processes: the command where there are too few."""
    if world_size > wanted:
        return f"start {before}{wanted}"
    return f"start {before}{wanted} with torchrun --nproc-per-node {wanted} or srun --ntasks {wanted}"


def count_text(processes: int) -> str:
    """``1 process``, ``2 processes``."""
    return f"{processes} process{'' if processes == 1 else 'es'}"


def product_text(sizes: dict[str, int]) -> str:
    """``dp_shard 4 × tp 2``: the axes that are not 1."""
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, -1)) or "one process"
