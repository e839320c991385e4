"""Of every kind of source each document comes exactly once an epoch, however a run is killed, resumed and dealt anew.

A script of kills and resumes must give, step for step, what an undisturbed run gives, but for the rows that it has put
into quarantine, with rows of one length or of several; and the undisturbed run's first epoch, of each length, must hold
the tokens of all documents, each as often as it is there.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripts import Session, Step, play, sessions, without

from kforge_data import (
    MegatronTokens,
    Mixture,
    PackedDocuments,
    RowPhase,
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
PHASES = {"one length": (), "three lengths": (RowPhase(6, 32), RowPhase(11, 8))}
KINDS = (
    *("shards", "npy", "raw", "megatron", "best fit", "truncated"),
    *("jsonl", "txt", "parquet", "dataset", "saved dataset"),
    *("stream", "saved stream", "parquet stream", "mixture", "mixture with streams"),
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
        "parquet stream": stream("p.parquet"),
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
def straight(makes: dict[str, Make]) -> Callable[..., tuple[list[Step], dict[str, Any]]]:
    """The undisturbed run of a kind, and the state after it."""
    found: dict[Any, Any] = {}

    def run(kind: str, phases: Sequence[RowPhase] = (), steps: int = STEPS) -> tuple[list[Step], dict[str, Any]]:
        key = (kind, tuple(phases), steps)
        if key not in found:
            script = [Session(steps, 0, 1, 4, 0)]
            found[key] = play(makes[kind], script, row_tokens=ROW, seed=SEED, phases=phases)
        return found[key]

    return run


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=sessions(), lengths=st.sampled_from(sorted(PHASES)))
@example(
    script=[Session(4, 2, 2, 1, 1, frozenset({17, 30, 60})), Session(5, 1, 4, 1, 0), Session(4, 0, 1, 3, 2)],
    lengths="three lengths",
)
def test_any_script_gives_what_an_undisturbed_run_does(
    kind: str, lengths: str, script: list[Session], makes: dict[str, Make], straight: Callable[..., Any]
) -> None:
    rows, last = straight(kind, PHASES[lengths])
    options: dict[str, Any] = {"row_tokens": ROW, "seed": SEED, "phases": PHASES[lengths]}
    options["order"] = [name for step in rows for name in step]
    wanted, _ = without(rows, script)
    found, state = play(makes[kind], script, **options)
    assert found == wanted
    assert state["position"] == 4 * len(wanted)
    rest = [Session(STEPS - len(wanted), 0, 2, 3, 1)]
    wanted, bad = without(rows, [*script, *rest])
    more, after = play(makes[kind], rest, state=state, **options)
    assert found + more == wanted
    if bad:  # a lane stands before the rows of it that were skipped
        assert {**after, "lanes": 0} == {**last, "lanes": 0, "quarantined": bad}
    else:
        assert after == last


@pytest.mark.parametrize("kind", KINDS)
def test_processes_give_what_an_undisturbed_run_does(
    kind: str, makes: dict[str, Make], straight: Callable[..., Any]
) -> None:
    """Forked, and of a source that came by pickle."""
    phases = PHASES["three lengths"]
    rows, _ = straight(kind, phases)
    script = [Session(5, 1, 2, 1, 1), Session(4, 0, 1, 2, 2)]
    found, _ = play(
        lambda: pickle.loads(pickle.dumps(makes[kind]())),
        script,
        row_tokens=ROW,
        seed=SEED,
        phases=phases,
        worker_kind="fork",
    )
    assert found == rows[:9]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_every_document_once(
    kind: str, makes: dict[str, Make], straight: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    lengths, phases = (ROW, 32, 8), (RowPhase(24, 32), RowPhase(40, 8))
    rows: dict[int, tuple[int, ...]] = {}
    order = []
    for name, ids in itertools.chain(*(step.items() for step in straight(kind, phases, 90)[0])):
        rows.setdefault(name, ids)
        order.append(name)
    texts = {f"document {i} " + "x" * (7 * i % 19) for i in range(40)}
    source, whole = makes[kind](), 0
    parts = dict(enumerate(getattr(source, "_sources", [source])))
    for (phase, length), (k, part) in itertools.product(enumerate(lengths), parts.items()):
        mine = [name for name in order if name >> 56 == phase and name >> 48 & 255 == k]
        assert all(len(rows[name]) == length for name in mine)
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
                whole += 1
            continue
        count = part.row_count(length)
        epochs = [mine[at : at + count] for at in range(0, len(mine), count)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        if epochs and len(epochs[0]) == count and kind != "truncated":
            numbers = Counter(itertools.chain(*(rows[name] for name in epochs[0])))
            wanted = Counter(token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_id])
            numbers[0] -= count * length - sum(wanted.values())  # padding
            assert +numbers == wanted
            whole += 1
    assert whole == (0 if kind == "truncated" else 3) or len(parts) > 1


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
