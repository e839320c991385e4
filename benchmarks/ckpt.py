"""What saving and restoring cost beside what they could cost: `python benchmarks/ckpt.py [--gib 1] [--turns 7]`.

A state of random float32 tensors of 64 MiB, on the GPU where there is one. In each turn: a synchronous save; one in the
background, begun before about a second of products as of a forward and backward, and what of it the caller waits for;
torch.save and torch.distributed.checkpoint.save of the same tensors, each made durable (fsync); a copy of the file,
with fsync; a load; and reading the bytes into memory. Ratios are made turn by turn, so that a slow minute of the disk
hits both sides. And the copy into host memory alone, which is all that a training step waits for, beside plain copies
of the same bytes (on a GPU into pinned memory, by one stream).

And, in a process of its own, how much more host memory three saves in the background take at most than was taken
before the first: without a limit beside the state, and with a quarter of that beside the limit (in the targets, a
hundredth is for threads and lists). What the saved files take of the system's cache is not in it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import _results
from _saving import Box, seconds

TENSOR_BYTES = 2**26


def sync_tree(folder: Path) -> None:
    """fsync every file of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync_tree(target.parent)


def read_through(path: Path, buffer: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def staging_and_copies(
    tensors: list[Any], device: Any, wait: Callable[[], None]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The copy of a save in the background into host memory, and plain copies of the same tensors there."""
    import torch

    from kforge_ckpt.staging import HostMemory, Staging

    cuda = device.type == "cuda"
    memory = HostMemory(pinned=cuda)
    plain = [torch.empty(tensor.numel(), pin_memory=cuda) for tensor in tensors]

    def staged() -> None:
        copy = Staging(tensors, memory, device)
        copy.wait()
        wait()
        for _ in copy.blocks():
            pass

    def copied_plainly() -> None:
        for source, target in zip(tensors, plain, strict=True):
            target.copy_(source, non_blocking=True)
        wait()

    return staged, copied_plainly


def measure_staging(gib: float, turns: int) -> tuple[list[dict[str, Any]], str | None]:
    """The copy into host memory alone, for a state as large as that of a large model."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    count = max(1, round(gib * 2**30 / TENSOR_BYTES))
    tensors = [torch.randn(TENSOR_BYTES // 4, device=device) for _ in range(count)]
    staged, plainly = staging_and_copies(tensors, device, torch.cuda.synchronize if cuda else lambda: None)
    pairs = [(seconds(plainly), seconds(staged)) for _ in range(turns + 1)][1:]
    value, spread = _results.median_and_spread([a / b for a, b in pairs])
    rate, _ = _results.median_and_spread([count * TENSOR_BYTES / 1e9 / b for _, b in pairs])
    parts = {"GB/s": rate, "bytes": count * TENSOR_BYTES}
    label = f"{gib:g} GiB: plain copies / staging"
    return [_results.row(label, value, "ratio", spread=spread, target=0.8, parts=parts)], (
        torch.cuda.get_device_name() if cuda else None
    )


def host_bytes(process: int | str, key: str) -> int:
    """A line of /proc/<process>/status: VmRSS and VmHWM are what lies in memory now, and did at most; RssAnon what is
    the process's own."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def extra_memory(folder: Path, gib: float, staging_bytes: int | None, writer: str) -> int:
    """Bytes of host memory, at most, that saves in the background take beside a state of tensors. Linux."""
    import torch

    from kforge_ckpt import Checkpointer
    from kforge_ckpt.staging import BLOCK_BYTES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = max(1, round(gib * 2**30 / TENSOR_BYTES))
    tensors = {f"w{n}": torch.randn(TENSOR_BYTES // 4, device=device) for n in range(count)}

    def checkpointer(name: str, limit: int | None) -> Checkpointer:
        return Checkpointer(
            folder / name,
            keep_last=1,
            mode="async",
            staging_bytes=limit,
            writer=writer,  # type: ignore[arg-type]
            on_event=lambda *_: None,
        )

    first = checkpointer("first", None)  # what is loaded and started the first time is not counted
    first.save(1, {"state": Box({"w": torch.ones(1, device=device)})})
    first.close()
    del first
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = host_bytes("self", "VmRSS")
    ckpt = checkpointer("run", staging_bytes)
    for step in range(3):
        ckpt.save(step, {"state": Box(tensors)})
    ckpt.wait()
    extra = host_bytes("self", "VmHWM") - before
    assert ckpt._memory is not None
    blocks = len(ckpt._memory.blocks) * BLOCK_BYTES
    if extra < blocks:  # pinned memory that does not count as this process's
        extra += blocks
    for process in ckpt._processes.values():
        extra += host_bytes(process.pid, "RssAnon")  # the blocks that it maps are ours
    ckpt.close()
    return extra


def measure_memory(folder: Path, gib: float, writer: str) -> list[dict[str, Any]]:
    state = max(1, round(gib * 2**30 / TENSOR_BYTES)) * TENSOR_BYTES
    rows = []
    for label, limit in (("the state", None), ("staging_bytes, a quarter of the state", state // 4)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            extra = pool.submit(extra_memory, folder / f"at most {limit}", gib, limit, writer).result()
        parts = {"extra_bytes": extra, "allowed_bytes": limit or state}
        name = f"extra host memory of a background save / {label}"
        rows.append(_results.row(name, extra / (limit or state), "ratio", better="lower", target=1.01, parts=parts))
    return rows


def gpu_name() -> str | None:
    """The GPU that the state lies on, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def measure(folder: Path, gib: float, turns: int, writer: str) -> list[dict[str, Any]]:
    import torch
    import torch.distributed.checkpoint as dcp

    from kforge_ckpt import Checkpointer

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    count = max(1, round(gib * 2**30 / TENSOR_BYTES))
    tensors = {f"w{n}": torch.randn(TENSOR_BYTES // 4, device=device) for n in range(count)}
    states = {"state": Box(tensors)}
    beside = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    times: dict[str, list[float]] = {}
    sync = Checkpointer(folder / "sync", keep_last=1, on_event=lambda *_: None)
    background = Checkpointer(
        folder / "background",
        keep_last=1,
        mode="async",
        overlap=True,
        writer=writer,  # type: ignore[arg-type]
        on_event=lambda *_: None,
    )
    buffer = memoryview(bytearray(count * TENSOR_BYTES + 2**20))
    a = torch.randn(2048 if not cuda else 8192, 2048 if not cuda else 8192, device=device)

    def products() -> None:
        for _ in range(products_count):
            torch.mm(a, a)

    products_count = 5
    products()
    wait()
    took = seconds(lambda: (products(), wait()))
    products_count = max(5, round(products_count / took))

    def note(name: str, work: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(seconds(work))

    def dcp_save() -> None:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        dcp.save(dict(tensors), checkpoint_id=str(folder / "dcp"), no_dist=True)
        sync_tree(folder / "dcp")

    def torch_save() -> None:
        (folder / "torch").mkdir(exist_ok=True)
        torch.save(tensors, folder / "torch" / "all.pt")
        sync_tree(folder / "torch")

    staged, copied_plainly = staging_and_copies(list(tensors.values()), device, wait)

    for turn in range(turns + 1):  # the first warms up: memory is taken, files are there
        wait()
        note("sync", lambda: sync.save(turn, states))  # noqa: B023
        sync.wait()

        note("step", lambda: (products(), wait()))
        blocked = 0.0

        def step() -> None:
            nonlocal blocked
            blocked = seconds(lambda: background.save(turn, states))  # noqa: B023
            products()
            blocked += seconds(background.staged)
            wait()

        note("saving step", step)
        times.setdefault("blocking", []).append(blocked)
        background.wait()
        file = sync.dir / f"step_{turn:08d}" / "tensors-00000.safetensors"
        (folder / "copy").mkdir(exist_ok=True)
        note("copy", lambda: copied(file, folder / "copy" / "all"))  # noqa: B023
        note("dcp", dcp_save)
        note("torch", torch_save)

        def restored() -> None:
            sync.restore({"state": Box(beside)}, turn)  # noqa: B023
            wait()

        note("load", restored)
        note("staging", staged)
        note("plain copies", copied_plainly)
        note("read", lambda: read_through(file, buffer))  # noqa: B023
    background.close()
    times = {name: values[1:] for name, values in times.items()}

    def ratio(label: str, top: str, bottom: str, **more: Any) -> dict[str, Any]:
        each = [a / b for a, b in zip(times[top], times[bottom], strict=True)]
        value, spread = _results.median_and_spread(each)
        return _results.row(label, value, "ratio", spread=spread, **more)

    nbytes = count * TENSOR_BYTES
    rows = [
        ratio("blocking of a background save / a synchronous one", "blocking", "sync", better="lower", target=0.05),
        ratio("copying and fsync / a synchronous save", "copy", "sync", target=0.9),
        ratio("load / reading the bytes into memory", "load", "read", better="lower", target=1.2),
        ratio("plain copies / staging", "plain copies", "staging", target=0.8 if cuda else None),
        ratio("a step with a background save / one without", "saving step", "step", better="lower"),
        ratio("torch.save / a synchronous save", "torch", "sync"),
        ratio("torch.distributed.checkpoint / a synchronous save", "dcp", "sync"),
    ]
    for name, label in (("sync", "a synchronous save"), ("load", "load")):
        rates = [nbytes / 1e9 / value for value in times[name]]
        value, spread = _results.median_and_spread(rates)
        rows.append(_results.row(label, value, "GB/s", spread=spread, bytes=nbytes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--writer", choices=["thread", "process"], default="thread")
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the temporary folder)")
    parser.add_argument("--staging", action="store_true", help="time the copy into host memory alone")
    parser.add_argument("--memory", action="store_true", help="measure the extra host memory alone")
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    arguments = parser.parse_args()
    if arguments.staging:
        rows, gpu = measure_staging(arguments.gib, arguments.turns)
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows, gpu = [], gpu_name()
            if not arguments.memory:
                rows += measure(Path(folder), arguments.gib, arguments.turns, arguments.writer)
            if sys.platform == "linux":
                rows += measure_memory(Path(folder), arguments.gib, arguments.writer)
    name = "ckpt_cuda" if gpu else "ckpt_cpu"
    _results.write(name, rows, _results.environment(gpu), arguments.out, keep=True)


if __name__ == "__main__":
    main()
