from __future__ import annotations

import base64
import io
import logging
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from kforge_metrics import Event, JsonlSink, close_logger, get_logger, write_report


class Page(HTMLParser):
    """Tags, links, pictures, table rows and text of a page."""

    VOID = ("meta", "img", "br", "link", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: dict[str, bytes] = {}
        self.links: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {key: value or "" for key, value in attrs}
        self.links += [values[key] for key in ("src", "href") if key in values]
        if tag == "img":
            head, data = values["src"].split(",", 1)
            assert head == "data:image/png;base64"
            self.images[values["alt"]] = base64.b64decode(data, validate=True)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if "style" not in self.open:
            self.text += data


def make_run(folder: Path, *, steps: int = 200) -> None:
    sink = JsonlSink(folder / "events.jsonl")

    def say(kind: str, step: int, **values: Any) -> None:
        sink.emit(Event(kind, step, 1_700_000_000.0 + step, values=values))

    say("start", 0, world=2, config={"model": {"dim": 128}}, versions={"torch": "2.13.0"})
    for step in range(10, steps + 1, 10):
        loss = 4.0 + 4.3 * math.exp(-step / 60)
        values: dict[str, Any] = {"loss": loss, "grad_norm": 1 / (1 + step / 50), "lr": 1e-3 * (1 - step / 250)}
        values |= {"tokens_per_s": 20_000.0 + step, "step_s": 0.5, "steps": 10, "mfu": None, "skipped_total": 1}
        say("step", step, tokens_total=step * 8192, **values)
        if step % 50 == 0:
            say("eval", step, loss=loss + 0.05, bits_per_byte=loss / 2.4, perplexity=math.exp(loss), tokens=65536)
            say("checkpoint", step, seconds=0.25)
    say("skip", 120, reason="step 120: loss is nan on rank 1", ranks=[1])
    say("resume", steps, path="x")
    say("end", steps, reason="all steps done")
    sink.close()


def test_report_shows_the_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    get_logger(1, 2, tmp_path)
    logging.getLogger("kforge_data").warning("shard 3 is <slow>")
    close_logger()
    out = write_report(
        tmp_path,
        title="Tiny & <b>bold</b>",
        summary={"held-out loss": 4.1234567, "parameters": 1_300_000, "beats the bigram": True, "device": "CPU"},
        sample="def f(x):\n    return x < 1 & </pre>",
        baselines={"Kneser-Ney bigram": 4.38},
    )
    assert out == tmp_path / "report.html"
    page = Page(out.read_text(encoding="utf-8"))
    assert set(page.images) == {"Loss", "Learning rate", "Throughput", "Gradient norm"}
    for data in page.images.values():
        pixels = imread(io.BytesIO(data), format="png")
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600 and float(pixels[..., :3].std()) > 0.02
    assert all(link.startswith("data:") for link in page.links)  # nothing is fetched
    assert not {"script", "link", "b", "slow"} & set(page.tags)  # and nothing gets in from the values

    assert "Tiny & <b>bold</b>" in page.text and "return x < 1 & </pre>" in page.text
    for row in (
        ["held-out loss", "4.1235"],
        ["parameters", "1,300,000"],
        ["beats the bigram", "yes"],
        ["device", "CPU"],
        ["step", "nats/token", "bits/byte", "perplexity", "tokens"],
    ):
        assert row in page.rows
    loss = 4.0 + 4.3 * math.exp(-200 / 60)
    assert ["200", f"{loss + 0.05:.4f}", f"{loss / 2.4:.4f}", f"{math.exp(loss):,.2f}", "65,536"] in page.rows
    happened = {row[2]: row[3] for row in page.rows if len(row) == 4 and row[0] in ("0", "120", "200")}
    assert happened["skip"] == "step 120: loss is nan on rank 1" and happened["end"] == "all steps done"
    assert happened["checkpoint"] == "4 saved, 0.25 s each (median)" and happened["start"] == "world 2"
    assert any(row[1:] == ["1", "kforge_data", "shard 3 is <slow>"] for row in page.rows)
    assert '"dim": 128' in page.text and "skipped steps" in page.text
    assert f"{loss:.4f}" in page.text and "1.64 M" in page.text and "20,105" in page.text and "0:01:40" in page.text


def test_a_run_without_steps_still_has_a_page(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.emit(Event("start", 0, 0.0, values={"world": 1}))
    sink.close()
    out = write_report(tmp_path, tmp_path / "deep" / "page.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert "No steps were logged." in page.text and not page.images


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    for step in range(1, 9):
        bad = step in (3, 4)
        values = {"loss": math.nan if bad else 4.0, "grad_norm": math.inf if bad else 1.0, "tokens_per_s": None}
        sink.emit(Event("step", step, 0.0, values=values))
    sink.close()
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert set(page.images) == {"Loss", "Gradient norm"}


def test_no_events_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl does not exist"):
        write_report(tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, steps=20)
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom kforge_metrics import write_report\n"
        f"try:\n    write_report({str(tmp_path)!r})\nexcept ImportError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "pip install 'kforge-metrics[report]'" in out
