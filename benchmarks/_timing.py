"""What one process of the speed benchmark does: a row through the Trainer, its bare loop, or its floor."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from _rows import Row


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
        self.peak_bytes = 0

    def mark(self) -> None:
        if self.cuda is None:
            self.marks.append(time.perf_counter())
        else:
            self.marks.append(self.cuda.Event(enable_timing=True))
            self.marks[-1].record()
            self.peak_bytes = max(self.peak_bytes, self.cuda.max_memory_allocated(self.device))
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
    """The row through `Trainer.run`, without its last checkpoint. Of several processes each has its own times and peak;
    what was logged is rank 0's alone."""
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
            path = Path(run_dir, f"trace-{parts.mesh.rank}.json")
            profile.export_chrome_trace(str(path))
            import _trace

            found["trace"] = _trace.summary(path)
            return verdict

        def save(self, *, temporary: bool = False) -> None:
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
        found["peak_bytes"] = clock.peak_bytes
        memory = torch.cuda.memory_stats(device) if clock.cuda else {}
        found["reserved_bytes"] = memory.get("reserved_bytes.all.peak", 0)
        # A retry means that memory of one stream's pool was given back to be had in another's: it waits for the device.
        found["allocator"] = {key: memory.get(key, 0) for key in ("num_alloc_retries", "num_sync_all_streams")}
        rank = parts.mesh.rank
    found["start_s"] = {"imported": imported, "built": built, "first step": clock.first_step_s}
    if rank:
        return found
    logged = [event.values for event in read_events(Path(run_dir, "events.jsonl")) if event.kind == "step"]
    found["losses"] = [values["loss"] for values in logged]
    found["skipped"] = sum(values["skipped"] for values in logged)
    found["data_s"] = max(values["data_s"] for values in logged[1:])
    found["peak_bytes"] = max(found["peak_bytes"], *(values["peak_memory_bytes"] or 0 for values in logged))
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
