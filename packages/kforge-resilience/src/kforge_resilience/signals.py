"""A signal is a request: it sets a flag, and the training loop ends where it is safe to end."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from kforge_resilience.config import ResilienceConfig, check_signal_names

DEFAULT_SIGNALS: tuple[str, ...] = ResilienceConfig().stop_signals


class StopRequest:
    """While entered, the named signals of this process set ``requested`` and do nothing else.

    ::

        with StopRequest(("SIGTERM", "SIGINT")) as stop:
            while ...:
                vote = guard.vote(loss, norm, stop.requested is not None)

    Each rank sees only its own signals; `Guard.vote` makes them one decision of all ranks.

    - A second signal, of the same name or another, changes nothing: it cannot cut short the save that the first one
      asked for. Whoever must end a process at once has SIGKILL and SIGQUIT (Ctrl-backslash).
    - The handlers that were there before come back at the end of the block, also after an exception.
    - A process forked inside the block gets those earlier handlers, so that it can still be terminated. For workers
      that must outlive a signal to the whole process group, see `shield_worker`.

    ``signals`` are names such as "SIGTERM". Raises ValueError at construction for a name that is no signal of this
    system or cannot be caught; RuntimeError when entered twice, or outside the main thread, where Python allows no
    signal handler.
    """

    def __init__(self, signals: Sequence[str] = DEFAULT_SIGNALS) -> None:
        if isinstance(signals, str):
            raise ValueError(f"signals = {signals!r} is one word; give a sequence of names: ({signals!r},)")
        check_signal_names(signals, "signals")
        self.signals: tuple[str, ...] = tuple(dict.fromkeys(signals))
        self._requested: str | None = None
        self._before: dict[int, Any] = {}
        self._entered = False

    @property
    def requested(self) -> str | None:
        """Name of the first of the signals that this process got since the block was entered, or None."""
        return self._requested

    def __enter__(self) -> StopRequest:
        if self._entered:
            raise RuntimeError("this StopRequest is active already; make a second one to nest them")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can be set in the main thread only; enter StopRequest there")
        self._requested = None
        self._entered = True
        _active.add(self)
        try:
            for name in self.signals:
                number = signal.Signals[name]
                self._before[number] = signal.signal(number, self._handle)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing but the flag: a handler runs between any two bytecodes, also inside a write to the very stream
        # that a log line would go to.
        if self._requested is None:
            self._requested = signal.Signals(number).name

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: the handler had been set by C code and cannot be put back from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self._entered = False
        _active.discard(self)


def shield_worker(worker_id: int = 0, signals: Sequence[str] = DEFAULT_SIGNALS) -> None:
    """Ignore the signals in this process: to be called at the start of a helper process that its parent ends itself.

    A scheduler or Ctrl-C sends the signal to the whole process group. A data-loading worker that dies of it takes the
    main process down on its next batch, before the checkpoint. The argument makes it fit as it is:
    ``DataLoader(..., worker_init_fn=shield_worker)``; those workers leave when the parent tells them to or is gone.
    """
    check_signal_names(signals, "signals")
    for name in signals:
        signal.signal(signal.Signals[name], signal.SIG_IGN)


_active: weakref.WeakSet[StopRequest] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for request in list(_active):
        request._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
