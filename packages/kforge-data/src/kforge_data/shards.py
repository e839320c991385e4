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
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.order import epoch_order
from kforge_data.sources import RowBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kforge_data.tokenizer import Tokenizer

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

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False)

    @property
    def fingerprint(self) -> str:
        """sha256 over what decides the rows: types, counts and checksums; not the place, nor the file names."""
        content = [self.dtype, self.vocab_size, self.eos_id, self.tokenizer]
        shards = [[s.tokens, s.documents, s.sha256_bin, s.sha256_docs] for s in self.shards]
        return "sha256:" + hashlib.sha256(json.dumps([content, shards]).encode()).hexdigest()


def read_index(path: str | Path) -> ShardIndex:
    """Read and check `path`/index.json. ValueError says what is wrong with it."""
    file = Path(path) / INDEX
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_dir():
            raise ValueError(f"{path} is not a folder of token shards: no such folder") from None
        parts = [part for part in ("train", "heldout") if (Path(path) / part / INDEX).exists()]
        hint = f"; it has {' and '.join(parts)} inside: name one of them" if parts else ""
        raise ValueError(f"{path} has no {INDEX}: not token shards, or a write that never finished{hint}") from None
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
            raise ValueError(f"{file} is not an index of token shards")
        if (version := raw.pop("version", None)) != VERSION:
            raise ValueError(f"{file} has version {version}; this kforge-data reads version {VERSION}")
        shards = tuple(ShardInfo(**shard) for shard in raw.pop("shards"))
        index = ShardIndex(shards=shards, **raw)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if index.dtype not in TOKEN_DTYPES:
        raise ValueError(f"{file} names dtype {index.dtype!r}; known are {', '.join(TOKEN_DTYPES)}")
    token_dtype(index.vocab_size, index.dtype)
    for shard in shards:
        if not _SHARD_NAME.match(shard.name):
            raise ValueError(f"{file} lists a shard of the impossible name {shard.name!r}")
        if shard.tokens < 1 or not 1 <= shard.documents <= shard.tokens:
            raise ValueError(f"{file} lists {shard.name} with {shard.documents} documents of {shard.tokens} tokens")
    for name in ("tokens", "documents", "text_bytes"):
        if getattr(index, name) != (total := sum(getattr(shard, name) for shard in shards)):
            raise ValueError(f"{file} counts {getattr(index, name)} {name}, its shards {total}")
    return index


