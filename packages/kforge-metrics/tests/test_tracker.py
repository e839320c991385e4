from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_metrics import Event, Tracker


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class Memory:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def steps(self) -> list[dict[str, Any]]:
        return [event.values for event in self.events if event.kind == "step"]

    def column(self, key: str) -> list[Any]:
        return [values[key] for values in self.steps()]


def make(**options: Any) -> tuple[Tracker, Memory, Clock]:
    sink, clock = Memory(), Clock()
    options.setdefault("every_steps", 10)
    return Tracker([sink], clock=clock, now=clock, **options), sink, clock


def run(tracker: Tracker, clock: Clock, first: int, last: int, *, tokens: Any = 1000, seconds: float = 1.0) -> None:
    """Steps first..last, each ``seconds`` long."""
    for step in range(first, last + 1):
        clock.time += seconds
        tracker.step(step, tokens=tokens, loss=2.0, norm=1.0, lr=1e-3)


def test_values_of_a_steady_run() -> None:
    tracker, sink, clock = make(total_steps=25, world=4, flops_per_token=1e9, flops_per_token_palm=2e9, peak_flops=1e12)
    run(tracker, clock, 1, 25)
    assert [event.step for event in sink.events] == [10, 20, 25]
    for values in sink.steps():
        assert values["loss"] == 2.0 and values["grad_norm"] == 1.0 and values["lr"] == 1e-3
        assert values["tokens_per_s"] == pytest.approx(1000) and values["step_s"] == pytest.approx(1.0)
        assert values["mfu"] == pytest.approx(1000 * 1e9 / 4e12) and values["mfu_palm"] == 2 * values["mfu"]
        assert values["skipped"] == 0 and values["peak_memory_bytes"] > 0
    assert sink.column("tokens_total") == [10_000, 20_000, 25_000]
    assert sink.column("steps") == [10, 10, 5]
    assert sink.steps()[0]["first_step_s"] == 1.0 and "first_step_s" not in sink.steps()[1]
    assert sink.events[0].time == 1010.0 and tracker.last == sink.events[-1] and tracker.done_steps == 25


def test_a_line_at_the_end_alone_takes_room_for_the_steps_of_the_run() -> None:
    tracker, sink, clock = make(every_steps=10**12, total_steps=7)
    run(tracker, clock, 1, 3)
    state = json.loads(json.dumps(tracker.state_dict()))
    run(tracker, clock, 4, 7)
    resumed, after, clock = make(every_steps=10**12, total_steps=7)
    resumed.load_state_dict(state)
    run(resumed, clock, 4, 7)
    for events in (sink, after):
        assert [event.step for event in events.events] == [7]
        assert events.column("steps") == [7] and events.column("tokens_total") == [7000]


def test_unknown_parts_are_none() -> None:
    tracker, sink, clock = make(flops_per_token=1e9)
    for step in range(1, 11):
        clock.time += 1.0
        tracker.step(step, tokens=10, loss=1.0)
    values = sink.steps()[0]
    assert values["mfu"] is None and values["mfu_palm"] is None  # a CPU has no peak
    assert values["lr"] is None and values["grad_norm"] is None


def test_first_step_does_not_drag_the_first_value_down() -> None:
    tracker, sink, clock = make()
    run(tracker, clock, 1, 1, seconds=60.0)  # compiles
    run(tracker, clock, 2, 20)
    assert sink.column("tokens_per_s") == pytest.approx([1000, 1000])
    assert sink.steps()[0]["first_step_s"] == 60.0
    assert sink.column("tokens_total") == [10_000, 20_000]


def test_a_first_step_that_is_alone_in_its_interval_is_timed() -> None:
    tracker, sink, clock = make(every_steps=1)
    run(tracker, clock, 1, 3, tokens=10_000, seconds=10.0)
    assert sink.column("tokens_per_s") == pytest.approx([1000, 1000, 1000])


@pytest.mark.parametrize("every", [1, 5])
def test_first_values_after_a_resume_are_sane(every: int) -> None:
    tracker, _, clock = make(every_steps=every)
    run(tracker, clock, 1, 100, tokens=10_000, seconds=10.0)
    state = tracker.state_dict()
    assert state == {"step": 100, "tokens_total": 1_000_000, "skipped_total": 0, "unfinished": []}

    again, sink, clock = make(every_steps=every)
    clock.time += 300.0  # restoring takes its time
    again.load_state_dict(state)
    assert again.done_steps == 100
    run(again, clock, 101, 115, tokens=10_000, seconds=10.0)
    assert sink.column("tokens_per_s")[:3] == pytest.approx([1000, 1000, 1000])
    assert sink.column("tokens_total")[0] == 1_000_000 + 10_000 * every


