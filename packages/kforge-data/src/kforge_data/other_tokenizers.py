"""Tokenizers that are no tokenizer.json: sentencepiece models, and tiktoken's encodings by name.

Both need their library (extras `sentencepiece` and `tiktoken`). What must not vary does not here either: text is
encoded without adding or recognising special tokens, and a fingerprint of the definition says which tokenizer it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kforge_data.text_files import needed
from kforge_data.tokenizer import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (Kudo and Richardson, 2018), from the bytes of its .model file.

    Control tokens, as </s>, are never found in text. Symbols that the model was trained to find in any text
    (`user_defined_symbols`) are, and its normalisation may change what a text is; both are the model's own.
    """

    file_name = "tokenizer.model"

    def __init__(self, definition: bytes, *, end_of_text: str | None = None) -> None:
        library = needed("sentencepiece", "sentencepiece", "a sentencepiece model")
        try:
            self._model = library.SentencePieceProcessor(model_proto=definition)
        except Exception as error:  # the library raises RuntimeError, and others of its own
            raise ValueError(f"not a sentencepiece model: {error}") from error
        self._bytes, self._end_of_text = definition, end_of_text
        self.fingerprint = "sha256:" + hashlib.sha256(definition).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the .model, whole or not at all."""
        _write(Path(path), self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _sentencepiece, (self._bytes, self._end_of_text)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_piece_size())

    def _find(self, token: str) -> int | None:
        found = int(self._model.piece_to_id(token))
        return found if self._model.id_to_piece(found) == token else None  # what it does not know is <unk>

    def _encode(self, texts: Sequence[str], parse_special: bool) -> Iterator[list[int]]:
        if parse_special:
            raise ValueError("a sentencepiece model finds no control tokens in text; leave parse_special out")
        return iter(self._model.encode(list(texts), out_type=int, num_threads=os.cpu_count() or 1))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids. Control tokens appear by name, or not at all with `skip_special`."""
        parts, plain = [], []
        for token in map(int, ids):
            if not self._model.is_control(token):
                plain.append(token)
            elif not skip_special:
                parts += [self._model.decode(plain), self._model.id_to_piece(token)]
                plain = []
        return "".join([*parts, self._model.decode(plain)])


class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken, from a `tiktoken.Encoding`."""

    file_name = ""

    def __init__(self, encoding: Any, *, end_of_text: str | None = None) -> None:
        self._encoding, self._end_of_text = encoding, end_of_text
        self._special: dict[str, int] = dict(encoding._special_tokens)
        digest = hashlib.sha256(json.dumps([encoding._pat_str, sorted(self._special.items())]).encode())
        for piece, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (rank, piece.hex().encode()))
        self.fingerprint = "sha256:" + digest.hexdigest()

    @classmethod
    def named(cls, name: str, *, end_of_text: str | None = None) -> TiktokenTokenizer:
        """The encoding of a name, which tiktoken downloads where it has it not yet. ValueError if there is none."""
        library = needed("tiktoken", "tiktoken", f"the encoding {name}")
        try:
            return cls(library.get_encoding(name), end_of_text=end_of_text)
        except ValueError as error:
            raise ValueError(f"tiktoken has no encoding {name!r}: {error}") from error
        except Exception as error:  # whatever its way to the network raises
            raise ValueError(f"tiktoken could not fetch the encoding {name!r}: {error}") from error

    def save(self, path: str | Path) -> None:
        """ValueError: an encoding of tiktoken is known by its name."""
        raise ValueError("an encoding of tiktoken has no file of its own; name it as tiktoken:NAME")

    def __reduce__(self) -> tuple[Any, ...]:
        return _tiktoken, (self._encoding, self._end_of_text)

    @property
    def vocab_size(self) -> int:
        return int(self._encoding.n_vocab)

    def _find(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def _encode(self, texts: Sequence[str], parse_special: bool) -> Iterator[list[int]]:
        threads = os.cpu_count() or 1
        if parse_special:
            return iter(self._encoding.encode_batch(list(texts), num_threads=threads, allowed_special="all"))
        return iter(self._encoding.encode_ordinary_batch(list(texts), num_threads=threads))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids. Special tokens appear by name, or not at all with `skip_special`."""
        special = set(self._special.values()) if skip_special else set()
        return str(self._encoding.decode([int(i) for i in ids if int(i) not in special]))


def _sentencepiece(definition: bytes, end_of_text: str | None) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(definition, end_of_text=end_of_text)


def _tiktoken(encoding: Any, end_of_text: str | None) -> TiktokenTokenizer:
    return TiktokenTokenizer(encoding, end_of_text=end_of_text)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".partial")
    temporary.write_bytes(content)
    os.replace(temporary, file)
