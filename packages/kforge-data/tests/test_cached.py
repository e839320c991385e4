"""Text and datasets tokenized once: by one process, into a cache that outlives kills, with no document lost."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kforge_data.cached
from kforge_data import DataConfig, Tokenizer, TokenShards, cached_tokens, open_tokens, training_source, verify_shards
from kforge_data.cache import _locked
from kforge_data.unfinished import NOTE

# One who fills the cache in batches of 3 documents, with a note after every 60 bytes, killed at the n-th batch.
KILLED = """
import os, sys
import kforge_data.tokenize as t, kforge_data.shard_writer as w
from kforge_data import Tokenizer, cached_tokens
t.BATCH_DOCUMENTS, t.NOTE_BYTES = 3, 60
left, real = int(sys.argv[1]), w.ShardWriter.add_batch
def dying(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    return real(*args)
w.ShardWriter.add_batch = dying
cached_tokens([sys.argv[2]], tokenizer=Tokenizer.load(sys.argv[3]), cache=sys.argv[4])
"""


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Names under which the same 60 documents, some without text, are found: .jsonl, .parquet and datasets of them."""
    import datasets

    texts = ["" if i % 9 == 4 else f"text {i} " * (1 + i % 5) for i in range(60)]
    (tmp_path / "files").mkdir()
    lines = [json.dumps({"n": i, "text": text}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "files" / "a.jsonl").write_text("".join(lines))
    data = datasets.Dataset.from_dict({"n": list(range(60)), "text": texts})
    data.to_parquet(tmp_path / "p.parquet")
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"all": data, "train": data.select(range(1))}).save_to_disk(tmp_path / "splits")
    hub = [f"datasets://{tmp_path}/{name}" for name in ("files", "p.parquet", "saved", "splits?split=all")]
    return [str(tmp_path / "files"), str(tmp_path / "p.parquet"), *hub]


def documents(shards: TokenShards, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(shards.document(i), skip_special=True) for i in range(shards.documents)]


