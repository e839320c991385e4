"""benchmarks/results/parity.json and mutation.json: what was proven, by how much, and at which commit.

KFORGE_KEEP=1 nox -s parity_full   # writes both anew, after all tests have passed
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

from cases import counts

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _results():
    spec = importlib.util.spec_from_file_location("kforge_results", ROOT / "benchmarks" / "_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept_rows(name):
    """The rows of a kept file; none before the first was written."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []


def kept_counts():
    """Class of layouts -> number of cases when the file was kept."""
    return {row["row"]: row["value"] for row in kept_rows("parity")}


def commit():
    """The commit of the tree, marked where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "not a git tree"


def write(reports):
    """Keep what the tests of a session reported: {"class", "worst"} of cases, {"fault", "caught_by"} of mutations.

    A file is written when all of its tests have run, and left as it is otherwise.
    """
    from mutations import MUTATIONS

    results = _results()
    environment = {**results.environment(), "commit": commit()}
    worst = {}
    for report in reports:
        if "class" in report:
            of_class = worst.setdefault(report["class"], {})
            for kind, error in report["worst"].items():
                of_class[kind] = max(error, of_class.get(kind, 0.0))
    if worst.keys() == counts().keys():
        rows = [
            results.row(name, count, "cases", worst={kind: float(f"{e:.2g}") for kind, e in worst[name].items()})
            for name, count in counts().items()
        ]
        results.write("parity", rows, environment)
    faults = [report for report in reports if "fault" in report]
    if len(faults) == len(MUTATIONS):
        rows = [results.row(report["fault"], 1, "caught", target=1, caught_by=report["caught_by"]) for report in faults]
        results.write("mutation", sorted(rows, key=lambda row: row["row"]), environment)
