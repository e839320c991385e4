"""One HTML file that shows a run: key figures, pictures, tables, a sample. It holds everything it shows."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_metrics.events import Event, plain
from kforge_metrics.logger import read_log
from kforge_metrics.sinks.console import duration
from kforge_metrics.sinks.jsonl import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY, _RED = "#2563eb", "#ea580c", "#94a3b8", "#dc2626"


def write_report(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    title: str = "Training run",
    summary: Mapping[str, Any] | None = None,
    sample: str | None = None,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Write the report of the run whose events are in ``run_dir/events.jsonl``; returns its path.

    out: the file, by default ``run_dir/report.html``. summary: rows for a table (name -> value). sample: text that the
    model wrote. baselines: name -> loss in nats a token, drawn as lines beside the run's loss.

    A run that was resumed is shown as one history (see `read_events`). Raises FileNotFoundError without events, and
    ImportError, with the name of the extra, without matplotlib.
    """
    folder = Path(run_dir)
    path = folder / "events.jsonl"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; is {folder} the folder of a run with metrics.jsonl = true?")
    events = read_events(path)
    body = [
        _cards(events),
        _section("Pictures", _pictures(events, baselines or {})),
        _section("Summary", _table(["", ""], [[k, _text(v)] for k, v in (summary or {}).items()], "pairs")),
        _section("Sample", f"<pre class=sample>{html.escape(sample)}</pre>" if sample else ""),
        _section("Evaluation on held-out text", _evaluations(events)),
        _section("What happened", _happenings(events)),
        _section("Warnings", _warnings(folder)),
        _section("Configuration", _configuration(events)),
    ]
    target = Path(out) if out is not None else folder / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    page = _PAGE.format(
        title=html.escape(title),
        when=time.strftime("%Y-%m-%d %H:%M"),
        run=html.escape(str(run_dir)),
        body="".join(body),
    )
    target.write_text(page, encoding="utf-8")
    return target


# Key figures


def _cards(events: list[Event]) -> str:
    steps = _of(events, "step")
    if not steps:
        return "<p class=empty>No steps were logged.</p>"
    last = steps[-1]
    evals = _of(events, "eval")
    cards = [("steps", f"{last.step:,}", "")]
    cards.append(("training loss", _form(last.values.get("loss"), ".4f"), "nats/token, last interval"))
    if evals:
        held_out = evals[-1].values
        cards.append(("held-out loss", _form(held_out.get("loss"), ".4f"), "nats/token"))
        if held_out.get("bits_per_byte") is not None:
            cards.append(("held-out", _form(held_out["bits_per_byte"], ".4f"), "bits/byte"))
    tokens = last.values.get("tokens_total")
    if tokens is not None:
        cards.append(("tokens", _short(tokens), "in all"))
    speeds = _finite(steps, "tokens_per_s")
    if speeds:
        cards.append(("throughput", f"{statistics.median(y for _, y in speeds):,.0f}", "tokens/s, median"))
    used = _finite(steps, "mfu")
    cards.append(("MFU", *((f"{statistics.median(y for _, y in used):.1%}", "median") if used else ("n/a", ""))))
    cards.append(("training time", duration(_training_seconds(steps)), "h:mm:ss, without evaluation and saving"))
    skipped = last.values.get("skipped_total")
    if skipped:
        cards.append(("skipped steps", f"{skipped:,}", "not finite"))
    cells = (
        f"<div class=card><div class=name>{html.escape(name)}</div><div class=value>{html.escape(value)}</div>"
        f"<div class=unit>{html.escape(unit)}</div></div>"
        for name, value, unit in cards
    )
    return f"<div class=cards>{''.join(cells)}</div>"


def _training_seconds(steps: list[Event]) -> float:
    first = sum(e.values.get("first_step_s") or 0.0 for e in steps)
    # The first step of a process is in first_step_s, not in step_s, unless it is alone in its interval.
    return first + sum(
        (e.values.get("step_s") or 0.0) * (e.values.get("steps", 1) - ("first_step_s" in e.values)) for e in steps
    )


