"""How long the command line takes to answer: what people wait for most often.

Wall time of whole processes, files in the page cache; commands take turns, so that a slow minute of the machine hits
them all. `python benchmarks/startup.py [--runs 9]`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import _results

TARGETS_S = {"--help": 0.3, "config": 0.3, "train --help": 1.5}


def seconds(command: list[str]) -> float:
    """Wall time of one run of a command, which must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each command (default 9)")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    options = parser.parse_args()
    kforge = str(Path(sys.executable).with_name("kforge"))
    commands = {f"kforge {words}": [kforge, *words.split()] for words in TARGETS_S}
    commands["python -c pass"] = [sys.executable, "-c", "pass"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(options.runs + 1):
        for name, command in commands.items():
            taken = seconds(command)
            if turn:  # the first turn fills the page cache
                times[name].append(taken)
    found = {name: _results.median_and_spread(values) for name, values in times.items()}
    bare = found["python -c pass"][0]
    rows = []
    for name, (median, spread) in found.items():
        target = TARGETS_S.get(name.removeprefix("kforge "))
        parts = {"runs": options.runs, "fastest": min(times[name]), "slowest": max(times[name])}
        line = _results.row(
            name, median, "s", better="lower", target=target, reference=bare, spread=spread, parts=parts
        )
        rows.append(line)
    _results.write("startup", rows, _results.environment(), options.out)


if __name__ == "__main__":
    main()
