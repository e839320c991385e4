"""Rows whose documents cannot be are refused: some kernels read cu_seqlens, some doc_ids, and none looks at them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_model import ModelConfig, Rows, Transformer
from kforge_model.rows import check_rows

POSITIONS = torch.arange(6).expand(2, 6)


def ends(*values: int) -> dict[str, Any]:
    return {"cu_seqlens": torch.tensor(values, dtype=torch.int32), "max_seqlen": 6}


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.sets(st.integers(1, 7), max_size=4), min_size=1, max_size=3),
    padding=st.integers(0, 3),
    spare=st.integers(0, 5),
    keep=st.sampled_from(["both", "cu_seqlens", "doc_ids"]),
)
def test_rows_of_documents_are_taken(cuts: list[set[int]], padding: int, spare: int, keep: str) -> None:
    rows = Rows.packed([[b - a for a, b in zip([0, *sorted(c)], [*sorted(c), 8], strict=True)] for c in cuts])
    assert rows.cu_seqlens is not None
    padded = torch.cat((rows.cu_seqlens, rows.cu_seqlens[-1:].expand(padding)))
    rows = dataclasses.replace(rows, cu_seqlens=padded, max_seqlen=rows.max_seqlen + spare)
    if keep != "both":
        rows = dataclasses.replace(rows, **{"doc_ids" if keep == "cu_seqlens" else "cu_seqlens": None})
    check_rows(rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (ends(0, 5), "begin with 0 and end with 5; they must rise from 0 to 12"),
        (ends(1, 6, 12), "begin with 1 and end with 12"),
        (ends(0, 6, 12, 18), "begin with 0 and end with 18"),
        (ends(0, 8, 6, 12), "and fall between"),
        (ends(0, 4, 9, 12), "crosses from row 0 into row 1; let one begin at token 6"),
        (ends(), r"torch\.int32 of shape \(0,\), and must be int32 \[documents \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0, 6, 12]), "max_seqlen": 6}, r"cu_seqlens came as torch\.int64"),
        ({**ends(0, 6, 12), "max_seqlen": 5}, "max_seqlen = 5 is below the longest document, 6 tokens"),
        ({"doc_ids": torch.zeros(1, 6, dtype=torch.int64)}, r"doc_ids of shape \(1, 6\) do not fit"),
        ({"doc_ids": torch.tensor([[0, 0, 1, 1, 0, 0]] * 2)}, "doc_ids fall along a row"),
        ({**ends(0, 3, 6, 12), "doc_ids": torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6])}, "different documents"),
        ({"position_ids": POSITIONS.float()}, r"position_ids came as torch\.float32"),
        ({"columns": torch.arange(6)}, "rows with columns are a part of the rows, and this attention core wants them"),
    ],
)
def test_rows_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    rows = Rows(**{"position_ids": POSITIONS, **changes})
    for window in (None, 3):
        model = Transformer(ModelConfig(vocab_size=9, dim=16, n_layers=1, n_heads=2, window=window))
        with pytest.raises(ValueError, match=words):
            model(torch.zeros(2, 6, dtype=torch.int64), rows)


def test_lengths_of_nothing() -> None:
    with pytest.raises(ValueError, match="holds no row"):
        Rows.packed([])
    with pytest.raises(ValueError, match="empty document or row"):
        Rows.packed([[], []])
