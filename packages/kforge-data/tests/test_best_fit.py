"""Best-fit packing against a loop over pieces; no token is lost or doubled; rows are as full as promised."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kforge_data.best_fit
from kforge_data import Loader, PackedDocuments, ShardWriter, TokenShards, pack_rows
from kforge_data.best_fit import best_fit, plan_rows

Make = Callable[..., TokenShards]


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each row, with pieces placed one at a time into the fullest row that has room."""
    room: list[int] = []
    for length in lengths:
        fitting = [i for i, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting, key=lambda i: room[i])] -= length
        else:
            room.append(capacity - length)
    return room


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 60).flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(1, s), max_size=60))))
def test_it_is_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    lengths = sorted(lengths, reverse=True)
    rows = best_fit(np.array(lengths, np.int64), capacity)
    room = slow_best_fit(lengths, capacity)
    used = np.bincount(rows, weights=lengths, minlength=len(room)) if lengths else np.zeros(0)
    assert sorted(capacity - used) == sorted(room)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    width=st.integers(1, 25),
    seed=st.integers(0, 9),
    truncate=st.booleans(),
)
def test_every_token_lies_in_one_row_and_no_fitting_document_is_cut(
    sizes: list[int], width: int, seed: int, truncate: bool
) -> None:
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    first, documents, starts, lengths = plan_rows(bounds, width, seed=seed, truncate=truncate)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    if truncate:
        kept = np.concatenate([np.arange(b, b + min(n, width)) for b, n in zip(bounds, sizes, strict=False)])
        assert sorted(covered) == kept.tolist()
    else:
        assert sorted(covered) == list(range(bounds[-1]))
    assert all(bounds[d] <= s and s + n <= bounds[d + 1] for d, s, n in zip(documents, starts, lengths, strict=True))
    assert np.add.reduceat(lengths, first).max() <= width
    pieces = np.bincount(documents, minlength=len(sizes))
    assert all(pieces[i] == (1 if truncate else -(-size // width)) for i, size in enumerate(sizes))


def test_long_tailed_lengths_fill_the_rows() -> None:
    """Log-normal lengths with a mean of about 1,000 tokens, as web text has them."""
    sizes = np.maximum(1, np.random.default_rng(0).lognormal(6.2, 1.2, 200_000)).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    for width in (2048, 4096):
        first, _, _, lengths = plan_rows(bounds, width)
        assert lengths.sum() / (len(first) * width) > 0.97


def test_rows_hold_whole_documents(make_shards: Make, tmp_path: Path) -> None:
    documents = [[10, 11, 12], [20, 21], [30], [40, 41, 42, 43, 44, 45], [50, 51, 52, 53]]
    source = PackedDocuments(make_shards(documents, shard_tokens=7), cache=tmp_path)
    block = source.read_rows(np.arange(source.row_count(4)), 4)
    rows = {tuple(row[:4].tolist()): i for i, row in enumerate(block.tokens)}
    assert set(rows) == {(10, 11, 12, 30), (20, 21, 44, 45), (50, 51, 52, 53), (40, 41, 42, 43)} or set(rows) == {
        (10, 11, 12, 30),
        (44, 45, 20, 21),
        (50, 51, 52, 53),
        (40, 41, 42, 43),
    }
    labels = pack_rows(block).labels
    assert labels[rows[40, 41, 42, 43]].tolist() == [41, 42, 43, 44]  # the document goes on in another row
    assert labels[rows[50, 51, 52, 53]].tolist() == [51, 52, 53, -100]
    assert labels[rows[10, 11, 12, 30]].tolist() == [11, 12, -100, -100]
    assert source.max_documents(4) == 2 and source.plan(4).fill == 1.0


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=20), min_size=1, max_size=20),
    width=st.integers(1, 12),
    shard_tokens=st.integers(1, 50),
)
def test_labels_are_those_of_the_documents(documents: list[list[int]], width: int, shard_tokens: int) -> None:
    """Every pair of neighbours in a document is scored once, and nothing else is."""
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder) / "s", vocab_size=100, shard_tokens=shard_tokens) as writer:
            for document in documents:
                writer.add(document)
        source = PackedDocuments(TokenShards(Path(folder) / "s"), cache=folder)
        block = source.read_rows(np.arange(source.row_count(width)), width)
        packed = pack_rows(block)
        scored = packed.labels != -100
        found = zip(packed.input_ids[scored].tolist(), packed.labels[scored].tolist(), strict=True)
        expected = [pair for document in documents for pair in pairwise(document)]
        assert sorted(found) == sorted(expected)
        counts = [len(np.unique(row)) for row in packed.doc_ids] if packed.doc_ids is not None else []
        assert max(counts) == source.max_documents(width)
        del source, block


def test_a_plan_is_made_once_and_depends_on_what_it_says(
    make_shards: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make_shards([[i] * (1 + i % 5) for i in range(40)])
    one = PackedDocuments(shards, cache=tmp_path)
    first = one.plan(8)
    again = pickle.loads(pickle.dumps(one))
    assert again.fingerprint == one.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(kforge_data.best_fit, "plan_rows", None)  # a second planning would fail
        assert np.array_equal(again.plan(8).starts, first.starts)
    others = [PackedDocuments(shards, cache=tmp_path, **change) for change in ({"seed": 1}, {"truncate": True})]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 3
    assert not np.array_equal(others[0].plan(8).starts, first.starts)
    assert one.row_count(16) < one.row_count(8)


def test_windows_bound_the_memory_of_planning(
    make_shards: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kforge_data.best_fit, "WINDOW_DOCUMENTS", 7)
    shards = make_shards([[i] * (1 + i % 5) for i in range(40)], shard_tokens=33)
    plan = PackedDocuments(shards, cache=tmp_path).plan(8)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(plan.starts, plan.lengths, strict=True)])
    assert sorted(covered) == list(range(shards.tokens)) and plan.rows[-1] == len(plan.starts)


def test_the_loader_reads_it(make_shards: Make, tmp_path: Path) -> None:
    shards = make_shards([[i + 1] * (1 + i % 7) for i in range(50)])
    source = PackedDocuments(shards, cache=tmp_path)
    with Loader(source, row_tokens=8, global_rows=4, epochs=1) as loader:
        batches = [batch for step in loader for batch in step]
    tokens = np.concatenate([batch["input_ids"].numpy().reshape(-1) for batch in batches])
    assert np.bincount(tokens, minlength=51)[1:].tolist() == [1 + i % 7 for i in range(50)]


def test_what_cannot_be(make_shards: Make, tmp_path: Path) -> None:
    source = PackedDocuments(make_shards([[1, 2]]), cache=tmp_path)
    with pytest.raises(ValueError, match="row_tokens = 0"):
        source.row_count(0)
    with pytest.raises(ValueError, match=r"row 1\.\.1 asked for; there are 1"):
        source.read_rows(np.array([1]), 4)
    with pytest.raises(ValueError, match="holds no tokens"):
        Loader(PackedDocuments(make_shards([], name="none"), cache=tmp_path), row_tokens=4, global_rows=1)
