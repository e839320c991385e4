"""How long processes wait for each other, by phase, and errors that say which phase it was.

| phase | what processes wait for | option |
|---|---|---|
| start-up | each other, and their groups | parallel.init_timeout_s |
| build | the first transfer; weights, checkpoints, compilation | parallel.build_timeout_s |
| step | transfers of training | parallel.step_timeout_s |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from kforge_parallel._torch import set_group_timeout
from kforge_parallel.config import ParallelConfig
from kforge_parallel.mesh import Mesh
from kforge_parallel.network import network_settings

# What gloo, NCCL's blocking wait and the stores say when a time-out ends a wait.
_LATE = re.compile(r"timed out|timeout|time-out|wait_for_all", re.IGNORECASE)


def set_timeout(mesh: Mesh, seconds: float) -> None:
    """Let every group of the mesh that this process is in, and the group of all, wait ``seconds``.

    Local: nothing is sent. A transfer that has begun keeps the time-out it began with.
    """
    for group in _groups(mesh):
        set_group_timeout(seconds, group)


@contextmanager
def phase(name: Literal["build", "step"], config: ParallelConfig, mesh: Mesh) -> Iterator[None]:
    """Give all groups the time-out of a phase, and name the phase when one ends a transfer in it.

    On leaving, groups have ``step_timeout_s``. gloo's time-outs are raised here, as RuntimeError with the value and
    the option. NCCL's end the process from a thread of its own, after it has written its last collectives to a file
    (see `kforge_parallel.network`); that they can be told apart takes the log of all ranks.
    """
    option = f"{name}_timeout_s"
    seconds = float(getattr(config, option))
    set_timeout(mesh, seconds)
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not _LATE.search(str(error)) or _is_named(error):
            raise
        raise RuntimeError(
            f"{name}: rank {mesh.rank} of {mesh.size} waited {seconds:g} s for the others (parallel.{option} = "
            f"{seconds:g}). Look for the rank that failed or is somewhere else first; raise the option if all were "
            f"only slow ({error})"
        ) from error
    finally:
        set_timeout(mesh, config.step_timeout_s)


def first_transfer(config: ParallelConfig, mesh: Mesh) -> None:
    """One small sum over each group: proof that the network carries what the store has only promised.

    Raises RuntimeError that names the group, the interface and the option when it does not.
    """
    if mesh.size == 1:
        return
    set_timeout(mesh, config.build_timeout_s)
    for name, group in _named_groups(mesh):
        size = dist.get_world_size(group)
        if size == 1:
            continue
        count = torch.ones(1, device=mesh.device)
        try:
            work = dist.all_reduce(count, group=group, async_op=True)
            assert work is not None  # this rank is in each of its groups
            work.wait(timedelta(seconds=config.build_timeout_s))  # with a time, NCCL's wait too ends here
            arrived = int(count.item())
        except (dist.DistError, RuntimeError) as error:
            raise RuntimeError(
                f"build: rank {mesh.rank} of {mesh.size} got no answer to its first transfer over {name} ({size} "
                f"ranks) within {config.build_timeout_s:g} s (parallel.build_timeout_s). The processes have met, so "
                f"either one has failed since, or the network interface is wrong ({network_settings()}): set "
                f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that joins the hosts ({error})"
            ) from error
        if arrived != size:
            raise RuntimeError(f"build: {arrived} of {size} ranks took part in the first transfer over {name}")


def _named_groups(mesh: Mesh) -> list[tuple[str, dist.ProcessGroup | None]]:
    named: list[tuple[str, dist.ProcessGroup | None]] = [("all", None)]
    for root in (mesh.device_mesh, mesh.expert_mesh):
        if root is not None and root.mesh_dim_names is not None:
            named += [(name, root.get_group(name)) for name in root.mesh_dim_names]
    if mesh.cp_group is not None:
        named.append(("cp", mesh.cp_group))
    return named


def _groups(mesh: Mesh) -> list[dist.ProcessGroup | None]:
    return [group for _, group in _named_groups(mesh)]


def _is_named(error: BaseException) -> bool:
    return re.match(r"(start-up|build|step): ", str(error)) is not None
