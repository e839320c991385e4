"""Token shards: a folder of raw token files that opens in no time and is read through memory maps.

    index.json      what the folder holds; written last, so a folder without it is unfinished
    0-00000.bin     tokens of shard 0, little-endian uint16 or uint32, document after document
    0-00000.docs    int64: where each document starts in that file, and as last entry its number of tokens
    0-00001.bin     ...

The first number in a file's name is the revision: rewriting a folder writes new files beside the old ones, replaces
index.json in one step, and only then removes the old files. A writer killed at any point leaves either the old set
or the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.streams import TokenStream

if TYPE_CHECKING:
    from numpy.typing import NDArray


FORMAT = "kforge-token-shards"
VERSION = 1
INDEX = "index.json"
OFFSET_DTYPE = np.dtype("<i8")
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SHARD_NAME = re.compile(r"^\d+-\d{5,}$")


def token_dtype(vocab_size: int, dtype: str = "auto") -> str:
    """Name of the integer type for ids 0..vocab_size-1: "uint16" up to 65,536 of them, else "uint32".

    A type asked for by name that cannot hold the vocabulary is a ValueError.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size = {vocab_size} must be at least 1")
    if vocab_size > 1 << 32:
        raise ValueError(f"vocab_size = {vocab_size} does not fit into 32-bit ids")
    if dtype == "auto":
        return "uint16" if vocab_size <= 1 << 16 else "uint32"
    if dtype not in TOKEN_DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not one of auto, {', '.join(TOKEN_DTYPES)}")
    if vocab_size > 1 << (8 * TOKEN_DTYPES[dtype].itemsize):
        raise ValueError(
            f"a vocabulary of {vocab_size} needs ids up to {vocab_size - 1}, which {dtype} cannot hold; "
            "use dtype uint32, or auto"
        )
    return dtype


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the index lists it."""

    name: str
    tokens: int
    documents: int
    text_bytes: int
    sha256_bin: str
    sha256_docs: str


@dataclass(frozen=True)
class ShardIndex:
    """The content of index.json."""

    dtype: str
    vocab_size: int
    eos_id: int | None
    tokenizer: str
    tokens: int
    documents: int
    text_bytes: int
    skipped_documents: int
    shards: tuple[ShardInfo, ...]
    meta: dict[str, Any]
    bos_id: int | None = None

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False)

    @property
    def fingerprint(self) -> str:
        """sha256 over what decides the rows: types, counts and checksums; not the place, nor the file names."""
        content: list[Any] = [self.dtype, self.vocab_size, self.eos_id, self.tokenizer]
        if self.bos_id is not None:
            content.append(self.bos_id)
        shards = [[s.tokens, s.documents, s.sha256_bin, s.sha256_docs] for s in self.shards]
        return "sha256:" + hashlib.sha256(json.dumps([content, shards]).encode()).hexdigest()


def read_index(path: str | Path) -> ShardIndex:
    """Read and check `path`/index.json. ValueError says what is wrong with it."""
    file = Path(path) / INDEX
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_dir():
            reason = "it is a file" if Path(path).exists() else "no such folder"
            raise ValueError(f"{path} is not a folder of token shards: {reason}") from None
        parts = [part for part in ("train", "heldout") if (Path(path) / part / INDEX).exists()]
        hint = f"; it has {' and '.join(parts)} inside: name one of them" if parts else ""
        raise ValueError(f"{path} has no {INDEX}: not token shards, or a write that never finished{hint}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise ValueError(f"{file} is not an index of token shards")
        if (version := raw.pop("version", None)) != VERSION or isinstance(version, bool):
            raise ValueError(f"{file} has version {version}; this kforge-data reads version {VERSION}")
        shards = tuple(ShardInfo(**shard) for shard in raw.pop("shards"))
        index = ShardIndex(shards=shards, **raw)
    except (TypeError, KeyError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    _check_types(file, index)
    if index.dtype not in TOKEN_DTYPES:
        raise ValueError(f"{file} names dtype {index.dtype!r}; known are {', '.join(TOKEN_DTYPES)}")
    try:
        token_dtype(index.vocab_size, index.dtype)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    for name in ("eos_id", "bos_id"):
        if (number := getattr(index, name)) is not None and number >= index.vocab_size:
            raise ValueError(f"{file} has {name} = {number}, which is no id of a vocabulary of {index.vocab_size}")
    if len({shard.name for shard in shards}) < len(shards):
        raise ValueError(f"{file} lists a shard twice")
    for shard in shards:
        if not _SHARD_NAME.match(shard.name):
            raise ValueError(f"{file} lists a shard of the impossible name {shard.name!r}")
        if shard.tokens < 1 or not 1 <= shard.documents <= shard.tokens:
            raise ValueError(f"{file} lists {shard.name} with {shard.documents} documents of {shard.tokens} tokens")
    for name in ("tokens", "documents", "text_bytes"):
        if getattr(index, name) != (total := sum(getattr(shard, name) for shard in shards)):
            raise ValueError(f"{file} counts {getattr(index, name)} {name}, its shards {total}")
    return index


_NUMBERS = ("vocab_size", "tokens", "documents", "text_bytes", "skipped_documents", "eos_id", "bos_id")
_STRINGS = ("dtype", "tokenizer", "name", "sha256_bin", "sha256_docs")


def _check_types(file: Path, index: ShardIndex) -> None:
    """ValueError that names the entry which is of a type that nobody writes."""
    for where, part in (("", index), *((f"shards[{i}].", shard) for i, shard in enumerate(index.shards))):
        for name, value in vars(part).items():
            if name in _NUMBERS:
                right = type(value) is int and value >= 0
                right = right or (value is None and name in ("eos_id", "bos_id"))
            else:
                right = isinstance(value, str) if name in _STRINGS else name == "shards" or isinstance(value, dict)
            if not right:
                raise ValueError(f"{file} is damaged: {where}{name} = {value!r}")


class TokenShards(TokenStream):
    """A folder of token shards, memory-mapped: the documents laid end to end are one stream of tokens.

    Opening reads index.json and maps the files: its time depends on the number of shards, not of tokens. A file
    whose size disagrees with the index is refused; `verify_shards` compares the content too.

    A `TokenStream`: reading, and cutting into rows, are described there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        token_type = TOKEN_DTYPES[self.index.dtype]
        super().__init__(
            [_map(self.path / f"{shard.name}.bin", token_type, shard.tokens) for shard in self.index.shards],
            [_map(self.path / f"{shard.name}.docs", OFFSET_DTYPE, shard.documents + 1) for shard in self.index.shards],
            dtype=token_type,
            vocab_size=self.index.vocab_size,
            eos_id=self.index.eos_id,
            text_bytes=self.index.text_bytes,
            tokenizer=self.index.tokenizer,
            fingerprint=self.index.fingerprint,
            name=str(path),
        )

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Path]]:
        return TokenShards, (self.path,)


def _map(path: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError(f"{path} is listed in {INDEX} and does not exist; the set is damaged") from None
    if size != length * dtype.itemsize:
        raise ValueError(
            f"{path} has {size} bytes; {length} entries of {dtype.name}, as {INDEX} says, are "
            f"{length * dtype.itemsize}: the file or its recorded type is wrong"
        )
    # A plain view of the map: numpy's memmap class costs a microsecond at each slice.
    return np.asarray(np.memmap(path, dtype, mode="r", shape=(length,)))
