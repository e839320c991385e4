"""The standard library as documents: everything that is text, in a fixed order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kforge_data import read_documents, stdlib_documents, write_stdlib_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name, content in {
        "b.py": b"b = 1\n",
        "a.py": "\ufeffa = 'gr\u00fc\u00dfe'\n".encode(),
        "pkg/__init__.py": b"",
        "pkg/x.py": b"x = 1\n",
        "pkg/latin.py": b"# -*- coding: latin-1 -*-\n# \xe4\n",
        "pkg/data.txt": b"no source",
        "pkg/__pycache__/x.py": b"no",
        "site-packages/other.py": b"no",
        "dist-packages/other.py": b"no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_what_is_gathered(library: Path) -> None:
    assert list(stdlib_documents(library)) == [
        ("a.py", "a = 'gr\u00fc\u00dfe'\n"),
        ("b.py", "b = 1\n"),
        ("pkg/__init__.py", ""),
        ("pkg/latin.py", None),
        ("pkg/x.py", "x = 1\n"),
    ]


def test_what_is_written(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "out" / "corpus.jsonl"
    report = write_stdlib_corpus(file, library)
    assert (report.documents, report.skipped) == (3, 2)
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [record["path"] for record in records] == ["a.py", "b.py", "pkg/x.py"]
    assert list(read_documents([file])) == [record["text"] for record in records]
    assert report.text_bytes == sum(len(record["text"].encode()) for record in records)
    assert [path.name for path in file.parent.iterdir()] == ["corpus.jsonl"]


def test_the_running_library_is_there() -> None:
    names = [name for name, _ in zip((name for name, _ in stdlib_documents()), range(20), strict=False)]
    assert names == sorted(names) and "__future__.py" in names


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no Python sources"):
        write_stdlib_corpus(tmp_path / "c.jsonl", tmp_path)
    assert list(tmp_path.iterdir()) == []
