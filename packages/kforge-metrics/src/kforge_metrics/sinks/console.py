"""The run as a person sees it: a progress bar on a terminal, plain lines in a file or a CI log."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from kforge_metrics.events import Event


class ConsoleSink:
    """Progress with loss, tokens/s, MFU and the time left; other events as lines.

    On a terminal it is a bar (by rich) that stays at the bottom while lines pass above it. Anywhere else, and where
    the environment says ``CI`` or ``TERM=dumb``, each event is one plain ASCII line without any control character.

    ``total_steps``: length of the run. ``file``: where to write, by default the standard output of the moment of the
    first event. ``terminal``: overrules the guess.
    """

    def __init__(self, total_steps: int, *, file: TextIO | None = None, terminal: bool | None = None) -> None:
        self.total_steps = total_steps
        self._file = file
        self._terminal = terminal
        self._bar: Any = None
        self._task: Any = None

    def emit(self, event: Event) -> None:
        """Show one event."""
        if self._file is None:
            self._file = sys.stdout
        if self._terminal is None:
            self._terminal = is_terminal(self._file)
        if self._terminal:
            self._show(event)
        else:
            self._file.write(line_of(event, self.total_steps) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Take the bar down and give the cursor back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self.close)

    def _show(self, event: Event) -> None:
        if self._bar is None:
            self._start(event.step)
        if event.kind == "step":
            self._bar.update(self._task, completed=event.step, line=_progress(event, self.total_steps))
        else:
            if event.kind == "resume":
                self._bar.update(self._task, completed=event.step)
            self._bar.console.print(line_of(event, self.total_steps), markup=False, highlight=False)

    def _start(self, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(file=self._file, force_terminal=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=self.total_steps, completed=step, line="")
        self._bar.start()
        atexit.register(self.close)  # a run that dies must not leave the terminal without its cursor


def is_terminal(file: TextIO) -> bool:
    """Whether a moving bar makes sense there."""
    if os.environ.get("TERM") == "dumb" or os.environ.get("CI", "") not in ("", "0", "false"):
        return False
    return bool(getattr(file, "isatty", lambda: False)())


def line_of(event: Event, total_steps: int) -> str:
    """One event as one plain line of printable ASCII."""
    say = _SAY.get(event.kind, _say_anything)
    head = f"[{event.step:>{len(str(total_steps))}}/{total_steps}]"
    text = f"{head} {say(event, total_steps)}".rstrip()
    return "".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in text)


def duration(seconds: float) -> str:
    """3723.4 -> "1:02:03"; not known -> "n/a"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "n/a"
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _number(values: dict[str, Any], key: str, form: str) -> str:
    value = values.get(key)
    return "n/a" if value is None or isinstance(value, str) else format(value, form)


def _progress(event: Event, total_steps: int) -> str:
    values = event.values
    step_s = values.get("step_s")
    left = math.nan if step_s is None else step_s * (total_steps - event.step)
    return "  ".join(
        [
            f"loss {_number(values, 'loss', '.4f')}",
            f"{_number(values, 'tokens_per_s', ',.0f')} tokens/s",
            f"MFU {_number(values, 'mfu', '.1%')}",
            f"ETA {duration(left)}",
        ]
    )


def _say_step(event: Event, total_steps: int) -> str:
    values = event.values
    parts = [_progress(event, total_steps)]
    parts += [f"norm {values['grad_norm']:.3g}"] if values.get("grad_norm") is not None else []
    parts += [f"lr {values['lr']:.2e}"] if values.get("lr") is not None else []
    parts += [f"skipped {values['skipped']}"] if values.get("skipped") else []
    return "  ".join(parts)


def _say_eval(event: Event, total_steps: int) -> str:
    values = event.values
    parts = [f"held-out loss {_number(values, 'loss', '.4f')} nats/token"]
    parts += [f"{values['bits_per_byte']:.4f} bits/byte"] if values.get("bits_per_byte") is not None else []
    parts += [f"perplexity {values['perplexity']:,.2f}"] if values.get("perplexity") is not None else []
    over = f" over {values['tokens']:,.0f} tokens" if values.get("tokens") is not None else ""
    return "eval: " + ", ".join(parts) + over


def _say_checkpoint(event: Event, total_steps: int) -> str:
    seconds = event.values.get("seconds")
    background = bool(event.values.get("background"))
    said = "checkpoint taken" if background else "checkpoint saved"
    took = "" if seconds is None else f" in {seconds:.1f} s"
    return said + took + (", being written in the background" if background else "")


def _say_resume(event: Event, total_steps: int) -> str:
    said_already = event.values.get("checkpoint") == event.step
    values = {key: value for key, value in event.values.items() if key != "checkpoint" or not said_already}
    return f"resumed from step {event.step}" + _rest(values)


def _say_start(event: Event, total_steps: int) -> str:
    world = event.values.get("world")
    return "start" + ("" if world is None else f" on {world} process{'' if world == 1 else 'es'}")


def _say_anything(event: Event, total_steps: int) -> str:
    if "reason" in event.values:
        return f"{event.kind}: {event.values['reason']}"
    return event.kind + _rest(event.values)


def _rest(values: dict[str, Any]) -> str:
    """The short values; a whole config has no place on a line."""
    short = {k: v for k, v in values.items() if isinstance(v, int | float | str) and len(str(v)) <= 60}
    return "".join(
        f" {key}={value:.6g}" if isinstance(value, float) else f" {key}={value}" for key, value in short.items()
    )


_SAY: dict[str, Callable[[Event, int], str]] = {
    "step": _say_step,
    "eval": _say_eval,
    "checkpoint": _say_checkpoint,
    "resume": _say_resume,
    "start": _say_start,
}
