from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kforge_resilience import Guard, StopRequest
from kforge_testing import run_ranks


def send(name: str) -> None:
    """A signal to this process itself: CPython runs the handler before the call returns to the next line."""
    signal.raise_signal(signal.Signals[name])


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell that put the tests in the background has it ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("interrupts")
def test_records_the_first_name_and_restores_handlers() -> None:
    before = {name: signal.getsignal(signal.Signals[name]) for name in ("SIGTERM", "SIGUSR1", "SIGINT")}
    with StopRequest() as stop:
        assert stop.requested is None
        send("SIGUSR1")
        assert stop.requested == "SIGUSR1"
        send("SIGINT")  # no KeyboardInterrupt
        send("SIGTERM")
        assert stop.requested == "SIGUSR1"
    assert stop.requested == "SIGUSR1"
    assert {name: signal.getsignal(signal.Signals[name]) for name in before} == before
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")


def test_handlers_come_back_after_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), StopRequest(("SIGTERM",)):
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == before


def test_blocks_nest_and_can_be_used_again() -> None:
    with StopRequest(("SIGTERM",)) as outer:
        with StopRequest(("SIGTERM",)) as inner:
            send("SIGTERM")
        assert inner.requested == "SIGTERM" and outer.requested is None
        with pytest.raises(RuntimeError, match="active already"):
            outer.__enter__()
        with inner:
            assert inner.requested is None
        send("SIGTERM")
        assert outer.requested == "SIGTERM"


def test_a_second_signal_does_not_cut_a_save_short() -> None:
    saved = []
    with StopRequest(("SIGTERM", "SIGINT")) as stop:
        send("SIGTERM")
        for part in range(3):  # "the save"
            send("SIGTERM")
            send("SIGINT")
            saved.append(part)
    assert saved == [0, 1, 2] and stop.requested == "SIGTERM"


@pytest.mark.parametrize("name", ["TERM", "SIGTREM", "SIGNOTHING", "sigterm", "", "SIGKILL", "SIGSTOP"])
def test_names_are_checked_at_construction(name: str) -> None:
    with pytest.raises(ValueError, match=name or "not a signal"):
        StopRequest(("SIGTERM", name))


def test_near_names_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean SIGTERM"):
        StopRequest(("SIGTREM",))
    with pytest.raises(ValueError, match="one word"):
        StopRequest("SIGTERM")


def test_only_the_main_thread_may_enter() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            StopRequest().__enter__()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in str(errors[0])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_be_terminated() -> None:
    with StopRequest(("SIGTERM",)):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # so that a failure ends, too
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def signal_to_one_rank(rank: int, world: int) -> list[Any]:
    guard = Guard(on_event=lambda kind, values: None)
    one = torch.ones(())
    trace: list[Any] = []
    with StopRequest(("SIGUSR1",)) as stop:
        for step in range(1, 20):
            if rank == 1 and step == 7:
                send("SIGUSR1")
            vote = guard.vote(one, one, stop.requested is not None)
            if vote.verdict == "stop":
                break
        trace = [step, guard.settle(), vote.verdict.step, vote.verdict.stop_ranks, stop.requested]
    return trace


def test_signal_to_one_rank_stops_all_at_the_same_step() -> None:
    first, second = run_ranks(signal_to_one_rank, 2)
    assert first == [8, "stop", 7, (1,), None]
    assert second == [8, "stop", 7, (1,), "SIGUSR1"]


WITH_WORKERS = """
import os, sys
import torch
from torch.utils.data import DataLoader
from kforge_resilience import StopRequest, exitcodes, shield_worker

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, i): return i

loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=shield_worker)
with StopRequest(("SIGTERM",)) as stop:
    batches = iter(loader)
    for step, batch in enumerate(batches):
        if step == 10:
            print("ready", flush=True)
            sys.stdin.readline()
        if stop.requested:
            after = [next(batches).tolist() for _ in range(20)]  # the workers are still there
            print("saved", step, len(after), stop.requested, flush=True)
            break
    del batches
sys.exit(exitcodes.STOPPED)
"""


def test_signal_to_the_whole_group_leaves_workers_alive_until_the_save() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_WORKERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate("go\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, err
    assert out == "saved 10 20 SIGTERM\n"
    with pytest.raises(ProcessLookupError):  # no orphan is left in the group
        os.killpg(process.pid, 0)