class TokenShards:
    """A folder of token shards, memory-mapped: the documents laid end to end are one stream of tokens.

    Opening reads index.json and maps the files: its time depends on the number of shards, not of tokens. A file
    whose size disagrees with the index is refused; `verify_shards` compares the content too.

    As a `Source` it cuts the stream into rows: row i of S tokens is stream[i*S : (i+1)*S], and the token after it as
    look-ahead. The last row is padded. Reading is safe from several threads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        self.fingerprint: str = self.index.fingerprint
        token_type = TOKEN_DTYPES[self.index.dtype]
        self._bins: list[NDArray[Any]] = []
        self._docs: list[NDArray[np.int64]] = []
        for shard in self.index.shards:
            self._bins.append(_map(self.path / f"{shard.name}.bin", token_type, shard.tokens))
            self._docs.append(_map(self.path / f"{shard.name}.docs", OFFSET_DTYPE, shard.documents + 1))
        # Stream position and document number at which each shard begins; the totals as last entries.
        self._first_token = np.cumsum([0, *(shard.tokens for shard in self.index.shards)], dtype=np.int64)
        self._first_document = np.cumsum([0, *(shard.documents for shard in self.index.shards)], dtype=np.int64)
        self._max_documents: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Path]]:
        return TokenShards, (self.path,)

    def __repr__(self) -> str:
        return f"TokenShards({str(self.path)!r}: {self.documents:,} documents, {self.tokens:,} tokens)"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Integer type of the ids on disk."""
        return TOKEN_DTYPES[self.index.dtype]

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""
        return self.index.vocab_size

    @property
    def eos_id(self) -> int | None:
        """The id that ends each document, if one does."""
        return self.index.eos_id

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return self.index.tokens

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.index.documents

    @property
    def text_bytes(self) -> int:
        """Bytes of UTF-8 text that the tokens stand for; end-of-text tokens stand for none."""
        return self.index.text_bytes

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A mean loss in nats per token as bits per byte of text: nats * tokens / (ln 2 * bytes).

        Every token is priced at the mean, also the few that no row scores (the first of each document).
        """
        if not self.text_bytes:
            raise ValueError(f"{self.path} does not know its bytes of text, so bits per byte cannot be told")
        return nats_per_token * self.tokens / (math.log(2) * self.text_bytes)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError unless these shards were made with this tokenizer."""
        if self.index.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f"{self.path} was made with the tokenizer {self.index.tokenizer[:19] or '(none recorded)'}, "
                f"not with {tokenizer.fingerprint[:19]}; tokenize again, or name the tokenizer that made it"
            )

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop) of the stream, in the type of the files. A view where one shard holds them all."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start}..{stop} lie outside of a stream of {self.tokens}")
        parts = [self._bins[s][lo:hi] for s, lo, hi in self._pieces(start, stop)]
        if not parts:
            return np.empty(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document(self, number: int) -> NDArray[Any]:
        """Tokens of one document (0..documents-1), its end-of-text token included."""
        if not 0 <= number < self.documents:
            raise ValueError(f"document {number} does not exist; there are {self.documents}, from 0")
        shard = int(np.searchsorted(self._first_document, number, side="right")) - 1
        inside = number - int(self._first_document[shard])
        return self._bins[shard][self._docs[shard][inside] : self._docs[shard][inside + 1]]

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, from, to) of the parts of [start, stop), positions inside the shard."""
        pieces = []
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        while start < stop:
            base, end = int(self._first_token[shard]), int(self._first_token[shard + 1])
            pieces.append((shard, start - base, min(stop, end) - base))
            start, shard = min(stop, end), shard + 1
        return pieces

    # What makes it a Source.

    def row_count(self, row_tokens: int) -> int:
        """Rows of `row_tokens` that hold the stream; the last may be padded."""
        if row_tokens < 1:
            raise ValueError(f"row_tokens = {row_tokens} must be at least 1")
        return -(-self.tokens // row_tokens)

    def rows_at(self, positions: NDArray[np.int64], *, row_tokens: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Row ids at these positions: a new pseudo-random permutation of the rows for every epoch."""
        return epoch_order(positions, rows=self.row_count(row_tokens), seed=seed, shuffle=shuffle)

    def read_rows(self, row_ids: NDArray[np.int64], row_tokens: int) -> RowBlock:
        """Rows of these ids, each with its look-ahead token and the document starts inside it."""
        row_ids = np.asarray(row_ids, np.int64).reshape(-1)
        rows = self.row_count(row_tokens)
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= rows):
            raise ValueError(f"row {row_ids.min()}..{row_ids.max()} asked for; there are {rows} of {row_tokens} tokens")
        starts = row_ids * row_tokens
        stops = np.minimum(starts + row_tokens + 1, self.tokens)
        tokens = np.empty((len(row_ids), row_tokens + 1), self.dtype)
        bounds = self._first_token
        first = np.searchsorted(bounds, starts, side="right") - 1
        last = np.searchsorted(bounds, stops - 1, side="right") - 1
        start_rows, start_columns = [], []
        touched = {s for a, b in zip(first.tolist(), last.tolist(), strict=True) for s in range(a, b + 1)}
        for shard in sorted(touched):
            here = np.flatnonzero((first <= shard) & (shard <= last))
            base = int(bounds[shard])
            a, b = starts[here], np.minimum(stops[here], bounds[shard + 1])
            low, high = np.maximum(a, base), b
            source = self._bins[shard]
            for row, column, lo, hi in zip(
                here.tolist(), (low - a).tolist(), (low - base).tolist(), (high - base).tolist(), strict=True
            ):
                tokens[row, column : column + hi - lo] = source[lo:hi]
            # Documents that start in (a, b): column 0 needs no mark.
            begins = self._docs[shard][:-1]
            i = np.searchsorted(begins, np.maximum(low, a + 1) - base)
            counts = np.searchsorted(begins, high - base) - i
            picked = np.repeat(i - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            start_rows.append(np.repeat(here, counts))
            start_columns.append(begins[picked] + base - np.repeat(a, counts))
        valid = stops - starts
        for row in np.flatnonzero(valid <= row_tokens).tolist():
            tokens[row, valid[row] :] = 0
        at_rows = np.concatenate(start_rows) if start_rows else np.empty(0, np.int64)
        at_columns = np.concatenate(start_columns) if start_columns else np.empty(0, np.int64)
        if len(start_rows) > 1:
            order = np.lexsort((at_columns, at_rows))
            at_rows, at_columns = at_rows[order], at_columns[order]
        return RowBlock(tokens, valid, at_rows, at_columns, np.zeros(len(row_ids), np.int16))

    def max_documents(self, row_tokens: int) -> int:
        """The most documents that any one row holds, parts and padding counted. One pass over the offsets, kept."""
        if row_tokens not in self._max_documents:
            rows = self.row_count(row_tokens)
            most = 1 + int(self.tokens % row_tokens != 0)
            carried_row, carried = -1, 0
            for shard, docs in enumerate(self._docs):
                for at in range(0, len(docs) - 1, 1 << 20):
                    begins = docs[at : min(at + (1 << 20), len(docs) - 1)] + self._first_token[shard]
                    begins = begins[begins % row_tokens != 0]
                    if not begins.size:
                        continue
                    row = begins // row_tokens
                    edges = np.flatnonzero(np.diff(row)) + 1
                    first = np.concatenate([[0], edges])
                    counts = np.diff(np.concatenate([first, [len(row)]]))
                    if row[0] == carried_row:
                        counts[0] += carried
                    padding = (row[first] == rows - 1) & (self.tokens % row_tokens != 0)
                    most = max(most, int((1 + counts + padding).max()))
                    carried_row, carried = int(row[-1]), int(counts[-1])
            self._max_documents[row_tokens] = most
        return self._max_documents[row_tokens]


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