def test_every_name_gives_the_same_documents(corpus: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    wanted = [f"text {i} " * (1 + i % 5) for i in range(60) if i % 9 != 4]
    for place in corpus:
        shards = open_tokens(place, tokenizer=tokenizer, cache=tmp_path / "cache")
        assert isinstance(shards, TokenShards)
        assert documents(shards, tokenizer) == wanted
        assert shards.index.skipped_documents == 60 - len(wanted)
    assert len({p.name for p in (tmp_path / "cache" / "tokens").iterdir() if p.is_dir()}) == len(corpus)


@pytest.mark.parametrize("name", [0, 4])
def test_a_half_built_cache_is_gone_on_with(name: int, corpus: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    place = corpus[name]
    tokenizer.save(tmp_path / "t.json")
    whole = cached_tokens([place], tokenizer=tokenizer, cache=tmp_path / "whole")
    for batches in (9, 5):
        words = [str(batches), place, str(tmp_path / "t.json"), str(tmp_path / "cache")]
        assert subprocess.run([sys.executable, "-c", KILLED, *words], check=False).returncode == -9
        (partial,) = (tmp_path / "cache" / "tokens").glob("*.partial")
        before = json.loads((partial / NOTE).read_text())["documents"]
        assert 0 < before < whole.documents
    again = cached_tokens([place], tokenizer=tokenizer, cache=tmp_path / "cache")
    assert before >= 18  # what the second one did went on from the first
    assert again.fingerprint == whole.fingerprint
    assert documents(again, tokenizer) == documents(whole, tokenizer)


@pytest.mark.parametrize("damage", ["note", "shard", "index"])
def test_a_half_built_cache_that_is_damaged_is_begun_anew(
    damage: str, corpus: list[str], tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.save(tmp_path / "t.json")
    whole = cached_tokens([corpus[0]], tokenizer=tokenizer, cache=tmp_path / "whole")
    words = ["9", corpus[0], str(tmp_path / "t.json"), str(tmp_path / "cache")]
    assert subprocess.run([sys.executable, "-c", KILLED, *words], check=False).returncode == -9
    (partial,) = (tmp_path / "cache" / "tokens").glob("*.partial")
    if damage == "note":
        note = (partial / NOTE).read_text()
        (partial / NOTE).write_text(note.replace('"part": ', '"part": 1'))
    elif damage == "shard":
        (partial / "0-00000.bin").unlink()
    else:  # it was killed between its last two moves
        (partial / "index.json").write_text("{")
    again = cached_tokens([corpus[0]], tokenizer=tokenizer, cache=tmp_path / "cache")
    assert "what was begun is made anew" in caplog.text
    assert again.fingerprint == whole.fingerprint and verify_shards(again.path) == []


def test_one_builds_while_others_wait(
    corpus: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    real = kforge_data.cached.tokenize_files

    def counting(files: Any, folder: Path, **options: Any) -> Any:
        built.append(folder)
        return real(files, folder, **options)

    monkeypatch.setattr(kforge_data.cached, "tokenize_files", counting)
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(cached_tokens, [corpus[2]], tokenizer=tokenizer, cache=tmp_path / "cache") for _ in range(3)
        ]
        found = {job.result().fingerprint for job in jobs}
    cached_tokens([corpus[2]], tokenizer=tokenizer, cache=tmp_path / "cache")  # a later run
    assert len(built) == 1 and len(found) == 1
    folder = built[0].with_suffix("")
    other = cached_tokens([corpus[2]], tokenizer=tokenizer, cache=tmp_path / "cache", txt_documents="line")
    assert len(built) == 2 and other.fingerprint in found  # other options, another entry
    folder.rename(folder.with_name("away"))
    tokenizer.save(tmp_path / "t.json")
    config = DataConfig(
        train=corpus[2], tokenizer=str(tmp_path / "t.json"), cache=str(tmp_path / "cache"), cache_wait_s=0.0
    )
    with (
        _locked(folder.with_name(folder.name + ".lock"), 1),
        pytest.raises(ValueError, match=r"data.train: another process has been building .* for 0 s"),
    ):
        training_source(config)


def test_in_a_config(corpus: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    config = DataConfig(
        mixture=({"name": "a", "path": corpus[0]}, {"name": "b", "path": corpus[4], "weight": 3}),
        tokenizer=str(tmp_path / "t.json"),
        cache=str(tmp_path / "cache"),
        row_tokens=16,
    )
    source = training_source(config)
    alone = training_source(DataConfig(train=corpus[0], tokenizer=config.tokenizer, cache=config.cache, row_tokens=16))
    assert source.row_count(16) == 2 * alone.row_count(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "?stream=1", "packing": "best_fit"}, "data.packing = best_fit looks at all documents before"),
        ({"train": "?stream=1", "mask_short": 9}, "data.mask_short = 9 looks at all documents before"),
        ({"train": "?stream=1", "mask_duplicates": True}, "data.mask_duplicates = True looks at all documents before"),
        ({"train": "?stream=1", "tokenizer": ""}, "stream=1 is text, which takes a tokenizer"),
        ({"train": ""}, "data.train is empty, and there is no data.mixture"),
        ({"lanes": 0}, "data.lanes = 0 must be at least 1"),
        ({"stream_block": 0}, "data.stream_block = 0 must be at least 1"),
        ({"tokenizer": ""}, r"is text, which takes a tokenizer; name its tokenizer.json \(data.tokenizer\)"),
        ({"text_field": "texts"}, "no record has the field 'texts'"),
        ({"cache_wait_s": -1.0}, "data.cache_wait_s = -1.0 must be"),
        ({"text_field": ""}, "data.text_field is empty"),
    ],
)
def test_what_cannot_be(
    change: dict[str, Any], message: str, corpus: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t.json")
    options = {"train": corpus[0], "tokenizer": str(tmp_path / "t.json"), "cache": str(tmp_path / "cache"), **change}
    if options["train"].startswith("?"):
        options["train"] = corpus[2] + options["train"]
    with pytest.raises(ValueError, match=message):
        training_source(DataConfig(**options))
