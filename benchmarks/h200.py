"""Training speed on one GPU: the real Trainer on real shards, beside what the device could do.

    python benchmarks/h200.py --rows 350m,bare-350m,1b        each row A-B-A, every timing a process of its own
    python benchmarks/h200.py --rows 8b --trace               and one step of it summed by kernel class
    python benchmarks/h200.py --rows 350m --smoke             tiny, on the CPU: shows that it runs, measures nothing

`bare-X` is a plain loop over the model of row X: no loader, guard, tracker or stop request. It is the B between the two
A of its row. Rows without one take turns: A B A B. A row counts when its two A agree within 2 %.

What a timing costs in seconds is in ``cost_s`` of its row in results/h200.json, and in NOTES.md: rows can be split over
calls, and the result file keeps the rows of earlier ones.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _results
from _rows import ROWS, Row, document_lengths, tiny, write_tokens
from _timing import child, job

TOKENS = 1_500_000
AGREE = 0.02


class Session:
    """The folder of shards and compile caches that the processes of one call share, and how they are started."""

    def __init__(self, folder: Path, smoke: bool, trace: bool) -> None:
        self.folder, self.smoke, self.trace = folder, smoke, trace
        self.gpu: str | None = None
        self.failed: list[str] = []

    def row(self, name: str) -> Row:
        return tiny(ROWS[name]) if self.smoke else ROWS[name]

    def tokens(self, row: Row) -> Path:
        """Shards for the vocabulary of a row, written when first asked for."""
        from kforge_train.resolve import resolve_config

        vocab = resolve_config(row.preset, {f"model.{k}": v for k, v in row.model.items()}).config.model.vocab_size
        path = self.folder / f"tokens-{vocab}"
        if not path.exists():
            write_tokens(path, vocab, 20_000 if self.smoke else TOKENS)
        return path

    def run(self, kind: str, name: str, trace: bool = False) -> dict[str, Any] | None:
        """One timing in a process of its own; None, and remembered as failed, when it fails."""
        out = self.folder / "result.json"
        out.unlink(missing_ok=True)
        tokens = self.tokens(self.row(name))
        environment = {
            **os.environ,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
        }
        started = time.time()
        words = ["--child", kind, "--rows", name, "--tokens", str(tokens), "--out", str(out), "--started", str(started)]
        words += (["--smoke"] if self.smoke else []) + (["--trace"] if trace else [])
        code = subprocess.run([sys.executable, __file__, *words], env=environment).returncode
        seconds = time.time() - started
        found = json.loads(out.read_text()) if code == 0 else None
        speed = ""
        if found is None:
            self.failed.append(f"{kind} {name}")
        else:
            self.gpu = found["gpu"] or self.gpu
            found["cost_s"] = round(seconds, 1)
            if "step_s" in found:
                median = _results.median_and_spread(found["step_s"])[0]
                speed = f", {self.row(name).tokens_per_step / median:,.0f} tokens/s"
            else:
                speed = f", floor {found['tokens_per_s']:,.0f} tokens/s"
        print(f"{kind} {name}: {seconds:.0f} s" + (speed or f", failed with exit code {code}"), flush=True)
        return found


def measure(names: list[str], session: Session, once: bool) -> list[dict[str, Any]]:
    """Time rows in turns and put their numbers together."""
    bases = list(dict.fromkeys(name.removeprefix("bare-") for name in names))
    with_bare = [base for base in bases if f"bare-{base}" in names]
    alone = [base for base in bases if base not in with_bare]
    turns = [turn for base in with_bare for turn in ([base, f"bare-{base}"] if once else [base, f"bare-{base}", base])]
    turns += alone if once else alone + alone
    timed: dict[str, list[dict[str, Any]]] = {}
    floors: dict[str, dict[str, Any] | None] = {}
    try:
        for turn in turns:
            base = turn.removeprefix("bare-")
            trace = session.trace and turn == base and (once or turn in timed)
            found = session.run("bare" if turn != base else "row", base, trace)
            timed.setdefault(turn, []).extend([found] if found else [])
            if base not in floors:  # right after the first timing, when the device is warm
                floors[base] = session.run("floor", base)
    except KeyboardInterrupt:
        print("interrupted: what is there is written", flush=True)
    rows = []
    for base in bases:
        if timed.get(base):
            rows += rows_of_base(session.row(base), timed[base], timed.get(f"bare-{base}", []), floors.get(base))
    return rows


def rows_of_base(
    row: Row, timings: list[dict[str, Any]], bare: list[dict[str, Any]], floor: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The numbers of one row from its timings, those of its bare loop, and its floor."""
    from kforge_metrics import mfu, peak_flops
    from kforge_model import flops_per_token, num_parameters

    def speeds(found: dict[str, Any]) -> list[float]:
        return [row.tokens_per_step / seconds for seconds in found["step_s"]]

    medians = [_results.median_and_spread(speeds(found))[0] for found in timings]
    value, spread = _results.median_and_spread([speed for found in timings for speed in speeds(found)])
    model = job(row, "tokens", "run").model
    attended = float(row.row_tokens)
    if row.isolate_documents:
        lengths = document_lengths(TOKENS).clip(max=row.row_tokens).astype(float)
        attended = float((lengths**2).sum() / lengths.sum())
    gpu = timings[0]["gpu"]
    peak = peak_flops(gpu, "bfloat16") if gpu else None
    losses = timings[0]["losses"]
    finite = all(loss == loss and abs(loss) != float("inf") for found in timings for loss in found["losses"])
    gap = (max(medians) - min(medians)) / max(medians)
    parts = {
        "mfu": mfu(value, flops_per_token(model, attended), 1, peak),
        "mfu_palm": mfu(value, flops_per_token(model, row.row_tokens, causal=False), 1, peak),
        "medians": medians,
        "agree": gap,
        "counts": len(medians) > 1 and gap <= AGREE,
        "losses": losses,
        "loss_finite": finite,
        "loss_falling": losses[-1] < losses[0],
        "skipped_steps": sum(found["skipped"] for found in timings),
        "reserved_gb": timings[0]["reserved_bytes"] / 1e9,
        "allocator": timings[0]["allocator"],
        "data_wait_s": max(found["data_s"] for found in timings),
        "start_s": [found["start_s"] for found in timings],
        "cost_s": [found["cost_s"] for found in timings],
        "steps_timed": [len(found["step_s"]) for found in timings],
        "step_s": [found["step_s"] for found in timings],
    }
    if floor:
        parts["floor"] = floor
    if bare:
        parts["bare_medians"] = [_results.median_and_spread(speeds(found))[0] for found in bare]
        parts["bare_peak_gb"] = bare[0]["peak_bytes"] / 1e9
        parts["bare_cost_s"] = [found["cost_s"] for found in bare]
    traces = [found["trace"] for found in timings if "trace" in found]
    if traces:
        parts["trace"] = traces[0]
    config = {
        **{key: value for key, value in asdict(row).items() if key not in ("name", "target", "model")},
        "model": asdict(model),
        "parameters": num_parameters(model),
        "tokens_per_step": row.tokens_per_step,
        "documents": "log-normal, mean 600 tokens",
        "precision": f"weights {row.storage}, moments {row.moments}, summed gradients fp32, compute bf16",
        "optimizer": "AdamW, one kernel",
    }
    lines = [
        _results.row(
            row.name,
            value,
            "tokens/s/GPU",
            target=row.target,
            reference=floor["tokens_per_s"] if floor else None,
            spread=spread,
            config=config,
            parts=parts,
        )
    ]
    if floor:
        lines.append(_results.row(f"{row.name} value/floor", value / floor["tokens_per_s"], "1", target=0.95))
    if bare:
        ratio = parts["bare_medians"][0] / value
        lines.append(
            _results.row(
                f"{row.name} trainer/bare",
                ratio,
                "time ratio",
                better="lower",
                target=1.015,
                reference=1.0,
                parts={"bare_tokens_per_s": parts["bare_medians"], "bare_peak_gb": parts["bare_peak_gb"]},
            )
        )
    first = [found["start_s"]["first step"] for found in timings]
    lines.append(_results.row(f"{row.name} first step, cold", first[0], "s", better="lower", target=45.0))
    if len(first) > 1:
        lines.append(_results.row(f"{row.name} first step, warm", first[-1], "s", better="lower", target=30.0))
    memory = max(found["peak_bytes"] for found in timings) / 1e9
    lines.append(_results.row(f"{row.name} peak memory", memory, "GB", better="lower"))
    return lines


