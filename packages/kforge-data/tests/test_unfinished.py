"""`kforge-data tokenize` killed anywhere and started again writes what it would have written, byte for byte."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from kforge_data import Tokenizer, TokenShards, tokenize_files, verify_shards
from kforge_data.cli import main
from kforge_data.unfinished import NOTE, CannotGoOn, held, read_note

# The command, in batches of 7 documents with a note after every 400 bytes, killed by -9 at the n-th call of a function.
KILLED = """
import os, sys
import kforge_data.tokenize as t, kforge_data.shard_writer as w
from kforge_data.cli import main
t.BATCH_DOCUMENTS, t.NOTE_BYTES = 7, 400
where, left = sys.argv[1], int(sys.argv[2])
owner, name = {"write": (w.ShardWriter, "add_batch"), "note": (t, "write_note"), "commit": (w.ShardWriter, "commit"),
               "finish": (w.ShardWriter, "finish"), "end": (t, "remove_note")}[where]
real = getattr(owner, name)
def dying(*args, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    return real(*args, **options)
setattr(owner, name, dying)
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Tokenizer) -> list[str]:
    """Arguments of the command for three files, of which one is packed and one has records without text."""
    import gzip

    tokenizer.save(tmp_path / "t.json")
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": "" if i % 11 == 5 else f"text {i} " * (1 + i % 13)}) + "\n" for i in range(120)]
    (folder / "a.jsonl").write_text("".join(lines[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[50:]).encode()))
    (folder / "c.txt").write_text("one\n\ntwo\n")
    arguments = [str(folder), "--tokenizer", str(tmp_path / "t.json"), "--heldout", "0.3", "--shard-tokens", "900"]
    return ["tokenize", *arguments, "--txt-documents", "line"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killed(where: str, call: int, arguments: list[str]) -> int:
    command = [sys.executable, "-c", KILLED, where, str(call), *arguments]
    return subprocess.run(command, check=False, capture_output=True).returncode


@pytest.mark.parametrize(
    ("where", "call"),
    [("write", 9), ("write", 20), ("note", 2), ("commit", 5), ("finish", 0), ("finish", 1), ("end", 1)],
)
def test_killed_and_started_again(where: str, call: int, corpus: list[str], tmp_path: Path) -> None:
    assert main([*corpus, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    assert killed(where, call, [*corpus, "--out", str(tmp_path / "out")]) == -9
    assert (tmp_path / "out" / NOTE).exists()
    if where == "write":  # a second time, a few batches later
        assert killed(where, 6, [*corpus, "--out", str(tmp_path / "out")]) == -9
    assert main([*corpus, "--out", str(tmp_path / "out")]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    shards = TokenShards(tmp_path / "out" / "train")
    assert len(shards.index.shards) > 2 and shards.index.skipped_documents == 11 + 1
    assert verify_shards(tmp_path / "out" / "train") == []


def test_killed_while_it_replaces_a_set(corpus: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([*corpus, "--out", str(out), "--quiet"]) == 0
    before = TokenShards(out / "train").fingerprint
    assert killed("write", 9, [*corpus, "--out", str(out), "--overwrite"]) == -9
    assert TokenShards(out / "train").fingerprint == before and verify_shards(out / "train") == []
    assert main([*corpus, "--out", str(out), "--overwrite"]) == 0
    assert TokenShards(out / "train").fingerprint == before
    assert next(path.name for path in sorted((out / "train").iterdir())).startswith("1-")


def test_a_slow_run_notes_by_the_clock(corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its speed, a kill costs seconds of work."""
    noted, now = list[float](), itertools.count(0, 7.0)  # seconds from each look at the clock to the next
    monkeypatch.setattr("kforge_data.tokenize.monotonic", lambda: next(now))
    monkeypatch.setattr("kforge_data.tokenize.BATCH_DOCUMENTS", 10)
    monkeypatch.setattr("kforge_data.tokenize.write_note", lambda folder, note: noted.append(note["documents"]))
    assert main([*corpus, "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert noted == [30, 60, 90, 111]  # at each third look


def test_another_run_in_the_same_place_is_refused(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert killed("write", 9, [*corpus, *out]) == -9
    assert main([*corpus, *out, "--parse-special", "--shard-tokens", "800"]) == 2
    error = capsys.readouterr().err
    assert "parse_special was False and is True; shard_tokens was 900 and is 800" in error and "--no-resume" in error
    first = tmp_path / "in" / "a.jsonl"
    before = first.read_text()
    first.write_text(before + before)
    assert main([*corpus, *out]) == 2 and f"{first} has changed" in capsys.readouterr().err
    first.unlink()
    assert main([*corpus, *out]) == 2 and "b.jsonl.gz comes now" in capsys.readouterr().err
    assert main([*corpus, *out, "--no-resume"]) == 0
    assert not (tmp_path / "out" / NOTE).exists() and verify_shards(tmp_path / "out" / "train") == []


def test_an_error_late_in_a_run_keeps_what_is_done(
    corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad line in the last file is no reason to tokenize the first ones again."""
    monkeypatch.setattr("kforge_data.tokenize.NOTE_BYTES", 1000)
    monkeypatch.setattr("kforge_data.tokenize.BATCH_DOCUMENTS", 10)
    last = tmp_path / "in" / "d.jsonl"
    last.write_text('{"text": "good"}\n{\n')
    out = ["--out", str(tmp_path / "out"), "--quiet"]
    assert main([*corpus, *out]) == 2 and "d.jsonl:2: not JSON" in capsys.readouterr().err
    done = json.loads((tmp_path / "out" / NOTE).read_text())["documents"]
    assert done >= 90
    assert main([*corpus, *out, "--max-bad-lines", "1"]) == 0
    assert "1 broken lines" in capsys.readouterr().out
    assert main([*corpus, "--out", str(tmp_path / "whole"), "--quiet", "--max-bad-lines", "1"]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def _hold(folder: Path, ready: multiprocessing.synchronize.Event, end: multiprocessing.synchronize.Event) -> None:
    with held(folder):
        ready.set()
        end.wait()


def test_two_at_once_are_refused(corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "out", ready, end))
    other.start()
    ready.wait()
    try:
        assert main([*corpus, "--out", str(tmp_path / "out")]) == 2
        assert "another process is writing to" in capsys.readouterr().err
    finally:
        end.set()
        other.join()
    assert main([*corpus, "--out", str(tmp_path / "out")]) == 0


def test_files_that_were_cut_are_told(corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert killed("write", 20, [*corpus, "--out", str(out)]) == -9
    (out / "train" / "0-00000.bin").write_bytes(b"")
    assert main([*corpus, "--out", str(out)]) == 2
    assert "0-00000.bin has 0 bytes" in capsys.readouterr().err
    assert main([*corpus, "--out", str(out), "--no-resume", "--quiet"]) == 0


def test_whatever_is_damaged_in_a_note_is_refused(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number of it can be another without being seen: documents would be lost or doubled."""
    assert main([*corpus, "--out", str(tmp_path / "whole"), "--quiet"]) == 0
    out = tmp_path / "out"
    assert killed("write", 20, [*corpus, "--out", str(out)]) == -9
    note = out / NOTE
    whole = note.read_bytes()
    before = content(out)
    damaged = [whole[:cut] for cut in (0, 1, len(whole) // 2, len(whole) - 1)]
    damaged += [b"null", b"[]", b"{}", b'{"version": 2}', b"[" * 100_000, b"\xff\xfe" + whole]
    for at in range(len(whole)):  # each byte another one of its kind
        if whole[at : at + 1].isalnum():
            damaged.append(whole[:at] + (b"7" if whole[at : at + 1] != b"7" else b"8") + whole[at + 1 :])
    for changed in damaged[::3]:
        note.write_bytes(changed)
        with pytest.raises(CannotGoOn, match=r"unfinished.json is .*--no-resume"):
            read_note(out)
    for changed in damaged[3:7]:
        note.write_bytes(changed)
        assert main([*corpus, "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "unfinished.json is" in error and "--no-resume" in error and error.count("\n") == 1
    assert content(out) == {**before, NOTE: damaged[6]}
    note.write_bytes(whole)
    assert main([*corpus, "--out", str(out), "--quiet"]) == 0
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("file", ["0-00000.bin", "0-00000.docs"])
def test_an_open_shard_that_is_not_what_was_noted_is_refused(
    file: str, corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, big = tmp_path / "out", ["--shard-tokens", "1000000"]
    assert killed("write", 20, [*corpus, *big, "--out", str(out)]) == -9
    shard = out / "train" / file
    whole = shard.read_bytes()
    shard.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    assert main([*corpus, *big, "--out", str(out)]) == 2
    assert f"{file} is not what was written" in (error := capsys.readouterr().err) and "--no-resume" in error


def test_nothing_of_a_killed_run_with_processes_stays(corpus: list[str], tmp_path: Path) -> None:
    """Its processes end with it, which is when nobody has its standard output open any more."""
    command = [sys.executable, "-c", KILLED, "write", "2", *corpus, "--out", str(tmp_path / "out"), "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read() == b""
    assert process.returncode == -9


def test_a_begin_of_text_token(tmp_path: Path, texts: list[str]) -> None:
    """What begins and ends a document is added once, also where its text has such strings in it."""
    from kforge_data import train_tokenizer

    tokenizer = train_tokenizer(texts, vocab_size=300, special_tokens=["<|endoftext|>", "<|begin|>"])
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "<|begin|>a<|endoftext|>"}) + '\n{"text": "b"}\n')
    shards = tokenize_files(
        [tmp_path / "c.jsonl"], tmp_path / "out", tokenizer=tokenizer, begin_of_text="<|begin|>"
    ).train
    for number, text in enumerate(("<|begin|>a<|endoftext|>", "b")):
        ids = shards.document(number).tolist()
        assert ids == [1, *tokenizer.encode(text), 0] and ids.count(1) == ids.count(0) == 1
    assert shards.index.bos_id == 1 and verify_shards(shards.path) == []
    with pytest.raises(ValueError, match="no token '<bos>'"):
        tokenize_files([tmp_path / "c.jsonl"], tmp_path / "o", tokenizer=tokenizer, begin_of_text="<bos>")