def test_pause_is_not_training_time() -> None:
    tracker, sink, clock = make()
    run(tracker, clock, 1, 5)
    with tracker.pause():
        clock.time += 100.0
        with tracker.pause():  # an evaluation that saves
            clock.time += 100.0
        clock.time += 7.0
    run(tracker, clock, 6, 10)
    with tracker.pause():  # right after a log line: the next interval's
        clock.time += 50.0
    with pytest.raises(KeyError), tracker.pause():
        clock.time += 50.0
        raise KeyError
    run(tracker, clock, 11, 20)
    assert sink.column("tokens_per_s") == pytest.approx([1000, 1000])
    assert sink.column("step_s") == pytest.approx([1.0, 1.0])


def test_pause_before_the_first_step_and_flush_inside_a_pause() -> None:
    tracker, sink, clock = make()
    with tracker.pause():
        clock.time += 500.0
    run(tracker, clock, 1, 4)
    with tracker.pause():
        clock.time += 30.0
        tracker.event("abort", 4, {"reason": "not finite"})
        clock.time += 30.0
    run(tracker, clock, 5, 10)
    assert [(e.kind, e.step) for e in sink.events] == [("step", 4), ("abort", 4), ("step", 10)]
    assert sink.column("tokens_per_s") == pytest.approx([1000, 1000])
    assert sink.steps()[0]["first_step_s"] == 1.0


def test_flops_that_change_on_the_way() -> None:
    """An interval counts those of its last step, numbered from 0."""
    tracker, sink, clock = make(
        every_steps=2, flops_per_token=lambda step: 1.0 + (step >= 4), flops_per_token_palm=4.0, peak_flops=1.0
    )
    run(tracker, clock, 1, 6)
    per_s = sink.column("tokens_per_s")
    assert sink.column("mfu") == pytest.approx([per_s[0], per_s[1], 2 * per_s[2]])
    assert sink.column("mfu_palm") == pytest.approx([4 * value for value in per_s])


def test_two_log_points_in_the_same_instant() -> None:
    tracker, sink, clock = make(every_steps=1, flops_per_token=1.0, peak_flops=1.0)
    run(tracker, clock, 1, 1)
    run(tracker, clock, 2, 2, seconds=0.0)
    run(tracker, clock, 3, 3, seconds=-1.0)  # a clock that was set back
    run(tracker, clock, 4, 4)
    assert sink.column("tokens_per_s") == [1000.0, None, None, 1000.0]
    assert sink.column("step_s") == [1.0, None, None, 1.0] and sink.column("mfu")[1:3] == [None, None]


def test_loss_is_weighted_by_scored_tokens() -> None:
    tracker, sink, _ = make(every_steps=2)
    tracker.step(1, tokens=100, scored_tokens=4, loss=1.0, norm=1.0)
    tracker.step(2, tokens=100, scored_tokens=1, loss=6.0, norm=3.0)
    assert sink.steps()[0]["loss"] == pytest.approx(2.0) and sink.steps()[0]["grad_norm"] == 2.0
    tracker.step(3, tokens=4, loss=1.0)
    tracker.step(4, tokens=torch.tensor(1), loss=torch.tensor(6.0))
    assert sink.steps()[1]["loss"] == pytest.approx(2.0)
    assert sink.column("tokens_total") == [200, 205]


