"""Every kind of source is reached from a job, and what is read from it is what it holds."""

import json
from dataclasses import replace

import numpy as np
import pytest
from jobs import VOCAB, job, train, values

from kforge_data import (
    DataConfig,
    ShardWriter,
    TokenShards,
    tokenize_files,
    train_tokenizer,
    training_source,
    write_megatron,
)
from kforge_testing import run_ranks
from kforge_train import ConfigError, JobConfig
from kforge_train.build import check


@pytest.fixture(scope="module")
def copies(tokens, tmp_path_factory):
    """The training tokens in every format, by name, with what must be said of it."""
    folder = tmp_path_factory.mktemp("copies")
    shards = TokenShards(tokens / "train")
    ids = shards.read(0, shards.tokens)
    np.save(folder / "t.npy", ids.astype(np.int32))
    (folder / "raw").mkdir()
    ids[:1000].astype(np.uint16).tofile(folder / "raw" / "0.bin")
    ids[1000:].astype(np.uint16).tofile(folder / "raw" / "1.bin")
    write_megatron(shards, folder / "m")
    return {
        "npy": {"data__train": str(folder / "t.npy"), "data__eos_id": 0},
        "bin": {"data__train": str(folder / "raw"), "data__eos_id": 0, "data__dtype": "uint16"},
        "megatron": {"data__train": str(folder / "m.idx")},
        "mixture": {
            "data__train": "",
            "data__mixture": [{"name": "a", "path": str(tokens / "train")}],
            "data__shuffle": False,
        },
    }


@pytest.fixture(scope="module")
def losses(tokens, tmp_path_factory):
    def of(**overrides):
        folder = tmp_path_factory.mktemp("run")
        config = job(tokens, folder, train__steps=3, data__cache=str(folder / "cache"), **overrides)
        assert run_ranks(train, 1, config) == [0]
        return values(folder, "loss")

    return of


@pytest.mark.parametrize("kind", ["npy", "megatron", "mixture", "bin"])
def test_every_kind_of_source_trains_alike(copies, losses, kind):
    shuffle = {"data__shuffle": False} if kind == "mixture" else {}  # its sources have orders of their own
    expected, found = losses(**shuffle), losses(**copies[kind])
    if kind == "bin":  # a document goes on in the second file as another one
        assert found.keys() == expected.keys() and all(abs(found[k] - expected[k]) < 0.1 for k in found)
    else:
        assert found == expected


def test_documents_of_a_file_without_their_end_are_one(copies, losses):
    assert losses(**copies["npy"]) != losses(**{**copies["npy"], "data__eos_id": None})


