"""`run_ranks`: one function, several fresh processes, their results in order of rank."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing as mp
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first DTensor operation imports it: a second for each worker otherwise
]
# What the ranks that did not fail say when a peer is gone.
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time; the message carries the traceback of the first one that did."""


def preload(*modules: str) -> None:
    """Have the server import ``modules``, too, before its first worker: each of them does it otherwise.

    For a conftest.py. One that is not installed is passed over, and left to the test that needs it.
    """
    PRELOAD.extend(modules)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    threads: int = 1,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(rank, world, *args)`` in ``world`` fresh processes and return the results in order of rank.

    ``fn`` is a module-level function. A module that cannot be imported by name, as pytest's test modules, is loaded
    from its file in each worker. Arguments and results travel by pickle. With ``init`` the workers share a gloo process
    group; without it RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT are set as torchrun would,
    for code that makes its own group. ``threads`` is torch's intra-op thread count in each worker.

    Raises RankFailure when a rank raises, dies or outlives ``timeout_s`` seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    folder = tempfile.mkdtemp(prefix="kforge-ranks-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    workers: list[Any] = []
    pipes: list[Connection] = []
    port = _held_port()
    try:
        payload = pickle.dumps((args, list(sys.path), {"MASTER_PORT": str(port.getsockname()[1]), **(env or {})}))
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(
                target=_work,
                args=(
                    theirs,
                    fn.__module__,
                    fn.__code__.co_filename,
                    fn.__qualname__,
                    rank,
                    world,
                    payload,
                    folder,
                    init,
                    threads,
                ),
                daemon=True,
            )
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        return _collect(pipes, time.monotonic() + timeout_s, timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for pipe in pipes:
            pipe.close()
        port.close()
        shutil.rmtree(folder, ignore_errors=True)


def _held_port() -> socket.socket:
    """A socket bound to a free port: rank 0 may listen there, and the kernel gives it to no one else meanwhile.

    Bound with SO_REUSEADDR and not listening, it lets another such socket listen (torch's store is one), while
    connections and ``bind(0)`` of other processes pass it by. A port that is only looked up may be gone again
    before rank 0 opens it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _collect(pipes: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        # After a first error the others get a moment to say theirs: the cause may come second.
        limit = min(deadline, time.monotonic() + 5.0) if errors else deadline
        ready = wait(list(open_pipes), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            if not errors:
                late = sorted(open_pipes.values())
                raise RankFailure(f"ranks {late} of {len(pipes)} had not returned after {timeout_s:g} s")
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "the process died without a word (killed, or os._exit)"
            (results if ok else errors)[rank] = value
    if errors:
        cause = [r for r in sorted(errors) if not any(text in errors[r] for text in PEER_GONE)] or sorted(errors)
        raise RankFailure(f"rank {cause[0]} of {len(pipes)} failed:\n{errors[cause[0]]}")
    return [results[rank] for rank in range(len(pipes))]


def _work(
    pipe: Connection,
    module: str,
    filename: str,
    qualname: str,
    rank: int,
    world: int,
    payload: bytes,
    folder: str,
    init: bool,
    threads: int,
) -> None:
    try:
        args, path, env = pickle.loads(payload)
        sys.path[:] = path
        os.environ.update(env)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if init:
            _keep_gloo_in_order()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        fn = _load(module, filename, qualname)
        answer = (True, fn(rank, world, *args))
        if init and dist.is_initialized():
            dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        pipe.send_bytes(pickle.dumps(answer))
    except Exception:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort now and then at a normal exit


def _keep_gloo_in_order() -> None:
    """One thread for the collectives of each gloo group: torch's two write one string without a lock, and now and
    then a rank dies of a corrupted heap. `kforge_parallel.launch` does the same for jobs."""
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo
    init = group.__init__

    def __init__(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = group._Options()
        options._timeout, options._threads, options._devices = timeout, 1, [group.create_default_device()]
        init(self, store, rank, size, options)

    __init__.in_order = True  # type: ignore[attr-defined]  # which `launch` looks for, so as not to do it twice
    group.__init__ = __init__


def _load(module_name: str, filename: str, qualname: str) -> Callable[..., Any]:
    value: Any = _named(module_name, filename) or _from_file(filename)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _named(name: str, filename: str) -> ModuleType | None:
    """The module of that name where it is that file (an installed package): its classes are those of the caller."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # pytest's own names for test modules
        return None
    if spec is None or spec.origin is None or not os.path.samefile(spec.origin, filename):
        return None
    return importlib.import_module(name)


def _from_file(filename: str) -> ModuleType:
    name = "kforge_ranks_" + Path(filename).stem
    spec = importlib.util.spec_from_file_location(name, filename)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(filename).parent))  # helpers beside a test file
    spec.loader.exec_module(module)
    return module
