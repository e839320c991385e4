"""How the processes of a job find each other: a store kept by rank 0, in which each says that it has come.

A port may be another job's, a process may never start, and one may have been given another layout. Each is told to
all who came, by name, and as soon as it is known: a group that forms around such a fault would hang instead.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from kforge_parallel.network import network_settings
from kforge_parallel.world import World

_WELCOME = "welcome"

# Address, port, rank and size -> the store there, and how often this process has met the others at it. The store
# outlives the group: were it closed with it, a process that launches again could meet the one that is going away.
_stores: dict[tuple[str, int, int, int], tuple[dist.Store, int]] = {}


def meet(world: World, wait_s: float, job: str, layout: str) -> dist.Store:
    """Wait until all ranks have come, and return the store at which they met, for torch to form its groups.

    job: what the job is called by who started it, or empty. layout: equal on all ranks, or refused.
    Raises RuntimeError that says what went wrong and what to change.
    """
    who = f"start-up: rank {world.rank} of {world.size} ({world.source})"
    where = f"{world.address}:{world.port}"
    other = "or choose another port: MASTER_PORT, or torchrun's --master-port or --standalone"
    try:
        store, alien = _enter(world, timedelta(seconds=wait_s), job)
        verdict = (
            f"found another job at {world.address}, port {world.port}: {alien}"
            if alien
            else _gather(store, world, layout, wait_s)
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"{who} cannot open port {world.port} on {world.address}: another process uses it. End that one, "
                f"{other} ({error})"
            ) from error
        raise RuntimeError(
            f"{who} did not reach rank 0 at {where} within {wait_s:g} s (parallel.init_timeout_s). Is rank 0 "
            f"running, can this host reach {world.address}, and is the port the same for all? "
            f"({network_settings()}; {error})"
        ) from error
    if alien:
        raise RuntimeError(f"{who} {verdict}. End it, {other}")
    if verdict != _WELCOME:
        raise RuntimeError(f"{who} met the others at {where}, but {verdict}")
    return store


def _enter(world: World, wait: timedelta, job: str) -> tuple[dist.Store, str]:
    """The store for this meeting, and who is there instead when it is not this job's."""
    # torchrun's agent may keep a store there already, for this job alone.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    key = (world.address, world.port, world.rank, world.size)
    if key not in _stores:
        whole: dist.Store = dist.TCPStore(
            world.address,
            world.port,
            world.size,
            is_master=world.rank == 0 and not agent,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
        )
        _stores[key] = (whole, 0)
    whole, times = _stores[key]
    _stores[key] = (whole, times + 1)
    whole.set_timeout(wait)
    store = dist.PrefixStore(f"kforge/{times}", whole)
    job = job or "a job without an id"
    if world.rank == 0:
        whole.set("kforge/job", job)
    elif (theirs := whole.get("kforge/job").decode()) != job:
        return store, f"{theirs}, and this is {job}"
    if not agent:
        mine = f"process {os.getpid()} of {socket.gethostname()}"
        holder = store.compare_set(f"rank {world.rank}", "", mine).decode()
        if holder != mine:
            return store, f"its rank {world.rank} is {holder}"
    return store, ""


def _gather(store: dist.Store, world: World, layout: str, wait_s: float) -> str:
    """Say that this rank has come, and hear from rank 0 whether all have, with one layout."""
    store.set(f"layout {world.rank}", layout)
    if world.rank:
        verdict = store.get("verdict").decode()
        if verdict != _WELCOME:
            store.set(f"heard {world.rank}", "")
        return verdict
    keys = [f"layout {rank}" for rank in range(world.size)]
    with suppress(dist.DistError, RuntimeError):
        store.wait(keys, timedelta(seconds=wait_s))
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        some = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        verdict = (
            f"{len(missing)} never came within {wait_s:g} s (parallel.init_timeout_s): rank {some}. Were all "
            f"{world.size} started, and can their hosts reach {world.address}?"
        )
    else:
        others = [(rank, text.decode()) for rank, text in enumerate(store.multi_get(keys)) if text.decode() != layout]
        verdict = _WELCOME
        if others:
            rank, theirs = others[0]
            verdict = f"rank {rank} was given another layout ({theirs}) than rank 0 ({layout}); start all with one"
    store.set("verdict", verdict)
    if verdict != _WELCOME:  # the store goes when this process does: let the others hear first
        with suppress(dist.DistError, RuntimeError):
            came = [rank for rank in range(1, world.size) if rank not in missing]
            store.wait([f"heard {rank}" for rank in came], timedelta(seconds=5))
    return verdict