def test_skipped_steps_are_counted_and_left_out_of_the_means() -> None:
    tracker, sink, clock = make(every_steps=3)
    gates = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    for step, gate in enumerate(gates, start=1):
        clock.time += 1.0
        loss = torch.tensor(float(step) if gate else math.nan)
        norm = torch.tensor(1.0 if gate else math.inf)
        tracker.step(step, tokens=100, loss=loss, norm=norm, gate=torch.tensor(gate))
    first, second = sink.steps()
    assert first["loss"] == 2.0 and first["grad_norm"] == 1.0 and first["skipped"] == 1
    # Nothing was accepted: what was seen is shown as it was.
    assert math.isnan(second["loss"]) and second["grad_norm"] == math.inf and second["skipped"] == 3
    assert sink.column("skipped_total") == [1, 4] and sink.column("tokens_total") == [300, 600]
    assert sink.column("tokens_per_s") == pytest.approx([100, 100])
    assert tracker.state_dict() == {"step": 6, "tokens_total": 600, "skipped_total": 4, "unfinished": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scalars_are_copied_and_python_numbers_do_as_well(dtype: torch.dtype) -> None:
    static = torch.zeros((), dtype=dtype)  # a buffer that the loop uses again, as CUDA graphs do
    tracker, sink, _ = make(every_steps=4)
    for step in range(1, 5):
        static.fill_(step)
        tracker.step(step, tokens=torch.tensor(10), loss=static, norm=static if step % 2 else float(step))
    assert sink.steps()[0]["loss"] == 2.5 and sink.steps()[0]["grad_norm"] == 2.5
    assert sink.steps()[0]["tokens_total"] == 40


def test_the_loss_scale_is_that_of_the_last_step_where_there_is_one() -> None:
    tracker, sink, _ = make(every_steps=2)
    scale = torch.tensor(8.0)
    for step in range(1, 4):
        tracker.step(step, tokens=10, loss=1.0, loss_scale=scale)
        scale.mul_(0.5)  # in place, as a scaler does
    state = json.loads(json.dumps(tracker.state_dict()))
    tracker, after, _ = make(every_steps=2)
    tracker.load_state_dict(state)
    tracker.step(4, tokens=10, loss=1.0, loss_scale=1.0)
    assert sink.column("loss_scale") == [4.0] and after.column("loss_scale") == [1.0]
    tracker.load_state_dict({**state, "unfinished": [row[:5] for row in state["unfinished"]]})  # of an older version
    tracker.step(4, tokens=10, loss=1.0)
    assert "loss_scale" not in after.steps()[-1] and after.steps()[-1]["steps"] == 2


def test_further_numbers_are_those_of_the_last_step() -> None:
    tracker, sink, _ = make(every_steps=2)
    for step in range(1, 6):
        more = {"a": torch.tensor(float(step)), "b/0": torch.tensor(10 * step)} if step < 5 else None
        tracker.step(step, tokens=10, loss=1.0, more=more)
    tracker.flush()
    assert [(event.get("a"), event.get("b/0")) for event in sink.steps()] == [(2.0, 20.0), (4.0, 40.0), (None, None)]


def test_waiting_for_data_is_counted_by_itself() -> None:
    tracker, sink, clock = make(every_steps=5)
    for step in range(1, 11):
        with tracker.data_wait():
            clock.time += 0.25
        clock.time += 0.75
        tracker.step(step, tokens=100, loss=1.0)
    assert sink.column("data_s") == pytest.approx([0.25, 0.25]) and sink.column("step_s") == pytest.approx([1.0, 1.0])


def test_state_holds_the_steps_that_no_line_was_due_for() -> None:
    tracker, sink, clock = make()
    run(tracker, clock, 1, 13)
    assert tracker.state_dict()["tokens_total"] == 13_000
    run(tracker, clock, 14, 20)
    assert sink.column("tokens_total") == [10_000, 20_000]  # asking did not disturb


@settings(deadline=None)
@given(
    every=st.integers(1, 7),
    cuts=st.lists(st.integers(1, 40), max_size=4),
    tokens=st.lists(st.integers(0, 9), min_size=40, max_size=40),
)
def test_totals_do_not_depend_on_restarts(every: int, cuts: list[int], tokens: list[int]) -> None:
    """A run of 40 steps stopped at any steps and gone on with from its state has the lines of one never stopped."""
    state, done, seen = {"step": 0, "tokens_total": 0, "skipped_total": 0}, 0, []
    whole, whole_sink, _ = make(every_steps=every, total_steps=40)
    for step in range(1, 41):
        whole.step(step, tokens=tokens[step - 1], loss=float(step))
    for end in [*sorted(cuts), 40]:
        tracker, sink, clock = make(every_steps=every, total_steps=40)
        tracker.load_state_dict(state)
        for step in range(done + 1, end + 1):
            clock.time += 1.0
            tracker.step(step, tokens=tokens[step - 1], loss=float(step))
        state = json.loads(json.dumps(tracker.state_dict()))
        assert state["tokens_total"] == sum(tokens[:end])
        tracker.close()
        done, seen = end, [*seen, *sink.steps()]
    for name in ("loss", "tokens_total", "steps", "skipped_total"):
        assert [line[name] for line in seen] == pytest.approx(whole_sink.column(name), nan_ok=True)
    assert all(line["tokens_per_s"] is None or line["tokens_per_s"] >= 0 for line in seen)


def test_steps_after_the_last_saved_state_are_told_at_the_end() -> None:
    tracker, sink, clock = make()
    run(tracker, clock, 1, 3)
    tracker.state_dict()
    tracker.close()
    assert sink.steps() == []  # the restart will tell of them
    tracker, sink, clock = make()
    run(tracker, clock, 1, 3)
    tracker.state_dict()
    run(tracker, clock, 4, 4)
    tracker.close()
    assert sink.column("steps") == [4]


def test_more_steps_than_a_line_holds_lose_nothing() -> None:
    tracker, sink, _ = make(every_steps=2)
    for _ in range(5):
        tracker.step(1, tokens=1, loss=1.0)
    tracker.close()
    assert sink.column("steps") == [2, 2, 1] and sink.column("tokens_total") == [2, 4, 5]


def test_events_come_in_order_and_leaves_can_report() -> None:
    tracker, sink, clock = make()
    run(tracker, clock, 1, 10)
    tracker.event("eval", 10, {"loss": 4.0})
    run(tracker, clock, 11, 13)
    tracker.on_event("checkpoint", {"seconds": 0.5})
    tracker.on_event("skip", {"step": 12, "reason": "why"})
    tracker.event("end", 13)
    tracker.close()
    assert [(e.kind, e.step) for e in sink.events] == [
        ("step", 10),
        ("eval", 10),
        ("checkpoint", 13),
        ("skip", 12),
        ("step", 13),
        ("end", 13),
    ]
    assert sink.closed == 1 and sink.events[1].time == 1010.0


def test_only_rank_0_sends_and_all_ranks_count() -> None:
    tracker, sink, clock = make(rank=1, world=2)
    run(tracker, clock, 1, 10)
    tracker.event("eval", 10, {})
    tracker.close()
    assert sink.events == [] and tracker.state_dict()["tokens_total"] == 10_000
    assert tracker.last is not None and tracker.last.values["loss"] == 2.0


def test_a_sink_that_fails_is_reported_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Memory):
        def emit(self, event: Event) -> None:
            raise OSError("disk full")

    tracker, sink, clock = make(every_steps=1)
    tracker.sinks.insert(0, Broken())
    with caplog.at_level(logging.WARNING, "kforge_metrics"):
        run(tracker, clock, 1, 5)
    assert len(sink.events) == 5
    assert len(caplog.records) == 1 and "Broken" in caplog.text and "disk full" in caplog.text


