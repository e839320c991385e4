"""From environment variables to a process group: torchrun, SLURM, or one plain process.

`launch` is the one call that a script makes. It finds out who started it, checks the mesh against the number of
processes before any of them waits for another, and only then joins the group.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kforge_parallel.config import ParallelConfig

if TYPE_CHECKING:
    import torch

    from kforge_parallel.mesh import Mesh

_log = logging.getLogger("kforge_parallel")


@dataclass(frozen=True)
class World:
    """Who this process is among all processes of the job."""

    source: str
    """What started it: torchrun, slurm or single."""
    rank: int
    """Number of this process, 0 to size - 1."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process on its host; chooses the CUDA device."""
    local_size: int
    """Number of processes on this host."""
    address: str
    """Host on which the processes meet (rank 0's)."""
    port: int
    """Port on that host; 0 where one process meets nobody."""


def expand_hosts(text: str) -> list[str]:
    """Expand a SLURM host list: ``gpu[001-003,007],login`` -> gpu001, gpu002, gpu003, gpu007, login.

    Leading zeros are kept and a name may hold several brackets. Raises ValueError for a list that is malformed.
    """

    def bad(why: str) -> ValueError:
        return ValueError(f"host list {text!r} cannot be read: {why}")

    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if depth not in (0, 1):
            raise bad("its brackets do not match")
    if depth:
        raise bad("its brackets do not match")
    parts.append(text[start:])

    hosts: list[str] = []
    for part in (p.strip() for p in parts):
        if not part:
            raise bad("a name is empty")
        names = [""]
        for literal, bracket in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            names = [name + piece for name in names for piece in ([literal] if literal else _numbers(bracket, bad))]
        hosts += names
    return hosts


def _numbers(bracket: str, bad: object) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise bad(f"[{bracket}] is not a list of numbers and rising ranges")  # type: ignore[operator]
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def find_world(env: Mapping[str, str] | None = None) -> World:
    """Read who this process is from the environment; nothing is contacted.

    torchrun's variables win over SLURM's. A SLURM batch script, or a shell inside an allocation, is one process:
    only ``srun`` starts the tasks of a job. Raises ValueError when a variable is missing or no number.
    """
    env = os.environ if env is None else env

    def number(name: str) -> int:
        text = env.get(name, "")
        if not text.isdecimal():
            raise ValueError(f"environment variable {name} = {text!r} must be a number, as torchrun or srun sets it")
        return int(text)

    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = number("RANK"), number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK") if "LOCAL_RANK" in env else rank
        local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size
        world = World(
            "torchrun", rank, size, local_rank, local_size, env.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")
        )
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        size = number("SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in env else number("SLURM_NTASKS")
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        address = env.get("MASTER_ADDR") or (expand_hosts(nodes)[0] if size > 1 else "127.0.0.1")
        port = number("MASTER_PORT") if "MASTER_PORT" in env else _slurm_port(env)
        # "2(x3),1": tasks on each node of the step; the node's own entry is not marked, so one that has more
        # local tasks than the first entry says is still right about itself.
        tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
        local_size = int(tasks[0]) if tasks else size
        world = World("slurm", number("SLURM_PROCID"), size, number("SLURM_LOCALID"), local_size, address, port)
    else:
        world = World("single", 0, 1, 0, 1, "127.0.0.1", 0)
    if not 0 <= world.rank < world.size:
        raise ValueError(f"rank {world.rank} does not exist in a world of {world.size} processes ({world.source})")
    if world.size > 1 and not 0 < world.port < 65_536:
        raise ValueError(
            f"MASTER_PORT = {world.port} is no port that {world.size} processes can meet at; use one from 1 to 65535 "
            "(torchrun --standalone finds a free one)"
        )
    return world


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port that every task of the step derives alike and that two jobs seldom share: 20000 to 59999."""
    step = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID"))
    return 20_000 + int.from_bytes(hashlib.sha256(step.encode()).digest()[:4], "big") % 40_000


def choose_device(config: ParallelConfig, world: World) -> torch.device:
    """The device of this process. Raises ValueError for CUDA where there is none, or too few devices."""
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("parallel.device = cuda, but torch sees no CUDA device; use --parallel.device cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no device of its own: this host shows {torch.cuda.device_count()}; "
            "start as many processes a host as it has devices"
        )
    return torch.device("cuda", world.local_rank)


def launch(config: ParallelConfig | None = None, env: Mapping[str, str] | None = None) -> Mesh:
    """Join the process group that the environment describes and lay the mesh over it.

    The backend is gloo on CPU and ``cpu:gloo,cuda:nccl`` on CUDA. A group that exists already is used as it is.
    Raises ValueError for a mesh that does not fit the world, before anything is contacted, and RuntimeError that
    names the phase when the processes do not find each other within ``init_timeout_s``.
    """
    import torch
    import torch.distributed as dist

    from kforge_parallel.layout import check_layout
    from kforge_parallel.mesh import build_mesh

    config = ParallelConfig() if config is None else config
    world = find_world(env)
    check_layout(config, world.size)
    device = choose_device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join(config, world, device)
    elif dist.get_world_size() != world.size:
        raise RuntimeError(
            f"a process group of {dist.get_world_size()} exists already, but the environment says {world.size}"
        )
    return build_mesh(config, world, device)


def _join(config: ParallelConfig, world: World, device: torch.device) -> None:
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world.address in ("127.0.0.1", "localhost", "::1") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo looks its own host name up, which fails on a laptop without a network.
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    wait = timedelta(seconds=config.init_timeout_s)
    try:
        if world.size == 1:
            store: Any = dist.HashStore()
        elif world.source == "torchrun":
            # Agrees with torchrun on whether its agent already keeps a store at this address.
            store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=wait))
            store.set_timeout(wait)
        else:
            store = dist.TCPStore(world.address, world.port, world.size, is_master=world.rank == 0, timeout=wait)
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=config.step_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise RuntimeError(
            f"start-up: rank {world.rank} of {world.size} ({world.source}) did not find the others at "
            f"{world.address}:{world.port} within {config.init_timeout_s:g} s. Are all {world.size} processes running, "
            f"can this host reach {world.address}, and is the port free? ({error})"
        ) from error
    _log.debug("joined %s as rank %d of %d on %s", backend, world.rank, world.size, device)


def shutdown() -> None:
    """Leave the process group, if there is one. Safe to call twice, and after a failure."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
