"""What the README says of odd input, one test a line of its table."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from kforge_data import (
    Loader,
    MegatronTokens,
    Mixture,
    PackedDocuments,
    ShardWriter,
    TokenFiles,
    Tokenizer,
    TokenShards,
    evaluation_batches,
    read_documents,
    tokenize_files,
    verify_shards,
    verify_tokens,
    write_megatron,
)
from kforge_data.cli import main

Make = Callable[..., TokenShards]
LONG = 70_000  # tokens of a document, more than 2**16


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFORGE_DATA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["cut", "best_fit", "mixture"])
def test_a_set_smaller_than_one_global_batch(numbered: Make, kind: str) -> None:
    """Epochs follow one another inside a step; with an end, the step is filled with padding, on every rank alike."""
    source: Any = numbered(3)
    if kind == "best_fit":
        source = PackedDocuments(source)
    limit = {"epochs": 1}
    if kind == "mixture":
        source, limit = Mixture({"a": source}, max_epochs={"a": 1}), {}
    endless = Mixture({"a": numbered(3, name="b")}) if kind == "mixture" else source
    with Loader(endless, row_tokens=4, global_rows=8) as loader:
        (batch,) = loader.next()
        first, second = batch["row_ids"][:3].tolist(), batch["row_ids"][3:6].tolist()
        assert sorted(first) == sorted(second) and len(set(first)) == 3 and (batch["row_ids"] >= 0).all()
    seen = []
    for rank in range(4):
        with Loader(source, row_tokens=4, global_rows=8, rank=rank, world=4, **limit) as loader:
            ((batch,),) = loader
            assert (batch["labels"][batch["row_ids"] == -1] == -100).all()
            seen += batch["row_ids"].tolist()
    assert sorted(seen)[:5] == [-1] * 5 and len({row for row in seen if row >= 0}) == 3
    batches = list(evaluation_batches(source, row_tokens=4, microbatch_rows=8))
    assert len(batches) == 1 and (batches[0]["row_ids"] >= 0).sum() == 3


def test_empty_files_of_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They hold no document, and are no fault beside others that do."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in {"a.jsonl": b"", "b.jsonl.gz": gzip.compress(b""), "c.txt": b"", "d.jsonl": b"\n\n"}.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), folder / "e.parquet")
    with pytest.raises(ValueError, match="no text in"):
        tokenize_files([folder], tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
    (folder / "f.jsonl").write_text('{"text": "one"}\n')
    assert tokenize_files([folder], tmp_path / "out", tokenizer=tokenizer).train.documents == 1
    (folder / "g.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"g.parquet is no whole parquet file"):
        list(read_documents([folder]))


def test_empty_files_of_tokens(make_shards: Make, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty(0, np.uint16))
    with pytest.raises(ValueError, match="no tokens in there"):
        TokenFiles(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.array([1, 0], np.uint16))
    assert TokenFiles([tmp_path / "a.npy", tmp_path / "b.npy"], eos_id=0).tokens == 2
    empty = make_shards([])
    assert empty.tokens == 0 and verify_shards(empty.path) == []
    with pytest.raises(ValueError, match="holds no tokens, so there is nothing to read"):
        Loader(empty, row_tokens=4, global_rows=1)
    write_megatron(make_shards([[1]], name="one"), tmp_path / "m")
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"m.bin has 0 bytes"):
        MegatronTokens(tmp_path / "m")


def test_empty_documents(make_shards: Make, tmp_path: Path) -> None:
    """Skipped and counted where they are written; one of nothing but its end is a token, which no row scores."""
    shards = make_shards([[], [3, 0], [], []], eos_id=0)
    assert shards.documents == 1 and shards.index.skipped_documents == 3
    np.save(tmp_path / "t.npy", np.array([0, 0, 3, 0], np.uint16))
    files = TokenFiles(tmp_path / "t.npy", eos_id=0)
    assert [files.document(i).tolist() for i in range(files.documents)] == [[0], [0], [3, 0]]
    ((batch,),) = Loader(files, row_tokens=4, global_rows=1, epochs=1)
    assert batch["labels"].tolist() == [[-100, -100, 0, -100]]


@pytest.mark.parametrize("kind", ["shards", "npy", "megatron"])
def test_a_document_of_more_than_65536_tokens(make_shards: Make, tmp_path: Path, kind: str) -> None:
    """It lies in one piece, whatever the size of a shard, and rows number its tokens without a break."""
    long = (np.arange(LONG) % 60_000 + 1).tolist()
    shards = make_shards([[5, 0], [*long, 0], [6, 0]], eos_id=0, shard_tokens=1000)
    if kind != "shards":
        out = tmp_path / ("t.npy" if kind == "npy" else "t.idx")
        assert main(["convert", str(shards.path), "--to", kind, "--out", str(out)]) == 0
    stream: Any = {
        "shards": lambda: shards,
        "npy": lambda: TokenFiles(tmp_path / "t.npy", eos_id=0),
        "megatron": lambda: MegatronTokens(tmp_path / "t"),
    }[kind]()
    assert stream.document(1).tolist() == [*long, 0] and stream.documents == 3
    width = 1 << 17
    (batch,) = evaluation_batches(stream, row_tokens=width, microbatch_rows=1)
    assert batch["position_ids"][0, 2 : 2 + LONG + 1].tolist() == list(range(LONG + 1))
    assert batch["cu_seqlens"][:4].tolist() == [0, 2, LONG + 3, LONG + 5] and batch["max_seqlen"] >= LONG
    packed = PackedDocuments(stream)
    labels = [
        label
        for batch in evaluation_batches(packed, row_tokens=4096, microbatch_rows=1)
        for label in batch["labels"].reshape(-1).tolist()
        if label != -100
    ]
    assert sorted(labels) == sorted([0, 0, *long[1:], 0])  # every token but the first of a document is scored once


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    """Refused where they are written or first read; found by `verify` in files that somebody changed."""
    with (
        pytest.raises(ValueError, match="id 10 is outside of a vocabulary of 10"),
        ShardWriter(tmp_path / "s", vocab_size=10) as writer,
    ):
        writer.add([1, 10])
    np.save(tmp_path / "t.npy", np.array([1, 10], np.uint16))
    with pytest.raises(ValueError, match="id 10 is outside of a vocabulary of 10; wrong dtype"):
        TokenFiles(tmp_path / "t.npy", vocab_size=10)
    with ShardWriter(tmp_path / "s", vocab_size=11) as writer:
        writer.add([1, 10])
    write_megatron(TokenShards(tmp_path / "s"), tmp_path / "m")
    assert MegatronTokens(tmp_path / "m").vocab_size == 11
    (fault,) = verify_tokens(MegatronTokens(tmp_path / "m", vocab_size=10))
    assert "id 10 is outside of a vocabulary of 10" in fault
    index = tmp_path / "s" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "vocab_size": 10}))
    assert any("id 10 is outside of a vocabulary of 10" in fault for fault in verify_shards(tmp_path / "s"))


def test_a_shard_whose_checksum_fails(make_shards: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening reads nothing and so sees nothing; `verify` names the file; a file of another size is refused at once."""
    shards = make_shards([[1, 2, 0], [3, 0]], eos_id=0)
    file = shards.path / "0-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 4]) + whole[1:])
    assert TokenShards(shards.path).fingerprint == shards.fingerprint
    assert main(["verify", str(shards.path)]) == 1
    captured = capsys.readouterr()
    assert f"{file}: sha256 is" in captured.err and "damaged" in captured.out
    file.write_bytes(whole[:-1])
    assert main(["verify", str(shards.path)]) == 1
    assert "0-00000.bin has 9 bytes" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"0-00000.bin has 9 bytes"):
        TokenShards(shards.path)
