"""What saves in the background cost a training run: `python benchmarks/ckpt_train.py [--rows 1b,3b]` on a GPU.

The real Trainer saves every ``every`` steps. Steps before the first save say what a step takes without one. The second
save finds its host memory allocated; what it costs is the time that the steps from it on take beyond as many of those
before the first. `--smoke`: tiny, on the CPU; shows that it runs, measures nothing.

Rows: `X: a save / 100 steps`, the second save's cost over the time of 100 steps (the first one's is in parts);
`X: longest step / median`, of the steps from the second save on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _results
from _rows import ROWS, Row, tiny, write_tokens
from _timing import Clock

PLAIN_FROM = 5
MODELS: dict[str, tuple[Row, int]] = {
    "1b": (ROWS["1b"], 40),
    "3b": (
        Row(name="3b", model={"preset": "llama3.2-3b"}, microbatch_rows=2, storage="split", moments="bf16"),
        30,
    ),
}
"""Row, and steps between saves."""


def measure(name: str, smoke: bool, folder: Path) -> list[dict[str, Any]]:
    """The rows of one model."""
    import torch

    from kforge_train.resolve import resolve_config

    torch.set_float32_matmul_precision("high")  # as kforge_train.run sets it
    row, every = MODELS[name]
    if smoke:
        row, every = tiny(row), 12
    vocabulary = resolve_config(row.preset, {f"model.{k}": v for k, v in row.model.items()}).config.model.vocab_size
    write_tokens(folder / "tokens", vocabulary, 20_000 if smoke else 1_500_000)
    return lines(name, saving(row, every, str(folder / "tokens"), folder / "run"))


def saving(row: Row, every: int, tokens: str, run_dir: Path) -> dict[str, Any]:
    """Seconds of steps and saves of this process, which saves in the background every so many steps."""
    from kforge_resilience import exitcodes
    from kforge_train.build import build
    from kforge_train.resolve import resolve_config
    from kforge_train.trainer import Trainer

    steps = 3 * every - 1
    saves = {"train.steps": steps, "ckpt.every_steps": every, "ckpt.keep_last": 1, "ckpt.mode": "async"}
    config = resolve_config(row.preset, {**row.overrides(tokens, str(run_dir)), **saves}).config
    staged: list[float] = []

    class Timed(Trainer):
        def step(self) -> Any:
            verdict = super().step()
            clock.mark()
            return verdict

        def save(self, *, temporary: bool = False) -> None:
            if self.next_step >= steps:  # the last one is awaited: not what is asked here
                return
            before = time.perf_counter()
            super().save(temporary=temporary)
            staged.append(time.perf_counter() - before)

    with build(config) as parts:
        clock = Clock(parts.mesh.device, time.time())
        code = Timed(parts).run()
        if code != exitcodes.OK:
            raise RuntimeError(f"the run ended with exit code {code}")
        seconds = clock.step_seconds(1, steps - 1)  # of steps 2 to the last
    plain = statistics.median(seconds[PLAIN_FROM : every - 1])
    first, second = seconds[every - 1 : 2 * every - 1], seconds[2 * every - 1 :]
    costs = [sum(part) - len(part) * plain for part in (first, second)]
    return {
        "seconds of a step": plain,
        "steps between saves": every,
        "cost of the first save s": costs[0],
        "cost of the second save s": costs[1],
        "the call of each save s": staged,
        "state bytes": state_bytes(run_dir),
        "steps from the second save on s": second,
        "plain steps s": seconds[PLAIN_FROM : every - 1],
    }


def state_bytes(run_dir: Path) -> int:
    """Bytes of the tensors of the newest checkpoint; 0 before there is one."""
    files = sorted(run_dir.rglob("step_*/tensors-*"))
    return sum(path.stat().st_size for path in files if path.parent == files[-1].parent)


def lines(name: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the result that tell of `saving`."""
    plain = told["seconds of a step"]
    ratio, slow = told["cost of the second save s"] / (100 * plain), max(told["steps from the second save on s"])
    return [
        _results.row(f"{name}: a save / 100 steps", ratio, "ratio", better="lower", target=0.01, parts=told),
        _results.row(f"{name}: longest step / median", slow / plain, "ratio", better="lower", target=1.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1b,3b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as folder:
        if options.child:
            options.out.write_text(json.dumps(measure(names[0], options.smoke, Path(folder))))
            return
        rows = []
        for name in names:  # a process each: what one leaves on the device is not the next one's
            out = Path(folder, f"{name}.json")
            words = ["--child", "--rows", name, "--out", str(out), *(["--smoke"] if options.smoke else [])]
            subprocess.run([sys.executable, __file__, *words], check=True)
            rows += json.loads(out.read_text())
    import torch

    gpu = None if options.smoke else torch.cuda.get_device_name()
    _results.write(
        f"ckpt_train_{'cpu' if options.smoke else 'cuda'}", rows, _results.environment(gpu), options.out, keep=True
    )


if __name__ == "__main__":
    main()
