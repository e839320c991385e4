"""What a state of many small tensors costs: `python benchmarks/ckpt_small.py [--tensors 100000] [--turns 3]`.

In each turn a tenth of the tensors, and then all: a synchronous save, the next one (whose plan is known), and a load;
and torch.distributed.checkpoint.save and load of the same tensors. Ratios are made turn by turn. What grows with the
square of the number shows as a ratio of ten where the time per tensor should be the same.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from pathlib import Path

import _results
from _saving import Box, seconds


def turn(folder: Path, count: int) -> dict[str, float]:
    """Seconds of each thing, with so many tensors of eight numbers."""
    import torch
    import torch.distributed.checkpoint as dcp

    from kforge_ckpt import Checkpointer

    tensors = {f"layers.{i}.weight": torch.full((8,), float(i)) for i in range(count)}
    ckpt = Checkpointer(folder / "ours", on_event=lambda *_: None)
    states, theirs = {"state": Box(tensors)}, str(folder / "dcp")
    times = {
        "save": seconds(lambda: ckpt.save(1, states)),
        "next save": seconds(lambda: ckpt.save(2, states)),
        "load": seconds(lambda: ckpt.restore(states)),
        "dcp save": seconds(lambda: dcp.save(dict(tensors), checkpoint_id=theirs, no_dist=True)),
        "dcp load": seconds(lambda: dcp.load(dict(tensors), checkpoint_id=theirs, no_dist=True)),
    }
    shutil.rmtree(folder)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    few, all_of_them = [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        turn(Path(folder) / "first", 100)  # imports
        for _ in range(arguments.turns):
            few.append(turn(Path(folder) / "few", arguments.tensors // 10))
            all_of_them.append(turn(Path(folder) / "all", arguments.tensors))

    rows = []
    for name in ("save", "next save", "load"):
        value, spread = _results.median_and_spread([each[name] for each in all_of_them])
        label = f"{name} of {arguments.tensors} tensors"
        rows.append(_results.row(label, value, "s", spread=spread, better="lower"))
    for ours, theirs in (("save", "dcp save"), ("next save", "dcp save"), ("load", "dcp load")):
        value, spread = _results.median_and_spread([each[theirs] / each[ours] for each in all_of_them])
        rows.append(_results.row(f"{theirs} / {ours}", value, "ratio", spread=spread, target=1.0))
    for name in ("save", "load"):
        pairs = zip(all_of_them, few, strict=True)
        value, spread = _results.median_and_spread([many[name] / (10 * some[name]) for many, some in pairs])
        label = f"{name}: time per tensor / that of a tenth of them"
        rows.append(_results.row(label, value, "ratio", spread=spread, better="lower", target=2.0))
    _results.write("ckpt_small", rows, _results.environment(), arguments.out)


if __name__ == "__main__":
    main()
