"""Evaluation: each row on one rank, and as many batches on all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kforge_data import TokenShards, evaluation_batches, evaluation_rows

Make = Callable[..., TokenShards]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("max_rows", [0, 5, 100])
def test_evaluation_has_each_row_on_one_rank(numbered: Make, world: int, max_rows: int) -> None:
    source = numbered(11)
    per_rank = [
        list(evaluation_batches(source, row_tokens=4, microbatch_rows=2, rank=rank, world=world, max_rows=max_rows))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(batch["input_ids"].shape == (2, 4) for batches in per_rank for batch in batches)
    batches = [batch for batches in per_rank for batch in batches]
    ids = [row for batch in batches for row in batch["row_ids"].tolist()]
    numbers = [row[0] for batch in batches for row in batch["input_ids"].tolist()]  # each document repeats its own
    assert all(row in (number, -1) for row, number in zip(ids, numbers, strict=True))
    rows = [number for number, row in zip(numbers, ids, strict=True) if row != -1]
    expected = evaluation_rows(source, row_tokens=4, max_rows=max_rows).tolist()
    assert sorted(rows) == expected and len(expected) == (5 if max_rows == 5 else 11)
    scored = sum(int((batch["labels"] != -100).sum()) for batches in per_rank for batch in batches)
    assert scored == 3 * len(expected)


def test_evaluation_rows_are_spread_over_the_source(numbered: Make) -> None:
    assert evaluation_rows(numbered(11), row_tokens=4, max_rows=3).tolist() == [0, 3, 7]
    with pytest.raises(ValueError, match="max_rows = -1"):
        evaluation_rows(numbered(1, name="one"), row_tokens=4, max_rows=-1)


def test_evaluation_sizes_that_cannot_be(numbered: Make) -> None:
    source = numbered(4)
    with pytest.raises(ValueError, match="microbatch_rows = 0"):
        evaluation_batches(source, row_tokens=4, microbatch_rows=0)
    with pytest.raises(ValueError, match="rank = 1"):
        evaluation_batches(source, row_tokens=4, microbatch_rows=1, rank=1)
