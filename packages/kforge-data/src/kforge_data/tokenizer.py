"""Byte-level BPE: train one, load one, and turn text into ids and back.

The work is done by the `tokenizers` library; this module fixes what must not vary: text is encoded whole, without
adding or recognising special tokens, and a tokenizer is known by a fingerprint of its definition.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from tokenizers import Tokenizer as _Library

END_OF_TEXT = "<|endoftext|>"
# Names under which public tokenizers carry their end-of-text token, in order of preference.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
TIKTOKEN = "tiktoken:"
_BYTES = 256


class Tokenizer:
    """A tokenizer.json and what is done with it. `load` gives one of another kind for what is none.

    Args:
        definition: the text of a tokenizer.json.
        end_of_text: the token that ends documents. None looks for one under its usual names.
    """

    file_name = "tokenizer.json"
    """How others expect its file to be called; "" for one that has none."""
    fingerprint: str
    """sha256 of the definition: two tokenizers of equal fingerprint give the same ids."""

    def __init__(self, definition: str, *, end_of_text: str | None = None) -> None:
        from tokenizers import Tokenizer as Library

        try:
            content = json.loads(definition)
            self._parsing: _Library = Library.from_str(definition)
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise ValueError(f"not a tokenizer.json: {error}") from error
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self._plain: _Library | None = None
        self._definition = definition
        self._end_of_text = end_of_text
        # Of the parsed definition, so that neither white space nor a release of the library changes it.
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        self.fingerprint = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
        """The tokenizer at a path: a tokenizer.json, a sentencepiece .model, or the one of these in a folder; or
        "tiktoken:NAME", an encoding of tiktoken. ValueError if there is none, it is not one, or its library is missing.
        """
        if str(path).startswith(TIKTOKEN):
            from kforge_data.other_tokenizers import TiktokenTokenizer

            return TiktokenTokenizer.named(str(path).removeprefix(TIKTOKEN), end_of_text=end_of_text)
        file = Path(path)
        if file.is_dir():
            files = [file / "tokenizer.json", *sorted(file.glob("*.model"))]
            file = next((one for one in files if one.exists()), files[0])
        if file.suffix == ".model" and file.is_file():
            from kforge_data.other_tokenizers import SentencePieceTokenizer

            try:
                return SentencePieceTokenizer(file.read_bytes(), end_of_text=end_of_text)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
        try:
            definition = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{file} does not exist; train a tokenizer or name the tokenizer.json of one") from None
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not a tokenizer.json: it is not text") from None
        try:
            return cls(definition, end_of_text=end_of_text)
        except ValueError as error:
            raise ValueError(f"{file} is {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer.json, whole or not at all."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(file.name + ".partial")
        temporary.write_text(self._definition, encoding="utf-8")
        os.replace(temporary, file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._definition, self._end_of_text)

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1, special tokens included."""
        ids = self._parsing.get_vocab(with_added_tokens=True).values()
        return 1 + max(ids, default=-1)

    @property
    def eos_id(self) -> int:
        """Id of the token that ends documents. ValueError if the tokenizer has none of a known name."""
        if (name := self._end_name()) is not None:
            return self.token_id(name)
        wanted = repr(self._end_of_text) if self._end_of_text else "one of " + ", ".join(_KNOWN_ENDS)
        raise ValueError(f"the tokenizer has no end-of-text token {wanted}; say which of its tokens ends a document")

    def _end_name(self) -> str | None:
        names = (self._end_of_text,) if self._end_of_text else _KNOWN_ENDS
        return next((name for name in names if self._find(name) is not None), None)

    def token_id(self, token: str) -> int:
        """Id of a token by its name. ValueError if there is none of that name."""
        if (found := self._find(token)) is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return found

    def _find(self, token: str) -> int | None:
        found = self._parsing.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Ids of a text. Nothing is added at either end.

        The names of special tokens (those that the tokenizer.json calls so, and the end of text) stay text, so that a
        document cannot forge control tokens; `parse_special=True` turns them into the special ids instead.
        """
        return next(self._encode([text], parse_special))

    def encode_batch(
        self, texts: Sequence[str], *, parse_special: bool = False
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of several texts laid end to end, uint32 [n], and how many each has, int64 [len(texts)].

        Uses all cores, unless the environment variable TOKENIZERS_PARALLELISM is false.
        """
        flat, lengths = array("I"), []  # which takes a list four times as fast as NumPy does
        for ids in self._encode(texts, parse_special):
            flat.fromlist(ids)
            lengths.append(len(ids))
        return np.array(flat, np.uint32), np.array(lengths, np.int64)

    def _encode(self, texts: Sequence[str], parse_special: bool) -> Iterator[list[int]]:
        encodings = self._library(parse_special).encode_batch_fast(list(texts), add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids. Special tokens appear by name, or not at all with `skip_special`.

        Bytes that are not UTF-8, as where a character is cut in two, become U+FFFD.
        """
        return self._parsing.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def _library(self, parse_special: bool) -> _Library:
        if parse_special:
            return self._parsing
        if self._plain is None:
            self._plain = _deaf(self._definition, self._end_name())
        return self._plain


def _deaf(definition: str, end: str | None) -> _Library:
    """The tokenizer of a definition for text in which nothing is a special token, with the same ids.

    The library's own switch passes over special tokens where it cuts text up. A model finds them all the same if they
    are words of its vocabulary (Unigram, WordLevel, BPE with ignore_merges), so there they get names that no text has.
    """
    from tokenizers import Tokenizer as Library

    content = json.loads(definition)
    added, model = content.get("added_tokens") or [], content.get("model") or {}
    hidden: set[str] = {token["content"] for token in added if token["special"]} | ({end} if end else set())
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    # A word that merges make, or are made of, is text beside its being special.
    hidden -= {word for pair in pairs for word in (*pair, "".join(pair))} | {name for name in hidden if len(name) < 2}
    secret = secrets.token_hex(16)
    renamed = {name: f"{name}{secret}" for name in hidden}
    for token in added:
        if token["content"] in renamed:
            token.update(content=renamed[token["content"]], special=True)
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(word, word): number for word, number in vocabulary.items()}
    else:  # Unigram: [word, score] by number
        model["vocab"] = [[renamed.get(word, word), score] for word, score in vocabulary]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    content.update(truncation=None, padding=None, post_processor=None)
    library = Library.from_str(json.dumps(content))
    library.encode_special_tokens = True  # their strings are text like any other
    return library


def _rebuild(definition: str, end_of_text: str | None) -> Tokenizer:
    return Tokenizer(definition, end_of_text=end_of_text)


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    multiple: int = 1,
) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al., 2016; on bytes as in GPT-2) on texts. The same texts give the same one.

    `vocab_size` counts the special tokens, which get the first ids, and the 256 bytes; it is rounded up to a multiple
    of `multiple`, as models that are cut over devices, or kernels, want it. Short texts may not fill it; with a
    multiple, tokens `<|reserved_0|>`, … that no text has then fill it up to one.
    Every string can be encoded and decoded again without loss.
    """
    smallest = _BYTES + len(special_tokens)
    if multiple < 1:
        raise ValueError(f"multiple = {multiple} must be at least 1")
    if len(set(special_tokens)) < len(special_tokens) or "" in special_tokens:
        raise ValueError(f"special_tokens = {list(special_tokens)} must differ from one another, and none be empty")
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size = {vocab_size} is too small: {_BYTES} bytes and {len(special_tokens)} special tokens are "
            f"{smallest} already"
        )
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_round_up(vocab_size, multiple),
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer=trainer)
    size = library.get_vocab_size()
    reserved = [f"<|reserved_{i}|>" for i in range(_round_up(size, multiple) - size)]
    library.add_special_tokens([AddedToken(token, special=True) for token in reserved])
    return Tokenizer(library.to_str())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
