"""The numbers of a training loop, gathered on the device and read when a log line is due.

`Tracker.step` puts device scalars into a small buffer and returns. When a line is due, the buffer is copied to the host
while the device goes on, and read at the next step, by when the copy is long done: the loop never waits for a number
that it only wants to print.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kforge_metrics import throughput
from kforge_metrics.events import Event
from kforge_metrics.memory import PeakMemory

if TYPE_CHECKING:
    from kforge_metrics.sinks import Sink

_log = logging.getLogger("kforge_metrics")

LOSS, NORM, TOKENS, SCORED, GATE, SCALE = range(6)  # columns of the buffer


@dataclass(frozen=True)
class _Stamp:
    """A moment of the run; times are sums since the tracker was made."""

    host_s: float
    paused_s: float
    waited_s: float
    """Waiting for data."""
    event: torch.cuda.Event | None
    """The same moment in the device's queue: the host may be far ahead of it."""

    def training_s(self, since: _Stamp) -> float:
        """Time between the two, without pauses. On CUDA the device must have passed both."""
        seconds = self.host_s - since.host_s
        if self.event is not None and since.event is not None:
            seconds = since.event.elapsed_time(self.event) / 1e3
        return seconds - (self.paused_s - since.paused_s)


@dataclass
class _Interval:
    """The steps since the last log line."""

    start: _Stamp
    last: _Stamp
    """At its last step."""
    first: _Stamp | None = None
    """At the first step of the process, where that is in this interval."""
    rows: int = 0
    carried: int = 0
    """So many of the rows are of steps before a restart: they count, but were not timed here."""
    kept: int = 0
    """So many of the rows are in a state that was saved, and so a restart will tell of them."""
    numbers: dict[tuple[int, int], float] = field(default_factory=dict)
    """What came as Python numbers, by row and column; the rest is in the device's buffer."""


@dataclass
class _Due:
    """A closed interval whose numbers are on their way to the host."""

    step: int
    time: float
    interval: _Interval
    table: Tensor
    copied: torch.cuda.Event | None
    values: dict[str, Any]
    more: Tensor | None
    """[n], on its way to the host as the table is; its names are in more_names."""
    more_names: list[str]


