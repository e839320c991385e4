"""The command: the whole way from text to a verified set, one-line errors, and a quick --help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kforge_data import TokenShards
from kforge_data.cli import main


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    file = tmp_path / "corpus.jsonl"
    records = [{"text": f"{text} number {i}"} for i in range(20) for text in texts] + [{"text": ""}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_the_whole_way(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, out = str(tmp_path / "tokenizer.json"), tmp_path / "shards"
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "300", "--out", tokenizer]) == 0
    assert "300 tokens, sha256:" in capsys.readouterr().out
    arguments = ["tokenize", str(corpus), "--tokenizer", tokenizer, "--out", str(out), "--heldout", "0.2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "train: " in printed and "tokens of uint16 in 1 shard" in printed
    assert "left out: 1 documents without text, 0 broken lines" in printed
    train, heldout = str(out / "train"), str(out / "heldout")
    assert TokenShards(train).documents + TokenShards(heldout).documents == 80

    assert main(["inspect", train, "--tokenizer", tokenizer, "--documents", "1", "--characters", "9"]) == 0
    printed = capsys.readouterr().out
    assert "--- document 0" in printed and printed.endswith("\nthe quick\n")
    assert main(["inspect", train, "--documents", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["dtype"] == "uint16" and answer["vocab_size"] == 300 and answer["skipped_documents"] == 1
    assert answer["fingerprint"] == TokenShards(train).fingerprint
    assert answer["shown"][0]["ids"].split()[-1] == "0"

    assert main(["verify", train, heldout]) == 0
    assert capsys.readouterr().out == f"{train}: whole\n{heldout}: whole\n"
    assert main(["ngram", "--train", train, "--heldout", heldout, "--row-tokens", "64", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0 < answer["bigram_nats"] < answer["unigram_nats"]
    assert main(["ngram", "--train", train, "--heldout", heldout, "--row-tokens", "64"]) == 0
    assert "Kneser-Ney bigram" in capsys.readouterr().out

    file = out / "train" / "0-00000.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    assert main(["verify", train, heldout]) == 1
    captured = capsys.readouterr()
    assert f"{train}: damaged" in captured.out and "0-00000.bin: sha256 is" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenize", "{corpus}", "--tokenizer", "none.json", "--out", "{out}"], "none.json does not exist"),
        (["train-tokenizer", "{corpus}", "--vocab-size", "5", "--out", "{out}"], "vocab_size = 5 is too small"),
        (
            ["train-tokenizer", "{corpus}", "--vocab-size", "300", "--field", "x", "--out", "{out}"],
            "no record has the field 'x'",
        ),
        (["inspect", "{out}"], "no such folder"),
        (["verify", "{out}"], "no such folder"),
        (["corpus", "stdlib", "--out", "{corpus}/x/c.jsonl"], "corpus.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(corpus=corpus, out=tmp_path / "out") for argument in arguments]
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kforge-data {arguments[0]}: error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["tokenize"], ["corpus", "web", "--out", "x"], ["verify"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "usage: kforge-data" in capsys.readouterr().err


def test_corpus_stdlib(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "a.py").write_text("a = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    assert main(["corpus", "stdlib", "--out", str(tmp_path / "c.jsonl")]) == 0
    assert "1 documents" in capsys.readouterr().out
    assert json.loads((tmp_path / "c.jsonl").read_text()) == {"path": "a.py", "text": "a = 1\n"}


HEAVY = ("torch", "numpy", "tokenizers")


@pytest.mark.parametrize(
    "code",
    [
        "import kforge_data.config",
        "import kforge_data.cli",
        "from kforge_data.cli import main; main(['--help'])",
        "from kforge_data.cli import main; main(['tokenize', '--help'])",
    ],
)
def test_help_and_config_import_nothing_heavy(code: str) -> None:
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as stop:\n    assert not stop.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m() -> None:
    command = [sys.executable, "-m", "kforge_data", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: kforge-data")


def test_the_way_to_shards_needs_no_torch(corpus: Path, tmp_path: Path) -> None:
    """A machine that only prepares data does not wait for torch to import."""
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom kforge_data.cli import main\n"
        "c, t, o = sys.argv[1:]\n"
        "assert main(['train-tokenizer', c, '--vocab-size', '300', '--out', t]) == 0\n"
        "assert main(['tokenize', c, '--tokenizer', t, '--out', o]) == 0\n"
        "assert main(['inspect', o]) == 0\nassert main(['verify', o]) == 0\n"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "t.json"), str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
