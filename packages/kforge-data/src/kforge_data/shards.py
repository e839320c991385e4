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
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from kforge_data.order import epoch_order
from kforge_data.sources import RowBlock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from kforge_data.tokenizer import Tokenizer

FORMAT = "kforge-token-shards"
VERSION = 1
INDEX = "index.json"
OFFSET_DTYPE = np.dtype("<i8")
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OWN_FILE = re.compile(r"^\d+-\d{5,}\.(bin|docs)$")
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


class ShardWriter:
    """Writes a folder of token shards, document by document. Nothing counts until `finish`.

        with ShardWriter("shards", vocab_size=50_000) as writer:
            writer.add([17, 4, 0])

    Leaving the block finishes the set; leaving it by an exception removes all that was written.

    Args:
        path: the folder. Created when the first document comes.
        vocab_size: ids are 0..vocab_size-1; an id outside is refused.
        tokenizer: fingerprint of the tokenizer that made the ids ("" if there is none).
        eos_id: the id that ends each document, recorded for readers; the writer adds nothing.
        dtype: "auto", "uint16" or "uint32". One that cannot hold the vocabulary is refused before any file.
        shard_tokens: a shard is closed rather than grown past this. A document is never split, so a longer one
            makes a longer shard.
        overwrite: replace the set that lies at `path`. The old one stays whole until the new one is finished.
        meta: anything JSON can hold, for people.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        tokenizer: str = "",
        eos_id: int | None = None,
        dtype: str = "auto",
        shard_tokens: int = 1 << 28,
        overwrite: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.dtype = token_dtype(vocab_size, dtype)
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens = {shard_tokens} must be at least 1")
        if eos_id is not None and not 0 <= eos_id < vocab_size:
            raise ValueError(f"eos_id = {eos_id} is not an id of a vocabulary of {vocab_size}")
        self.path = Path(path)
        if (self.path / INDEX).exists() and not overwrite:
            raise ValueError(f"{self.path} already holds token shards; remove it, or ask to overwrite")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and token shards need a folder")
        self._vocab_size, self._tokenizer, self._eos_id = vocab_size, tokenizer, eos_id
        self._shard_tokens, self._meta = shard_tokens, dict(meta or {})
        self._revision = 1 + max(self._listed_revisions(), default=-1)
        self._shards: list[ShardInfo] = []
        self._open: _OpenShard | None = None
        self._made: list[Path] = []  # folders to remove again on abort, innermost first
        self._skipped = 0
        self._done = False

    def _listed_revisions(self) -> list[int]:
        try:
            return [int(shard.name.split("-")[0]) for shard in read_index(self.path).shards]
        except ValueError:  # none there, or damaged: its files may go
            return []

    def add(self, tokens: ArrayLike, text_bytes: int = 0) -> None:
        """Append one document of ids [n], made from `text_bytes` bytes of UTF-8. An empty one is counted as skipped."""
        flat = np.asarray(tokens)
        self.add_batch(flat, np.array([flat.size], np.int64), np.array([text_bytes], np.int64))

    def add_batch(self, tokens: ArrayLike, lengths: ArrayLike, text_bytes: ArrayLike) -> None:
        """Append documents laid end to end: ids [n], their lengths [d] (sum n), bytes of text of each [d]."""
        if self._done:
            raise ValueError(f"the shards at {self.path} are finished; nothing can be added")
        flat = np.asarray(tokens).reshape(-1)
        sizes, weights = np.asarray(lengths, np.int64).reshape(-1), np.asarray(text_bytes, np.int64).reshape(-1)
        if sizes.sum() != flat.size or sizes.shape != weights.shape:
            raise ValueError(f"lengths sum to {sizes.sum()}, and there are {flat.size} tokens; or text_bytes differs")
        if flat.size:
            if not np.issubdtype(flat.dtype, np.integer):
                raise ValueError(f"ids must be integers, not {flat.dtype}")
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high >= self._vocab_size:
                raise ValueError(f"id {high if low >= 0 else low} is outside of a vocabulary of {self._vocab_size}")
        filled = sizes > 0
        self._skipped += int((~filled).sum())
        sizes, weights = sizes[filled], weights[filled]
        flat = flat.astype(TOKEN_DTYPES[self.dtype], copy=False)
        ends = np.cumsum(sizes)
        first, token = 0, 0
        while first < len(sizes):
            shard = self._open or self._start_shard()
            room = self._shard_tokens - shard.tokens
            last = int(np.searchsorted(ends, token + room, side="right"))
            if last <= first:
                if shard.tokens:
                    self._close_shard()
                    continue
                last = first + 1
            shard.write(flat[token : int(ends[last - 1])], sizes[first:last], int(weights[first:last].sum()))
            first, token = last, int(ends[last - 1])

    def skip(self, documents: int = 1) -> None:
        """Count documents that were left out (empty ones); they appear in the index as skipped."""
        self._skipped += documents

    def finish(self) -> TokenShards:
        """Close the files, write index.json and return the set. Older revisions are removed after that."""
        if self._done:
            raise ValueError(f"the shards at {self.path} are finished already")
        if self._open:
            self._close_shard()
        index = ShardIndex(
            dtype=self.dtype,
            vocab_size=self._vocab_size,
            eos_id=self._eos_id,
            tokenizer=self._tokenizer,
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            text_bytes=sum(shard.text_bytes for shard in self._shards),
            skipped_documents=self._skipped,
            shards=tuple(self._shards),
            meta=self._meta,
        )
        text = index.to_json()
        self._make_folder()
        temporary = self.path / (INDEX + ".partial")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / INDEX)
        _sync_folder(self.path)
        self._done = True
        listed = {f"{shard.name}.{kind}" for shard in self._shards for kind in ("bin", "docs")}
        for file_path in self.path.iterdir():
            if _OWN_FILE.match(file_path.name) and file_path.name not in listed:
                file_path.unlink()
        return TokenShards(self.path)

    def abort(self) -> None:
        """Remove everything that this writer wrote, folders that it made included. Harmless after `finish`."""
        if self._done:
            return
        self._done = True
        if self._open:
            self._open.discard()
        for shard in self._shards:
            for kind in ("bin", "docs"):
                (self.path / f"{shard.name}.{kind}").unlink(missing_ok=True)
        (self.path / (INDEX + ".partial")).unlink(missing_ok=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:  # another writer has put something there
                break

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._done:
            try:
                self.finish()
            except BaseException:
                self.abort()
                raise

    def _make_folder(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._made = self._made or missing

    def _start_shard(self) -> _OpenShard:
        self._make_folder()
        self._open = _OpenShard(self.path, f"{self._revision}-{len(self._shards):05d}")
        return self._open

    def _close_shard(self) -> None:
        if self._open:
            self._shards.append(self._open.close())
            self._open = None


class _OpenShard:
    """The two files of the shard being written, hashed as they grow."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.tokens, self._documents, self._text_bytes = name, 0, 0, 0
        self._paths = [folder / f"{name}.bin", folder / f"{name}.docs"]
        self._files: list[BinaryIO] = [path.open("wb") for path in self._paths]
        self._hashes = [hashlib.sha256(), hashlib.sha256()]

    def _put(self, which: int, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self._files[which].write(data)
        self._hashes[which].update(data)

    def write(self, tokens: NDArray[Any], sizes: NDArray[np.int64], text_bytes: int) -> None:
        self._put(0, tokens)
        self._put(1, (self.tokens + np.cumsum(sizes) - sizes).astype(OFFSET_DTYPE))
        self.tokens += len(tokens)
        self._documents += len(sizes)
        self._text_bytes += text_bytes

    def close(self) -> ShardInfo:
        self._put(1, np.array([self.tokens], OFFSET_DTYPE))
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        sums = [digest.hexdigest() for digest in self._hashes]
        return ShardInfo(self.name, self.tokens, self._documents, self._text_bytes, *sums)

    def discard(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


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


def _sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system lets a folder be opened."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