class Tracker:
    """Loss, norm, rate, throughput, MFU and memory of a run, as events for the sinks.

    A "step" event every ``every_steps`` steps (where the step number divides, and at ``total_steps``) with the means
    over the steps since the last one:

    - ``loss``: mean weighted by scored tokens over the accepted steps; ``grad_norm``: their plain mean. Where every
      step was skipped, the means of all, so that what made them skip is seen as it was.
    - ``tokens_per_s`` of all devices, ``step_s``, ``data_s`` (of it, waiting for data), ``mfu``, ``mfu_palm``. None
      where not known: no time passed, no FLOPs given, unknown device.
    - ``lr`` of the last step, ``steps``, ``skipped`` of the interval; ``tokens_total`` and ``skipped_total`` of the
      run; ``peak_memory_bytes`` of this process's device in the interval; ``loss_scale`` of the last step, where the
      loss is scaled; and what `step` was given as ``more`` for the last step.

    **Time.** Throughput is that of the interval alone: tokens of its steps over its time, whatever the run had done
    before a restart. Time inside `pause` does not count. The first step of a process, which compiles and allocates,
    is not counted either (it is ``first_step_s`` of the first event), unless it is the only one of its interval.
    Skipped steps count: they took time and consumed their tokens.

    All ranks call it alike; only rank 0 sends events. A sink that fails is reported once and never stops the run.

    ``world``: devices that work on the run together. ``flops_per_token``: forward and backward, with causal attention
    counted once; ``flops_per_token_palm``: with the full square, as most others print it. Where they change on the way,
    each is a function of the number of a step, from 0, and of an interval that of its last step counts.
    ``peak_flops``: of one device, in FLOP/s; by default what the function `peak_flops` knows of ``device`` for
    bfloat16. ``clock`` (seconds, any origin) and ``now`` (seconds
    since 1970) are there for tests.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        every_steps: int = 10,
        flops_per_token: float | Callable[[int], float | None] | None = None,
        flops_per_token_palm: float | Callable[[int], float | None] | None = None,
        world: int = 1,
        device: torch.device | str = "cpu",
        rank: int = 0,
        total_steps: int | None = None,
        first_step: int = 0,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps = {every_steps} must be at least 1 step")
        if world < 1:
            raise ValueError(f"world = {world} must be at least 1 device")
        self.sinks = list(sinks)
        self.every_steps, self.total_steps, self.rank, self.world = every_steps, total_steps, rank, world
        self.device = torch.device(device)
        self.flops_per_token, self.flops_per_token_palm = flops_per_token, flops_per_token_palm
        cuda = self.device.type == "cuda"
        if peak_flops is None and cuda:
            peak_flops = throughput.peak_flops(torch.cuda.get_device_name(self.device))
        self.peak_flops = peak_flops
        self.done_steps = first_step
        """Steps done: the number that the last `step` was given."""
        self.last: Event | None = None
        """The last "step" event that was sent."""
        self._clock, self._now = clock, now
        self._tokens_total, self._skipped_total = 0, 0
        self._memory = PeakMemory(self.device)
        self._broken: set[int] = set()
        room = every_steps if total_steps is None else max(1, min(every_steps, total_steps))
        self._buffer = torch.zeros(room, 6, dtype=torch.float64, device=self.device)
        self._host = torch.empty_like(self._buffer, device="cpu", pin_memory=True) if cuda else None
        self._due: _Due | None = None
        self._lr: float | None = None
        self._has_norm, self._has_scale = False, False
        self._more: Mapping[str, Tensor] = {}
        self._pauses, self._pause_started = 0, 0.0
        self._paused_s, self._waited_s = 0.0, 0.0
        self._fresh = True
        start = self._stamp()
        self._interval = _Interval(start, start)

    def step(
        self,
        next_step: int,
        *,
        tokens: int | Tensor,
        loss: float | Tensor,
        norm: float | Tensor | None = None,
        lr: float | None = None,
        gate: float | Tensor = 1.0,
        scored_tokens: int | Tensor | None = None,
        loss_scale: float | Tensor | None = None,
        more: Mapping[str, Tensor] | None = None,
    ) -> None:
        """One optimizer step was given to the device; never waits for it.

        next_step: steps done now (1 after the first). tokens: of the whole global batch. loss: its global mean over
        scored tokens. norm: global gradient norm before clipping. lr: rate of this step. gate: 1, or 0 when the
        step was skipped and changed no weight. scored_tokens: the loss's denominator, and so its weight in the mean; by
        default ``tokens``. loss_scale: what the loss was multiplied by for backward (float16). more: further numbers by
        name, on the tracker's device; the event has those of its last step. Tensors are 0-dim of any dtype; they are
        copied, and may be overwritten afterwards, but for those of more.
        """
        self._send_due()
        if self._interval.rows == len(self._buffer):
            self._close_interval()  # steps that were not numbered one by one
        row = self._interval.rows
        scored = tokens if scored_tokens is None else scored_tokens
        for column, value in ((LOSS, loss), (NORM, norm), (TOKENS, tokens), (SCORED, scored), (GATE, gate)):
            if isinstance(value, Tensor):
                self._buffer[row, column].copy_(value.detach())
            elif value is not None:
                self._interval.numbers[row, column] = float(value)
            else:
                self._interval.numbers[row, column] = math.nan
        if isinstance(loss_scale, Tensor):
            self._buffer[row, SCALE].copy_(loss_scale.detach())
        elif loss_scale is not None:
            self._interval.numbers[row, SCALE] = float(loss_scale)
        self._interval.rows += 1
        self.done_steps, self._lr = next_step, lr
        self._has_norm, self._has_scale = norm is not None, loss_scale is not None
        self._more = more or {}
        self._interval.last = self._stamp()
        if self._fresh:
            self._fresh = False
            self._interval.first = self._interval.last
        if next_step % self.every_steps == 0 or next_step == self.total_steps:
            self._close_interval()

    def event(self, kind: str, step: int, values: dict[str, Any] | None = None) -> None:
        """Send an event of any kind, after the step events before it ("abort" and "end": also the unfinished one)."""
        if kind in ("abort", "end"):
            self.flush()
        self._send_due()
        self._send(Event(kind, step, self._now(), self.rank, dict(values or {})))

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """`event` in the shape that other packages call: the step is the value "step", or that of the last step."""
        self.event(kind, int(values.get("step", self.done_steps)), values)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The time inside is not training: evaluation, saving. Waits for the device at both ends; nests."""
        self._send_due()
        self._synchronize()
        if self._pauses == 0:
            self._pause_started = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._synchronize()
            self._pauses -= 1
            if self._pauses == 0:
                self._paused_s += self._clock() - self._pause_started

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """The time inside is spent waiting for data: training time, and counted by itself as ``data_s``."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - started

    def flush(self) -> None:
        """Send what is gathered, also of an unfinished interval; waits for the device."""
        self._send_due()
        if self._interval.rows:
            self._close_interval()
            self._send_due()

    def close(self) -> None:
        """Close the sinks, after what is gathered; steps that a saved state holds are left to the restart."""
        self._send_due()
        if self._interval.rows > self._interval.kept:
            self.flush()
        for sink in self.sinks:
            self._guarded(sink, sink.close)

    def state_dict(self) -> dict[str, Any]:
        """Totals of the run and the numbers of the steps since the last line, equal on all ranks; waits for the device.

        After a restart the next line is the mean over all its steps, as if nothing had happened.
        """
        self._send_due()
        self._interval.kept = self._interval.rows
        rows = self._rows(self._interval, self._buffer.cpu())
        return {
            "step": self.done_steps,
            "tokens_total": self._tokens_total + _tokens(rows),
            "skipped_total": self._skipped_total + _skipped(rows),
            "unfinished": rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these totals and this step, see `start_at`."""
        self._tokens_total = int(state["tokens_total"])
        self._skipped_total = int(state["skipped_total"])
        self.start_at(int(state["step"]))
        rows: list[list[float]] = state.get("unfinished", [])
        if len(rows) >= len(self._buffer):
            return  # more than a line holds since every_steps was made smaller: they are in the totals
        self._tokens_total -= _tokens(rows)
        self._skipped_total -= _skipped(rows)
        interval = self._interval
        interval.rows = interval.carried = interval.kept = len(rows)
        interval.numbers = {(i, j): float(value) for i, row in enumerate(rows) for j, value in enumerate(row)}
        self._has_norm = any(not math.isnan(row[NORM]) for row in rows)

    def start_at(self, step: int) -> None:
        """So many steps are done, and the next one begins: steps gathered so far are forgotten, time starts anew."""
        self.done_steps = step
        self._due, self._fresh = None, True
        start = self._stamp()
        self._interval = _Interval(start, start)

    def _stamp(self) -> _Stamp:
        at, event = self._clock(), None
        if self._host is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
        running_pause = at - self._pause_started if self._pauses else 0.0
        return _Stamp(at, self._paused_s + running_pause, self._waited_s, event)

    def _close_interval(self) -> None:
        interval = self._interval
        self._interval = _Interval(interval.last, interval.last)
        table, copied = self._buffer, None
        more = torch.stack([value.detach().double() for value in self._more.values()]) if self._more else None
        if self._host is not None:
            table = self._host
            table.copy_(self._buffer, non_blocking=True)
            if more is not None:
                more = torch.empty_like(more, device="cpu", pin_memory=True).copy_(more, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
        values = {"lr": self._lr, "peak_memory_bytes": self._memory.read()}
        self._due = _Due(self.done_steps, self._now(), interval, table, copied, values, more, list(self._more))
        if copied is None:
            self._send_due()

    def _send_due(self) -> None:
        if self._due is None:
            return
        due, self._due = self._due, None
        if due.copied is not None:
            due.copied.synchronize()
        values = self._values(due)
        self.last = Event("step", due.step, due.time, self.rank, values)
        self._send(self.last)

    def _values(self, due: _Due) -> dict[str, Any]:
        interval = due.interval
        rows = self._rows(interval, due.table)
        start, timed = interval.start, rows[interval.carried :]
        if interval.first is not None and len(timed) > 1:
            start, timed = interval.first, timed[1:]
        elapsed_s, waited_s = interval.last.training_s(start), interval.last.waited_s - start.waited_s
        accepted = [row for row in rows if row[GATE] > 0]
        skipped = _skipped(rows)
        self._tokens_total += _tokens(rows)
        self._skipped_total += skipped
        shown = accepted or rows
        per_s = throughput.tokens_per_second(sum(row[TOKENS] for row in timed), elapsed_s)
        peak = self.peak_flops
        values: dict[str, Any] = {
            "loss": _mean([row[LOSS] for row in shown], [row[SCORED] for row in shown]),
            "grad_norm": _mean([row[NORM] for row in shown]) if self._has_norm else None,
            "lr": due.values["lr"],
            "tokens_per_s": per_s,
            "step_s": elapsed_s / len(timed) if per_s is not None else None,
            "data_s": waited_s / max(1, len(timed)),
            "mfu": throughput.mfu(per_s, _at(self.flops_per_token, due.step), self.world, peak),
            "mfu_palm": throughput.mfu(per_s, _at(self.flops_per_token_palm, due.step), self.world, peak),
            "tokens_total": self._tokens_total,
            "steps": len(rows),
            "skipped": skipped,
            "skipped_total": self._skipped_total,
            "peak_memory_bytes": due.values["peak_memory_bytes"],
        }
        if self._has_scale:
            values["loss_scale"] = rows[-1][SCALE]
        if interval.first is not None:
            values["first_step_s"] = interval.first.training_s(interval.start)
        if due.more is not None:
            values |= dict(zip(due.more_names, due.more.tolist(), strict=True))
        return values

    def _rows(self, interval: _Interval, table: Tensor) -> list[list[float]]:
        rows: list[list[float]] = table[: interval.rows].tolist()
        for (row, column), value in interval.numbers.items():
            rows[row][column] = value
        return rows

    def _send(self, event: Event) -> None:
        if self.rank != 0:
            return
        for sink in self.sinks:
            self._guarded(sink, sink.emit, event)

    def _guarded(self, sink: Sink, method: Callable[..., None], *args: Event) -> None:
        try:
            method(*args)
        except Exception as error:
            if id(sink) not in self._broken:
                self._broken.add(id(sink))
                _log.warning("%s does not work and may miss events; training goes on: %r", type(sink).__name__, error)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _tokens(rows: list[list[float]]) -> int:
    return round(sum(row[TOKENS] for row in rows))


def _skipped(rows: list[list[float]]) -> int:
    return sum(not row[GATE] > 0 for row in rows)


def _at(value: float | Callable[[int], float | None] | None, steps: int) -> float | None:
    """A value that may depend on the step, at the last of so many."""
    return value(steps - 1) if callable(value) else value


def _mean(values: list[float], weights: list[float] | None = None) -> float:
    if weights is None or not sum(weights) > 0:
        weights = [1.0] * len(values)
    # A weight of 0 takes its value out, also one that is not finite.
    return sum(v * w for v, w in zip(values, weights, strict=True) if w > 0) / sum(weights)
