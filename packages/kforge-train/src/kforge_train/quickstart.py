"""`kforge quickstart`: from the text on this machine to a trained model and a report, in a few minutes.

Every stage but the report is a command that can be typed, and is printed before it runs. Training is stopped by a
signal two thirds of the way and started again: a run that does not resume is not worth starting. At the end the model
has to beat what counting pairs of tokens can do, or the command fails. How many steps fit into the time is measured
once, at the start; if something else kept the machine busy then, they may be too few, and training goes on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kforge_train.cpu import has_fast_bf16
from kforge_train.errors import ConfigError
from kforge_train.resolve import resolve_config

MARGIN = 0.15
"""Nats a token by which the model must beat the Kneser-Ney bigram."""
DEFAULT_TRAINING_MINUTES = 3.0
LONG_MINUTES = 20.0
"""From here on the larger model is trained."""
CALIBRATION = {
    "train.steps": "24",
    "optim.warmup_steps": "0",
    "metrics.every_steps": "8",
    "data.heldout": "",
    "train.eval_every_steps": "0",
}
"""What the trial run that tells the machine's speed changes of the job."""
MIN_STEPS = 400
"""A slow machine trains longer than it was asked to: 300 steps end 0.11 nats below the bigram."""
ENOUGH_STEPS = 1200
"""A run of fewer that does not beat the bigram goes on, by half as many again each time."""
MAX_EPOCHS = 4
"""Further passes through the same text teach little (Muennighoff et al. 2023, arXiv:2305.16264)."""
BIGRAM = "Kneser-Ney bigram, counted"
PROMPT = "def read_config(path):"


@dataclass(frozen=True)
class Paths:
    """Where the quickstart keeps what it makes."""

    root: Path

    corpus = property(lambda self: self.root / "corpus.jsonl")
    tokenizer = property(lambda self: self.root / "tokenizer.json")
    tokens = property(lambda self: self.root / "tokens")
    run = property(lambda self: self.root / "run")
    calibration = property(lambda self: self.root / "calibration")
    report = property(lambda self: self.root / "report.html")


