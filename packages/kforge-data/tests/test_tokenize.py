"""Text to shards: nothing lost (C07), nothing empty (C08), no forged boundary (C09), the split by hash."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kforge_data import (
    DataConfig,
    Loader,
    Tokenizer,
    TokenShards,
    read_documents,
    tokenize_files,
    training_streams,
    verify_shards,
)


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(shards: TokenShards, tokenizer: Tokenizer) -> list[str]:
    """Texts of the documents, each checked to end with the end-of-text token, and without it."""
    ids = [shards.document(i).tolist() for i in range(shards.documents)]
    assert all(document[-1] == tokenizer.eos_id for document in ids)
    return [tokenizer.decode(document[:-1]) for document in ids]


def test_texts_come_back_in_order(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    report = tokenize_files([file], tmp_path / "out", tokenizer=tokenizer)
    shards = TokenShards(tmp_path / "out")
    assert report.heldout is None and report.train.fingerprint == shards.fingerprint
    assert documents(shards, tokenizer) == texts
    assert shards.text_bytes == sum(len(text.encode()) for text in texts)
    assert shards.vocab_size == 300 and shards.dtype == np.uint16 and shards.eos_id == 0
    assert shards.index.tokenizer == tokenizer.fingerprint
    assert verify_shards(tmp_path / "out") == []


# C07: the last partial batch of documents is never written.


@pytest.mark.parametrize("count", [2500, 999, 1])
def test_c07_the_tail_is_written(tokenizer: Tokenizer, tmp_path: Path, count: int) -> None:
    (tmp_path / "c.txt").write_text("".join(f"word{i}\n" for i in range(count)))
    report = tokenize_files([tmp_path / "c.txt"], tmp_path / "out", tokenizer=tokenizer, txt_documents="line")
    assert report.train.documents == count
    assert documents(report.train, tokenizer) == [f"word{i}" for i in range(count)]


def test_c07_the_last_short_shard_is_listed_and_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"text": f"word{i}"} for i in range(100)])
    whole = tokenize_files([file], tmp_path / "one", tokenizer=tokenizer).train
    limit = whole.tokens * 2 // 3
    shards = tokenize_files([file], tmp_path / "two", tokenizer=tokenizer, shard_tokens=limit).train
    assert next(shard.documents for shard in shards.index.shards) > 50 and len(shards.index.shards) == 2
    assert shards.index.shards[1].tokens < limit and shards.documents == 100
    rows = [
        batch["input_ids"].reshape(-1)
        for window in Loader(shards, row_tokens=8, global_rows=1, shuffle=False, epochs=1)
        for batch in window
    ]
    assert np.concatenate(rows)[: shards.tokens].tolist() == whole.read(0, whole.tokens).tolist()


# C08: an empty document aborts preprocessing.


@pytest.mark.parametrize("workers", [0, 2])
def test_c08_empty_documents_are_skipped_and_counted(tokenizer: Tokenizer, tmp_path: Path, workers: int) -> None:
    records = [{"text": ""}, {"text": " "}, {"text": "hello"}, {"text": None}, {"other": 1}, {"text": ""}]
    file = jsonl(tmp_path / "c.jsonl", records)
    report = tokenize_files([file], tmp_path / "out", tokenizer=tokenizer, workers=workers)
    assert documents(report.train, tokenizer) == [" ", "hello"]
    assert report.empty == 4 and report.train.index.skipped_documents == 4
    assert verify_shards(tmp_path / "out") == []


def test_c08_strict_names_the_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"text": "a"}, {"text": ""}])
    with pytest.raises(ValueError, match=r"c.jsonl:2: the document has no text"):
        tokenize_files([file], tmp_path / "out", tokenizer=tokenizer, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl"]


# C09: special-token strings inside raw text become control tokens.


def test_c09_a_marker_in_the_text_makes_no_boundary(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "a <|endoftext|> b"
    file = jsonl(tmp_path / "c.jsonl", [{"text": text}])
    plain = tokenize_files([file], tmp_path / "plain", tokenizer=tokenizer).train
    assert documents(plain, tokenizer) == [text]
    assert np.count_nonzero(plain.document(0) == tokenizer.eos_id) == 1
    ((batch,),) = Loader(plain, row_tokens=plain.tokens, global_rows=1, epochs=1)
    assert batch["doc_ids"].max() == 0 and (batch["labels"] == -100).sum() == 1
    parsed = tokenize_files([file], tmp_path / "parsed", tokenizer=tokenizer, parse_special=True).train
    assert np.count_nonzero(parsed.document(0) == tokenizer.eos_id) == 2 and parsed.documents == 1


# The split.


def test_heldout_is_by_hash_of_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    records = [{"text": f"document number {i % 1500}"} for i in range(2000)]
    file = jsonl(tmp_path / "a.jsonl", records)
    report = tokenize_files([file], tmp_path / "a", tokenizer=tokenizer, heldout=0.1)
    assert report.heldout is not None
    assert report.train.path == tmp_path / "a" / "train" and report.heldout.path == tmp_path / "a" / "heldout"
    train, heldout = documents(report.train, tokenizer), documents(report.heldout, tokenizer)
    assert sorted(train + heldout) == sorted(record["text"] for record in records)
    assert not set(train) & set(heldout)  # copies stay together
    assert 0.06 < len(set(heldout)) / 1500 < 0.14
    # Another order, other files: the same documents are held out.
    back = jsonl(tmp_path / "b.jsonl", records[::-1])
    again = tokenize_files([back], tmp_path / "b", tokenizer=tokenizer, heldout=0.1, workers=2)
    assert again.heldout is not None and sorted(documents(again.heldout, tokenizer)) == sorted(heldout)


def test_workers_write_the_same_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"text": f"text {i} " * (i % 17)} for i in range(3000)])
    one = tokenize_files([file], tmp_path / "one", tokenizer=tokenizer, heldout=0.2)
    two = tokenize_files([file], tmp_path / "two", tokenizer=tokenizer, heldout=0.2, workers=2)
    assert one.train.fingerprint == two.train.fingerprint
    assert one.heldout and two.heldout and one.heldout.fingerprint == two.heldout.fingerprint


# Reading.


def test_units_of_txt(tmp_path: Path) -> None:
    file = tmp_path / "c.txt"
    file.write_bytes(b"one\r\ntwo\n\n\nthree\nfour")
    assert list(read_documents([file])) == ["one\r\ntwo\n\n\nthree\nfour"]
    assert list(read_documents([file], txt_documents="line")) == ["one", "two", "three", "four"]
    assert list(read_documents([file], txt_documents="paragraph")) == ["one\ntwo", "three\nfour"]
    with pytest.raises(ValueError, match="'word' is not one of file, line, paragraph"):
        list(read_documents([file], txt_documents="word"))


def test_folders_are_read_in_order_and_unknown_files_refused(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("b")
    (tmp_path / "in" / "notes.md").write_text("not taken")
    (tmp_path / "in" / "sub" / "c.txt").write_text("c")
    jsonl(tmp_path / "in" / "a.jsonl", [{"body": "a"}])
    assert list(read_documents([tmp_path / "in"], field="body")) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"notes.md is neither .jsonl nor .txt"):
        list(read_documents([tmp_path / "in" / "notes.md"]))
    with pytest.raises(ValueError, match="does not exist"):
        list(read_documents([tmp_path / "nothing.txt"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .jsonl or .txt or .parquet file"):
        list(read_documents([tmp_path / "empty"]))
    with pytest.raises(ValueError, match="no input files"):
        list(read_documents([]))


def test_broken_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "c.jsonl"
    lines = [
        b'{"text": "a"}',
        b"{",
        b"[1]",
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"",
        b'{"text": "b"}',
    ]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"c.jsonl:2: not JSON"):
        list(read_documents([file]))
    with pytest.raises(ValueError, match=r"c.jsonl:6: half of a surrogate pair.*max_bad_lines = 4"):
        list(read_documents([file], max_bad_lines=4))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="kforge_data"):
        assert list(read_documents([file], max_bad_lines=5)) == ["a", "b"]
    assert len(caplog.records) == 5 and "c.jsonl:3: a JSON list, not a record" in caplog.text
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(ValueError, match=r"bad.txt:2: not UTF-8"):
        list(read_documents([tmp_path / "bad.txt"], txt_documents="line"))
    with pytest.raises(ValueError, match=r"bad.txt: not UTF-8"):
        list(read_documents([tmp_path / "bad.txt"]))


def test_a_wrong_field_is_told(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"content": "a", "id": 1}])
    with pytest.raises(ValueError, match="no record has the field 'text'; the first one has content, id"):
        list(read_documents([file]))


# Refusals leave nothing.


def test_a_failed_run_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text('{"text": "a"}\n' * 1500 + "{")
    empty = jsonl(tmp_path / "empty.jsonl", [{"text": ""}])
    for options, message in [
        ({"inputs": [file], "heldout": 0.5}, "not JSON"),
        ({"inputs": [file], "workers": 2}, "not JSON"),
        ({"inputs": [empty], "heldout": 0.5}, "all 1 documents are empty"),
        ({"inputs": [file], "heldout": 1.0}, "heldout = 1.0"),
        ({"inputs": [file], "workers": -1}, "workers = -1"),
        ({"inputs": [file], "dtype": "uint8"}, "'uint8'"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenize_files(**{"out": tmp_path / "out", "tokenizer": tokenizer, **options})  # type: ignore[arg-type]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "empty.jsonl"]


def test_existing_shards_are_kept_unless_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "c.jsonl", [{"text": "one"}])
    tokenize_files([file], tmp_path / "out", tokenizer=tokenizer)
    jsonl(file, [{"text": "two"}])
    with pytest.raises(ValueError, match="already holds token shards"):
        tokenize_files([file], tmp_path / "out", tokenizer=tokenizer)
    report = tokenize_files([file], tmp_path / "out", tokenizer=tokenizer, overwrite=True)
    assert documents(report.train, tokenizer) == ["two"]


def test_the_tokenizer_is_checked(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    from kforge_data import train_tokenizer

    file = jsonl(tmp_path / "c.jsonl", [{"text": "one"}])
    shards = tokenize_files([file], tmp_path / "out", tokenizer=tokenizer).train
    shards.check_tokenizer(tokenizer)
    other = train_tokenizer(texts, vocab_size=290)
    with pytest.raises(ValueError, match="was made with the tokenizer sha256:"):
        shards.check_tokenizer(other)
    tokenize_files([file], tmp_path / "other", tokenizer=other)
    mixture = tuple({"name": name, "path": str(tmp_path / name)} for name in ("out", "other"))
    with pytest.raises(ValueError, match="the same ids say different things"):
        training_streams(DataConfig(mixture=mixture))