def show_trace(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        trace = line.get("parts", {}).get("trace")
        if trace:
            print(f"one step of {line['row']}: {trace['span_ms']:.1f} ms from its first kernel to its last")
            for name, time_ms in {**trace["classes_ms"], "idle": trace["idle_ms"]}.items():
                print(f"  {name:<20}{time_ms:>10.1f} ms{time_ms / max(trace['span_ms'], 1e-9):>8.1%}")


def show_parts(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        parts = line.get("parts", {})
        if "mfu" in parts:
            floor = {name: round(s * 1e3, 1) for name, s in parts.get("floor", {}).get("parts_s", {}).items()}
            told = {key: parts[key] for key in ("mfu", "mfu_palm", "agree", "counts", "loss_falling", "cost_s")}
            print(
                f"{line['row']}: {told}; floor ms {floor}; losses {parts['losses'][0]:.3f} -> {parts['losses'][-1]:.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="350m,bare-350m", help="comma-separated: " + ", ".join(ROWS) + "; or bare-X")
    parser.add_argument("--once", action="store_true", help="time each row once; it does not count then")
    parser.add_argument("--trace", action="store_true", help="profile one more step of each row, in its last timing")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    for name in ("--child", "--tokens", "--started"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.rows.split(",")
    unknown = [name for name in names if name.removeprefix("bare-") not in ROWS]
    if unknown:
        parser.error(f"no row is called {', '.join(unknown)}; rows: {', '.join(ROWS)}, each also with bare- before it")
    if options.child:
        row = tiny(ROWS[names[0]]) if options.smoke else ROWS[names[0]]
        found = child(options.child, row, options.tokens, float(options.started), options.trace)
        options.out.write_text(json.dumps(found))
        return 0
    if not options.smoke:
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device here, so nothing was measured; --smoke runs a tiny row on the CPU")
            return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit keeps what has been measured
    with tempfile.TemporaryDirectory(prefix="kforge-bench-") as folder:
        session = Session(Path(folder), options.smoke, options.trace)
        rows = measure(names, session, options.once)
    environment = _results.environment(session.gpu)
    name = "h200-smoke" if options.smoke else "h200"
    show_trace(rows)
    show_parts(rows)
    _results.write(name, rows, environment, options.out, keep=True)
    if session.failed:
        print("failed: " + ", ".join(session.failed))
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
