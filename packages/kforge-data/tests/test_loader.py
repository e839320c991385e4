"""Order as a function of (seed, position), through any resume, on any number of processes (C01, C03, C04, C10)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kforge_data import Loader, TokenShards, evaluation_batches

Make = Callable[..., TokenShards]


def load(source: TokenShards, **options: Any) -> Loader:
    return Loader(source, **{"row_tokens": 4, "global_rows": 2, "seed": 42, "workers": 0, **options})


def seen(window: list[dict[str, Any]]) -> list[int]:
    """What the rows of a window show of themselves: the number that each numbered document repeats."""
    numbers = [row[0] for batch in window for row in batch["input_ids"].tolist()]
    ids = [row for batch in window for row in batch["row_ids"].tolist()]
    assert all(row in (number, -1) for row, number in zip(ids, numbers, strict=True))
    return [number for number, row in zip(numbers, ids, strict=True) if row != -1]


def step_of(source: TokenShards, world: int, state: dict[str, Any] | None, steps: int, **options: Any) -> Any:
    """(rows of each of some steps in order of rank, state after) with `world` processes."""
    loaders = [load(source, rank=rank, world=world, **options) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    rows = [[number for loader in loaders for number in seen(loader.next())] for _ in range(steps)]
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    for loader in loaders:
        loader.close()
    return rows, states[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_c01_two_resumes_inside_one_epoch(numbered: Make, workers: int) -> None:
    source = numbered(1000)
    straight, _ = step_of(source, 1, None, 60, workers=workers, epochs=1)
    first, state = step_of(source, 1, None, 30, workers=workers, epochs=1)
    second, state = step_of(source, 1, state, 10, workers=workers, epochs=1)
    assert state["position"] == 80  # 40 batches of 2 rows, not the 10 since the last start
    third, _ = step_of(source, 1, state, 20, workers=workers, epochs=1)
    assert first + second + third == straight
    assert len({row for rows in straight for row in rows}) == 120


@pytest.mark.parametrize("then", [2, 8])
def test_c03_another_number_of_processes_after_a_resume(numbered: Make, then: int) -> None:
    source = numbered(64)
    before, state = step_of(source, 4, None, 3, global_rows=8)
    after, _ = step_of(source, then, state, 5, global_rows=8)
    straight, _ = step_of(source, 1, None, 8, global_rows=8)
    assert before + after == straight
    assert sorted(row for rows in before + after for row in rows) == list(range(64))


def test_c03_another_microbatch_after_a_resume(numbered: Make) -> None:
    """What the reference system loses: 4 processes to 2 with another microbatch repeated 16 of 64 samples."""
    source = numbered(64)
    before, state = step_of(source, 4, None, 4, global_rows=8, microbatch_rows=1)
    after, _ = step_of(source, 2, state, 4, global_rows=8, microbatch_rows=4)
    assert sorted(row for rows in before + after for row in rows) == list(range(64))


def test_c04_each_epoch_has_its_own_order(numbered: Make) -> None:
    source = numbered(16)
    epochs, _ = step_of(source, 2, None, 12, global_rows=4)
    orders = [[row for rows in epochs[4 * e : 4 * e + 4] for row in rows] for e in range(3)]
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again, _ = step_of(source, 1, None, 12, global_rows=4)
    assert again == epochs
    before, state = step_of(source, 2, None, 6, global_rows=4)  # killed in epoch 1
    after, _ = step_of(source, 2, state, 6, global_rows=4)
    assert before + after == epochs


def test_c10_three_rows_and_a_global_batch_of_four(numbered: Make) -> None:
    source = numbered(3)
    for world in (1, 2):
        loaders = [load(source, rank=rank, world=world, global_rows=4, epochs=1) for rank in range(world)]
        windows = [loader.next() for loader in loaders]
        assert sorted(row for window in windows for row in seen(window)) == [0, 1, 2]
        scored = sum(int((batch["labels"] != -100).sum()) for window in windows for batch in window)
        assert scored == 9  # three rows of one document of four tokens; the padding is not scored
        assert {loader.position for loader in loaders} == {3}
        for loader in loaders:
            with pytest.raises(StopIteration):
                loader.next()


def test_c10_without_an_end_the_next_epoch_fills_the_step(numbered: Make) -> None:
    rows, state = step_of(numbered(3), 2, None, 3, global_rows=4)
    assert [len(row) for row in rows] == [4, 4, 4] and state["position"] == 12
    flat = [number for row in rows for number in row]
    assert all(sorted(flat[3 * e : 3 * e + 3]) == [0, 1, 2] for e in range(4))


def test_c10_nothing_to_read_is_an_error(make_shards: Make) -> None:
    empty = make_shards([])
    with pytest.raises(ValueError, match="holds no tokens"):
        load(empty)
    with pytest.raises(ValueError, match="holds no tokens"):
        list(evaluation_batches(empty, row_tokens=4, microbatch_rows=2))


def test_c10_five_rows_in_steps_of_four(numbered: Make) -> None:
    for world in (1, 2):
        rows, state = step_of(numbered(5, name=f"w{world}"), world, None, 2, global_rows=4, epochs=1)
        assert sorted(rows[0] + rows[1]) == list(range(5)) and len(rows[1]) == 1 and state["position"] == 5


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4, 6, 12]),  # world
            st.sampled_from([None, 1, 5]),  # microbatch_rows
            st.sampled_from([0, 1, 3]),  # workers
            st.sampled_from([12, 12, 24, 36]),  # global_rows
            st.integers(0, 4),  # steps until the next kill
            st.booleans(),  # killed with or without a save: without, the steps are done again
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
def test_any_script_of_kills_and_resumes_gives_the_same_rows(
    numbered: Make, script: list[tuple[Any, ...]], seed: int
) -> None:
    source = numbered(50, overwrite=True)
    state: dict[str, Any] | None = None
    rows: list[int] = []
    for world, microbatch, workers, global_rows, steps, saved in script:
        options = {"seed": seed, "microbatch_rows": microbatch, "workers": workers, "global_rows": global_rows}
        some, after = step_of(source, world, state, steps, **options)
        if saved:
            rows += [row for step in some for row in step]
            state = after
    expected = source.rows_at(np.arange(len(rows)), row_tokens=4, seed=seed, shuffle=True)
    assert rows == expected.tolist()
    assert (state or {"position": 0})["position"] == len(rows)


# State.


def test_another_sequence_is_refused_with_what_differs(numbered: Make, make_shards: Make) -> None:
    source = numbered(20)
    state = load(source).state_dict()
    for other, message in [
        (load(source, seed=1), "seed was 42 and is 1"),
        (load(source, row_tokens=8), "row_tokens was 4 and is 8"),
        (load(source, shuffle=False), "shuffle was True and is False"),
        (
            load(make_shards([[1, 2, 3]], name="other")),
            "of the source, tokens was 80 and is 3, documents was 20 and is 1, content was",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert other.position == 0
    with pytest.raises(ValueError, match="version 7"):
        load(source).load_state_dict({**state, "version": 7})
    with pytest.raises(ValueError, match="position of the loader state is -1, and must be a whole number from 0"):
        load(source).load_state_dict({**state, "position": -1})


def test_a_changed_source_can_be_accepted(numbered: Make, make_shards: Make, caplog: pytest.LogCaptureFixture) -> None:
    loader = load(numbered(20))
    loader.next()
    state = loader.state_dict()
    other = load(make_shards([[7] * 100], name="other"), accept_changed_data=True)
    other.load_state_dict(state)
    assert other.position == state["position"] and "tokens was 80 and is 100" in caplog.text


def test_a_moved_copy_of_the_source_is_the_same_source(numbered: Make) -> None:
    loader = load(numbered(20, name="here"))
    loader.next()
    other = load(numbered(20, name="there"))
    other.load_state_dict(loader.state_dict())
    assert seen(other.next()) == seen(loader.next())


def test_the_state_is_a_few_numbers(numbered: Make) -> None:
    loader = load(numbered(20), workers=2)
    loader.next()
    state = loader.state_dict()
    assert len(json.dumps(state)) < 600
    assert state.pop("batch_phases") == state.pop("phases") == state.pop("quarantined") == []
    assert state.pop("source")["tokens"] == 80
    assert all(isinstance(value, int | str | bool) for value in state.values())
    loader.close()


def test_saved_at_the_end_of_an_epoch_and_gone_on_with_more(numbered: Make) -> None:
    source = numbered(5)
    first, state = step_of(source, 1, None, 2, global_rows=4, epochs=1)
    more = load(source, global_rows=4, epochs=2)
    more.load_state_dict(state)
    assert more.step == 2 and more.epoch == 1
    rest = [seen(window) for window in more]
    assert [len(row) for row in rest] == [4, 1]
    expected = source.rows_at(np.arange(10), row_tokens=4, seed=42, shuffle=True).tolist()
    assert [row for rows in first + rest for row in rows] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_saved_inside_an_accumulation_window(numbered: Make, workers: int) -> None:
    """A state counts the window that was handed out as read, at whichever of its microbatches it is taken."""
    options: dict[str, Any] = {"row_tokens": 4, "global_rows": 6, "microbatch_rows": 2, "workers": workers}
    with Loader(numbered(40), **options) as loader:
        windows = [[batch["row_ids"].tolist() for batch in loader.next()] for _ in range(5)]
    with Loader(numbered(40, name="again"), **options) as loader:
        loader.next()
        states = [loader.state_dict() for _ in loader.next()]
    assert len(states) == 3 and all(state["position"] == 12 for state in states)
    for state in states:
        with Loader(numbered(40, name="more", overwrite=True), **options) as loader:
            loader.load_state_dict(state)
            assert [[batch["row_ids"].tolist() for batch in loader.next()] for _ in range(3)] == windows[2:]


def test_loading_drops_what_was_read_ahead(numbered: Make) -> None:
    loader = load(numbered(100), workers=2)
    start = loader.state_dict()
    first = [seen(loader.next()) for _ in range(5)]
    loader.load_state_dict(start)
    assert [seen(loader.next()) for _ in range(5)] == first
    loader.close()


# Steps and rows.


def test_rows_of_tells_what_next_gives(numbered: Make) -> None:
    source = numbered(30)
    loaders = [load(source, rank=rank, world=2, global_rows=8) for rank in range(2)]
    given_rows = [[row for loader in loaders for row in seen(loader.next())] for _ in range(6)]
    assert loaders[0].step == 6 and loaders[0].position == 48 and loaders[0].epoch == 1
    for loader in loaders:
        assert loader.rows_of(range(1, 4)).tolist() == [row for rows in given_rows[1:4] for row in rows]
    assert loaders[0].rows_of(range(0)).tolist() == []


def test_rows_of_after_global_rows_changed(numbered: Make) -> None:
    source = numbered(100)
    before, state = step_of(source, 1, None, 3, global_rows=8)
    loader = load(source, global_rows=10)
    loader.load_state_dict(state)
    assert loader.step == 3
    after = [seen(loader.next()) for _ in range(2)]
    assert loader.step == 5
    assert loader.rows_of(range(3, 5)).tolist() == after[0] + after[1]
    with pytest.raises(ValueError, match="step 2 lies before step 3"):
        loader.rows_of(range(2, 5))
    again = load(source, global_rows=10)  # a second resume knows it too
    again.load_state_dict(loader.state_dict())
    assert again.step == 5 and again.rows_of(range(3, 4)).tolist() == after[0]
    assert len({row for rows in before + after for row in rows}) == 44


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_phases_cut_the_same_rows_into_other_steps(numbered: Make, workers: int, microbatch: int | None) -> None:
    """Killed in the second of three phases and gone on with another number of processes."""
    source = numbered(64)
    options = {"global_rows": 16, "batch_phases": [(3, 4), (2, 8)], "microbatch_rows": microbatch, "workers": workers}
    straight, _ = step_of(source, 1, None, 8, **options)
    assert [len(rows) for rows in straight] == [4, 4, 4, 8, 8, 16, 16, 16]
    plain, _ = step_of(source, 1, None, 19, global_rows=4)
    assert [row for rows in straight for row in rows] == [row for rows in plain for row in rows]
    for then in (1, 2, 4):
        before, state = step_of(source, 2, None, 4, **options)
        if microbatch is not None and then == 4:
            options = {**options, "microbatch_rows": 1}
        after, end = step_of(source, then, state, 4, **options)
        assert before + after == straight
        assert (end["position"], end["base_step"], end["base_position"]) == (76, 0, 0)


def test_phases_that_change_at_a_resume(numbered: Make) -> None:
    """Each step has the rows that its number says, of the phases that hold now, and no row is lost or repeated."""
    source = numbered(100)
    before, state = step_of(source, 1, None, 4, global_rows=16, batch_phases=[(3, 4), (2, 8)])
    loader = load(source, global_rows=2, batch_phases=[(5, 10), (1, 6)])
    loader.load_state_dict(state)
    assert (loader.step, loader.position) == (4, 20)
    after = [seen(loader.next()) for _ in range(3)]
    assert [len(rows) for rows in after] == [10, 6, 2] and loader.step == 7
    assert loader.rows_of(range(4, 7)).tolist() == [row for rows in after for row in rows]
    with pytest.raises(ValueError, match="step 3 lies before step 4, where a resume changed global_rows to 2 or the"):
        loader.rows_of(range(3, 5))
    expected = source.rows_at(np.arange(38), row_tokens=4, seed=42, shuffle=True).tolist()
    assert [row for rows in before + after for row in rows] == expected


def test_an_epoch_that_ends_inside_a_phase(numbered: Make) -> None:
    source = numbered(11)
    for world in (1, 2):
        options = {"world": world, "global_rows": 8, "batch_phases": [(2, 4)], "epochs": 1}
        loaders = [load(source, rank=rank, **options) for rank in range(world)]
        windows = [list(loader) for loader in loaders]
        assert [len(window) for window in windows] == [3] * world
        rows = [number for step in range(3) for window in windows for number in seen(window[step])]
        assert sorted(rows) == list(range(11))
        assert all(loader.position == 11 and loader.step == 3 for loader in loaders)
        assert all(len(batch["row_ids"]) == 8 // world for window in windows for batch in window[2])


def test_rows_of_stops_where_the_epochs_do(numbered: Make) -> None:
    loader = load(numbered(5), global_rows=4, epochs=1)
    assert loader.epoch_rows == 5 and loader.rows_of(range(9)).shape == (5,)


def test_in_order_without_shuffle(numbered: Make) -> None:
    rows, _ = step_of(numbered(5), 1, None, 3, shuffle=False)
    assert rows == [[0, 1], [2, 3], [4, 0]]


# Batches.


def test_what_a_batch_holds(make_shards: Make) -> None:
    source = make_shards([[5, 6, 0], [7, 0], [8, 9, 1, 0]])
    loader = load(source, row_tokens=6, global_rows=2, shuffle=False)
    (batch,) = loader.next()
    assert batch["input_ids"].tolist() == [[5, 6, 0, 7, 0, 8], [9, 1, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 0, -100, 0, -100, 9], [1, 0, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 1, 2]]
    assert batch["doc_ids"].tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6, 9, 12, 12]  # room for 2 rows of up to 3 documents
    assert batch["max_seqlen"] == 6
    assert batch["source_ids"].tolist() == [[0] * 6] * 2
    assert batch["row_ids"].tolist() == [0, 1]
    kinds = {name: value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert kinds == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "doc_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "source_ids": torch.int16,
    }


def test_without_isolation(make_shards: Make) -> None:
    source = make_shards([[5, 6, 0], [7, 0], [8]])
    (batch,) = load(source, row_tokens=6, global_rows=1, isolate_documents=False).next()
    assert batch["labels"].tolist() == [[6, 0, -100, 0, -100, -100]]
    assert batch["position_ids"].tolist() == [list(range(6))]
    assert batch["doc_ids"] is None and batch["cu_seqlens"] is None and batch["max_seqlen"] == 6


def test_shapes_do_not_change_from_batch_to_batch(make_shards: Make) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 99, generator.integers(1, 40)).tolist() for _ in range(200)]
    loader = load(make_shards(documents), row_tokens=64, global_rows=4, microbatch_rows=2, epochs=2)
    shapes = {
        tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, torch.Tensor))
        for window in loader
        for batch in window
    }
    assert len(shapes) == 1


def test_every_token_of_the_stream_comes_once_an_epoch(make_shards: Make) -> None:
    generator = np.random.default_rng(1)
    documents = [generator.integers(1, 9999, generator.integers(1, 30)).tolist() for _ in range(100)]
    source = make_shards(documents, shard_tokens=200)
    rows: dict[int, list[int]] = {}
    scored = 0
    for window in load(source, row_tokens=16, global_rows=8, epochs=1, workers=2):
        for batch in window:
            scored += int((batch["labels"] != -100).sum())
            for row, ids in zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True):
                if row >= 0:
                    rows[row] = ids
    flat = [token for row in sorted(rows) for token in rows[row]]
    assert flat[: source.tokens] == [token for document in documents for token in document]
    assert scored == source.tokens - len(documents)  # all but the first of each document


def test_an_error_in_a_thread_is_raised_and_the_step_can_be_had_again(numbered: Make) -> None:
    source = numbered(40)

    class Flaky(TokenShards):
        broken = False

        def read_rows(self, row_ids: Any, row_tokens: int) -> Any:
            if Flaky.broken:
                raise OSError("the disk is gone")
            return super().read_rows(row_ids, row_tokens)

    loader = load(Flaky(source.path), workers=2)
    expected, _ = step_of(source, 1, None, 10)
    got = [seen(loader.next())]
    Flaky.broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(10):
            got.append(seen(loader.next()))
    Flaky.broken = False
    got += [seen(loader.next()) for _ in range(10 - len(got))]
    assert got == expected
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_microbatch_of_a_step_has_what_is_left(numbered: Make, workers: int) -> None:
    source, options = numbered(40), {"global_rows": 14, "world": 2, "shuffle": False, "workers": workers}
    for rank in (0, 1):
        whole = load(source, rank=rank, **options)
        cut = load(source, rank=rank, microbatch_rows=3, **options)
        more = load(source, rank=rank, microbatch_rows=9, **options)
        for step in range(4):
            (want,), parts, (all_of_it,) = whole.next(), cut.next(), more.next()
            assert [len(part["input_ids"]) for part in parts] == [3, 3, 1]
            for key in ("input_ids", "labels", "position_ids"):
                assert torch.equal(torch.cat([part[key] for part in parts]), want[key])
                assert torch.equal(all_of_it[key], want[key])
            assert all(part["cu_seqlens"][-1] == part["input_ids"].numel() for part in parts), step
        for loader in (whole, cut, more):
            loader.close()


@pytest.mark.parametrize(("kind", "workers"), [("fork", 2), ("spawn", 1)])  # to spawn one takes seconds
def test_processes_give_what_threads_do(numbered: Make, kind: str, workers: int) -> None:
    """Several microbatches a step, a resume in the middle, an end inside a step; nothing is left running."""
    source = numbered(21)
    options = {"global_rows": 8, "microbatch_rows": 2, "epochs": 2, "batch_phases": [(2, 4)]}
    expected = [seen(window) for window in load(source, **options)]
    with load(source, **options, workers=workers, worker_kind=kind) as loader:
        found = [seen(loader.next()) for _ in range(3)]
        if kind == "fork":
            state = loader.state_dict()
            loader.next()
            loader.load_state_dict(state)
        found += [seen(window) for window in loader]
    assert found == expected
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", ["thread", "fork"])
@pytest.mark.parametrize("error", [StopIteration, ConnectionResetError, EOFError])
def test_errors_that_could_be_taken_for_an_end(numbered: Make, kind: str, error: type[Exception]) -> None:
    """Neither the loop over the loader nor the worker ends silently for one that a source raises."""

    class Ending(TokenShards):
        def read_rows(self, row_ids: Any, row_tokens: int) -> Any:
            raise error("of the source")

    wanted, message = (RuntimeError, "StopIteration") if error is StopIteration else (error, "of the source")
    with load(Ending(numbered(4).path), workers=1, worker_kind=kind) as loader, pytest.raises(wanted, match=message):
        list(loader)


def test_idle_workers_are_told_of(numbered: Make, caplog: pytest.LogCaptureFixture) -> None:
    source = numbered(10)
    for workers, world, said in [(5, 1, ""), (6, 1, "1 workers are idle; set workers to 5"), (6, 2, "5 batches")]:
        caplog.clear()
        for rank in range(world):
            load(source, rank=rank, world=world, workers=workers, epochs=1).close()
        assert len(caplog.records) == (said != "") and said in caplog.text


class _Broken(TokenShards):
    """Raises at one row, and dies at another."""

    def read_rows(self, row_ids: Any, row_tokens: int) -> Any:
        if 7 in row_ids:
            raise OSError("the disk is gone")
        if 5 in row_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_rows(row_ids, row_tokens)


@pytest.mark.parametrize(("row", "message"), [(7, "the disk is gone"), (5, "worker .* (killed|exited)")])
def test_a_worker_that_fails_or_dies_is_an_error(numbered: Make, row: int, message: str) -> None:
    source = _Broken(numbered(10).path)
    with load(source, shuffle=False, global_rows=1, workers=2, worker_kind="fork") as loader:
        loader.quarantine({5, 7} - {row})
        with pytest.raises((OSError, RuntimeError), match=message):
            for _ in range(10):
                loader.next()
        assert loader.position <= row  # a death is told as soon as it is known
        loader.quarantine([row])
        rest = range(loader.position, 10)
        assert [seen(loader.next()) for _ in rest] == [[i] if i not in (5, 7) else [] for i in rest]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_workers_end_with_the_process_that_made_them(numbered: Make, how: str) -> None:
    """However it ends: they hold its standard output open, so that waiting for its end is waiting for theirs."""
    script = (
        "import os, signal, sys\nfrom kforge_data import Loader, TokenShards\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs tests in the background ignores it
        "loader = Loader(TokenShards(sys.argv[1]), row_tokens=4, global_rows=2, workers=2, worker_kind='fork')\n"
        "loader.next()\n"
        f"os.kill(os.getpid(), signal.{how})\n"
        "loader.next()\n"
    )
    command = [sys.executable, "-c", script, str(numbered(20).path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -getattr(signal, how), done.stderr
    assert "kforge-data-" not in done.stderr  # no worker says anything


def test_quarantined_rows_are_padding_and_move_nothing(numbered: Make) -> None:
    source = numbered(20)
    straight, _ = step_of(source, 1, None, 10)
    loader = load(source)
    bad = [straight[1][0], straight[3][1]]
    assert loader.rows_of(range(1, 2)).tolist() == straight[1]
    assert seen(loader.next()) == straight[0]
    loader.quarantine(bad[::-1])
    loader.quarantine(bad[:1])
    (batch,) = loader.next()
    assert batch["row_ids"].tolist() == [straight[1][1], -1]
    assert (batch["labels"][1] == -100).all()
    state = loader.state_dict()
    assert state["quarantined"] == sorted(bad)
    again = load(source, world=1, workers=2)
    again.load_state_dict(json.loads(json.dumps(state)))
    expected = [[row for row in rows if row not in bad] for rows in straight[2:]]
    assert [seen(again.next()) for _ in range(8)] == expected
    again.close()


def test_processes_of_one_loader_end_while_those_of_another_go_on(numbered: Make) -> None:
    """A forked worker has copies of the pipes to those that were there before, which must not keep these alive."""
    source = numbered(60)
    first = load(source, workers=2, worker_kind="fork")
    first.next()
    before = set(multiprocessing.active_children())
    second = load(source, workers=2, worker_kind="fork")
    second.next()
    codes = {process: process.exitcode for process in before}
    assert len(before) == 2 and set(codes.values()) == {None}
    first.close()
    assert [process.exitcode for process in before] == [0, 0]  # not killed
    second.next()
    second.close()


def test_closing_ends_the_threads(numbered: Make) -> None:
    before = set(threading.enumerate())
    with load(numbered(100), workers=3) as loader:
        loader.next()
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
    with pytest.raises(ValueError, match="closed"):
        loader.next()
    assert loader.state_dict()["position"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_rows": 0}, "global_rows = 0"),
        ({"global_rows": 10, "world": 4}, "by 4 data-parallel processes; set global_rows to 8 or 12"),
        ({"global_rows": 2, "world": 4}, "set global_rows to 4"),
        ({"global_rows": 8, "world": 4, "batch_phases": [(1, 6)]}, r"batch_phases\[0\].rows to 4 or 8"),
        ({"microbatch_rows": 0}, "microbatch_rows = 0"),
        ({"rank": 2, "world": 2}, "rank = 2 is not one of 2"),
        ({"workers": -1}, "workers = -1"),
        ({"epochs": 0}, "epochs = 0"),
        ({"row_tokens": 0}, "row_tokens = 0"),
    ],
)
def test_sizes_that_cannot_be(numbered: Make, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(numbered(30), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["thread", "spawn"])
def test_on_the_gpu_it_is_the_same(numbered: Make, kind: str) -> None:
    source = numbered(64)
    there = load(source, device="cuda", global_rows=8, microbatch_rows=2, workers=2, worker_kind=kind)
    here = load(source, global_rows=8, microbatch_rows=2)
    for _ in range(12):
        for a, b in zip(there.next(), here.next(), strict=True):
            for name, value in b.items():
                if isinstance(value, torch.Tensor):
                    assert a[name].is_cuda and torch.equal(a[name].cpu(), value)
                else:
                    assert np.array_equal(a[name], value)
    there.close()
