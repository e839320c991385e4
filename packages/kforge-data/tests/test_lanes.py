"""Streams in lanes: each document once an epoch, whatever reads them (C02, C03, C04, C11)."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamed import CountedTexts, numbered_texts

from kforge_data import (
    DatasetStream,
    LaneState,
    Loader,
    Mixture,
    PackedDocuments,
    StreamedDocuments,
    Tokenizer,
    mask_documents,
    merge_states,
)
from kforge_data.best_fit import hash_seed
from kforge_data.order import Permutation

ROW = 8


def stream(tokenizer: Tokenizer, documents: int = 40, shards: int = 1, **options: Any) -> StreamedDocuments:
    return StreamedDocuments(
        numbered_texts(documents, shards), tokenizer, **{"lanes": 4, "block_documents": 4, **options}
    )


def load(source: Any, **options: Any) -> Loader:
    return Loader(source, **{"row_tokens": ROW, "global_rows": 8, "seed": 3, "workers": 0, **options})


def run(
    source: Any, steps: int, world: int = 1, state: dict[str, Any] | None = None, **options: Any
) -> tuple[list[dict[int, list[int]]], dict[str, Any]]:
    """(rows of each of some steps as row id -> its ids, the state after) over ``world`` processes."""
    loaders = [load(source, rank=rank, world=world, **options) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    found: list[dict[int, list[int]]] = []
    for _ in range(steps):
        rows: dict[int, list[int]] = {}
        for loader in loaders:
            for batch in loader.next():
                assert "lane_states" not in batch
                for name, ids in zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True):
                    assert name not in rows
                    rows[name] = ids
        found.append(rows)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    return found, merge_states(states)


def lane_tokens(source: StreamedDocuments, lane: int, rows: int, row_tokens: int = ROW) -> list[int]:
    """Tokens of the first rows of a lane, laid end to end."""
    block = source.read_rows(np.arange(rows) * source.lanes + lane, row_tokens)
    return [
        token
        for row, valid in zip(block.tokens.tolist(), block.valid.tolist(), strict=True)
        for token in row[: min(valid, row_tokens)]
    ]


def documents_of(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """Whole documents that tokens begin with."""
    found, now = [], []
    for token in tokens:
        if token == tokenizer.eos_id:
            found.append(tokenizer.decode(now))
            now = []
        else:
            now.append(token)
    return found


@pytest.mark.parametrize(("shards", "lanes"), [(1, 1), (1, 4), (3, 4), (4, 4), (7, 4), (3, 8)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_c04_every_document_once_an_epoch_in_another_order(
    tokenizer: Tokenizer, shards: int, lanes: int, shuffle: bool
) -> None:
    source = stream(tokenizer, 41, shards, lanes=lanes).ordered(seed=5, shuffle=shuffle)
    first: list[str] = []
    for lane in range(lanes):
        documents = documents_of(lane_tokens(source, lane, 60 // lanes * 4), tokenizer)
        size = documents.index(documents[0], 1) if not shuffle else len(set(documents))
        epochs = [documents[at : at + size] for at in range(0, 3 * size, size)]
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
        if shuffle and size > 4:
            assert len({tuple(epoch) for epoch in epochs}) == 3
        if not shuffle:
            assert epochs[0] == epochs[1]
        first += epochs[0]
    assert sorted(first, key=int) == [str(i) for i in range(41)]


def test_a_block_is_permuted_by_its_key(tokenizer: Tokenizer) -> None:
    """Against the definition, written out: one lane of one shard of 10 documents, in blocks of 4."""
    source = stream(tokenizer, 10, lanes=1).ordered(seed=5, shuffle=True)
    wanted: list[str] = []
    for epoch in range(6):
        for begin in range(0, 10, 4):
            numbers = list(range(begin, min(begin + 4, 10)))
            key = Permutation(len(numbers), seed=hash_seed(5, "block", 0, epoch, begin))
            wanted += [str(numbers[i]) for i in key(np.arange(len(numbers))).tolist()]
    found = documents_of(lane_tokens(source, 0, 12), tokenizer)
    assert len(found) > 20 and found == wanted[: len(found)]


def test_rows_are_those_of_the_documents_laid_end_to_end(tokenizer: Tokenizer) -> None:
    texts = ["one two three", "x", "a longer text of many words that goes on over several rows", "y z"] * 4
    source = StreamedDocuments(CountedTexts([texts]), tokenizer, lanes=1, block_documents=3)
    ends: list[int] = []
    flat: list[int] = []
    for text in texts:
        flat += [*tokenizer.encode(text), tokenizer.eos_id]
        ends.append(len(flat))
    rows = len(flat) // ROW
    block = source.read_rows(np.arange(rows), ROW)
    for row in range(rows):
        begin = row * ROW
        goes_on = begin + ROW not in ends  # the look-ahead is there where the document goes on
        assert block.valid[row] == ROW + goes_on
        assert block.tokens[row, : ROW + goes_on].tolist() == flat[begin : begin + ROW + goes_on]
        starts = block.start_columns[block.start_rows == row].tolist()
        assert starts == [end - begin for end in ends if begin < end < begin + ROW]


def test_c09_a_marker_in_a_stream_stays_text(tokenizer: Tokenizer) -> None:
    texts = ["a <|endoftext|> b", "c"]
    source = StreamedDocuments(CountedTexts([texts]), tokenizer, lanes=1)
    assert documents_of(lane_tokens(source, 0, 6), tokenizer)[:4] == texts * 2
    word = Tokenizer(tokenizer._definition, end_of_text="the")  # which merges make of text
    source = StreamedDocuments(CountedTexts([["x", "the end"]]), word, lanes=1)
    with pytest.raises(ValueError, match=r"makes 'the', which ends documents, of the text of one"):
        lane_tokens(source, 0, 1)


def test_a_row_ends_early_rather_than_hold_more_documents_than_boundaries_have_room_for(tokenizer: Tokenizer) -> None:
    source = StreamedDocuments(CountedTexts([["x"] * 100]), tokenizer, lanes=1)
    assert source.max_documents(64) == 9
    block = source.read_rows(np.arange(5), 64)
    assert block.valid.tolist() == [16] * 5  # 8 documents of two tokens
    with load(source, row_tokens=64, global_rows=2) as loader:
        (batch,) = loader.next()
    assert batch["cu_seqlens"].shape == (2 * 9 + 1,)
    assert (batch["labels"] != -100).sum() == 2 * 8  # each document's first token predicts its end


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("workers", [0, 2])
def test_c02_a_stream_resumed_anywhere_gives_what_it_would_have(tokenizer: Tokenizer, steps: int, workers: int) -> None:
    source = stream(tokenizer, 120)
    straight, _ = run(source, 14)
    before, state = run(source, steps, workers=workers, microbatch_rows=2)
    after, _ = run(stream(tokenizer, 120), 14 - steps, state=state, workers=workers)
    assert before + after == straight


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 4), (4, 1)])
def test_c03_another_number_of_processes_reads_on(tokenizer: Tokenizer, before: int, after: int) -> None:
    source = stream(tokenizer, 60, shards=3)
    straight, _ = run(source, 8)
    first, state = run(source, 3, before)
    second, again = run(source, 2, after, state)
    third, _ = run(source, 3, 2, again, global_rows=8, microbatch_rows=1)
    assert first + second + third == straight
    with pytest.raises(ValueError, match="lanes = 4 cannot be dealt to 8 data-parallel processes"):
        load(source, world=8)


def test_the_state_is_five_integers_a_lane(tokenizer: Tokenizer) -> None:
    _, state = run(stream(tokenizer), 3, 2)
    assert [row[0] for row in state["lanes"]["0"]] == [0, 1, 2, 3]
    assert all(len(row) == 1 + len(LaneState._fields) == 6 for row in state["lanes"]["0"])
    assert [row[1] for row in state["lanes"]["0"]] == [6, 6, 6, 6]  # 3 steps of 8 rows over 4 lanes


def test_a_resume_reads_one_block_of_each_lane_again_and_nothing_else(tokenizer: Tokenizer) -> None:
    texts = numbered_texts(4000)
    source = StreamedDocuments(texts, tokenizer, lanes=4, block_documents=4)
    _, state = run(source, 100)
    used = max(document for _, document in texts.read)
    again = numbered_texts(4000)
    run(StreamedDocuments(again, tokenizer, lanes=4, block_documents=4), 1, state=state)
    first = min(document for _, document in again.read)
    assert used - 4 * 4 - 4 < first  # no lane goes back by more than its block
    # Each of 4 lanes passes over 4 documents of the one shard for each of its own: a block again, and one ahead.
    assert sum(again.read.values()) <= 4 * 4 * 4 * 3


def test_no_process_reads_shards_of_another(tokenizer: Tokenizer) -> None:
    seen = []
    for rank in range(2):
        texts = numbered_texts(200, shards=8)
        source = StreamedDocuments(texts, tokenizer, lanes=4, block_documents=4)
        with load(source, rank=rank, world=2, workers=2) as loader:
            for _ in range(10):
                loader.next()
        seen.append({shard for shard, _ in texts.read})
    assert seen == [{0, 2, 4, 6}, {1, 3, 5, 7}]


@pytest.mark.parametrize(("kind", "workers"), [("fork", 3), ("spawn", 1)])
def test_processes_read_what_threads_do(tokenizer: Tokenizer, kind: str, workers: int) -> None:
    source = stream(tokenizer, 60)
    straight, _ = run(source, 6)
    first, state = run(source, 2, workers=workers, worker_kind=kind, microbatch_rows=3)
    second, again = run(source, 2, state=state, workers=workers, worker_kind="fork")
    third, last = run(source, 2, state=again)
    assert first + second + third == straight
    assert last == run(source, 6)[1]


@pytest.mark.parametrize(("files", "world", "workers"), [(3, 2, 8), (1, 2, 4)])
def test_c11_more_workers_than_shards(
    tokenizer: Tokenizer, tmp_path: Path, files: int, world: int, workers: int
) -> None:
    """100 numbered documents in files of JSON lines: each once over all ranks and workers."""
    for file in range(files):
        lines = [json.dumps({"text": f"{i:03d}"}) + "\n" for i in range(file, 100, files)]
        (tmp_path / f"{file}.jsonl").write_text("".join(lines))
    data = DatasetStream(f"datasets://{tmp_path}")
    assert data.shards == files
    source = StreamedDocuments(data, tokenizer, lanes=4, block_documents=8)
    found: list[dict[int, list[int]]]
    found, _ = run(source, 20, world, workers=workers, worker_kind="fork", row_tokens=16, global_rows=4)
    rows: dict[int, list[int]] = {}
    for step in found:
        rows |= step
    numbers: Counter[str] = Counter()
    for lane in range(4):
        own = [token for name in sorted(rows) if name % 4 == lane for token in rows[name]]
        documents = documents_of(own, tokenizer)
        size = len(set(documents))
        numbers.update(documents[:size])
    assert numbers == Counter(f"{i:03d}" for i in range(100))


def test_workers_without_a_lane_are_told_of(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    load(stream(tokenizer), workers=2, world=2).close()
    assert not caplog.text
    load(stream(tokenizer), workers=3, world=2).close()
    assert "each of 2 processes has 2 of 4 lanes" in caplog.text and "set workers to 2" in caplog.text


def test_an_error_while_reading_is_raised_and_the_step_can_be_had_again(tokenizer: Tokenizer) -> None:
    straight, _ = run(stream(tokenizer), 4)
    texts = numbered_texts(40)
    texts.fails_at = (0, 17)
    source = StreamedDocuments(texts, tokenizer, lanes=4, block_documents=4)
    found: list[list[int]] = []
    with load(source) as loader:
        failed = 0
        while len(found) < 4 * 8:
            try:
                (batch,) = loader.next()
            except OSError:
                failed += 1
                continue
            found += batch["input_ids"].tolist()
    assert failed == 1
    assert found == [ids for step in straight for ids in step.values()]


def test_empty_documents_are_passed_over_and_empty_lanes_refused(tokenizer: Tokenizer) -> None:
    texts = CountedTexts([["a", None, "", "b"], [], [None, "c"], ["", None]])
    source = StreamedDocuments(texts, tokenizer, lanes=2, block_documents=3)
    assert documents_of(lane_tokens(source, 0, 4), tokenizer)[:6] == ["a", "b", "c"] * 2
    with pytest.raises(ValueError, match="lane 1 of 2 has no document with text; set fewer lanes"):
        lane_tokens(source, 1, 1)


def test_quarantined_rows_are_padding_and_move_nothing(tokenizer: Tokenizer) -> None:
    source = stream(tokenizer)
    straight, _ = run(source, 5)
    bad = [9, 12, 15, 31]
    with load(source) as loader:
        assert loader.rows_of(range(5)).tolist() == [name for step in straight for name in step]
        loader.quarantine(bad)
        found: dict[int, list[int]] = {}
        for _ in range(3):
            for batch in loader.next():
                found.update(zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True))
        state = loader.state_dict()
    more, _ = run(stream(tokenizer), 2, state=state)
    rows = {**straight[0], **straight[1], **straight[2], **straight[3], **straight[4]}
    for step in (found, *more):
        assert all(step[name] == rows[name] for name in step if name != -1)
    names = {name for step in (found, *more) for name in step} - {-1}
    assert names == set(rows) - set(bad)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_mixture(tokenizer: Tokenizer, numbered: Any, workers: int) -> None:
    shards = numbered(50)

    def mixture() -> Mixture:
        sources = {"a": stream(tokenizer), "shards": shards, "b": stream(tokenizer, 90, 5)}
        return Mixture(
            sources, {"a": 5, "shards": 3, "b": 2}, max_epochs={"shards": 1.5}, phases=[(90, {"a": 1, "b": 6})]
        )

    assert mixture().lanes == 4
    straight, _ = run(mixture(), 40)
    names = [name for step in straight for name in step]
    finite = [name for name in names if name >> 48 == 1]
    assert len(finite) == 38 and max(Counter(finite).values()) == 2  # 1.5 epochs of 25
    first, state = run(mixture(), 7, 2, workers=workers)
    second, again = run(mixture(), 9, 4, state, microbatch_rows=1)
    third, _ = run(mixture(), 24, 1, again, workers=workers)
    assert first + second + third == straight


def test_a_lane_of_a_mixture_takes_the_lanes_of_its_streams(tokenizer: Tokenizer, numbered: Any) -> None:
    mixture = Mixture({"a": stream(tokenizer), "shards": numbered(500)}, {"a": 5, "shards": 3}).ordered(
        seed=1, shuffle=True
    )
    names = mixture.rows_at(np.arange(4000), row_tokens=ROW, seed=1, shuffle=True)
    own = names < 1 << 48
    assert (names[own] % 4 == np.flatnonzero(own) % 4).all()
    for lane in range(4):
        rows = names[own & (np.arange(4000) % 4 == lane)] // 4
        assert rows.tolist() == list(range(len(rows)))
    assert mixture.counts(4000, ROW)["a"] == own.sum()
    shards = Counter(names[~own].tolist())
    assert max(shards.values()) - min(shards.values()) <= 1 or len(shards) < 250


def test_realised_shares_are_within_a_block_of_the_lanes(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    weights = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}
    sources = {name: stream(tokenizer, lanes=64) for name in weights}
    mixture = Mixture(sources, weights)
    row_ids = mixture.ordered(seed=1, shuffle=False).rows_at(np.arange(1 << 16), row_tokens=ROW, seed=1, shuffle=False)
    source = row_ids >> 48
    worst = 0.0
    for first, size in zip(rng.integers(0, 1 << 15, 300), rng.integers(1, 1 << 15, 300), strict=True):
        counts = np.bincount(source[first : first + size], minlength=4)
        worst = max(worst, float(np.abs(counts - size * np.array(list(weights.values()))).max()))
    assert worst < 64  # one row of each lane


def test_pickled_it_is_the_same(tokenizer: Tokenizer) -> None:
    source = stream(tokenizer).ordered(seed=2, shuffle=True)
    expected = source.read_rows(np.arange(8), ROW).tokens
    other = pickle.loads(pickle.dumps(source))
    assert (other.read_rows(np.arange(8), ROW).tokens == expected).all()
    assert other.fingerprint == source.fingerprint


def test_any_row_can_be_read_in_any_order(tokenizer: Tokenizer) -> None:
    source = stream(tokenizer).ordered(seed=2, shuffle=True)
    names = np.arange(64)
    expected = source.read_rows(names, ROW).tokens
    shuffled = np.random.default_rng(0).permutation(64)
    assert (source.read_rows(shuffled, ROW).tokens == expected[shuffled]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, n: Mixture({"a": s(), "b": s(lanes=8)}), "the same number of lanes; these have a 4, b 8"),
        (lambda s, n: Mixture({"a": s()}, by="documents"), "does not know its documents before it is read"),
        (lambda s, n: Mixture({"a": s()}, max_epochs={"a": 2}), "so max_epochs cannot be kept"),
        (
            lambda s, n: Mixture({"a": s(), "b": n(4)}, max_epochs={"b": 2}, phases=[(9, {"a": 0})]),
            "does not end, and in its last phase every source that has a weight has max_epochs",
        ),
        (lambda s, n: load(s(), epochs=1), "epochs = 1 cannot be kept"),
        (lambda s, n: PackedDocuments(s()), "packing looks at all documents before the first row"),
        (lambda s, n: mask_documents(s(), 4), "masking documents looks at all documents before the first row"),
        (lambda s, n: s(lanes=0), "lanes = 0 must be at least 1"),
        (lambda s, n: s(block_documents=0), "block_documents = 0 must be at least 1"),
        (lambda s, n: s().rows_at(np.arange(2), row_tokens=8, seed=4, shuffle=True), "take ordered"),
    ],
)
def test_what_cannot_be(make: Any, message: str, tokenizer: Tokenizer, numbered: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(lambda **options: stream(tokenizer, **options), numbered)


def test_states_that_cannot_be(tokenizer: Tokenizer) -> None:
    source = stream(tokenizer)
    loaders = [load(source, rank=rank, world=2) for rank in range(2)]
    for loader in loaders:
        loader.next()
    states = [loader.state_dict() for loader in loaders]
    with pytest.raises(ValueError, match="does not say where lane 1 stands, nor of 1 more: it is of one process of"):
        load(source).load_state_dict(states[0])
    loaders[0].next()
    with pytest.raises(ValueError, match="the states are of different steps, at positions 16, 8"):
        merge_states([loaders[0].state_dict(), states[1]])
    damaged = merge_states(states)
    damaged["lanes"]["0"][2][1] = 77
    with pytest.raises(ValueError, match="lane 2 stands at row 77 in the state, and has given 2 at position 8"):
        load(source).load_state_dict(damaged)
    for other in (stream(tokenizer, lanes=8), stream(tokenizer, block_documents=5), stream(tokenizer, documents=41)):
        with pytest.raises(ValueError, match="another sequence of rows: of the source"):
            load(other).load_state_dict(merge_states(states))
    with load(stream(tokenizer, lanes=8), accept_changed_data=True) as loader:
        loader.load_state_dict(merge_states(states))
        (batch,) = loader.next()
        assert batch["row_ids"].tolist() == list(range(8, 16))
        assert sorted(documents_of(batch["input_ids"].flatten().tolist(), tokenizer))[:2] == ["0", "1"]
    for loader in loaders:
        loader.close()