def test_start_at_starts_the_clock_anew() -> None:
    tracker, sink, clock = make(every_steps=5)
    clock.time += 300.0
    tracker.start_at(100)
    assert tracker.done_steps == 100
    run(tracker, clock, 101, 105)
    assert sink.column("tokens_per_s") == pytest.approx([1000]) and sink.steps()[0]["first_step_s"] == 1.0


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="every_steps = 0"):
        Tracker([], every_steps=0)
    with pytest.raises(ValueError, match="world = 0"):
        Tracker([], world=0)


@pytest.mark.gpu
def test_cuda_steps_never_synchronise() -> None:
    sink = Memory()
    tracker = Tracker([sink], every_steps=3, device="cuda", flops_per_token=1e9, total_steps=9)
    values = torch.arange(1.0, 10.0, device="cuda")
    tokens = torch.tensor(128, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 10):
            loss = values[step - 1]
            tracker.step(step, tokens=tokens, loss=loss, norm=loss, lr=0.1, gate=loss * 0 + 1)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert [event.step for event in sink.events] == [3, 6]  # the last is on its way
    with tracker.pause():
        pass
    assert sink.column("loss") == [2.0, 5.0, 8.0] and sink.column("tokens_total") == [384, 768, 1152]
    assert all(bytes_ > 0 for bytes_ in sink.column("peak_memory_bytes"))