@pytest.mark.parametrize("kind", ["lines.jsonl", "dataset"])
def test_text_trains_as_its_tokens_do(kind, losses, tmp_path):
    texts = [f"{i} and {i * i} make {i + i * i}. " * (1 + i % 7) for i in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    tokenize_files([tmp_path / "lines.jsonl"], tmp_path / "tokens", tokenizer=tokenizer, field="body")
    more = {"model__vocab_size": 300, "data__tokenizer": str(tmp_path / "t.json"), "data__heldout": ""}
    expected = losses(data__train=str(tmp_path / "tokens"), **more)
    place = str(tmp_path / kind) if kind == "lines.jsonl" else f"datasets://{tmp_path}/lines.jsonl"
    assert losses(data__train=place, data__text_field="body", **more) == expected


def test_a_stream_trains_on_any_number_of_ranks(tmp_path):
    """Saved by two ranks and gone on with by one, a dataset that is read while training gives the losses of one run."""
    texts = [f"{i} and {i * i} make {i + i * i}. " * (1 + i % 7) for i in range(200)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def run(name, ranks, steps, **overrides):
        config = job(
            tmp_path,
            tmp_path / name,
            model__vocab_size=300,
            data__train="",
            data__mixture=[
                {"name": "live", "path": f"datasets://{tmp_path}/lines.jsonl?stream=1", "weight": 3},
                {"name": "kept", "path": str(tmp_path / "lines.jsonl")},
            ],
            data__tokenizer=str(tmp_path / "t.json"),
            data__cache=str(tmp_path / "cache"),
            data__heldout="",
            data__lanes=4,
            data__stream_block=16,
            train__steps=steps,
            ckpt__every_steps=2,
            optim__schedule="constant",
            optim__warmup_steps=0,
            **overrides,
        )
        assert run_ranks(train, ranks, config) == [0] * ranks
        return values(tmp_path / name, "loss")

    straight = run("straight", 1, 6)
    run("moved", 2, 2, data__microbatch_rows=1)
    run("moved", 1, 4, data__workers=2)
    assert run("moved", 2, 6) == pytest.approx(straight, rel=1e-5)

    def source(**changes):
        stream = f"datasets://{tmp_path}/lines.jsonl?stream=1"
        return DataConfig(train=stream, tokenizer=str(tmp_path / "t.json"), **changes)

    orders = [training_source(source(**change)) for change in ({}, {"lanes": 32}, {"stream_block": 16})]
    assert len({order.fingerprint for order in orders}) == 3
    refused = job(tmp_path, tmp_path / "no", model__vocab_size=300, data__global_rows=3, parallel__dp_shard=3)
    with pytest.raises(ConfigError, match=r"data\.lanes = 64 cannot be dealt to 3 data ranks"):
        check(replace(refused, data=replace(source(), global_rows=3, row_tokens=16)), 3)


def test_a_document_that_is_there_twice_is_scored_once(tmp_path):
    """With copies masked, the loss is that of a set that has none."""
    losses = {}
    for name, numbers, masked in (("copies", "121312", False), ("masked", "121312", True), ("once", "123", False)):
        with ShardWriter(tmp_path / name, vocab_size=VOCAB, eos_id=0) as writer:
            for number in map(int, numbers):
                writer.add([*range(number, 9 * number, number), 0])
        config = job(
            tmp_path,
            tmp_path / f"{name}-run",
            data__train=str(tmp_path / name),
            data__mask_duplicates=masked,
            data__cache=str(tmp_path / "cache"),
            data__row_tokens=9,
            data__global_rows=len(numbers),
            data__heldout="",
            train__steps=1,
            optim__warmup_steps=0,
        )
        assert run_ranks(train, 1, config) == [0]
        losses[name] = values(tmp_path / f"{name}-run", "loss")[1]
    assert losses["masked"] == pytest.approx(losses["once"], rel=1e-12)
    assert losses["masked"] != pytest.approx(losses["copies"], rel=1e-6)


def test_a_changed_mixture_is_refused_or_accepted(tokens, tmp_path):
    def run(steps, weight, **overrides):
        mixture = [
            {"name": "a", "path": str(tokens / "train")},
            {"name": "b", "path": str(tokens / "heldout"), "weight": weight},
        ]
        return job(tokens, tmp_path, data__train="", data__mixture=mixture, train__steps=steps, **overrides)

    assert run_ranks(train, 1, run(2, 1.0, ckpt__every_steps=2)) == [0]
    with pytest.raises(Exception, match=r"weights from row 0 was .* and is "):
        run_ranks(train, 1, run(3, 2.0))
    assert run_ranks(train, 1, run(3, 2.0, data__accept_changed_data=True)) == [0]
    assert sorted(values(tmp_path, "loss")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__train": "", "data__mixture": [{"name": "a", "path": "x"}]}, "data.mixture a: x is not a folder"),
        ({"data__packing": "tight"}, "data.packing = 'tight' is not one of"),
        ({"data__phases": [{"step": 2, "weights": {}}]}, "there is no data.mixture"),
        ({"data__mixture": [{"name": "a", "path": "x"}]}, "data.train and data.mixture are both set"),
    ],
)
def test_what_cannot_be(tokens, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(job(tokens, tmp_path, **overrides), 1)


def test_a_mixture_that_ends_too_soon_is_refused_before_the_run(tokens, tmp_path):
    mixture = [{"name": "a", "path": str(tokens / "train"), "max_epochs": 1}]
    config: JobConfig = job(tokens, tmp_path, data__train="", data__mixture=mixture, train__steps=10_000)
    with pytest.raises(ConfigError, match="want 80000 rows, and the mixture ends after"):
        check(config, 1)


def test_a_source_of_a_mixture_that_is_never_read_is_refused_before_the_run(tokens, tmp_path):
    weights = {"train": 1.0, "heldout": 0.0}
    mixture = [{"name": name, "path": str(tokens / name), "weight": weight} for name, weight in weights.items()]
    config = job(tokens, tmp_path, data__train="", data__mixture=mixture)
    with pytest.raises(ConfigError, match="heldout has weight 0 in every phase and would never be read"):
        check(config, 1)
