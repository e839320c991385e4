"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kforge_metrics import close_logger, read_events


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    close_logger()


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    events = read_events(f"{names['run_dir']}/events.jsonl")
    assert [(e.kind, e.step) for e in events] == [
        ("start", 0),
        *(("step", step) for step in (10, 20, 30, 40)),
        ("eval", 40),
    ]
    assert events[4].values["loss"] < events[1].values["loss"] and events[4].values["tokens_total"] == 1280
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[ 0/40] start on 1 process" and "MFU n/a" in out[1] and len(out) == 6
    report = names["report"]
    assert isinstance(report, Path) and "A small run" in report.read_text(encoding="utf-8")
