"""From environment variables to a process group: torchrun, SLURM, or one plain process.

`launch` is the one call that a script makes. It finds out who started it, checks the mesh against the number of
processes before any of them waits for another, and only then joins the group.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from kforge_parallel.axes import count_text
from kforge_parallel.config import ParallelConfig

if TYPE_CHECKING:
    import torch

    from kforge_parallel.mesh import Mesh

_log = logging.getLogger("kforge_parallel")
_MOST_HOSTS = 65_536
_LAST_MOMENT_S = 0.1


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

    Leading zeros are kept and a name may hold several brackets. The first is where SLURM starts task 0. Raises
    ValueError for a list that is malformed, or that stands for more than 65,536 hosts.
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
            if literal and not re.fullmatch(r"[A-Za-z0-9_.-]+", literal):
                raise bad(f"{literal!r} is no part of a host's name")
            pieces = [literal] if literal else _numbers(bracket, bad)
            if len(hosts) + len(names) * len(pieces) > _MOST_HOSTS:
                raise bad(f"it stands for more than {_MOST_HOSTS} hosts")
            names = [name + piece for name in names for piece in pieces]
        hosts += names
    return hosts


def _numbers(bracket: str, bad: Callable[[str], ValueError]) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise bad(f"[{bracket}] is not a list of numbers and rising ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MOST_HOSTS:
            raise bad(f"it stands for more than {_MOST_HOSTS} hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def find_world(env: Mapping[str, str] | None = None) -> World:
    """Read who this process is from the environment; nothing is contacted.

    torchrun's variables win over SLURM's. A SLURM batch script, or a shell inside an allocation, is one process:
    only ``srun`` starts the tasks of a job. Raises ValueError when a variable is missing or no number, and for
    processes of ``mpirun``, which says who they are in its own way.
    """
    env = os.environ if env is None else env

    def number(name: str) -> int:
        text = env.get(name, "")
        if not text.isdecimal():
            raise ValueError(f"environment variable {name} = {text!r} must be a number, as torchrun or srun sets it")
        return int(text)

    step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    tasks_of = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = number("RANK"), number("WORLD_SIZE")
        local_rank = number("LOCAL_RANK") if "LOCAL_RANK" in env else rank
        local_size = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size
        world = World(
            "torchrun", rank, size, local_rank, local_size, env.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")
        )
    elif step:
        size = number(tasks_of)
        _check_one_start(env, {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": str(size)})
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        address = env.get("MASTER_ADDR") or "127.0.0.1"
        if size > 1 and not env.get("MASTER_ADDR"):
            if not nodes:
                raise ValueError(
                    f"{tasks_of} = {size}, but SLURM_STEP_NODELIST does not say on which hosts the tasks are; start "
                    "with srun, which sets it, or export MASTER_ADDR, the host of task 0"
                )
            address = expand_hosts(nodes)[0]
        port = number("MASTER_PORT") if "MASTER_PORT" in env else _slurm_port(env)
        tasks = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
        node = number("SLURM_NODEID") if "SLURM_NODEID" in env else 0
        local_size = tasks[min(node, len(tasks) - 1)] if tasks else size
        world = World("slurm", number("SLURM_PROCID"), size, number("SLURM_LOCALID"), local_size, address, port)
    else:
        _check_one_start(env, {})
        world = World("single", 0, 1, 0, 1, "127.0.0.1", 0)
    if not 0 <= world.rank < world.size:
        raise ValueError(f"rank {world.rank} does not exist in a world of {count_text(world.size)} ({world.source})")
    if world.size > 1 and not 0 < world.port < 65_536:
        raise ValueError(
            f"MASTER_PORT = {world.port} is no port that {world.size} processes can meet at; use one from 1 to 65535 "
            "(torchrun --standalone finds a free one)"
        )
    return world


def _check_one_start(env: Mapping[str, str], slurm: Mapping[str, str]) -> None:
    """Refuse variables of another start than that of ``slurm``'s step, or than none: such processes would all take
    themselves for one and the same. ``slurm``: rank and number of tasks, which half of torchrun's pair may repeat."""
    for here, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if here in env and env[here] != slurm.get(here):
            says = f", where SLURM says {slurm[here]}" if slurm else ""
            raise ValueError(
                f"{here} = {env[here]}{says}, but {other} is not set: start with torchrun or srun, or export "
                f"{other} too (or unset {here})"
            )
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        size = env.get(name, "")
        # srun gives PMI variables too: of the same tasks. Of mpirun inside a step, SLURM sees the daemons only.
        if size.isdecimal() and int(size) > 1 and size != slurm.get("WORLD_SIZE"):
            raise ValueError(
                f"mpirun has started {size} processes ({name}), which do not know of each other here; start with "
                "torchrun or srun, or export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
            )


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's short form, ``2(x3),1`` -> 2, 2, 2, 1; empty for what is not of that form."""
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", item.strip())
        if match is None:
            return []
        tasks += [int(match[1])] * min(int(match[2] or 1), _MOST_HOSTS)
    return tasks


