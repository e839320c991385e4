from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_metrics import Event, JsonlSink, read_events


def event(kind: str, step: int, mark: str = "") -> Event:
    return Event(kind, step, 0.0, values={"mark": mark})


def write(path: Path, events: list[Event]) -> None:
    sink = JsonlSink(path)
    for one in events:
        sink.emit(one)
    sink.close()


def points(path: Path, kind: str = "step") -> list[tuple[int, str]]:
    return [(e.step, e.values["mark"]) for e in read_events(path) if e.kind == kind]


def test_each_event_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    sink = JsonlSink(path)
    assert not path.parent.exists()  # nothing is opened before the first event
    for n in range(1, 4):
        sink.emit(event("step", n))
        lines = path.read_text().splitlines()
        assert len(lines) == n and json.loads(lines[-1])["step"] == n
    sink.close()
    sink.close()
    sink.emit(event("step", 4))
    assert [e.step for e in read_events(path)] == [1, 2, 3, 4]


@settings(deadline=None)
@given(cut=st.integers(0, 10_000), steps=st.integers(1, 8))
def test_a_torn_last_line_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, cut: int, steps: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    write(path, [event("step", n, "é\u2028") for n in range(steps)])
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    write(path, [event("step", 100), event("step", 101)])
    lines = data[:cut].split(b"\n")
    whole = len(lines) - 1 + (lines[-1] in data.split(b"\n")[:-1])  # a line that lacks only its newline is whole
    assert [e.step for e in read_events(path)] == [*range(whole), 100, 101]
    assert path.read_bytes().startswith(data[:cut])  # nothing is deleted


def test_after_a_resume_from_an_older_step_each_point_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = [event("start", 0, "a"), *(event("step", n, "a") for n in range(10, 151, 10))]
    first.insert(11, event("checkpoint", 100, "a"))
    write(path, [*first, event("eval", 150, "a")])
    write(path, [event("start", 100, "b"), event("resume", 100, "b")])
    write(path, [event("step", n, "b") for n in range(110, 201, 10)])
    expected = [(n, "a") for n in range(10, 101, 10)] + [(n, "b") for n in range(110, 201, 10)]
    assert points(path) == expected
    assert points(path, "eval") == [] and points(path, "checkpoint") == [(100, "a")]
    assert points(path, "start") == [(0, "a"), (100, "b")] and points(path, "resume") == [(100, "b")]
    # A second and a third time, from yet older ones.
    write(path, [event("resume", 60, "c"), event("step", 70, "c")])
    write(path, [event("resume", 60, "d"), event("step", 70, "d"), event("step", 80, "d")])
    assert points(path) == [(n, "a") for n in range(10, 61, 10)] + [(70, "d"), (80, "d")]


def test_a_start_that_says_step_0_before_a_resume_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [event("start", 0, "a"), *(event("step", n, "a") for n in (10, 20, 30))])
    write(path, [event("start", 0, "b")])  # killed here
    assert points(path) == [(10, "a"), (20, "a"), (30, "a")]
    write(path, [event("start", 0, "c"), event("resume", 20, "c"), event("step", 30, "c")])
    assert points(path) == [(10, "a"), (20, "a"), (30, "c")]


def test_a_run_that_begins_again_makes_the_first_one_void(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [event("start", 0, "a"), event("step", 10, "a"), event("step", 20, "a")])
    write(path, [event("start", 0, "b"), event("eval", 0, "b"), event("step", 10, "b")])
    assert points(path) == [(10, "b")] and points(path, "eval") == [(0, "b")]


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "none.jsonl")
