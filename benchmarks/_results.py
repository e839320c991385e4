"""The form in which every benchmark leaves its numbers: ``results/<name>.json``, and the same as a table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def row(
    name: str,
    value: float | None,
    unit: str,
    *,
    better: str = "higher",
    target: float | None = None,
    reference: float | None = None,
    spread: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One measured number.

    better: "higher" or "lower". target: what it must reach. reference: what it is compared with, measured in the same
    run. spread: the distance between the quartiles of what ``value`` is the median of, in the same unit. ``more``:
    config, parts and whatever else explains the number.
    """
    line = {"row": name, "value": value, "unit": unit, "better": better, "target": target, "reference": reference}
    return {**line, "spread": spread, **more}


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def environment(gpu: str | None = None) -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    versions = {}
    for name in ("model", "parallel", "data", "optim", "ckpt", "resilience", "metrics", "train"):
        try:
            versions[f"kforge-{name}"] = metadata.version(f"kforge-{name}")
        except metadata.PackageNotFoundError:  # run from a tree that is not installed
            versions[f"kforge-{name}"] = "source tree"
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} logical cores",
        "gpu": gpu,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def merged(new: list[dict[str, Any]], path: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier call that this one did not measure, if it was the same machine and torch, and the new ones.
    A kept row has its "date"; that of the environment is the date of the new ones."""
    if not path.exists():
        return new
    old = json.loads(path.read_text())
    same = all(old["environment"][key] == environment[key] for key in ("torch", "gpu"))
    names = {line["row"] for line in new}
    kept = [line for line in old["rows"] if same and line["row"] not in names]
    return [{**line, "date": line.get("date", old["environment"]["date"])} for line in kept] + new


def write(
    name: str,
    rows: list[dict[str, Any]],
    environment: dict[str, Any],
    folder: Path = RESULTS,
    *,
    keep: bool = False,
    quiet: bool = False,
) -> Path:
    """Write ``<folder>/<name>.json`` and print its rows. keep: of the file that is there, keep the rows that are not
    among these (`merged`). quiet: print nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    rows = merged(rows, path, environment) if keep else rows
    result = {"benchmark": name, "environment": environment, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not quiet:
        show(rows)
    return path


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    wide = max((len(line["row"]) for line in rows), default=3)
    head = f"{'row':<{wide}}{'value':>12}{'spread':>10}  {'unit':<14}{'better':<8}{'target':>10}{'reference':>11}"
    print("\n" + head)
    for line in rows:
        value, spread, target, reference = (_number(line[key]) for key in ("value", "spread", "target", "reference"))
        print(
            f"{line['row']:<{wide}}{value:>12}{spread:>10}  {line['unit']:<14}{line['better']:<8}"
            f"{target:>10}{reference:>11}"
        )
    print(flush=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