# Pictures


def _pictures(events: list[Event], baselines: Mapping[str, float]) -> str:
    steps, evals = _of(events, "step"), _of(events, "eval")
    pictures = []
    if _finite(steps, "loss") or _finite(evals, "loss"):
        pictures.append(_picture("Loss", "nats per token", lambda axes: _draw_loss(axes, events, baselines)))
    for title, unit, key in (
        ("Learning rate", "", "lr"),
        ("Throughput", "tokens per second", "tokens_per_s"),
        ("Gradient norm", "before clipping", "grad_norm"),
    ):
        points = _finite(steps, key)
        if points:
            pictures.append(_picture(title, unit, lambda axes, points=points: _draw(axes, points, events)))  # type: ignore[misc]
    if not pictures:
        return ""
    legend = []
    if any(event.kind == "resume" for event in events):
        legend.append("Dotted: the run was resumed there.")
    if any(event.kind == "skip" for event in events):
        legend.append("Red: a step was skipped.")
    note = f"<p class=about>{' '.join(legend)}</p>" if legend else ""
    return f"<div class=pictures>{''.join(pictures)}</div>{note}"


def _draw_loss(axes: Axes, events: list[Event], baselines: Mapping[str, float]) -> None:
    train, held_out = _finite(_of(events, "step"), "loss"), _finite(_of(events, "eval"), "loss")
    if train:
        axes.plot(*zip(*train, strict=True), color=_BLUE, linewidth=1.4, label="training")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), color=_ORANGE, marker="o", markersize=4.5, linewidth=1, label="held-out"
        )
    for (name, value), style in zip(baselines.items(), ["--", "-.", ":"] * len(baselines), strict=False):
        axes.axhline(value, color=_GREY, linestyle=style, linewidth=1.2, label=f"{name} ({value:.2f})")
    _draw_restarts(axes, events)
    if train or held_out:
        axes.legend(frameon=False, fontsize=8)


def _draw(axes: Axes, points: list[tuple[int, float]], events: list[Event]) -> None:
    axes.plot(*zip(*points, strict=True), color=_BLUE, linewidth=1.4)
    axes.set_ylim(bottom=0)
    if max(y for _, y in points) >= 1000:
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    _draw_restarts(axes, events)


def _draw_restarts(axes: Axes, events: list[Event]) -> None:
    for event in events:
        if event.kind == "resume":
            axes.axvline(event.step, color=_GREY, linestyle=":", linewidth=1)
        elif event.kind == "skip":
            axes.axvline(event.step, color=_RED, linewidth=0.8, alpha=0.4)


