"""The commands that look at sets of tokens and rewrite them, end to end through the command."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kforge_data import (
    MegatronTokens,
    Mixture,
    TokenFiles,
    Tokenizer,
    TokenShards,
    open_tokens,
    train_tokenizer,
    verify_shards,
)
from kforge_data.cli import main

Make = Callable[..., TokenShards]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFORGE_DATA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def words(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Token shards of five documents with lines, of which two are the same, and the tokenizer beside them."""
    tokenizer.save(tmp_path / "t.json")
    texts = ["one\ntwo", "grüße 東京", "one\ntwo", "x" * 50, "the end"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "words"), "--quiet"]
    assert main(["tokenize", str(tmp_path / "c.jsonl"), *arguments, "--shard-tokens", "40"]) == 0
    return tmp_path / "words"


def same(one: object, other: object) -> bool:
    assert isinstance(one, TokenShards | TokenFiles | MegatronTokens)
    assert isinstance(other, TokenShards | TokenFiles | MegatronTokens)
    bounds = [stream.document_bounds(0, stream.documents).tolist() for stream in (one, other)]
    return bounds[0] == bounds[1] and one.read(0, one.tokens).tolist() == other.read(0, other.tokens).tolist()


def test_convert_there_and_back(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = TokenShards(words)
    assert len(shards.index.shards) > 1
    raw = ["--eos-id", "0", "--vocab-size", "300"]
    for to, name, more in (("npy", "w.npy", []), ("bin", "w.bin", ["--dtype", "uint16"]), ("megatron", "m.idx", [])):
        assert main(["convert", str(words), "--to", to, "--out", str(tmp_path / name)]) == 0
        assert "5 documents" in capsys.readouterr().out
        opened = open_tokens(tmp_path / name, dtype="uint16" if to == "bin" else "", eos_id=0, vocab_size=300)
        assert same(opened, shards), to
        back = str(tmp_path / f"back-{to}")
        assert main(["convert", str(tmp_path / name), "--to", "shards", "--out", back, *raw, *more]) == 0
        assert same(TokenShards(back), shards) and TokenShards(back).vocab_size == 300
        assert verify_shards(back) == []
        assert main(["convert", str(words), "--to", to, "--out", str(tmp_path / name)]) == 2
        assert "is there already" in capsys.readouterr().err
        assert main(["convert", str(words), "--to", to, "--out", str(tmp_path / name), "--overwrite"]) == 0
    assert np.load(tmp_path / "w.npy").dtype == np.uint16
    again = str(tmp_path / "again")
    assert main(["convert", str(words), "--to", "shards", "--out", again]) == 0
    assert same(TokenShards(again), shards) and TokenShards(again).text_bytes == shards.text_bytes
    assert TokenShards(again).index.tokenizer == shards.index.tokenizer


def test_convert_to_text(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tokenizer = tmp_path / "back.jsonl", ["--tokenizer", str(tmp_path / "t.json")]
    assert main(["convert", str(words), "--to", "jsonl", "--out", str(out), *tokenizer]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()
    ]
    text = str(tmp_path / "back.txt")
    assert main(["convert", str(words), "--to", "txt", "--out", text, *tokenizer]) == 2
    assert "document 0" in (error := capsys.readouterr().err) and "has several lines" in error
    assert main(["convert", str(words), "--to", "txt", "--out", text]) == 2
    assert "takes the tokenizer" in capsys.readouterr().err
    assert not Path(text).exists() and not Path(text + ".partial").exists()


@pytest.mark.parametrize("vocab_size", [300, 1 << 16, 100_000])
def test_convert_from_any_to_any(vocab_size: int, make_shards: Make, tmp_path: Path) -> None:
    """Over several shards: the same tokens in the same documents."""
    rng = np.random.default_rng(vocab_size)
    documents = [[*rng.integers(1, vocab_size, n).tolist(), 0] for n in (1, 40, 0, 7, 300, 2)]
    documents[1][0] = vocab_size - 1
    shards = make_shards(documents, name="begin", vocab_size=vocab_size, eos_id=0, bos_id=None, shard_tokens=50)
    kind, saying = shards.dtype.name, ["--eos-id", "0", "--vocab-size", str(vocab_size)]
    formats = {"n": ("npy", "t.npy"), "b": ("bin", "t.bin"), "m": ("megatron", "t.idx"), "s": ("shards", "t")}
    place, options = shards.path, list[str]()
    for step, letter in enumerate("nbnmnsbmbsmsn"):  # each to each other
        to, name = formats[letter]
        out = tmp_path / str(step) / name
        assert main(["convert", str(place), "--to", to, "--out", str(out), *options]) == 0
        place, options = out, [] if to == "shards" else saying + (["--dtype", kind] if to == "bin" else [])
        stream = open_tokens(place, dtype=kind if to == "bin" else "", eos_id=0, vocab_size=vocab_size)
        assert [stream.document(n).tolist() for n in range(stream.documents)] == documents, step


def test_convert_to_text_refuses_what_is_no_whole_text(
    make_shards: Make, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer.save(tmp_path / "t.json")
    half, mark = tokenizer.encode("\U0001f999")[:2], tokenizer.encode("\ufffd")
    options = {"vocab_size": tokenizer.vocab_size, "eos_id": 0, "tokenizer": tokenizer.fingerprint}
    for name, ids, code in (("half", half, 2), ("mark", mark, 0)):
        shards = make_shards([[5, 0], [*ids, 0]], name=name, **options)
        words = ["--to", "jsonl", "--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / f"{name}.jsonl")]
        assert main(["convert", str(shards.path), *words]) == code
        assert (tmp_path / f"{name}.jsonl").exists() == (code == 0)
    assert "document 1 of" in (error := capsys.readouterr().err) and "no whole text" in error


def test_what_begins_documents_is_kept(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By `dedup` and `convert`, and it is no text."""
    tokenizer = train_tokenizer(texts, vocab_size=300, special_tokens=["<|endoftext|>", "<|begin|>"])
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": "bc"}\n{"text": "a"}\n')
    with_tokenizer = ["--tokenizer", str(tmp_path / "t.json")]
    places = [str(tmp_path / name) for name in ("words", "once", "again", "back.jsonl")]
    made = [*with_tokenizer, "--begin-of-text", "<|begin|>", "--out", places[0], "--quiet"]
    assert main(["tokenize", str(tmp_path / "c.jsonl"), *made]) == 0
    assert main(["dedup", places[0], "--out", places[1], *with_tokenizer]) == 0
    assert main(["convert", places[1], "--out", places[2], "--to", "shards"]) == 0
    for place in places[:3]:
        assert TokenShards(place).index.bos_id == 1 and verify_shards(place) == []
    assert TokenShards(places[1]).text_bytes == TokenShards(places[2]).text_bytes == 3
    assert main(["convert", places[2], "--out", places[3], "--to", "jsonl", *with_tokenizer]) == 0
    assert Path(places[3]).read_text() == '{"text": "a"}\n{"text": "bc"}\n'
    assert main(["convert", places[0], "--out", str(tmp_path / "m.idx"), "--to", "megatron"]) == 0
    assert main(["convert", str(tmp_path / "m.idx"), "--out", str(tmp_path / "plain"), "--to", "shards"]) == 0
    capsys.readouterr()
    index = json.loads((tmp_path / "plain" / "index.json").read_text())
    index.update(eos_id=0, tokenizer=tokenizer.fingerprint, vocab_size=300)
    (tmp_path / "plain" / "index.json").write_text(json.dumps(index))
    assert main(["dedup", places[0], str(tmp_path / "plain"), "--out", str(tmp_path / "no")]) == 2
    assert "has bos_id None" in capsys.readouterr().err


def test_convert_refuses_what_would_lose_boundaries(
    make_shards: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [([[1, 2], [3]], None, "no id that ends them"), ([[1, 9], [9, 3, 9]], 9, "without the end-of-text id 9")]
    for i, (documents, eos_id, message) in enumerate(cases):
        shards = make_shards(documents, name=f"s{i}", eos_id=eos_id)
        assert main(["convert", str(shards.path), "--to", "npy", "--out", str(tmp_path / "o.npy")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "o.npy").exists()
    assert main(["convert", str(shards.path), "--to", "csv", "--out", str(tmp_path / "o")]) == 2
    assert "'csv' is not one of shards, npy" in capsys.readouterr().err


def test_dedup(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tokenizer = str(tmp_path / "once"), ["--tokenizer", str(tmp_path / "t.json")]
    assert main(["dedup", str(words), str(words), "--out", out, *tokenizer]) == 0
    assert "left out: 6 documents" in capsys.readouterr().out
    shards, once = TokenShards(words), TokenShards(out)
    assert [once.document(i).tolist() for i in range(4)] == [shards.document(i).tolist() for i in (0, 1, 3, 4)]
    assert once.documents == 4 and once.text_bytes == sum(
        map(len, ("one\ntwo", "grüße 東京" + 6 * "-", "x" * 50, "the end"))
    )
    assert once.index.tokenizer == shards.index.tokenizer and verify_shards(out) == []
    assert main(["dedup", str(words), "--out", f"{out}-unknown"]) == 0
    assert "bytes a token" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [-5, 0, 10**12])
def test_damaged_boundaries_are_an_error_of_every_command(
    value: int, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none writes anything of such a set."""
    places = np.fromfile(words / "0-00000.docs", "<i8")
    places[1] = value
    places.tofile(words / "0-00000.docs")
    out, tokenizer = ["--out", str(tmp_path / "o")], ["--tokenizer", str(tmp_path / "t.json")]
    commands = [["convert", str(words), *out, *tokenizer, "--to", to] for to in ("shards", "npy", "megatron", "jsonl")]
    commands += [["dedup", str(words), *out], ["stats", str(words)], ["inspect", str(words), "--documents", "1"]]
    job = tmp_path / "job.toml"
    job.write_text(f'[data]\nmixture = [{{name = "a", path = "{words}"}}]\npacking = "best_fit"\n')
    for command in [*commands, ["mix", str(job), "--steps", "3"]]:
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert f"{words}: where documents begin in its file number 0 does not run from 0" in error, command
        assert error.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("o")]
    assert main(["verify", str(words)]) == 1


def test_dedup_of_what_cannot_lie_together(
    make_shards: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_shards([[1]], name="a", vocab_size=5), make_shards([[1]], name="b", vocab_size=6)
    assert main(["dedup", str(one.path), str(two.path), "--out", str(tmp_path / "o")]) == 2
    assert "vocab_size 6" in capsys.readouterr().err


def test_duplicates_do_not_depend_on_the_integer_type(make_shards: Make) -> None:
    from kforge_data import duplicate_documents

    small = make_shards([[1, 2], [3], [1, 2], [2, 1]], name="a", vocab_size=10)
    large = make_shards([[3], [1], [1, 2, 0]], name="b", vocab_size=10, dtype="uint32")
    assert duplicate_documents([small, large]).tolist() == [False, False, True, False, True, False, False]


def test_stats(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lengths.png"
    assert main(["stats", str(words), "--out", str(picture)]) == 0
    shards = TokenShards(words)
    printed = capsys.readouterr().out
    assert f"5 documents, {shards.tokens:,} tokens" in printed
    assert f"{shards.tokens / shards.text_bytes:.4f} tokens a byte" in printed
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 5000
    assert main(["stats", str(words), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    lengths = np.diff(shards.document_bounds(0, 5))
    assert answer["longest"] == lengths.max() and answer["mean"] == lengths.mean()
    assert answer["quantiles"]["50%"] == np.median(lengths) and sum(answer["counts"]) == 5
    for length in lengths:
        bin_ = np.searchsorted(answer["edges"], length, side="right") - 1
        assert answer["counts"][bin_] == sum(answer["edges"][bin_] <= n < answer["edges"][bin_ + 1] for n in lengths)


def test_stats_of_files_that_know_no_text(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(words), "--to", "npy", "--out", str(tmp_path / "w.npy")]) == 0
    capsys.readouterr()
    assert main(["stats", str(tmp_path / "w.npy"), "--eos-id", "0"]) == 0
    assert "bytes of text are not known" in capsys.readouterr().out
    arguments = ["--eos-id", "0", "--tokenizer", str(tmp_path / "t.json"), "--json"]
    assert main(["stats", str(tmp_path / "w.npy"), *arguments]) == 0
    shards = TokenShards(words)
    assert json.loads(capsys.readouterr().out)["tokens_per_byte"] == shards.tokens / shards.text_bytes


def test_mix(numbered: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shares that the command tells are those of the rows that a loader would read."""
    from kforge_data import Loader

    one, two = numbered(100, name="one"), numbered(30, name="two")
    (tmp_path / "job.toml").write_text(
        f"""[model]
dim = 8
[data]
row_tokens = 4
global_rows = 8
mixture = [{{name = "one", path = "{one.path}", weight = 3}}, {{name = "two", path = "{two.path}"}}]
phases = [{{step = 10, weights = {{one = 1, two = 4}}}}]
"""
    )
    picture = tmp_path / "mix.png"
    arguments = ["mix", str(tmp_path / "job.toml"), "--steps", "20", "--windows", "4"]
    assert main([*arguments, "--json", "--out", str(picture)]) == 0
    windows = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(PNG)
    source = Mixture({"one": one, "two": two}, {"one": 3, "two": 1}, phases=[(80, {"one": 1, "two": 4})])
    with Loader(source, row_tokens=4, global_rows=8) as loader:
        read = [batch["source_ids"][:, 0].numpy() for _ in range(20) for batch in loader.next()]
    assert [(w["first"], w["last"], w["name"]) for w in windows[:3]] == [(0, 5, "one"), (0, 5, "two"), (5, 10, "one")]
    for window in windows:
        here = np.concatenate(read[window["first"] : window["last"]]) == ("one", "two").index(window["name"])
        assert window["rows"] == here.sum() and window["realised"] == here.mean()
        asked = {"one": 0.75 if window["first"] < 10 else 0.2}
        assert window["asked"] == pytest.approx(asked["one"] if window["name"] == "one" else 1 - asked["one"])
    assert sum(w["rows"] for w in windows if w["name"] == "two") / 30 == windows[-1]["epochs"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    row = ["0-4", "one", "75.0000%", "75.0000%", "30", "0.30"]
    assert row in [line.split() for line in printed.splitlines()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\n", "no table [data]"),
        ("[data]\ntrain = 3\nspam = 1\n", "spam"),
        ("[data\n", "job.toml"),
    ],
)
def test_mix_of_what_is_no_job(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(text)
    assert main(["mix", str(tmp_path / "job.toml"), "--steps", "2"]) == 2
    assert message in capsys.readouterr().err


def test_mix_of_one_source_or_past_its_end(numbered: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards, job = numbered(10), tmp_path / "job.toml"
    job.write_text(f'[data]\ntrain = "{shards.path}"\n')
    assert main(["mix", str(job), "--steps", "2"]) == 2 and "no data.mixture" in capsys.readouterr().err
    job.write_text(
        f'[data]\nrow_tokens = 4\nglobal_rows = 4\nmixture = [{{name = "a", path = "{shards.path}", max_epochs = 1}}]\n'
    )
    assert main(["mix", str(job), "--steps", "3"]) == 2 and "the mixture ends after 10" in capsys.readouterr().err


def test_verify_of_other_files(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.idx.bin").write_bytes(b"12")
    assert main(["verify", str(tmp_path / "w.idx.bin")]) == 2 and "give --dtype" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "w.idx.bin")]) == 2 and "it is a file" in capsys.readouterr().err
    assert main(["convert", str(words), "--to", "bin", "--out", str(tmp_path / "w.bin")]) == 0
    raw = ["--dtype", "uint16", "--eos-id", "0"]
    assert main(["verify", str(tmp_path / "w.bin"), *raw]) == 0
    assert main(["verify", str(tmp_path / "w.bin"), *raw, "--vocab-size", "10"]) == 1
    assert "outside of a vocabulary of 10" in capsys.readouterr().err
    np.save(tmp_path / "open.npy", np.array([1, 2, 0, 3], np.uint16))
    assert main(["verify", str(tmp_path / "open.npy"), "--eos-id", "0"]) == 1
    assert "1 documents end without id 0, number 1 is one" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_at_boundaries_only_on_a_terminal(
    words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["inspect", str(words), "--tokenizer", str(tmp_path / "t.json"), "--documents", "2"]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "one\ntwo<|endoftext|>\n--- document 1" in plain
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert main(arguments) == 0
    coloured = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;36m--- document 0, " in coloured and "two\x1b[1;35m<|endoftext|>\x1b[0m\n" in coloured
    monkeypatch.setattr(sys, "stdout", _Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 0
    assert sys.stdout.getvalue() == plain  # type: ignore[attr-defined]
