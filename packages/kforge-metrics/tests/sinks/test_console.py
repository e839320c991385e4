from __future__ import annotations

import io
import os
import sys

import pytest

from kforge_metrics import ConsoleSink, Event
from kforge_metrics.sinks.console import duration, is_terminal

STEP = Event(
    "step",
    120,
    0.0,
    values={
        "loss": 4.12345,
        "grad_norm": 0.8512,
        "lr": 3e-4,
        "tokens_per_s": 12345.6,
        "step_s": 0.5,
        "mfu": 0.4123,
        "skipped": 0,
    },
)


def lines(*events: Event, total_steps: int = 1000) -> list[str]:
    out = io.StringIO()
    sink = ConsoleSink(total_steps, file=out)
    for event in events:
        sink.emit(event)
    sink.close()
    return out.getvalue().splitlines()


def test_a_step_is_one_plain_line() -> None:
    assert lines(STEP) == [
        "[ 120/1000] loss 4.1235  12,346 tokens/s  MFU 41.2%  ETA 0:07:20  norm 0.851  lr 3.00e-04",
    ]


def test_what_is_not_known_is_said_so() -> None:
    step = Event("step", 5, 0.0, values={"loss": float("nan"), "tokens_per_s": None, "mfu": None, "skipped": 2})
    assert lines(step, total_steps=10) == ["[ 5/10] loss nan  n/a tokens/s  MFU n/a  ETA n/a  skipped 2"]


def test_other_kinds_have_a_line_each() -> None:
    seen = lines(
        Event("start", 0, 0.0, values={"world": 2, "config": {"a": 1}}),
        Event("eval", 50, 0.0, values={"loss": 4.1, "bits_per_byte": 1.7312, "perplexity": 60.34}),
        Event("eval", 50, 0.0, values={"loss": 4.1, "perplexity": 60.34, "tokens": 65536.0}),
        Event("checkpoint", 50, 0.0, values={"seconds": 1.24}),
        Event("checkpoint", 50, 0.0, values={"seconds": 0.01, "background": True}),
        Event("resume", 50, 0.0, values={"checkpoint": 50}),
        Event("resume", 50, 0.0, values={"checkpoint": 48}),
        Event("skip", 51, 0.0, values={"reason": "step 51: loss is nan on rank 1; skipped on all ranks"}),
        Event("mine", 52, 0.0, values={"x": 1.5, "text": "y", "config": {"long": 1}}),
        total_steps=100,
    )
    assert seen == [
        "[  0/100] start on 2 processes",
        "[ 50/100] eval: held-out loss 4.1000 nats/token, 1.7312 bits/byte, perplexity 60.34",
        "[ 50/100] eval: held-out loss 4.1000 nats/token, perplexity 60.34 over 65,536 tokens",
        "[ 50/100] checkpoint saved in 1.2 s",
        "[ 50/100] checkpoint taken in 0.0 s, being written in the background",
        "[ 50/100] resumed from step 50",
        "[ 50/100] resumed from step 50 checkpoint=48",
        "[ 51/100] skip: step 51: loss is nan on rank 1; skipped on all ranks",
        "[ 52/100] mine x=1.5 text=y",
    ]


def test_no_control_character_reaches_a_log_even_from_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI systems set it; a log is still no terminal
    sink = ConsoleSink(10)
    sink.emit(Event("skip", 1, 0.0, values={"reason": "\x1b[31mred\x1b[0m\r\nnext \u2028 ü"}))
    sink.emit(STEP)
    sink.close()
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2
    assert all(c == "\n" or " " <= c <= "~" for c in out)


def test_where_a_bar_makes_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Terminal()) and not is_terminal(io.StringIO())
    monkeypatch.setenv("CI", "true")
    assert not is_terminal(Terminal())
    monkeypatch.delenv("CI")
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())


def test_a_terminal_gets_a_bar_with_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    sink = ConsoleSink(1000, file=out, terminal=True)
    stdout = sys.stdout
    sink.emit(Event("resume", 100, 0.0))
    sink.emit(STEP)
    sink.emit(Event("checkpoint", 120, 0.0, values={"seconds": 1.0}))
    sink.close()
    sink.close()
    text = out.getvalue()
    assert "loss 4.1235" in text and "12,346 tokens/s" in text and "MFU 41.2%" in text and "ETA 0:07:20" in text
    assert "120/1000" in text and "[ 120/1000] checkpoint saved in 1.0 s" in text and "[ 100/1000] resumed" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back
    assert sys.stdout is stdout


def test_plain_lines_do_not_import_rich() -> None:
    code = (
        "import sys, io; sys.modules['rich'] = None; from kforge_metrics.events import Event; "
        "from kforge_metrics.sinks import ConsoleSink; ConsoleSink(3, file=io.StringIO()).emit(Event('step', 1, 0.0))"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3723.4, "1:02:03"), (90061, "25:01:01"), (-1, "n/a"), (float("nan"), "n/a")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
