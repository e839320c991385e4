"""Where the time of a step goes on the device: kernels of a profile, summed by class.

Only what ran on the device is counted (kernels, copies, fills), never the host's view of the same. Kernels may overlap
on several streams, so that classes may add up to more than the busy time; the busy time is the union of all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CLASSES: list[tuple[str, tuple[str, ...]]] = [
    # The first that fits counts. Names as CUDA 12 and 13 libraries, inductor and torch's own kernels have them.
    ("elementwise/triton", ("triton_",)),  # first: inductor puts names of what it fused, as copy, into its kernels
    ("optimizer", ("adam", "lpnorm", "multi_tensor_apply")),
    ("attention", ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq")),
    ("gemm", ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk")),
    ("collectives", ("nccl",)),
    ("accumulation", ("functor_add", "functoradd")),
    ("copy/memset", ("memcpy", "memset", "copy", "chunk_cat", "split_with_sizes", "catarray", "fillfunctor")),
    ("elementwise/triton", ("triton", "elementwise", "reduce", "softmax", "scatter", "gather", "index")),
]


def kernel_class(name: str, category: str = "kernel") -> str:
    """The class of a kernel by its name; copies and fills have a category of their own."""
    if category in ("gpu_memcpy", "gpu_memset"):
        return "copy/memset"
    low = name.lower()
    return next((word for word, parts in CLASSES if any(part in low for part in parts)), "other")


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gaps(device: list[tuple[str, str, float, float]], longest: int = 12) -> list[dict[str, Any]]:
    """The longest times in which nothing ran, with when they began and the kernels before and after."""
    found: list[dict[str, Any]] = []
    ordered = sorted(device, key=lambda event: event[2])
    last, reached, first = ordered[0][0], ordered[0][2], ordered[0][2]
    for name, _, start, duration in ordered:
        if start > reached:
            place = {"ms": (start - reached) / 1e3, "at_ms": (reached - first) / 1e3}
            found.append({**place, "after": last[:80], "before": name[:80]})
        if start + duration > reached:
            last, reached = name, start + duration
    return sorted(found, key=lambda gap: -gap["ms"])[:longest]


def summary(path: Path, names: int = 40) -> dict[str, Any]:
    """Milliseconds by class, of a Chrome trace that torch.profiler wrote, and the longest kernels by name."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    device = [
        (event["name"], event["cat"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    if not device:
        return {"span_ms": 0.0, "busy_ms": 0.0, "idle_ms": 0.0, "overlap_ms": 0.0, "classes_ms": {}}
    classes: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, category, _, duration in device:
        classes[kernel_class(name, category)] += duration
        by_name[name].append(duration)
    first = min(start for _, _, start, _ in device)
    span = max(start + duration for _, _, start, duration in device) - first
    busy = busy_us((start, start + duration) for _, _, start, duration in device)
    longest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:names]
    return {
        "span_ms": span / 1e3,
        "busy_ms": busy / 1e3,
        "idle_ms": (span - busy) / 1e3,
        "overlap_ms": (sum(classes.values()) - busy) / 1e3,
        "classes_ms": {name: time / 1e3 for name, time in sorted(classes.items(), key=lambda item: -item[1])},
        "longest_gaps": gaps(device),
        "kernels": [
            {
                "name": name[:160],
                "class": kernel_class(name),
                "ms": sum(by_name[name]) / 1e3,
                "calls": len(by_name[name]),
            }
            for name in longest
        ],
    }
