"""Of every kind of source each document comes exactly once an epoch, however a run is killed, resumed and dealt anew.

A script of kills and resumes must give, step for step, what an undisturbed run gives; and the undisturbed run's first
epoch must hold the tokens of all documents, each as often as it is there.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripts import Session, Step, play, sessions

from kforge_data import (
    MegatronTokens,
    Mixture,
    PackedDocuments,
    ShardWriter,
    StreamedDocuments,
    TokenFiles,
    Tokenizer,
    TokenShards,
    open_tokens,
    train_tokenizer,
    write_megatron,
)
from kforge_data.hugging_face import open_shards

ROW, SEED, STEPS = 16, 7, 24
KINDS = (
    *("shards", "npy", "raw", "megatron", "best fit", "truncated"),
    *("jsonl", "txt", "parquet", "dataset", "saved dataset"),
    *("stream", "saved stream", "mixture", "mixture with streams"),
)
Make = Callable[[], Any]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([f"{i} {i * i}" for i in range(100)], vocab_size=280)


@pytest.fixture(scope="module")
def makes(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Make]:
    """Of each kind, what opens it anew. All hold the same 40 documents, of 2 to 24 tokens; eos last."""
    import datasets

    folder = tmp_path_factory.mktemp("kinds")
    texts = [f"document {i} " + "x" * (7 * i % 19) for i in range(40)]
    eos = tokenizer.eos_id
    documents = [[*tokenizer.encode(text), eos] for text in texts]
    with ShardWriter(folder / "shards", vocab_size=tokenizer.vocab_size, eos_id=eos, shard_tokens=100) as writer:
        for document in documents:
            writer.add(document, text_bytes=1)
    ids = np.array([token for document in documents for token in document])
    np.save(folder / "t.npy", ids.astype(np.uint16))
    (folder / "raw").mkdir()
    ids.astype(np.uint32).tofile(folder / "raw" / "0.bin")
    write_megatron(TokenShards(folder / "shards"), folder / "m")
    for name, part in (("a.jsonl", texts[:15]), ("b.jsonl", texts[15:])):
        (folder / "lines").mkdir(exist_ok=True)
        (folder / "lines" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:03d}.txt").write_text(text)
    data = datasets.Dataset.from_dict({"text": texts})
    data.to_parquet(folder / "p.parquet", batch_size=10)
    data.save_to_disk(folder / "saved")

    def opened(place: str, **options: Any) -> Make:
        return lambda: open_tokens(place, tokenizer=tokenizer, cache=folder / "cache", **options)

    def stream(name: str) -> Make:
        place = f"datasets://{folder}/{name}"
        return lambda: StreamedDocuments(open_shards(place), tokenizer, lanes=4, block_documents=3)

    shards: Make = lambda: TokenShards(folder / "shards")  # noqa: E731
    found: dict[str, Make] = {
        "shards": shards,
        "npy": lambda: TokenFiles(folder / "t.npy", eos_id=eos, cache=folder / "cache"),
        "raw": lambda: TokenFiles(folder / "raw", dtype="uint32", eos_id=eos, cache=folder / "cache"),
        "megatron": lambda: MegatronTokens(folder / "m.idx", vocab_size=tokenizer.vocab_size, cache=folder / "cache"),
        "best fit": lambda: PackedDocuments(shards(), cache=folder / "cache"),
        "truncated": lambda: PackedDocuments(shards(), truncate=True, cache=folder / "cache"),
        "jsonl": opened(str(folder / "lines")),
        "txt": opened(str(folder / "texts")),
        "parquet": opened(str(folder / "p.parquet")),
        "dataset": opened(f"datasets://{folder}/lines"),
        "saved dataset": opened(f"datasets://{folder}/saved"),
        "stream": stream("lines"),
        "saved stream": stream("saved"),
    }
    found["mixture"] = lambda: Mixture(
        {"a": found["best fit"](), "b": found["jsonl"](), "c": found["dataset"]()},
        {"a": 3, "b": 2, "c": 1},
        max_epochs={"a": 1},
        phases=[(40, {"b": 1, "c": 4})],
    )
    found["mixture with streams"] = lambda: Mixture(
        {"a": found["stream"](), "b": found["saved stream"](), "c": found["shards"]()},
        {"a": 3, "b": 2, "c": 2},
        max_epochs={"c": 1},
        phases=[(40, {"a": 1, "b": 4})],
    )
    return found


@pytest.fixture(scope="module")
def straight(makes: dict[str, Make]) -> Callable[[str], tuple[list[Step], dict[str, Any]]]:
    """The undisturbed run of a kind, and the state after it."""
    found: dict[str, Any] = {}

    def run(kind: str) -> tuple[list[Step], dict[str, Any]]:
        if kind not in found:
            found[kind] = play(makes[kind], [Session(STEPS, 0, 1, 4, 0)], row_tokens=ROW, seed=SEED)
        return found[kind]

    return run


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=sessions())
def test_any_script_gives_what_an_undisturbed_run_does(
    kind: str, script: list[Session], makes: dict[str, Make], straight: Callable[[str], Any]
) -> None:
    rows, _ = straight(kind)
    kept = sum(session.kept for session in script)
    found, state = play(makes[kind], script, row_tokens=ROW, seed=SEED)
    assert found == rows[:kept]
    assert state["position"] == 4 * kept
    more, after = play(makes[kind], [*script, Session(STEPS - kept, 0, 2, 3, 1)], row_tokens=ROW, seed=SEED)
    assert more == rows and after == straight(kind)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_every_document_once(
    kind: str, makes: dict[str, Make], straight: Callable[[str], Any], tokenizer: Tokenizer
) -> None:
    rows: dict[int, tuple[int, ...]] = {}
    order = []
    for name, ids in itertools.chain(*(step.items() for step in straight(kind)[0])):
        rows.setdefault(name, ids)
        order.append(name)
    texts = {f"document {i} " + "x" * (7 * i % 19) for i in range(40)}
    source = makes[kind]()
    parts = dict(enumerate(getattr(source, "_sources", [source])))
    for k, part in parts.items():
        mine = [name for name in order if name >> 48 == k]
        if isinstance(part, StreamedDocuments):
            lanes = [[name for name in mine if name % 4 == lane] for lane in range(4)]
            assert all(len(set(lane)) == len(lane) for lane in lanes)
            seen = [whole_documents([rows[name] for name in lane], tokenizer) for lane in lanes]
            firsts = [documents[: len(set(documents))] for documents in seen]
            assert all(len(set(first)) == len(first) for first in firsts)
            counted = Counter(itertools.chain(*firsts))
            assert set(counted.values()) == {1} and set(counted) <= texts
            if len(parts) == 1:
                assert set(counted) == texts
            continue
        count = part.row_count(ROW)
        epochs = [mine[at : at + count] for at in range(0, len(mine), count)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        if len(epochs[0]) == count and kind != "truncated":
            numbers = Counter(itertools.chain(*(rows[name] for name in epochs[0])))
            wanted = Counter(token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_id])
            numbers[0] -= count * ROW - sum(wanted.values())  # padding
            assert +numbers == wanted


def whole_documents(rows: list[tuple[int, ...]], tokenizer: Tokenizer) -> list[str]:
    """Documents that rows, laid end to end, begin with."""
    found, now = [], []
    for token in itertools.chain(*rows):
        if token != tokenizer.eos_id:
            now.append(token)
        elif now:
            found.append(tokenizer.decode(now))
            now = []
    return found


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=sessions(), bad=st.sets(st.integers(0, 60), max_size=5))
def test_rows_that_are_skipped_stay_skipped_through_any_script(
    script: list[Session], bad: set[int], makes: dict[str, Make], straight: Callable[[str], Any]
) -> None:
    """The same, with some rows of a stream in quarantine from the beginning."""
    kind = "stream"
    rows, _ = straight(kind)
    _, state = play(makes[kind], [Session(0, 0, 1, 4, 0)], row_tokens=ROW, seed=SEED)
    state["quarantined"] = sorted(bad)
    found, _ = play(makes[kind], script, row_tokens=ROW, seed=SEED, state=state)
    for step, whole in zip(found, rows, strict=False):
        assert {name: ids for name, ids in step.items() if name != -1} == {
            name: ids for name, ids in whole.items() if name not in bad
        }
