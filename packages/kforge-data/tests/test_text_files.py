"""The same documents from every kind of file; damage and missing packages told by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import kforge_data.text_files
from kforge_data import ReadCounts, Tokenizer, read_documents, tokenize_files

TEXTS = ["one", "two\nlines", "grüße 東京", "x" * 300_000, "", "last"]
FILLED = [text for text in TEXTS if text]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def packed(name: str) -> bytes:
    """The documents as a file of this name has them."""
    if name.endswith(".parquet"):
        sink = pyarrow.BufferOutputStream()
        table = pyarrow.table({"id": list(range(len(TEXTS))), "text": [text or None for text in TEXTS]})
        pyarrow.parquet.write_table(table, sink, row_group_size=2)
        return bytes(sink.getvalue())
    if name.endswith(".gz"):
        return gzip.compress(JSONL)
    if name.endswith(".zst"):  # two frames, as parallel writers make them
        half = len(JSONL) // 2
        return zstandard.compress(JSONL[:half]) + zstandard.compress(JSONL[half:])
    return JSONL


NAMES = ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("remote", [False, True])
def test_every_file_gives_the_same_documents(tmp_path: Path, name: str, remote: bool) -> None:
    place = f"memory://{tmp_path.name}/{remote}" if remote else str(tmp_path)
    with fsspec.open(f"{place}/{name}", "wb") as file:
        file.write(packed(name))
    counts = ReadCounts()
    assert list(read_documents([f"{place}/{name}"], counts=counts)) == FILLED
    assert counts.empty == 1
    assert list(read_documents([place])) == FILLED  # the folder


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("keep", [0.6, 0.99])
def test_a_file_that_was_cut_is_an_error_by_name(tmp_path: Path, name: str, keep: float) -> None:
    whole = packed(name)
    (tmp_path / name).write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=rf"{name} is (damaged|no whole parquet file)"):
        list(read_documents([tmp_path / name]))


def test_a_gz_that_is_damaged_inside_is_an_error_by_name(tmp_path: Path) -> None:
    whole = packed("t.jsonl.gz")
    (tmp_path / "t.jsonl.gz").write_bytes(whole[:40] + b"x" * 10 + whole[50:])
    with pytest.raises(ValueError, match=r"t.jsonl.gz is damaged: .* invalid"):
        list(read_documents([tmp_path / "t.jsonl.gz"]))


def test_a_line_that_is_too_deep_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + '}\n{"text": "a"}\n')
    assert list(read_documents([tmp_path / "t.jsonl"], max_bad_lines=1)) == ["a"]


def test_tokens_do_not_depend_on_the_kind_of_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prints = set()
    for name in NAMES:
        (tmp_path / name).write_bytes(packed(name))
        report = tokenize_files([tmp_path / name], tmp_path / f"{name}-out", tokenizer=tokenizer)
        prints.add(report.train.fingerprint)
        assert report.train.index.meta["inputs"] == [name] and report.empty == 1
    assert len(prints) == 1


def test_columns_that_cannot_be_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no column 'text'; it has id"):
        list(read_documents([tmp_path / "t.parquet"]))
    with pytest.raises(ValueError, match=r"t.parquet:1: column 'id' holds a int, not text"):
        list(read_documents([tmp_path / "t.parquet"], field="id"))
    counts = ReadCounts()
    assert list(read_documents([tmp_path / "t.parquet"], field="id", max_bad_lines=2, counts=counts)) == []
    assert counts.bad_lines == 2


@pytest.mark.parametrize(("name", "extra"), [("t.parquet", "parquet"), ("t.jsonl.zst", "zst")])
def test_a_missing_package_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    def missing(module: str) -> Any:
        raise ModuleNotFoundError(module)

    (tmp_path / name).write_bytes(packed(name))
    monkeypatch.setattr(kforge_data.text_files, "import_module", missing)
    with pytest.raises(ValueError, match=rf"pip install 'kforge-data\[{extra}\]'"):
        list(read_documents([tmp_path / name]))


def test_a_url_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"memory://nowhere/t.jsonl does not exist"):
        list(read_documents(["memory://nowhere/t.jsonl"]))