def _job(env: Mapping[str, str]) -> str:
    """What the job is called by who started it: equal on its processes, other in another job. May be empty."""
    names = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    return "/".join(f"{name} {env[name]}" for name in names if env.get(name))


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port that every task of the step derives alike and that two jobs seldom share: 20000 to 31999.

    Below 32768, where Linux starts to give out ports to outgoing connections, which would be in the way.
    """
    step = "/".join(env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID"))
    return 20_000 + int.from_bytes(hashlib.sha256(step.encode()).digest()[:4], "big") % 12_000


def choose_device(config: ParallelConfig, world: World) -> torch.device:
    """The device of this process. Raises ValueError for CUDA where there is none, or too few devices."""
    import torch

    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("parallel.device = cuda, but torch sees no CUDA device; use --parallel.device cpu")
    if torch.cuda.device_count() == 1 and os.environ.get("SLURM_GPUS_PER_TASK", "").split(":")[-1] == "1":
        return torch.device("cuda", 0)  # SLURM shows each task its own device only
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no device of its own: this host shows {torch.cuda.device_count()}; "
            "start as many processes a host as it has devices"
        )
    return torch.device("cuda", world.local_rank)


def launch(config: ParallelConfig | None = None, env: Mapping[str, str] | None = None) -> Mesh:
    """Join the process group that the environment describes and lay the mesh over it.

    The backend is gloo on CPU and ``cpu:gloo,cuda:nccl`` on CUDA. A group that exists already is used as it is, but
    for its time-out. Groups wait ``init_timeout_s`` while they form, ``build_timeout_s`` for their first transfer, and
    ``step_timeout_s`` once this returns (see `phase`).

    Raises ValueError for a layout that does not fit the world or cannot be trained, before anything is contacted,
    and RuntimeError that names the phase, how long it waited and the option that says so.
    """
    import torch
    import torch.distributed as dist

    from kforge_parallel._torch import keep_gloo_in_order
    from kforge_parallel.layout import check_layout
    from kforge_parallel.mesh import build_mesh
    from kforge_parallel.network import record_flights, set_interfaces
    from kforge_parallel.phases import first_transfer, set_timeout

    config = ParallelConfig() if config is None else config
    env = os.environ if env is None else env
    world = find_world(env)
    axes = check_layout(config, world.size)
    device = choose_device(config, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        record_flights()
    atexit.unregister(_let_threads_end)
    atexit.register(_let_threads_end)
    keep_gloo_in_order()
    if not dist.is_initialized():
        set_interfaces(world)
        _join(config, world, device, _job(env), str(axes))
    elif dist.get_world_size() != world.size:
        raise RuntimeError(
            f"a process group of {dist.get_world_size()} exists already, but the environment says {world.size}"
        )
    mesh = build_mesh(config, world, device)
    first_transfer(config, mesh)
    set_timeout(mesh, config.step_timeout_s)
    return mesh


def _join(config: ParallelConfig, world: World, device: torch.device, job: str, layout: str) -> None:
    import torch.distributed as dist

    from kforge_parallel.meeting import meet
    from kforge_parallel.network import network_settings

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = meet(world, config.init_timeout_s, job, layout) if world.size > 1 else dist.HashStore()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=config.init_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if "Duplicate GPU" in str(error):
            why = "two processes of a host use one GPU: start as many a host as it has devices, each with LOCAL_RANK"
        else:
            why = (
                "either one has failed since, or the network interface is not one that joins the hosts "
                f"({network_settings()}): set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            )
        raise RuntimeError(
            f"start-up: rank {world.rank} of {world.size} ({world.source}) has met the others, but they made no "
            f"{backend} group in the {config.init_timeout_s:g} s that parallel.init_timeout_s gives: {why} ({error})"
        ) from error
    _log.debug("joined %s as rank %d of %d on %s", backend, world.rank, world.size, device)


def shutdown() -> None:
    """Leave the process group, if there is one. Safe to call twice, and after a failure."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _let_threads_end() -> None:
    """Give gloo's threads the interpreter once more before it goes away.

    A thread that is done with a collective gives the tensor back, for which it needs the interpreter. One that gets to
    ask for it only while Python exits is ended by Python within a destructor, and that aborts the process.
    """
    time.sleep(_LAST_MOMENT_S)
