"""The bar: what is done, how long it will take, and when it is drawn."""

from __future__ import annotations

import io

from kforge_data.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal() -> None:
    now, stream = [0.0], _Terminal()
    bar = Progress(stream, clock=lambda: now[0])
    assert not bar.due()
    bar.show(0, 400_000_000, "0 documents")
    now[0] = 50.0
    assert bar.due()
    bar.show(100_000_000, 400_000_000, "7 documents")
    assert not bar.due()
    bar.close()
    drawn = stream.getvalue().split("\r\x1b[K")[-1]
    assert drawn == f"[{'█' * 7}{'·' * 21}]  25% of 400.0 MB, 7 documents, 2 min 30 s left\n"


def test_lines_elsewhere_and_a_resumed_run_does_not_count_what_it_did_not_do() -> None:
    now, stream = [0.0], io.StringIO()
    bar = Progress(stream, clock=lambda: now[0])
    bar.show(50, 100, "a")
    now[0] = 59.0
    assert not bar.due()
    now[0] = 4000.0
    assert bar.due()
    bar.show(75, 100, "b")
    bar.show(100, 100, "c")
    bar.close()
    assert stream.getvalue().splitlines() == [
        " 50% of 0.0 MB, a",
        " 75% of 0.0 MB, b, 1 h 06 min left",
        "100% of 0.0 MB, c",
    ]