def main(folder: Path | None = None, minutes: float | None = None) -> int:
    """Run the whole story in ``folder``, or end one that was interrupted. ``minutes``: how long to train, on a machine
    that is as busy as when it is measured.

    Returns the exit code: 1 when the model did not beat the bigram. Raises ConfigError when a stage failed.
    """
    from kforge_train.saved import load_run

    if minutes is not None and not 0 < minutes < float("inf"):
        raise ConfigError(f"--minutes {minutes:g} must be above 0")
    minutes = minutes or DEFAULT_TRAINING_MINUTES
    paths = Paths(folder or Path("runs/quickstart-long" if minutes >= LONG_MINUTES else "runs/quickstart"))
    started = time.monotonic()
    paths.root.mkdir(parents=True, exist_ok=True)

    if (paths.run / "config.toml").exists():
        title(f"{paths.run} is there already: it goes on (another --dir, or none of it, starts anew)")
        finish_training([str(paths.run / "config.toml"), "--train.run_dir", str(paths.run)], paths)
    else:
        prepare_text(paths)
        job = choose_job(paths, minutes)
        train_in_two_parts(paths, job)
    baselines = count_pairs(paths)
    values = score(paths)
    while not beats(values, baselines) and (steps := load_run(paths.run).train.steps) < ENOUGH_STEPS:
        further = min(steps + -(-steps // 2), ENOUGH_STEPS)
        title(f"{steps} steps have not beaten the bigram by {MARGIN} nats a token: on to {further}")
        finish_training(
            [str(paths.run / "config.toml"), "--train.run_dir", str(paths.run), "--train.steps", str(further)], paths
        )
        values = score(paths)
    return judge(paths, values, baselines, time.monotonic() - started)


def prepare_text(paths: Paths) -> None:
    """Text, tokenizer and token shards; a stage whose result is there already is not done again."""
    if not paths.corpus.exists():
        data_command("corpus", "stdlib", "--out", str(paths.corpus))
    if not paths.tokenizer.exists():
        data_command("train-tokenizer", str(paths.corpus), "--vocab-size", "4096", "--out", str(paths.tokenizer))
    if not (paths.tokens / "heldout" / "index.json").exists():
        tokens = ["--tokenizer", str(paths.tokenizer), "--heldout", "0.05", "--out", str(paths.tokens)]
        data_command("tokenize", str(paths.corpus), *tokens)


def choose_job(paths: Paths, minutes: float) -> list[str]:
    """The training command's arguments, sized for this machine and the minutes."""
    import torch

    from kforge_data import TokenShards

    gpu = torch.cuda.is_available()
    preset = "quickstart-gpu" if gpu else "quickstart-10m" if minutes >= LONG_MINUTES else "quickstart"
    fast_bf16 = gpu or has_fast_bf16()
    job = [
        preset,
        *("--parallel.precision", "bf16" if fast_bf16 else "fp32"),
        *("--optim.muon_ns_dtype", "bfloat16" if fast_bf16 else "float32"),
        *("--data.train", str(paths.tokens / "train")),
        *("--data.heldout", str(paths.tokens / "heldout")),
        *("--data.tokenizer", str(paths.tokenizer)),
    ]
    title("how fast is this machine?")
    shutil.rmtree(paths.calibration, ignore_errors=True)  # of a quickstart that was interrupted
    trial = [word for name, value in CALIBRATION.items() for word in (f"--{name}", value)]
    code = train_command([*job, *trial, "--train.run_dir", str(paths.calibration)])
    if code != 0:
        raise ConfigError(f"the trial run ended with exit code {code}; its log is in {paths.calibration}")
    seconds = [e["values"]["step_s"] for e in events(paths.calibration) if e["kind"] == "step"]
    step_s = min(seconds)  # what the machine can do when nothing disturbs it
    data = resolve_config(preset).config.data
    epoch = TokenShards(paths.tokens / "train").tokens / (data.global_rows * data.row_tokens)
    steps = max(MIN_STEPS, min(int(minutes * 60 / step_s), int(MAX_EPOCHS * epoch)))
    print(f"{step_s * 1e3:.0f} ms a step: {steps} steps, {steps / epoch:.0%} of the text")
    return [*job, "--train.run_dir", str(paths.run), "--train.steps", str(steps)]


def train_in_two_parts(paths: Paths, job: list[str]) -> None:
    """Train to two thirds, stop as a cluster would stop it, and go on from the checkpoint."""
    from kforge_resilience import exitcodes

    steps = int(job[job.index("--train.steps") + 1])
    title("train, and stop it two thirds of the way")
    code = train_command(job, stop_at=(paths.run, steps * 2 // 3))
    if code != exitcodes.STOPPED:
        raise ConfigError(f"the stopped run ended with exit code {code}, not {exitcodes.STOPPED}; see {paths.run}")
    print(f"exit code {code}: saved, start me again")
    title("the same command again: it goes on where it stopped")
    finish_training(job, paths)


def finish_training(job: list[str], paths: Paths) -> None:
    """Train to the end. Raises ConfigError when that did not work."""
    from kforge_resilience import exitcodes

    code = train_command(job)
    if code != exitcodes.OK:
        raise ConfigError(f"training ended with exit code {code}; its log is in {paths.run}")


def score(paths: Paths) -> dict[str, float]:
    """The loss of the run on all held-out text, as `evaluate_run` gives it."""
    from kforge_train.evaluate import evaluate_run

    title("evaluate on held-out text", "kforge", "eval", str(paths.run))
    return evaluate_run(paths.run)


def count_pairs(paths: Paths) -> dict[str, float]:
    """What counting tokens and pairs of them reaches on held-out text, in nats a token; the pairs last."""
    from kforge_data import TokenShards, ngram_baseline
    from kforge_train.saved import load_run

    row_tokens = load_run(paths.run).data.row_tokens
    train, heldout = TokenShards(paths.tokens / "train"), TokenShards(paths.tokens / "heldout")
    folders = ["--train", str(train.path), "--heldout", str(heldout.path)]
    title("what counting reaches", "kforge-data", "ngram", *folders, "--row-tokens", str(row_tokens))
    counted = ngram_baseline(train, heldout, row_tokens=row_tokens)
    return {"unigram, counted": counted.unigram_nats, BIGRAM: counted.bigram_nats}


def beats(values: dict[str, float], baselines: dict[str, float]) -> bool:
    """Whether a model of this held-out loss is as far below the bigram as is wanted."""
    return values["loss"] <= baselines[BIGRAM] - MARGIN


def judge(paths: Paths, values: dict[str, float], baselines: dict[str, float], seconds: float) -> int:
    """Generate, write the report; say whether the model beats the bigram."""
    from kforge_data import TokenShards
    from kforge_metrics import write_report
    from kforge_train.generate import sample
    from kforge_train.saved import load_run

    to_bits = TokenShards(paths.tokens / "heldout").bits_per_byte(1.0)
    rows = {**baselines, "this model": values["loss"]}
    for name, loss in rows.items():
        print(f"  {name:<28} {loss:6.3f} nats/token   {loss * to_bits:6.3f} bits/byte")

    flags = ["--prompt", PROMPT, "--max-new-tokens", "96", "--temperature", "0.7", "--top-k", "50"]
    title("generate", "kforge", "generate", str(paths.run), *flags)
    text = sample(paths.run, PROMPT, max_new_tokens=96, temperature=0.7, top_k=50)
    print(text)

    won = beats(values, baselines)
    below = baselines[BIGRAM] - values["loss"]
    where = f"{abs(below):.2f} nats a token {'below' if below >= 0 else 'above'} the counted bigram"
    verdict = f"{where}, at least {MARGIN} below wanted"
    if not won:
        verdict += f"; {load_run(paths.run).train.steps} steps were not enough: give it more with --minutes"
    summary: dict[str, Any] = {
        name: f"{loss:.3f} nats/token, {loss * to_bits:.3f} bits/byte" for name, loss in rows.items()
    }
    summary["verdict"] = verdict
    summary["minutes in all"] = f"{seconds / 60:.1f}"
    heading = "kforge quickstart" if won else "kforge quickstart: FAILED"
    write_report(paths.run, paths.report, title=heading, summary=summary, sample=text, baselines=baselines)
    title(f"{'done' if won else 'FAILED'} in {seconds / 60:.1f} minutes: {verdict}")
    print(f"report: {paths.report}")
    print("try next:")
    print(f"  kforge generate {paths.run} --prompt 'class Queue:' --temperature 0.9")
    print(f"  kforge eval {paths.run}")
    print("  kforge config llama3-1b")
    print(f"  kforge train {paths.run / 'config.toml'} --train.run_dir runs/mine --optim.lr 0.01")
    return 0 if won else 1


def title(text: str, *command: str) -> None:
    """Say what comes, and the command that does it."""
    print(f"\n== {text}", flush=True)
    if command:
        print(f"$ {shlex.join(command)}", flush=True)


def data_command(*args: str) -> None:
    """A kforge-data command, in this process. Raises ConfigError when it fails."""
    from kforge_data.cli import main as kforge_data

    title(args[0], "kforge-data", *args)
    code = kforge_data(list(args))
    if code:
        raise ConfigError(f"kforge-data {args[0]} ended with exit code {code}")


def train_command(args: list[str], stop_at: tuple[Path, int] | None = None) -> int:
    """``kforge train`` in a process of its own. ``stop_at``: run folder and step after which it gets SIGTERM."""
    print(f"$ {shlex.join(['kforge', 'train', *args])}", flush=True)
    environment = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # one process, whoever started this one
        environment.pop(name, None)
    process = subprocess.Popen([sys.executable, "-m", "kforge_train", "train", *args], env=environment)
    try:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if stop_at and any(e["step"] >= stop_at[1] for e in events(stop_at[0]) if e["kind"] == "step"):
                    process.send_signal(signal.SIGTERM)
                    stop_at = None
    except BaseException:
        process.kill()
        process.wait()
        raise


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Events of a run as plain dicts; none before it has written any."""
    from kforge_metrics import read_events

    path = run_dir / "events.jsonl"
    return [{"kind": e.kind, "step": e.step, "values": e.values} for e in read_events(path)] if path.exists() else []
