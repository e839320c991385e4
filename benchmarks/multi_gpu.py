"""Training speed on several GPUs of one host: what layouts, schedules, experts and checkpoints make of one GPU's.

    python benchmarks/multi_gpu.py --rows fsdp,fsdp-fp32,by-hand      on all GPUs there, or on --gpus N of them
    python benchmarks/multi_gpu.py --rows fsdp --tiny --gpus 2        on the CPU over gloo: shows that it runs
    python benchmarks/multi_gpu.py --list --gpus 8                    what the rows are

Each row is timed in processes of its own, one a GPU, through the real Trainer on real shards; `by-hand` is torch's
fully_shard in a plain loop. A row that is held against one GPU, or against another row, has that timed as well, in the
same call, unless results/multi_gpu.json has it from this machine and torch (--again: then too). Tokens a GPU are those
of the row on one GPU. A row is written as soon as it is measured, so that those of a call that is cut short are kept,
and so are those of earlier calls.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _results
from _rows import ROWS, Row, write_tokens
from _spread import Spread, rows_at, toy
from _timing import job

TOKENS = 1_500_000
STOP_S = 60.0
"""How long processes may take to end before they are killed."""


class Session:
    """Where the processes of one call find tokens and compiled code, and how they are started."""

    def __init__(self, folder: Path, gpus: int, is_tiny: bool) -> None:
        self.folder, self.gpus, self.tiny = folder, gpus, is_tiny
        self.gpu: str | None = None
        self.failed: list[str] = []
        self.spreads = rows_at(gpus)
        self.fewer = {name: spread.fewer for name, spread in self.spreads.items()}
        for spread in list(self.spreads.values()):
            if spread.one:
                self.spreads[f"one-{spread.one}"] = Spread(row=ROWS[spread.one], needs=1)
        if is_tiny:
            self.spreads = {
                name: toy(spread, gpus if name in self.fewer else 1) for name, spread in self.spreads.items()
            }

    def processes(self, name: str) -> int:
        return 1 if name.startswith("one-") else self.gpus // self.fewer[name]

    def tokens(self, row: Row) -> Path:
        """Shards for the vocabulary of a row, written when first asked for."""
        vocab = job(row, "tokens", "run").model.vocab_size
        path = self.folder / f"tokens-{vocab}"
        if not path.exists():
            write_tokens(path, vocab, 20_000 if self.tiny else TOKENS)
        return path

    def run(self, name: str) -> list[dict[str, Any]] | None:
        """What each rank found; None, and remembered as failed, when one of them fails."""
        spread, world = self.spreads[name], self.processes(name)
        with tempfile.TemporaryDirectory(dir=self.folder) as run_dir:
            environment = {
                **os.environ,
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
            }
            started = time.time()
            words = [__file__, "--child", name, "--gpus", str(self.gpus), "--started", str(started)]
            words += ["--tokens", str(self.tokens(spread.row)), "--out", run_dir, *(["--tiny"] if self.tiny else [])]
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            code = end_with([sys.executable, *(torchrun if world > 1 else []), *words], environment)
            seconds = time.time() - started
            if code:
                self.failed.append(name)
                print(f"{name}: {seconds:.0f} s, failed with exit code {code}", flush=True)
                return None
            ranks = [json.loads(Path(run_dir, f"rank-{rank}.json").read_text()) for rank in range(world)]
        self.gpu = ranks[0]["gpu"] or self.gpu
        ranks[0]["cost_s"] = round(seconds, 1)
        print(f"{name}: {seconds:.0f} s", flush=True)
        return ranks


def end_with(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; when this process is interrupted, end it first: torchrun passes the signal on to its ranks."""
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def child(name: str, session: Session, tokens: str, run_dir: str, started: float) -> None:
    """What one process of a row does; its numbers go to a file of its own."""
    import _by_hand
    import _reshard
    import _timing
    import ckpt_train
    import torch

    torch.set_float32_matmul_precision("high")  # as kforge_train.run sets it
    spread, rank = session.spreads[name], int(os.environ.get("RANK", "0"))
    if spread.kind == "hand":
        found = _by_hand.run(spread.row, tokens, started, rank, session.processes(name))
    elif spread.kind == "saves":
        every = 8 if session.tiny else 20
        found = ckpt_train.saving(spread.row, every, tokens, Path(run_dir))
    elif spread.kind in ("save", "load"):
        saved = Path(tokens).parent / (spread.of or name)
        found = _reshard.run(spread.row, tokens, run_dir, saved, spread.kind == "load")
    else:
        found = _timing.run_trainer(spread.row, tokens, run_dir, started, spread.trace)
    found["gpu"] = torch.cuda.get_device_name() if spread.row.device == "cuda" else None
    Path(run_dir, f"rank-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort now and then at a normal exit


def measure(
    names: list[str],
    session: Session,
    known: dict[str, dict[str, Any]],
    keep: Callable[[list[dict[str, Any]]], Any] = lambda lines: None,
) -> dict[str, list[dict[str, Any]]]:
    """Row -> its lines in the result, which ``keep`` gets as soon as they are there. known: lines of an earlier call
    that need not be measured for a ratio."""
    lines = dict(known)
    measured: dict[str, list[dict[str, Any]]] = {}
    try:
        for name in names:
            if needs := too_large(name, session):
                print(f"{name}: left out, it needs {needs / 1e9:.0f} GB of each GPU", flush=True)
                continue
            ranks = session.run(name)
            if ranks:
                kind = session.spreads[name].kind
                tell = lines_of if kind in ("row", "hand") else lines_of_checkpoints
                found = tell(name, session, ranks, lines)
                lines |= {line["row"]: line for line in found}
                measured[name] = found
                keep(found)
    except KeyboardInterrupt:
        print("interrupted: what is there is written", flush=True)
    return measured


def too_large(name: str, session: Session) -> int:
    """Bytes that a row needs, where they are more than a GPU has; else 0."""
    from kforge_train.estimate import estimate_job

    if session.tiny or session.spreads[name].kind == "hand":
        return 0
    import torch

    needs = estimate_job(job(session.spreads[name].row, "tokens", "run"), session.processes(name))[1].peak
    return needs if needs > torch.cuda.get_device_properties(0).total_memory else 0


def in_order(names: list[str], session: Session, known: dict[str, dict[str, Any]]) -> list[str]:
    """The rows that are asked for, each after what it is held against."""
    order: list[str] = []
    for name in names:
        spread = session.spreads[name]
        wanted = [f"one-{spread.one}"] if spread.one else []
        wanted += [spread.against] if spread.against else []
        order += [spread.of] if spread.of else []  # what it saved lives as long as this call
        order += [other for other in wanted if other in names or label(other, session) not in known]
        order.append(name)
    return list(dict.fromkeys(order))


def label(name: str, session: Session) -> str:
    """How a row is called in the result."""
    world = session.processes(name)
    return f"{name.removeprefix('one-')}, " + ("1 GPU" if world == 1 else f"{world} GPUs")


def lines_of(
    name: str, session: Session, ranks: list[dict[str, Any]], lines: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The numbers of one row: its speed, and what that is beside one GPU and beside what it is held against."""
    from kforge_metrics import mfu, peak_flops
    from kforge_model import flops_per_token, num_parameters
    from kforge_train.estimate import estimate_job

    spread, world, called = session.spreads[name], session.processes(name), label(name, session)
    row, first = spread.row, ranks[0]
    config = job(row, "tokens", "run")
    value, spread_of = _results.median_and_spread(
        [row.tokens_per_step / max(seconds) / world for seconds in zip(*(r["step_s"] for r in ranks), strict=True)]
    )
    one = lines.get(f"{spread.one}, 1 GPU")
    peak = peak_flops(first["gpu"], "bfloat16") if first["gpu"] else None
    reached = mfu(value, flops_per_token(config.model, float(row.row_tokens)), 1, peak)
    peaks = [found["peak_bytes"] / 1e9 for found in ranks]
    estimate = None if spread.kind == "hand" else estimate_job(config, world)[1].peak / 1e9
    parts = {
        "gpus": world,
        "mfu": reached,
        "peak_gb": peaks,
        "estimate_gb": estimate,
        "losses": first["losses"],
        "loss_finite": all(abs(loss) < float("inf") for loss in first["losses"]),
        "loss_falling": first["losses"][-1] < first["losses"][0],
        "start_s": first["start_s"],
        "cost_s": first["cost_s"],
        "step_s": first["step_s"],
        **({"traces": [found["trace"] for found in ranks]} if spread.trace else {}),
    }
    told = {
        **{key: value for key, value in asdict(row).items() if key not in ("name", "target", "model")},
        "model": asdict(config.model),
        "parameters": num_parameters(config.model),
        "tokens_per_step": row.tokens_per_step,
    }
    found = [
        _results.row(
            called,
            value,
            "tokens/s/GPU",
            target=spread.scaling * one["value"] if spread.scaling and one else None,
            reference=one["value"] if one else None,
            spread=spread_of,
            config=told,
            parts=parts,
        )
    ]
    if one:
        ratio = value / one["value"]
        found.append(_results.row(f"{called} / one", ratio, "ratio", target=spread.scaling, reference=1.0))
    other = lines.get(label(spread.against, session)) if spread.against else None
    if other:
        ratio = other["value"] / value
        name_of = f"{called} / {spread.against}"
        found.append(_results.row(name_of, ratio, "time ratio", better="lower", target=spread.times, reference=1.0))
    if reached:
        found.append(_results.row(f"{called}: mfu", reached, "1", target=spread.mfu))
    if session.gpu:
        found.append(_results.row(f"{called}: peak memory", max(peaks), "GB", better="lower", reference=estimate))
    if session.gpu and estimate:
        ratio = estimate / max(peaks)
        found.append(_results.row(f"{called}: memory, estimated / peak", ratio, "ratio", better="lower", reference=1.0))
    return found


def lines_of_checkpoints(
    name: str, session: Session, ranks: list[dict[str, Any]], lines: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The numbers of a row that saves or loads: of the rank that it cost the most."""
    import ckpt_train

    spread, called = session.spreads[name], label(name, session)
    if spread.kind == "saves":
        return ckpt_train.lines(called, max(ranks, key=lambda found: found["cost of the second save s"]))
    seconds = max(found["seconds"] for found in ranks)
    size = ranks[0]["bytes"]
    parts = {
        "bytes": size,
        "gb_per_s": size / seconds / 1e9,
        "losses": ranks[0]["losses"],
        "cost_s": ranks[0]["cost_s"],
    }
    found = [_results.row(f"{called}: seconds", seconds, "s", better="lower", parts=parts)]
    saved = lines.get(f"{label(spread.of, session)}: seconds") if spread.of else None
    if saved:
        pairs = zip(parts["losses"], saved["parts"]["losses"], strict=True)
        apart = max(abs(a - b) / b for a, b in pairs)
        found.append(_results.row(f"{called}: loss apart", apart, "relative", better="lower", target=0.01))
    return found


def known_lines(path: Path, session: Session) -> dict[str, dict[str, Any]]:
    """Lines of an earlier call on this machine and torch, by name."""
    if session.tiny or not path.exists():
        return {}
    import torch

    session.gpu = torch.cuda.get_device_name()
    kept = _results.merged([], path, _results.environment(session.gpu))
    return {line["row"]: line for line in kept}


def devices() -> int:
    import torch

    return torch.cuda.device_count()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="fsdp,fsdp-fp32,by-hand", help="comma-separated, or all; --list tells them")
    parser.add_argument("--gpus", type=int, help="how many (all that are there)")
    parser.add_argument("--again", action="store_true", help="time what rows are held against, though it is known")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on the CPU over gloo")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    for name in ("--child", "--tokens", "--started"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpus = options.gpus or (2 if options.tiny or options.list else devices())
    if not options.child and not options.tiny and not options.list:
        if devices() < 2:
            print(f"{devices()} CUDA devices here and 2 are the least, so nothing was measured; --tiny runs on the CPU")
            return 0
        if not 2 <= gpus <= devices():
            parser.error(f"--gpus {gpus}: from 2 to {devices()} can be used here")
    with tempfile.TemporaryDirectory(prefix="kforge-bench-") as folder:
        session = Session(Path(folder), gpus, options.tiny)
        if options.child:
            child(options.child, session, options.tokens, str(options.out), float(options.started))
            return 0
        if options.list:
            for name, spread in session.spreads.items():
                row = spread.row
                print(f"{name:<28}{row.global_rows:>4} rows of {row.row_tokens:>7,} tokens  {row.job}")
            return 0
        every = [name for name in session.spreads if not name.startswith("one-")]
        names = every if options.rows == "all" else options.rows.split(",")
        if unknown := [name for name in names if name not in session.spreads]:
            parser.error(f"no row on {gpus} GPUs is called {', '.join(unknown)}; rows: {', '.join(every)}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps what has been measured
        result = "multi_gpu-tiny" if options.tiny else "multi_gpu"
        known = known_lines(options.out / f"{result}.json", session)

        def keep(lines: list[dict[str, Any]], quiet: bool = True) -> None:
            _results.write(result, lines, _results.environment(session.gpu), options.out, keep=True, quiet=quiet)

        measured = measure(in_order(names, session, {} if options.again else known), session, known, keep)
    rows = [line for lines in measured.values() for line in lines]
    keep(rows, quiet=False)
    if session.failed:
        print("failed: " + ", ".join(session.failed))
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
