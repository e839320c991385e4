"""Fresh processes of this machine for `kforge_parallel.testing`: one function on every rank, results in order."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What a fork server has imported before it forks: a second or more for each process otherwise.
PRELOAD = [
    "torch",
    "torch._dynamo",  # the first DTensor operation imports it
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
# What the ranks that did not fail say when another is gone.
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


class ProcessFailure(RuntimeError):
    """A process raised, died or ran out of time; the message has the traceback of the first that did."""


def run_processes(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float) -> list[Any]:
    """``fn(rank, world, *args)`` on ``world`` new processes that share a gloo group; their results by rank.

    The environment says RANK, WORLD_SIZE and so on as under torchrun. ``fn`` and ``args`` travel by pickle: they must
    be importable where they are defined. Raises ValueError when they cannot be sent, ProcessFailure when a process
    fails or has not returned after ``timeout_s`` seconds; none is left running in either case.
    """
    try:
        payload = pickle.dumps((fn, args))
    except Exception as error:
        raise ValueError(
            f"what is compared is sent to other processes, and this cannot be: {error}. Use functions and classes at "
            "the top of a module in place of lambdas and local ones (functools.partial gives them arguments)"
        ) from error
    # Not plain fork: the caller's threads (torch's among them) would be missing in the copy, their locks held.
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    context: Any = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    folder = tempfile.mkdtemp(prefix="kforge-compare-")
    workers: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(theirs, rank, world, payload, folder), daemon=True)
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        return _collect(pipes, timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        # After a first error the others get a moment to tell theirs: the cause may come second.
        limit = min(deadline, time.monotonic() + 5.0) if errors else deadline
        ready = wait(list(waiting), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            if not errors:
                late = sorted(waiting.values())
                raise ProcessFailure(f"ranks {late} of {len(pipes)} had not returned after {timeout_s:g} s")
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "the process died without a word"
            (results if ok else errors)[rank] = value
    if errors:
        cause = [r for r in sorted(errors) if not any(text in errors[r] for text in PEER_GONE)] or sorted(errors)
        raise ProcessFailure(f"rank {cause[0]} of {len(pipes)} failed:\n{errors[cause[0]]}")
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, rank: int, world: int, payload: bytes, folder: str) -> None:
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nobody meets there: the group exists
        import torch
        import torch.distributed as dist

        from kforge_parallel._torch import keep_gloo_in_order

        torch.set_num_threads(1)
        keep_gloo_in_order()
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=world)
        fn, args = pickle.loads(payload)
        answer = (True, fn(rank, world, *args))
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