def _picture(title: str, unit: str, draw: Any) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the report needs matplotlib: pip install 'kforge-metrics[report]'") from error
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#cbd5e1"}
    with rc_context(style):
        figure = Figure(figsize=(6.4, 3.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.grid(True, color="#eef2f6", linewidth=0.8)
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#0f172a")
        axes.set_xlabel("step", color="#475569")
        axes.set_ylabel(unit, color="#475569")
        data = io.BytesIO()
        figure.savefig(data, format="png")
    text = base64.b64encode(data.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{text}">'


# Tables


def _evaluations(events: list[Event]) -> str:
    rows = [
        [
            f"{event.step:,}",
            _form(event.values.get("loss"), ".4f"),
            _form(event.values.get("bits_per_byte"), ".4f"),
            _form(event.values.get("perplexity"), ",.2f"),
            _form(event.values.get("tokens"), ",.0f"),
        ]
        for event in _of(events, "eval")
    ]
    return _table(["step", "nats/token", "bits/byte", "perplexity", "tokens"], rows, "numbers")


def _happenings(events: list[Event]) -> str:
    saves = [event for event in events if event.kind == "checkpoint"]
    rows = []
    for event in events:
        if event.kind in ("step", "eval", "checkpoint"):
            continue
        short = {k: v for k, v in event.values.items() if k not in ("config", "versions") and len(_text(v)) <= 200}
        said = event.values.get("reason") or ", ".join(f"{k} {_text(v)}" for k, v in short.items())
        rows.append([f"{event.step:,}", time.strftime("%H:%M:%S", time.localtime(event.time)), event.kind, str(said)])
    if len(rows) > 60:
        rows = [*rows[:10], ["", "", "", f"({len(rows) - 60} more, see events.jsonl)"], *rows[-50:]]
    if saves:
        seconds = [e.values["seconds"] for e in saves if isinstance(e.values.get("seconds"), int | float)]
        took = f", {statistics.median(seconds):.2f} s each (median)" if seconds else ""
        done = "taken" if any(event.values.get("background") for event in saves) else "saved"
        said = f"{len(saves)} {done}{took}"
        rows.append(
            [f"{saves[-1].step:,}", time.strftime("%H:%M:%S", time.localtime(saves[-1].time)), "checkpoint", said]
        )
    return _table(["step", "time", "what", ""], rows)


def _warnings(folder: Path) -> str:
    lines = [line for line in read_log(folder) if line.get("level") in ("WARNING", "ERROR", "CRITICAL")]
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(float(line["time"]))),
            str(line.get("rank", "")),
            str(line.get("logger", "")),
            str(line.get("message", "")),
        ]
        for line in lines[-20:]
    ]
    return _table(["time", "rank", "from", "message"], rows)


def _configuration(events: list[Event]) -> str:
    starts = [event for event in events if event.kind == "start"]
    if not starts:
        return ""
    text = json.dumps(plain(starts[-1].values), indent=2, ensure_ascii=False)
    return f"<details><summary>What the run was started with</summary><pre>{html.escape(text)}</pre></details>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>" if content else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], look: str = "plain") -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    head = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    lines = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table class={look}>{head}<tbody>{body}</tbody></table>"


# Values


def _of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def _finite(events: list[Event], key: str) -> list[tuple[int, float]]:
    """(step, value) of the events that have a finite number there."""
    points = ((event.step, event.values.get(key)) for event in events)
    return [(step, float(y)) for step, y in points if isinstance(y, int | float) and y == y and abs(y) != float("inf")]


def _form(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "n/a"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "n/a"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(plain(value))


def _short(value: float) -> str:
    """1234567 -> "1.23 M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.0f}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #f8fafc; color: #0f172a; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }}
h1 {{ font-size: 26px; margin: 0; }}
h2 {{ font-size: 16px; margin: 0 0 12px; }}
.about {{ color: #64748b; margin: 2px 0 20px; font-size: 13px; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }}
.cards {{ margin-bottom: 20px; }}
.card, section {{ background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; }}
.card {{ padding: 12px 14px; }}
.card .name {{ color: #64748b; font-size: 13px; }}
.card .value {{ font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }}
.card .unit {{ color: #94a3b8; font-size: 12px; }}
section {{ padding: 16px 18px 18px; margin-bottom: 20px; overflow-x: auto; }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }}
.pictures img {{ width: 100%; height: auto; display: block; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid #eef2f6; vertical-align: top; }}
th {{ color: #64748b; font-weight: 500; }}
td {{ font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.numbers th, .numbers td {{ text-align: right; }}
.pairs td:first-child {{ width: 30%; color: #475569; }}
.pictures + .about {{ margin: 10px 0 0; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
pre {{ font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }}
.sample {{ background: #f8fafc; border-radius: 6px; padding: 12px 14px; }}
summary {{ cursor: pointer; color: #475569; }}
details pre {{ margin-top: 10px; }}
.empty {{ color: #64748b; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="about">{run} &middot; {when}</p>
{body}
</main>
</body>
</html>
"""
