"""What several files at once bring: `python benchmarks/ckpt_threads.py [--gib 1] [--turns 5] [--folder DIR]`.

A state of random float32 tensors of 16 MiB in host memory. In each turn, with `threads` of 1, 2, 4 and 8: a synchronous
save, and a load of it (from the page cache). Ratios to one file are made turn by turn. It depends on what `--folder`
lies on; a local disk is as a rule filled by one.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import _results
from _saving import Box, seconds

TENSOR_BYTES = 2**24
THREADS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    import torch

    from kforge_ckpt import Checkpointer

    count = max(8, round(arguments.gib * 2**30 / TENSOR_BYTES))
    states = {"state": Box({f"w{n}": torch.randn(TENSOR_BYTES // 4) for n in range(count)})}
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        ckpts = {
            number: Checkpointer(Path(folder, str(number)), keep_last=1, threads=number, on_event=lambda *_: None)
            for number in THREADS
        }
        for turn in range(arguments.turns + 1):  # the first warms up
            for number, ckpt in ckpts.items():
                times.setdefault(("save", number), []).append(seconds(lambda: ckpt.save(turn, states)))  # noqa: B023
                ckpt.wait()
                times.setdefault(("load", number), []).append(seconds(lambda: ckpt.restore(states)))  # noqa: B023
    rows = []
    for what in ("save", "load"):
        for number in THREADS:
            mine, one = times[what, number][1:], times[what, 1][1:]
            value, spread = _results.median_and_spread([count * TENSOR_BYTES / 1e9 / each for each in mine])
            ratio, _ = _results.median_and_spread([a / b for a, b in zip(one, mine, strict=True)])
            label = f"{what}, {number} files at once"
            parts = {"times as fast as one": ratio}
            rows.append(_results.row(label, value, "GB/s", spread=spread, parts=parts, bytes=count * TENSOR_BYTES))
    _results.write("ckpt_threads", rows, _results.environment(), arguments.out)


if __name__ == "__main__":
    main()
