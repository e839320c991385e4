"""Which optimizer learns most from the same tokens: each of them at three rates.

One small model, the same initial weights, the same text (the sources of Python's standard library) in the same order,
the same number of steps; what differs is the optimizer and its rate. Each run is a `kforge train` of its own, two at a
time with one thread each. It leaves `results/optim_race.json` and
`results/optim_race.png`. One run a setting: differences of a few hundredths are noise.

    python benchmarks/optim_race.py [--steps 400] [--optimizers adamw,muon] [--tokens FOLDER]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _results

VOCAB = 2048
JOB: dict[str, Any] = {
    "model.vocab_size": VOCAB,
    "model.dim": 128,
    "model.n_layers": 4,
    "model.n_heads": 4,
    "model.tie_embeddings": True,
    "parallel.device": "cpu",
    "parallel.precision": "fp32",
    "data.row_tokens": 128,
    "data.global_rows": 16,
    "optim.schedule": "linear",
    "optim.min_lr_ratio": 0.0,
    "train.eval_rows": 512,
    "ckpt.every_steps": 0,
    "metrics.console": False,
}
WARMUP_SHARE = 0.05
# Optimizer -> what its job sets, and the rates that it is tried at.
RACERS: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "adamw": ({"optim.name": "adamw"}, (2e-3, 5e-3, 1e-2)),
    "muon": ({"optim.name": "muon", "optim.adamw_lr": 5e-3}, (1e-2, 2e-2, 4e-2)),
    "lion": ({"optim.name": "lion", "optim.weight_decay": 0.5}, (5e-4, 1e-3, 2e-3)),
    "adamax": ({"optim.name": "torch.optim.Adamax"}, (5e-3, 1e-2, 2e-2)),
    "schedule_free": ({"optim.name": "schedule_free", "optim.schedule": "constant"}, (5e-3, 1e-2, 2e-2)),
}
COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#64748b")


def prepare(folder: Path) -> Path:
    """Token shards ``train`` and ``heldout`` of the standard library's sources, under ``folder``."""
    from kforge_data.cli import main as kforge_data

    corpus, tokenizer, tokens = str(folder / "corpus.jsonl"), str(folder / "tokenizer.json"), folder / "tokens"
    for words in (
        ["corpus", "stdlib", "--out", corpus],
        ["train-tokenizer", corpus, "--vocab-size", str(VOCAB), "--out", tokenizer],
        ["tokenize", corpus, "--tokenizer", tokenizer, "--heldout", "0.05", "--out", str(tokens)],
    ):
        if kforge_data(words):
            raise SystemExit(f"kforge-data {words[0]} failed")
    return tokens


def race(tokens: Path, folder: Path, name: str, lr: float, steps: int) -> dict[str, Any]:
    """Train one setting and return its row of the table."""
    from kforge_metrics import read_events

    settings, _ = RACERS[name]
    run = folder / f"{name}-{lr:g}"
    fields = {
        **JOB,
        "optim.warmup_steps": round(steps * WARMUP_SHARE),
        **settings,
        "optim.lr": lr,
        "data.train": tokens / "train",
        "data.heldout": tokens / "heldout",
        "train.run_dir": run,
        "train.steps": steps,
        "train.eval_every_steps": max(1, steps // 8),
        "metrics.every_steps": max(1, steps // 40),
    }
    words = [f"--{path}={str(value).lower() if isinstance(value, bool) else value}" for path, value in fields.items()]
    command = [sys.executable, "-m", "kforge_train", "train", *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} at {lr:g} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    events = list(read_events(run / "events.jsonl"))
    step_events = [event for event in events if event.kind == "step"]
    heldout = {event.step: event.values["loss"] for event in events if event.kind == "eval"}
    parts = {
        "train_loss": {event.step: round(event.values["loss"], 4) for event in step_events},
        "heldout_loss": {step: round(loss, 4) for step, loss in heldout.items()},
        "step_s": min(event.values["step_s"] for event in step_events if event.values["step_s"]),
    }
    final, config = heldout[steps], settings | {"lr": lr}
    print(f"{name:<20} lr {lr:<8g} held-out loss {final:.3f}", flush=True)
    return _results.row(f"{name} {lr:g}", final, "nats/token", better="lower", config=config, parts=parts)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: loss over steps, each optimizer's best rate bold. Right: the last loss over the rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["row"].rpartition(" ")[0] for row in rows))
    for name, colour in zip(names, COLOURS, strict=False):
        mine = [row for row in rows if row["row"].rpartition(" ")[0] == name]
        best = min(mine, key=lambda row: row["value"])
        for row in mine:
            curve = row["parts"]["heldout_loss"]
            bold = (
                {"lw": 2.2, "label": f"{name}, lr {row['config']['lr']:g}"}
                if row is best
                else {"lw": 0.8, "alpha": 0.4}
            )
            left.plot([int(step) for step in curve], list(curve.values()), color=colour, **bold)
        right.plot(
            [row["config"]["lr"] for row in mine], [row["value"] for row in mine], "o-", color=colour, label=name
        )
    left.set_xlabel("optimizer step")
    right.set_xlabel("learning rate")
    right.set_xscale("log")
    for axes in (left, right):
        axes.set_ylabel("held-out loss, nats a token")
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each run (default 400)")
    parser.add_argument("--optimizers", default=",".join(RACERS), help="which of them (default: all)")
    parser.add_argument("--rates", type=int, default=3, choices=(1, 2, 3), help="how many rates of each (default 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--tokens", type=Path, help="token shards train and heldout that are there already")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the results")
    options = parser.parse_args()
    names = options.optimizers.split(",")
    unknown = [name for name in names if name not in RACERS]
    if unknown:
        parser.error(f"no optimizer of the race is called {unknown[0]}; there are {', '.join(RACERS)}")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(temporary)
        tokens = options.tokens.absolute() if options.tokens else prepare(folder)
        settings = [(name, lr) for name in names for lr in RACERS[name][1][: options.rates]]
        rows = list(pool.map(lambda setting: race(tokens, folder, *setting, options.steps), settings))
    path = _results.write("optim_race", rows, _results.environment(), options.out)
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
