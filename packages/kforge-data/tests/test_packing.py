"""Packed rows against a per-token loop, and the boundaries of documents (C05 on the data's side)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_data import RowBlock, pack_rows


def block_of(rows: list[tuple[list[int], list[int]]], length: int) -> RowBlock:
    """rows: (tokens incl. look-ahead, columns at which documents start)."""
    tokens = np.zeros((len(rows), length + 1), np.uint16)
    marks = [(i, column) for i, (_, starts) in enumerate(rows) for column in starts]
    for i, (row, _) in enumerate(rows):
        tokens[i, : len(row)] = row
    at = np.array(marks, np.int64).reshape(-1, 2)
    valid = np.array([len(row) for row, _ in rows], np.int64)
    return RowBlock(tokens, valid, at[:, 0], at[:, 1], np.zeros(len(rows), np.int16))


def slow_pack(rows: list[tuple[list[int], list[int]]], length: int) -> dict[str, Any]:
    """The definition, token by token."""
    ids, labels, positions, documents, ends = [], [], [], [], [0]
    longest = 0
    for tokens, starts in rows:
        number = position = 0
        for column in range(length):
            if column and (column in starts or column == len(tokens)):
                number, position = number + 1, 0
                ends.append(len(ids))
            ids.append(tokens[column] if column < len(tokens) else 0)
            scored = column + 1 < len(tokens) and column + 1 not in starts
            labels.append(tokens[column + 1] if scored else -100)
            positions.append(position)
            documents.append(number)
            position += 1
            longest = max(longest, position)
        ends.append(len(ids))
    return {"ids": ids, "labels": labels, "positions": positions, "documents": documents, "ends": ends, "max": longest}


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[tuple[list[int], list[int]]], int]:
    length = draw(st.integers(1, 300))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        valid = draw(st.sampled_from([0, 1, length // 2, length, length + 1, length + 1]))
        tokens = draw(st.lists(st.integers(0, 65535), min_size=valid, max_size=valid))
        starts = draw(st.sets(st.integers(1, valid - 1), max_size=12)) if valid > 1 else set()
        rows.append((tokens, sorted(starts)))
    return rows, length


@settings(deadline=None, max_examples=100)
@given(blocks())
def test_it_equals_the_definition(case: tuple[list[tuple[list[int], list[int]]], int]) -> None:
    rows, length = case
    expected = slow_pack(rows, length)
    packed = pack_rows(block_of(rows, length))
    assert packed.doc_ids is not None and packed.cu_seqlens is not None
    assert packed.input_ids.reshape(-1).tolist() == expected["ids"]
    assert packed.labels.reshape(-1).tolist() == expected["labels"]
    assert packed.position_ids.reshape(-1).tolist() == expected["positions"]
    assert packed.doc_ids.reshape(-1).tolist() == expected["documents"]
    assert packed.cu_seqlens.tolist() == expected["ends"]
    assert packed.max_seqlen == min(length, -(-expected["max"] // 128) * 128)
    for array in (packed.input_ids, packed.labels, packed.position_ids, packed.doc_ids):
        assert array.shape == (len(rows), length) and array.dtype == np.int64
    assert packed.cu_seqlens.dtype == np.int32
    plain = pack_rows(block_of(rows, length), isolate_documents=False)
    assert np.array_equal(plain.labels, packed.labels) and np.array_equal(plain.input_ids, packed.input_ids)
    assert plain.position_ids.tolist() == [list(range(length))] * len(rows)
    assert plain.doc_ids is None and plain.cu_seqlens is None and plain.max_seqlen == length


def test_c05_an_example_by_hand() -> None:
    #             A  A  A| B  B| C   look-ahead: C goes on
    packed = pack_rows(block_of([([5, 6, 0, 7, 0, 8, 9], [3, 5])], 6), cu_length=6)
    assert packed.labels.tolist() == [[6, 0, -100, 0, -100, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert packed.doc_ids is not None and packed.doc_ids.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 3, 5, 6, 6, 6]
    assert packed.max_seqlen == 6


def test_a_document_that_starts_at_the_look_ahead_cuts_the_last_label() -> None:
    packed = pack_rows(block_of([([5, 0, 6], [2])], 2))
    assert packed.labels.tolist() == [[0, -100]]
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 2]


def test_long_rows() -> None:
    length = 32_768
    generator = np.random.default_rng(0)
    starts = np.sort(generator.choice(np.arange(1, length), 50, replace=False))
    row = generator.integers(0, 60_000, length + 1).tolist()
    packed = pack_rows(block_of([(row, starts.tolist())] * 2, length), cu_length=200)
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens[:52].tolist() == [0, *starts.tolist(), length]
    assert (packed.cu_seqlens[102:] == 2 * length).all() and len(packed.cu_seqlens) == 200
    longest = int(np.diff([0, *starts, length]).max())
    assert longest <= packed.max_seqlen < longest + 128 and packed.max_seqlen % 128 == 0


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 documents do not fit into cu_seqlens of length 3"):
        pack_rows(block_of([([1, 2, 3, 4], [1, 2])], 3), cu_length=3)
