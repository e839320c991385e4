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
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _results
from _rows import ROWS, Row, document_lengths, tiny, write_tokens

TOKENS = 1_500_000
AGREE = 0.02


# ------------------------------------------------------------------------------------------------ one process a row


def job(row: Row, tokens: str, run_dir: str, extra_steps: int = 0) -> Any:
    """The JobConfig of a row."""
    from kforge_train.resolve import resolve_config

    return resolve_config(row.preset, row.overrides(tokens, run_dir, extra_steps)).config


class Clock:
    """A mark on the device at the end of each step; the host waits for the first one only."""

    def __init__(self, device: Any, started: float) -> None:
        import torch

        self.device, self.started = device, started
        self.cuda = torch.cuda if device.type == "cuda" else None
        self.marks: list[Any] = []
        self.first_step_s = 0.0

    def mark(self) -> None:
        if self.cuda is None:
            self.marks.append(time.perf_counter())
        else:
            self.marks.append(self.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        if len(self.marks) == 1:
            self.wait()
            self.first_step_s = time.time() - self.started

    def wait(self) -> None:
        if self.cuda is not None:
            self.cuda.synchronize(self.device)

    def step_seconds(self, warmup: int, steps: int) -> list[float]:
        """Seconds of each timed step: from the end of the one before to its own end."""
        self.wait()
        marks = self.marks[warmup - 1 : warmup + steps]
        if self.cuda is None:
            return [b - a for a, b in itertools.pairwise(marks)]
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def run_trainer(row: Row, tokens: str, run_dir: str, started: float, trace: bool) -> dict[str, Any]:
    """The row through `Trainer.run`, without its last checkpoint."""
    import torch

    from kforge_metrics import read_events
    from kforge_resilience import exitcodes
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    steps = row.warmup_steps + row.timed_steps
    found: dict[str, Any] = {}

    class Timed(Trainer):
        def step(self) -> Any:
            if trace and self.next_step == steps:
                return self.traced()
            verdict = super().step()
            clock.mark()
            return verdict

        def traced(self) -> Any:
            clock.wait()
            kinds = [torch.profiler.ProfilerActivity.CUDA] if clock.cuda else [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=kinds) as profile:
                verdict = super().step()
                clock.wait()
            path = Path(run_dir, "trace.json")
            profile.export_chrome_trace(str(path))
            import _trace

            found["trace"] = _trace.summary(path)
            return verdict

        def save(self) -> None:
            """Nothing: the time of a checkpoint is another benchmark's question."""

    config = job(row, tokens, run_dir, extra_steps=1 if trace else 0)
    imported = time.time() - started
    with build(config) as parts:
        device = parts.mesh.device
        clock = Clock(device, started)
        trainer = Timed(parts)
        built = time.time() - started
        code = trainer.run()
        if code != exitcodes.OK:
            raise RuntimeError(f"the run ended with exit code {code}")
        found["step_s"] = clock.step_seconds(row.warmup_steps, row.timed_steps)
        memory = torch.cuda.memory_stats(device) if clock.cuda else {}
        found["reserved_bytes"] = memory.get("reserved_bytes.all.peak", 0)
        # A retry means that memory of one stream's pool was given back to be had in another's: it waits for the device.
        found["allocator"] = {key: memory.get(key, 0) for key in ("num_alloc_retries", "num_sync_all_streams")}
    logged = [event.values for event in read_events(Path(run_dir, "events.jsonl")) if event.kind == "step"]
    found["losses"] = [values["loss"] for values in logged]
    found["skipped"] = sum(values["skipped"] for values in logged)
    found["data_s"] = max(values["data_s"] for values in logged[1:])
    found["peak_bytes"] = max(values["peak_memory_bytes"] or 0 for values in logged)
    found["start_s"] = {"imported": imported, "built": built, "first step": clock.first_step_s}
    return found


def run_bare(row: Row, tokens: str, run_dir: str, started: float) -> dict[str, Any]:
    """The same model, microbatches, norm, clipping and optimizer in a plain loop over one window that stays."""
    import torch

    from kforge_data import Loader, TokenShards
    from kforge_optim import build_optimizer, clip
    from kforge_parallel import launch, set_last_microbatch, shutdown
    from kforge_train.build import build_model
    from kforge_train.engine import rows_of

    config = job(row, tokens, run_dir)
    mesh = launch(config.parallel)
    model = build_model(config, mesh)
    optimizer = build_optimizer(model, config.optim, config.train.steps)
    optimizer.init_state()
    loader = Loader(
        TokenShards(tokens),
        row_tokens=row.row_tokens,
        global_rows=row.global_rows,
        microbatch_rows=row.microbatch_rows,
        isolate_documents=row.isolate_documents,
        device=mesh.device,
    )
    window = loader.next()
    loader.close()
    scale = 1.0 / torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum().to(torch.float64)
    clock = Clock(mesh.device, started)
    losses = []
    for _ in range(config.train.steps):
        parts = []
        for i, batch in enumerate(window):
            set_last_microbatch(model, i == len(window) - 1)
            loss, _ = model(batch["input_ids"], rows_of(batch), labels=batch["labels"], scale=scale)
            loss.backward()
            parts.append(loss.detach())
        optimizer.step(scale=clip.clip_factor(clip.total_norm(model.parameters()), config.optim.clip_norm))
        optimizer.zero_grad()
        losses.append(torch.stack(parts).sum())
        clock.mark()
    found: dict[str, Any] = {"step_s": clock.step_seconds(row.warmup_steps, row.timed_steps)}
    found["losses"] = torch.stack(losses).tolist()
    found["skipped"] = 0
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if clock.cuda else 0
    found["start_s"] = {"first step": clock.first_step_s}
    shutdown()
    return found


def child(kind: str, row: Row, tokens: str, started: float, trace: bool) -> dict[str, Any]:
    """What a process of its own does: `row`, `bare` or `floor`."""
    import torch

    torch.set_float32_matmul_precision("high")  # as kforge_train.run sets it
    cuda = row.device == "cuda"
    found: dict[str, Any]
    with tempfile.TemporaryDirectory() as run_dir:
        if kind == "floor":
            import _floor

            found = _floor.measure(row, job(row, tokens, run_dir).model, torch.device(row.device))
        elif kind == "bare":
            found = run_bare(row, tokens, run_dir, started)
        else:
            found = run_trainer(row, tokens, run_dir, started, trace)
    return {**found, "gpu": torch.cuda.get_device_name() if cuda else None}


# ------------------------------------------------------------------------------------------------ all of them


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
        "precision": "weights, moments and summed gradients fp32, compute bf16",
        "optimizer": "AdamW, fused",
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


def merged(new: list[dict[str, Any]], path: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier call that this one did not measure, if it was the same machine and torch, and the new ones."""
    if not path.exists():
        return new
    old = json.loads(path.read_text())
    same = all(old["environment"][key] == environment[key] for key in ("torch", "gpu"))
    names = {line["row"] for line in new}
    return [line for line in old["rows"] if same and line["row"] not in names] + new


def show_trace(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        trace = line.get("parts", {}).get("trace")
        if trace:
            print(f"one step of {line['row']}: {trace['span_ms']:.1f} ms from its first kernel to its last")
            for name, time_ms in {**trace["classes_ms"], "idle": trace["idle_ms"]}.items():
                print(f"  {name:<20}{time_ms:>10.1f} ms{time_ms / max(trace['span_ms'], 1e-9):>8.1%}")


def show_parts(rows: list[dict[str, Any]]) -> None:
    for line in rows:
        if "parts" in line:
            parts = line["parts"]
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
    with tempfile.TemporaryDirectory(prefix="kforge-bench-") as folder:
        session = Session(Path(folder), options.smoke, options.trace)
        rows = measure(names, session, options.once)
    environment = _results.environment(session.gpu)
    name = "h200-smoke" if options.smoke else "h200"
    rows = merged(rows, options.out / f"{name}.json", environment)
    show_trace(rows)
    show_parts(rows)
    _results.write(name, rows, environment, options.out)
    if session.failed:
        print("failed: " + ", ".join(session.failed))
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
