"""What is read but not scored, against definitions written token by token."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_data import (
    AnswersOnly,
    DataConfig,
    Loader,
    MaskRepetition,
    Mixture,
    PackedDocuments,
    TokenShards,
    evaluation_batches,
    mask_documents,
    row_transforms,
    training_source,
)
from kforge_data.packing import row_labels
from kforge_data.sources import RowBlock

Make = Callable[..., TokenShards]


def block_of(rows: list[list[list[int]]], width: int) -> RowBlock:
    """Rows of documents, filled up with zeros to ``width`` tokens."""
    tokens, starts = np.zeros((len(rows), width), np.uint16), []
    for number, documents in enumerate(rows):
        column = 0
        for document in documents:
            tokens[number, column : column + len(document)] = document
            starts += [(number, column)] if column else []
            column += len(document)
    valid = np.array([sum(map(len, documents)) for documents in rows])
    at = np.array(starts, np.int64).reshape(-1, 2)
    return RowBlock(tokens, valid, at[:, 0], at[:, 1], np.zeros(len(rows), np.int16))


def masked_of(block: RowBlock) -> list[list[bool]]:
    masked = np.zeros(block.tokens.shape, bool) if block.masked is None else block.masked
    return [row[:valid].tolist() for row, valid in zip(masked, block.valid.tolist(), strict=True)]


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=5), min_size=1, max_size=4
)


def repeated(document: list[int], repeats: int, period: int) -> list[bool]:
    """Token i is masked if it lies in a run of tokens that equal the one p before, (repeats - 1) p long or longer."""
    result = [False] * len(document)
    for p in range(1, period + 1):
        begin = p
        while begin < len(document):
            end = begin
            while end < len(document) and document[end] == document[end - p]:
                end += 1
            if end - begin >= (repeats - 1) * p:
                result[begin:end] = [True] * (end - begin)
            begin = end + 1
    return result


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.integers(2, 4), st.integers(1, 4))
def test_repetition(rows: list[list[list[int]]], repeats: int, period: int) -> None:
    block = block_of(rows, 1 + max(sum(map(len, documents)) for documents in rows))
    expected = [[flag for document in documents for flag in repeated(document, repeats, period)] for documents in rows]
    assert masked_of(MaskRepetition(repeats, period)(block)) == expected


def test_repetition_keeps_the_first_period_and_what_follows() -> None:
    block = block_of([[[7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8]], [[1, 2, 3, 1, 2, 3, 4]], [[5] * 40]], 41)
    masked = masked_of(MaskRepetition(3, period=3)(block))
    assert masked == [[False] * 4 + [True] * 6 + [False], [False] * 7, [False] + [True] * 39]
    labels = row_labels(MaskRepetition(3, period=3)(block))
    assert labels[0, :10].tolist() == [1, 2, 3, -100, -100, -100, -100, -100, -100, 8]
    # Text as people write it is left alone, at the setting that a job would take.
    rng = np.random.default_rng(0)
    text = block_of([[rng.integers(0, 50_000, 4096).tolist()] for _ in range(4)], 4097)
    assert MaskRepetition(32)(text).masked is None


def answers(document: list[int], start: list[int], end: list[int]) -> list[bool]:
    """Whether each token is of an answer: after the last of ``start``, to the last of ``end`` inclusive."""
    result, inside = [], False
    for i in range(len(document)):
        if document[:i][-len(end) :] == end:
            inside = False
        if document[:i][-len(start) :] == start:
            inside = True
        result.append(inside)
    return result


@settings(max_examples=300, deadline=None)
@given(
    DOCUMENTS,
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
def test_answers_only(rows: list[list[list[int]]], start: list[int], end: list[int]) -> None:
    block = block_of(rows, 1 + max(sum(map(len, documents)) for documents in rows))
    expected = [[not flag for document in documents for flag in answers(document, start, end)] for documents in rows]
    assert masked_of(AnswersOnly(tuple(start), tuple(end))(block)) == expected


START, END = 8, 9


def test_a_chat_is_scored_on_its_answers(make_shards: Make, tmp_path: Path) -> None:
    """Two turns: what the model has to say and the token that ends it, of each; in training and in evaluation."""
    chats = make_shards([[1, 2, START, 3, 4, END, 5, START, 6, END, 0], [1, 1, START, 7, END, 0]], vocab_size=10)
    packed = PackedDocuments(chats, cache=tmp_path)
    only = AnswersOnly((START,), (END,))
    with Loader(packed, row_tokens=20, global_rows=1, epochs=1, transforms=[only]) as loader:
        (batch,) = loader.next()
    (evaluated,) = evaluation_batches(packed, row_tokens=20, microbatch_rows=1, transforms=[only])
    for one in (batch, evaluated):
        kept = one["labels"][0][one["labels"][0] != -100].tolist()
        assert sorted(kept) == sorted([3, 4, END, 6, END, 7, END])
        assert (one["input_ids"] == START).sum() == 3  # read all the same
    with Loader(packed, row_tokens=20, global_rows=1, epochs=1) as loader:
        (plain,) = loader.next()
    assert set(batch) == set(plain)
    for name in ("input_ids", "position_ids", "doc_ids", "cu_seqlens"):
        assert batch[name].tolist() == plain[name].tolist()


DOCS = [[1, 2, 3, 4, 5, 0], [6, 0], [7, 8, 9, 0], [1, 2, 3, 4, 5, 0], [2, 0], [4, 4, 4, 4, 0], [6, 0]] * 3


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
@pytest.mark.parametrize(("min_tokens", "duplicates"), [(3, False), (0, True), (5, True)])
def test_masked_documents(make_shards: Make, tmp_path: Path, packing: str, min_tokens: int, duplicates: bool) -> None:
    shards = make_shards(DOCS, shard_tokens=20)
    stream = mask_documents(shards, min_tokens, duplicates, tmp_path / "cache")
    assert stream.fingerprint == shards.fingerprint and stream.tokens == shards.tokens
    seen: list[list[int]] = []
    expected: list[int] = []
    for document in DOCS:
        if len(document) >= min_tokens and not (duplicates and document in seen):
            expected += document[1:]
        seen.append(document)
    sources = [PackedDocuments(s, cache=tmp_path / "cache") if packing == "best_fit" else s for s in (shards, stream)]
    labels = []
    for source in sources:
        with Loader(source, row_tokens=8, global_rows=2, shuffle=False, epochs=1) as loader:
            batches = [batch for window in loader for batch in window]
        labels.append(np.concatenate([batch["labels"].reshape(-1) for batch in batches]))
    plain, masked = labels
    assert ((masked == plain) | (masked == -100)).all()
    if packing == "cut":  # in the order of the documents, so these are all
        scored = [t for d in DOCS for t in d[1:]]
        assert plain[plain != -100].tolist() == scored and masked[masked != -100].tolist() == expected
    else:
        assert sorted(masked[masked != -100].tolist()) == sorted(expected)


def test_masks_travel_through_a_mixture_and_to_workers(make_shards: Make, tmp_path: Path) -> None:
    one, two = make_shards([[1, 0], [3, 4, 5, 0]] * 8, name="a"), make_shards([[7] * 6] * 8, name="b")
    masked = mask_documents(one, 3, cache=tmp_path)
    assert mask_documents(two) is two
    again = pickle.loads(pickle.dumps(masked))
    assert again.masked_tokens == masked.masked_tokens == 16  # type: ignore[attr-defined]
    source = Mixture({"a": masked, "b": two})
    rows = {}
    for kind in ("thread", "fork"):
        options = {"row_tokens": 6, "global_rows": 6, "workers": 1, "worker_kind": kind}
        with Loader(source, **options, transforms=[MaskRepetition(4)]) as loader:
            rows[kind] = [batch for _ in range(3) for batch in loader.next()]
    for threads, forks in zip(rows["thread"], rows["fork"], strict=True):
        assert threads["labels"].tolist() == forks["labels"].tolist()
        for labels, source_ids in zip(threads["labels"].tolist(), threads["source_ids"].tolist(), strict=True):
            scored = {label for label in labels if label != -100}
            assert scored <= ({4, 5, 0} if source_ids[0] == 0 else set())


def test_masks_may_change_at_a_resume(make_shards: Make, tmp_path: Path) -> None:
    shards = make_shards(DOCS)
    with Loader(shards, row_tokens=8, global_rows=2) as loader:
        loader.next()
        state = loader.state_dict()
    with Loader(mask_documents(shards, 5, True, tmp_path), row_tokens=8, global_rows=2) as loader:
        loader.load_state_dict(state)
        assert loader.position == 2


def test_from_a_config(make_shards: Make, tmp_path: Path) -> None:
    shards = make_shards(DOCS, vocab_size=10)
    config = DataConfig(
        train=str(shards.path),
        cache=str(tmp_path),
        mask_short=3,
        mask_duplicates=True,
        mask_repetition=4,
        repetition_period=5,
        answer_start=(1,),
        answer_end=(0,),
    )
    assert row_transforms(config) == [MaskRepetition(4, 5), AnswersOnly((1,), (0,))]
    assert row_transforms(config, training=False) == [AnswersOnly((1,), (0,))]
    block = training_source(config).read_rows(np.array([0]), 200)
    kept = [[1, 2, 3, 4, 5, 0], [7, 8, 9, 0], [4, 4, 4, 4, 0]]
    assert block.masked is not None
    assert block.tokens[0, : shards.tokens][~block.masked[0, : shards.tokens]].tolist() == [
        t for document in kept for t in document
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_short": -1}, "data.mask_short = -1"),
        ({"mask_repetition": 1}, "data.mask_repetition = 1"),
        ({"repetition_period": 0}, "data.repetition_period = 0"),
        ({"answer_start": (1,)}, "belong together"),
        ({"answer_start": (1,), "answer_end": (-1,)}, "data.answer_end"),
    ],
)
def test_what_a_config_cannot_say(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)  # type: ignore[arg-type]


def test_what_masks_cannot_be(make_shards: Make) -> None:
    with pytest.raises(ValueError, match="repeats = 1"):
        MaskRepetition(1)
    with pytest.raises(ValueError, match="period = 0"):
        MaskRepetition(2, 0)
    with pytest.raises(ValueError, match="end is empty"):
        AnswersOnly((1,), ())
    with pytest.raises(ValueError, match="min_tokens = -1"):
        mask_documents(make_shards([[1]]), -1)
