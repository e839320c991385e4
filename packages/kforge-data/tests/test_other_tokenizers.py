"""Sentencepiece models and encodings of tiktoken do what a tokenizer.json does; both made here, none is downloaded."""

from __future__ import annotations

import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from kforge_data import Tokenizer, TokenShards, tokenize_files
from kforge_data.cli import main
from kforge_data.other_tokenizers import SentencePieceTokenizer, TiktokenTokenizer

WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "the end of the story is the start of the next",
    "one two three",
]


@pytest.fixture(scope="session")
def model() -> bytes:
    """A sentencepiece model with a token for every byte, and text left as it is."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20),
        model_writer=out,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        control_symbols=["<|user|>"],
        minloglevel=2,
    )
    return out.getvalue()


def encoding(**changes: Any) -> Any:
    import tiktoken

    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    fields = {
        "name": "ours",
        "pat_str": r" ?\w+|\s+|[^\s\w]+",
        "mergeable_ranks": ranks,
        "special_tokens": {"<|endoftext|>": 259, "<|user|>": 260},
    }
    return tiktoken.Encoding(**{**fields, **changes})


@pytest.fixture(params=["sentencepiece", "tiktoken"])
def other(request: pytest.FixtureRequest, model: bytes) -> Tokenizer:
    return SentencePieceTokenizer(model) if request.param == "sentencepiece" else TiktokenTokenizer(encoding())


def test_text_comes_back_and_markers_stay_text(other: Tokenizer) -> None:
    end = "</s>" if isinstance(other, SentencePieceTokenizer) else "<|endoftext|>"
    assert other.eos_id == other.token_id(end)
    for text in (*WORDS, "gr\u00fc\u00dfe \u6771\u4eac \U0001f642\n\tx  y", f"a {end} b <|user|>", ""):
        ids = other.encode(text)
        assert other.decode(ids) == text
        assert not {other.eos_id, other.token_id("<|user|>")} & set(ids)
        assert all(0 <= token < other.vocab_size for token in ids)
    marked = [*other.encode("one"), other.eos_id, *other.encode("two")]
    assert other.decode(marked) == f"one{end}two" and other.decode(marked, skip_special=True) == "onetwo"
    assert len(other.encode("the the the")) < len("the the the")
    with pytest.raises(ValueError, match="no token '<nope>'"):
        other.token_id("<nope>")


def test_batches_pickles_and_fingerprints(other: Tokenizer, model: bytes) -> None:
    flat, lengths = other.encode_batch([*WORDS, ""])
    assert [other.encode(text) for text in WORDS] == [
        flat[sum(lengths[:i]) : sum(lengths[: i + 1])].tolist() for i in range(len(WORDS))
    ]
    again = pickle.loads(pickle.dumps(other))
    assert again.fingerprint == other.fingerprint and again.encode(WORDS[0]) == other.encode(WORDS[0])
    assert len({SentencePieceTokenizer(model).fingerprint, TiktokenTokenizer(encoding()).fingerprint}) == 2
    changed = [{"special_tokens": {"<|endoftext|>": 259}}, {"pat_str": r"\w+|\W+"}, {"name": "theirs"}]
    prints = [TiktokenTokenizer(encoding(**change)).fingerprint for change in changed]
    assert len({*prints, TiktokenTokenizer(encoding()).fingerprint}) == 3  # a name is no part of what it does


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_are_made_with_it_and_know_it(
    other: Tokenizer, tokenizer: Tokenizer, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in WORDS))
    shards = tokenize_files([tmp_path / "c.jsonl"], tmp_path / "out", tokenizer=other, workers=workers).train
    assert [other.decode(shards.document(i)[:-1]) for i in range(3)] == WORDS
    assert shards.eos_id == other.eos_id and shards.vocab_size == other.vocab_size
    shards.check_tokenizer(other)
    with pytest.raises(ValueError, match="was made with the tokenizer sha256:"):
        shards.check_tokenizer(tokenizer)


def test_the_command_takes_both(
    model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tiktoken

    def known(name: str) -> Any:
        if name != "ours":
            raise ValueError(f"Unknown encoding {name}")
        return encoding()

    monkeypatch.setattr(tiktoken, "get_encoding", known)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.model").write_bytes(model)
    (tmp_path / "c.txt").write_text(WORDS[0])
    for number, name in enumerate((str(tmp_path / "t"), str(tmp_path / "t" / "tokenizer.model"), "tiktoken:ours")):
        out = str(tmp_path / f"o{number}")
        assert main(["tokenize", str(tmp_path / "c.txt"), "--tokenizer", name, "--out", out]) == 0
        assert main(["inspect", out, "--tokenizer", name, "--documents", "1"]) == 0
        assert WORDS[0] in capsys.readouterr().out
        assert main(["inspect", out, "--tokenizer", "tiktoken:ours" if number < 2 else str(tmp_path / "t")]) == 2
        assert "was made with the tokenizer" in capsys.readouterr().err
    assert TokenShards(tmp_path / "o0").fingerprint == TokenShards(tmp_path / "o1").fingerprint
    assert main(["inspect", out, "--tokenizer", "tiktoken:theirs"]) == 2
    assert "tiktoken has no encoding 'theirs'" in capsys.readouterr().err

    def offline(name: str) -> Any:
        raise OSError("no way there")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    assert main(["inspect", out, "--tokenizer", "tiktoken:ours"]) == 2
    assert "could not fetch the encoding 'ours': no way there" in capsys.readouterr().err


def test_what_cannot_be(model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.model").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad.model: not a sentencepiece model"):
        Tokenizer.load(tmp_path / "bad.model")
    made = SentencePieceTokenizer(model)
    with pytest.raises(ValueError, match="finds no control tokens in text"):
        made.encode("a", parse_special=True)
    made.save(tmp_path / "deep" / "m.model")
    assert Tokenizer.load(tmp_path / "deep").fingerprint == made.fingerprint
    ours = TiktokenTokenizer(encoding())
    assert ours.encode("a<|user|>", parse_special=True) == [97, 260]
    with pytest.raises(ValueError, match="no file of its own; name it as tiktoken:NAME"):
        ours.save(tmp_path / "t.json")
    for module, name in (("sentencepiece", str(tmp_path / "bad.model")), ("tiktoken", "tiktoken:gpt2")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            with pytest.raises(ValueError, match=rf"needs {module}: pip install 'kforge-data\[{module}\]'"):
                Tokenizer.load(name)
