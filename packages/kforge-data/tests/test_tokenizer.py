"""Round trips, special strings that stay text (C09), and one fingerprint for one tokenizer."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_data import Tokenizer, tokenize_files, train_tokenizer

MARKER = "<|endoftext|>"


def test_training_is_deterministic(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == 0
    assert train_tokenizer(texts, vocab_size=300).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(texts, vocab_size=301).fingerprint != tokenizer.fingerprint


def test_it_compresses(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert len(tokenizer.encode(texts[3])) < 0.7 * len(texts[3])


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=200)
@given(raw=st.binary(max_size=40))
def test_every_byte_string_comes_back(tokenizer: Tokenizer, raw: bytes) -> None:
    """Bytes that are UTF-8 as the text that they are; any others as text of a character a byte, as a corpus of bytes is
    written. Each gives its bytes back, through the files of a set of shards as through the encoder."""
    try:
        text = raw.decode()
        assert tokenizer.decode(tokenizer.encode(text)).encode() == raw
    except UnicodeDecodeError:
        pass
    text = raw.decode("latin-1")
    flat, lengths = tokenizer.encode_batch([text])
    assert lengths.tolist() == [len(flat)] and flat.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.decode(flat).encode("latin-1") == raw


def test_every_byte_is_in_the_vocabulary() -> None:
    """Trained on one letter, it still knows all characters."""
    small = train_tokenizer(["aaaa"], vocab_size=300)
    assert small.vocab_size < 300  # the text gives no more merges
    text = "".join(map(chr, range(1, 0x3000, 7))) + "🙂"
    assert small.decode(small.encode(text)) == text


def test_c09_a_marker_in_the_text_stays_text(tokenizer: Tokenizer) -> None:
    text = f"a {MARKER} b"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(parsed) == text and tokenizer.decode(parsed, skip_special=True) == "a  b"
    assert tokenizer.encode(text) == ids  # the switch does not stick


def _definitions() -> dict[str, dict[str, Any]]:
    """Tokenizers in whose vocabulary the end of text, "</s>", is a word that their model finds in a text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -2.0), ("b", -2.0), *((piece, -3.0) for piece in "</s>\u2581")]
    unigram = Library(models.Unigram(pieces, unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = Library(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for library in (unigram, words):
        library.add_special_tokens([AddedToken("<unk>"), AddedToken("</s>")])
    trained = train_tokenizer(["aaaa"], vocab_size=300, special_tokens=["<unk>", "</s>"])
    whole = json.loads(trained._definition)
    whole["model"]["ignore_merges"] = True
    whole["pre_tokenizer"]["use_regex"] = False
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": " ?[^ ]+"}, "behavior": "Isolated", "invert": False},
            whole["pre_tokenizer"],
        ],
    }
    plain = Library.from_str(train_tokenizer(["aaaa"], vocab_size=300, special_tokens=["<unk>"])._definition)
    plain.add_tokens([AddedToken("<tool>"), AddedToken("</s>")])  # not called special
    texts = {"unigram": unigram, "words": words, "plain": plain}
    return {"whole words": whole, **{name: json.loads(library.to_str()) for name, library in texts.items()}}


@pytest.mark.parametrize("kind", ["unigram", "words", "whole words", "plain"])
def test_c09_a_marker_that_is_a_word_of_the_vocabulary_stays_text(kind: str) -> None:
    definition = _definitions()[kind]
    tokenizer = Tokenizer(json.dumps(definition))
    (end,) = (token["id"] for token in definition["added_tokens"] if token["content"] == "</s>")
    assert tokenizer.eos_id == end and tokenizer.encode("</s>", parse_special=True)[-1] == end
    for text in ("</s>", "a </s> b", "a </s></s>"):
        ids = tokenizer.encode(text)
        assert end not in ids
        if kind != "words":  # whose words are but these
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a b") == tokenizer.encode("a b", parse_special=True)  # what is text has the same ids
    if kind == "plain":  # a word that the tokenizer itself looks for in text, and does not call special
        assert tokenizer.encode("<tool>") == [tokenizer.token_id("<tool>")]
    if kind == "words":
        assert tokenizer.encode("c <unk>") == [0, 0]


def test_a_word_that_text_makes_is_refused_as_its_own_end(tmp_path: Path) -> None:
    """Where merges make the end of text, it cannot stay text: better an error than documents cut in two."""
    trained = train_tokenizer(["stop stop stop"] * 5, vocab_size=280)
    (word,) = (word for word in json.loads(trained._definition)["model"]["vocab"] if word == "stop")
    tokenizer = Tokenizer(trained._definition, end_of_text=word)
    (tmp_path / "c.jsonl").write_text('{"text": "go on"}\n{"text": "stop, and go on"}\n')
    assert tokenizer.encode("stop") == [tokenizer.eos_id]
    with pytest.raises(ValueError, match=r"makes 'stop', which ends documents, of the text .* 'stop, and go on'"):
        tokenize_files([tmp_path / "c.jsonl"], tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
    parsed = tokenize_files([tmp_path / "c.jsonl"], tmp_path / "out", tokenizer=tokenizer, parse_special=True).train
    assert parsed.documents == 2


def test_a_definition_that_cuts_or_pads_texts_does_neither(tokenizer: Tokenizer, texts: list[str]) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_str(tokenizer._definition)
    library.enable_truncation(4)
    library.enable_padding(length=64)
    short = Tokenizer(library.to_str())
    for parse in (False, True):
        for text in texts:
            assert short.encode(text, parse_special=parse) == tokenizer.encode(text, parse_special=parse)


def test_a_batch_is_its_texts_one_by_one(tokenizer: Tokenizer, texts: list[str]) -> None:
    several = [*texts, "", f"x{MARKER}"]
    for parse in (False, True):
        flat, lengths = tokenizer.encode_batch(several, parse_special=parse)
        assert flat.dtype == np.uint32 and lengths.dtype == np.int64
        expected = [tokenizer.encode(text, parse_special=parse) for text in several]
        assert lengths.tolist() == [len(ids) for ids in expected]
        assert flat.tolist() == [token for ids in expected for token in ids]


def test_saved_loaded_and_reformatted_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(file)
    assert Tokenizer.load(file).fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(file.parent).fingerprint == tokenizer.fingerprint
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    assert Tokenizer.load(file).fingerprint == tokenizer.fingerprint
    assert pickle.loads(pickle.dumps(tokenizer)).encode("the end") == tokenizer.encode("the end")


def test_other_end_of_text_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = train_tokenizer(["aaaa"], vocab_size=300, special_tokens=["<pad>", "</s>"])
    assert other.eos_id == 1
    strange = train_tokenizer(["aaaa"], vocab_size=300, special_tokens=["<stop>"])
    with pytest.raises(ValueError, match="no end-of-text token one of"):
        _ = strange.eos_id
    strange.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json", end_of_text="<stop>").eos_id == 0
    with pytest.raises(ValueError, match="no end-of-text token '<nope>'"):
        _ = Tokenizer.load(tmp_path / "t.json", end_of_text="<nope>").eos_id


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Tokenizer.load(tmp_path / "none.json")
    for content in (b"{", b'{"a": 1}', b"\xff\xfe\x00"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.json is not a tokenizer.json"):
            Tokenizer.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="vocab_size = 256 is too small"):
        train_tokenizer(["a"], vocab_size=256)


# The size that a model wants.


@pytest.mark.parametrize(
    ("asked", "multiple", "size"), [(300, 64, 320), (320, 64, 320), (290, 1, 290), (270, 128, 384)]
)
def test_a_size_that_a_model_wants(asked: int, multiple: int, size: int) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcd "), 40).tolist()) for _ in range(100)]
    made = train_tokenizer(texts, vocab_size=asked, multiple=multiple)
    assert made.vocab_size == size and "reserved" not in made._definition
    assert made.fingerprint == train_tokenizer(texts, vocab_size=asked, multiple=multiple).fingerprint


def test_a_text_that_gives_too_little_is_filled_up_with_tokens_that_no_text_has() -> None:
    made = train_tokenizer(["aaaa"], vocab_size=300, special_tokens=[MARKER, "<|user|>"], multiple=64)
    assert made.vocab_size == 320 and made.token_id("<|user|>") == 1
    assert made.token_id("<|reserved_0|>") == 320 - sum(f"<|reserved_{i}|>" in made._definition for i in range(64))
    text = "<|reserved_0|> <|user|>"
    assert made.decode(made.encode(text)) == text and max(made.encode(text)) < made.token_id("<|reserved_0|>")
    assert made.encode(text, parse_special=True)[0] == made.token_id("<|reserved_0|>")


def test_the_same_in_another_process_on_other_threads(tmp_path: Path) -> None:
    """Ties between merges are settled alike, whatever threads count them."""
    corpus = tmp_path / "c.txt"
    rng = np.random.default_rng(0)
    corpus.write_text("\n".join("".join(rng.choice(list("abcdefgh "), 40).tolist()) for _ in range(500)))
    seen = set()
    for number, threads in enumerate(("1", "2", "5")):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, "-m", "kforge_data", "train-tokenizer", str(corpus), "--txt-documents", "line"]
        done = subprocess.run(
            [*command, "--vocab-size=500", "--vocab-multiple=64", "--special-token=<|pad|>", f"--out={out}"],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "512 tokens" in done.stdout
        seen.add(out.read_bytes())
    assert len(seen) == 1 and Tokenizer.load(tmp_path / "0.json").token_id("<|pad|>") == 1


def test_special_tokens_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="must differ from one another"):
        train_tokenizer(["a"], vocab_size=300, special_tokens=["<a>", "<a>"])
    with pytest.raises(ValueError, match="multiple = 0"):
        train_tokenizer(["a"], vocab_size=300, multiple=0)
