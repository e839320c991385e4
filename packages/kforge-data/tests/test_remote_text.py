"""Text in an object store, S3's protocol over a local server: the same documents, or an error that names the file,
whatever the store does; never fewer documents. And what a run over it goes on from."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import s3fs
import zstandard

from kforge_data import Tokenizer, cached_tokens, read_documents, tokenize_files
from kforge_data.cli import main
from kforge_testing.s3 import S3, served

TEXTS = [f"document {i} {random.Random(i).randbytes(i % 97).hex()}" for i in range(2000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
BLOCK = 1 << 15  # bytes that are asked for at a time
NAMES = ["t.jsonl", "t.txt", "t.jsonl.gz", "t.jsonl.zst", "t.parquet"]


def packed(name: str) -> bytes:
    if name == "t.txt":
        return "\n".join(TEXTS).encode()
    if name == "t.parquet":
        out = io.BytesIO()
        table = pyarrow.table({"text": TEXTS})
        pyarrow.parquet.write_table(table, out, row_group_size=300, compression="none", use_dictionary=False)
        return out.getvalue()
    # Two members, or frames, at whose ends a file could seem to be whole.
    half = len(LINES) // 2
    parts = [LINES[:half], LINES[half:]]
    if name.endswith(".gz"):
        return b"".join(gzip.compress(part, 0) for part in parts)
    if name.endswith(".zst"):
        return b"".join(zstandard.compress(part, 1) for part in parts)
    return LINES


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    with served() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket, ``s3.bucket``; two attempts at each request, without a pause that is worth the name."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}, "default_block_size": BLOCK}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**once, "use_listings_cache": False})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()
    s3_server.new_bucket()
    yield s3_server
    s3_server.clear()


def put(s3: S3, name: str, content: bytes) -> str:
    place = f"s3://{s3.bucket}/{name}"
    fsspec.filesystem("s3").pipe(place, content)
    s3.clear()
    return place


def gets(answer: Any, first: int = 0, times: int = 10**9) -> Callable[[Any], Any]:
    """A fault of so many requests for content, from number ``first`` on."""
    count = itertools.count()
    return lambda request: answer if request.range and first <= next(count) < first + times else None


def first(name: str) -> int:
    """The request for content at which faults begin: the second one, of files that take several."""
    return int(not name.endswith(".zst"))


def nothing(s3: S3) -> Any:
    """An answer that is in order, and holds nothing of what was asked for."""

    def answer(environ: dict[str, Any], start: Any) -> list[bytes]:
        kept: list[Any] = []
        list(s3._moto(environ, lambda status, headers, *_: kept.extend((status, headers))))
        headers = [(name, value) for name, value in kept[1] if name.lower() not in ("content-length", "content-range")]
        start(kept[0], [*headers, ("Content-Length", "0")])
        return []

    return answer


def documents(place: str) -> list[str]:
    s3fs.S3FileSystem.clear_instance_cache()
    return list(read_documents([place], txt_documents="line"))


@pytest.mark.parametrize("name", NAMES)
def test_what_passes_is_not_seen(name: str, s3: S3) -> None:
    place = put(s3, name, packed(name))
    cut = s3.moto(lambda headers, body: [body[: len(body) // 2]])
    faults = {"slow down": s3.error(503, "SlowDown"), "hung up": s3.hang_up, "cut": cut}
    for what, fault in faults.items():
        s3.fault = gets(fault, first=first(name), times=1)
        assert documents(place) == TEXTS, what
    s3.clear()
    assert documents(f"s3://{s3.bucket}") == TEXTS  # the folder


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_pass_is_an_error_by_name(name: str, s3: S3) -> None:
    place = put(s3, name, packed(name))
    faults = {
        "slow down": s3.error(503, "SlowDown"),
        "denied": s3.error(403, "AccessDenied"),
        "gone": s3.error(404, "NoSuchKey"),
        "hung up": s3.hang_up,
        "cut": s3.moto(lambda headers, body: [body[: len(body) // 2]]),
        "nothing": nothing(s3),
    }
    for what in faults if name in ("t.jsonl", "t.parquet") else ("cut", "nothing"):
        s3.fault = gets(faults[what], first=first(name))
        with pytest.raises(ValueError, match=rf"{place} (cannot be read|is damaged|is no whole parquet)"):
            documents(place)
            pytest.fail(what)


def test_what_cannot_be_looked_at(
    s3: S3, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = put(s3, "t.jsonl", LINES)
    for fault in (s3.error(403, "AccessDenied"), s3.hang_up):
        s3.fault = lambda request, fault=fault: fault
        with pytest.raises(ValueError, match=rf"{place} cannot be looked at"):
            documents(place)
    s3.clear()
    with pytest.raises(ValueError, match=r"no.jsonl does not exist"):
        documents(f"s3://{s3.bucket}/no.jsonl")
    tokenizer.save(tmp_path / "t.json")
    for place, message in (
        ("nope://x/t.jsonl", "nope://x/t.jsonl cannot be opened: Protocol not known: nope"),
        ("dropbox://x/t.jsonl", "dropbox://x/t.jsonl needs a library of its store: "),
    ):
        words = ["tokenize", place, "--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
        assert main(words) == 2 and message in capsys.readouterr().err


def test_a_run_that_a_store_broke_off_is_gone_on_with(s3: S3, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By a new process, that asks for the same version of the file; another one of the same size is refused."""
    tokenizer.save(tmp_path / "t.json")
    place = put(s3, "t.jsonl", LINES)
    whole = tokenize_files([place], tmp_path / "whole", tokenizer=tokenizer).train
    code = "import sys, kforge_data.tokenize as t, kforge_data.cli as c; t.BATCH_DOCUMENTS, t.NOTE_BYTES = 50, 3000\n"
    code += "import fsspec, s3fs; s3fs.S3FileSystem.retries = 1\n"
    code += f"fsspec.config.conf['s3'] = {fsspec.config.conf['s3']!r}\nsys.exit(c.main(sys.argv[1:]))"
    words = ["tokenize", place, "--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out"), "--quiet"]

    def again() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *words], check=False, capture_output=True, text=True)

    s3.fault = gets(s3.error(403, "AccessDenied"), first=2)
    broken = again()
    assert broken.returncode == 2 and f"{place} cannot be read: " in broken.stderr and broken.stderr.count("\n") == 1
    assert (tmp_path / "out" / "unfinished.json").exists()
    put(s3, "t.jsonl", LINES[:-4] + b'y"}\n')
    changed = again()
    assert changed.returncode == 2 and f"{place} has changed" in changed.stderr
    put(s3, "t.jsonl", LINES)
    assert again().returncode == 0
    for file in sorted(whole.path.iterdir()):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_the_cache_knows_versions(s3: S3, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An object of the same name and size that says something else is tokenized anew; the same is not."""
    found = []
    for text in ("one", "two", "two"):
        s3fs.S3FileSystem.clear_instance_cache()
        place = put(s3, "t.jsonl", json.dumps({"text": text}).encode())
        shards = cached_tokens([place], tokenizer=tokenizer, cache=tmp_path)
        assert tokenizer.decode(shards.document(0), skip_special=True) == text
        found.append(shards.path)
    assert found[0] != found[1] == found[2]
