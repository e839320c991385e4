"""Rows that cut no document which fits into one: best-fit packing, planned once from lengths alone.

Pieces are placed into rows of S tokens longest first, each into the fullest row that still has room (best-fit
decreasing: Johnson et al., 1974; for language models Ding et al., "Fewer Truncations Improve Language Modeling",
2024). A document longer than S is cut into full rows and a rest, which is placed like a document; the token after a
full row is known as its look-ahead, so that no label is lost.

The plan is what a row is made of: (document, start, length) pieces. It is made in vectorised passes whose number
depends on S and not on the number of documents, kept on disk, and read through memory maps.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kforge_data.cache import build_once, cache_folder
from kforge_data.order import Permutation, epoch_order
from kforge_data.sources import RowBlock
from kforge_data.streams import TokenStream, check_known

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VERSION = 1
_FILES = ("rows", "documents", "starts", "lengths")
# So many documents are packed among one another at a time, which bounds the memory of planning to about 1 GB.
WINDOW_DOCUMENTS = 1 << 24


class Plan(NamedTuple):
    """What each of R rows is made of, P pieces in all; memory maps."""

    rows: NDArray[np.int64]
    """[R+1]: the first piece of each row; P as last entry."""
    documents: NDArray[np.int64]
    """[P]: number of the document."""
    starts: NDArray[np.int64]
    """[P]: where in the stream the piece begins, in tokens."""
    lengths: NDArray[np.int32]
    """[P]: its tokens."""
    max_documents: int
    """The most documents in one row, padding counted."""
    tokens: int
    """Tokens in all rows."""

    @property
    def fill(self) -> float:
        """Share of the rows' columns that hold text."""
        width = self.row_tokens
        return self.tokens / (width * (len(self.rows) - 1)) if len(self.rows) > 1 else 0.0

    row_tokens: int = 0
    """S."""


class PackedDocuments:
    """A `TokenStream` whose rows are packed by best fit, as a `Source` for the `Loader`.

    Args:
        stream: where the documents are.
        truncate: of a document longer than a row keep the first row only; False keeps all, in several rows.
        seed: chooses which documents of equal length come together.
        cache: folder for plans (default: `cache_folder`). One process of a machine plans, others wait for it.

    Rows of another length have another plan. Rows that are not full end in padding.
    """

    def __init__(
        self, stream: TokenStream, *, truncate: bool = False, seed: int = 0, cache: str | Path | None = None
    ) -> None:
        check_known(stream, "packing")
        self.stream, self._truncate, self._seed, self._cache = stream, truncate, seed, cache
        self.name, self.tokenizer = stream.name, stream.tokenizer
        text = json.dumps(["best-fit", _VERSION, WINDOW_DOCUMENTS, stream.fingerprint, truncate, seed])
        self.fingerprint = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        self._plans: dict[int, Plan] = {}

    def __repr__(self) -> str:
        return f"PackedDocuments({self.stream!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.stream, self._truncate, self._seed, self._cache)

    def describe(self) -> dict[str, Any]:
        """What the fingerprint is of, for people: plain data."""
        return {**self.stream.describe(), "packing": "truncate" if self._truncate else "best_fit", "seed": self._seed}

    def plan(self, row_tokens: int) -> Plan:
        """The plan for rows of this length, made if there is none yet. ValueError for a length below 1."""
        if row_tokens not in self._plans:
            if row_tokens < 1:
                raise ValueError(f"row_tokens = {row_tokens} must be at least 1")
            key = hashlib.sha256(f"{self.fingerprint} {row_tokens}".encode()).hexdigest()
            folder = build_once(cache_folder(self._cache) / "plans" / key, lambda path: self._build(path, row_tokens))
            self._plans[row_tokens] = _open(folder, row_tokens)
        return self._plans[row_tokens]

    def _build(self, folder: Path, row_tokens: int) -> None:
        pieces, most, tokens, rows = 0, 0, 0, 0
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(folder / name, "wb")) for name in _FILES}
            for first in range(0, self.stream.documents, WINDOW_DOCUMENTS):
                last = min(first + WINDOW_DOCUMENTS, self.stream.documents)
                bounds = self.stream.document_bounds(first, last)
                seed = hash_seed(self._seed, first)
                at, documents, starts, lengths = plan_rows(bounds, row_tokens, truncate=self._truncate, seed=seed)
                filled = np.add.reduceat(lengths, at) if len(at) else np.empty(0, np.int64)
                counts = np.diff(at, append=len(lengths)) + (filled < row_tokens)
                most, tokens, rows = max(most, int(counts.max(initial=0))), tokens + int(lengths.sum()), rows + len(at)
                files["rows"].write((at + pieces).astype("<i8").tobytes())
                files["documents"].write((documents + first).astype("<i8").tobytes())
                files["starts"].write(starts.astype("<i8").tobytes())
                files["lengths"].write(lengths.astype("<i4").tobytes())
                pieces += len(lengths)
            files["rows"].write(np.array([pieces], "<i8").tobytes())
        found = {"rows": rows, "pieces": pieces, "max_documents": most, "tokens": tokens}
        (folder / "plan.json").write_text(json.dumps(found))

    # What makes it a Source.

    def row_count(self, row_tokens: int) -> int:
        """Rows of this length that the documents fill."""
        return len(self.plan(row_tokens).rows) - 1

    def rows_at(self, positions: NDArray[np.int64], *, row_tokens: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Row ids at these positions: a new pseudo-random permutation of the rows for every epoch."""
        return epoch_order(positions, rows=self.row_count(row_tokens), seed=seed, shuffle=shuffle)

    def read_rows(self, row_ids: NDArray[np.int64], row_tokens: int) -> RowBlock:
        """Rows of these ids. The look-ahead is set where a row is full and its document goes on."""
        plan = self.plan(row_tokens)
        row_ids = np.asarray(row_ids, np.int64).reshape(-1)
        if row_ids.size and (row_ids.min() < 0 or row_ids.max() >= len(plan.rows) - 1):
            raise ValueError(f"row {row_ids.min()}..{row_ids.max()} asked for; there are {len(plan.rows) - 1}")
        first = plan.rows[row_ids]
        counts = plan.rows[row_ids + 1] - first
        picked = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        starts, lengths = plan.starts[picked], plan.lengths[picked].astype(np.int64)
        at_rows = np.repeat(np.arange(len(row_ids)), counts)
        ends = np.cumsum(lengths)
        leading = np.cumsum(counts) - counts  # first piece of each row
        before = (ends - lengths)[leading] if len(leading) else np.empty(0, np.int64)
        columns = ends - lengths - np.repeat(before, counts)
        filled = np.add.reduceat(lengths, leading) if len(leading) else np.empty(0, np.int64)
        goes_on = self._goes_on(plan, picked, starts, lengths, row_tokens)
        lengths = lengths + goes_on
        tokens = np.zeros((len(row_ids), row_tokens + 1), self.stream.dtype)
        at = at_rows * (row_tokens + 1) + columns
        self.stream.copy_pieces(starts, lengths, tokens.reshape(-1), at)
        masked = self.stream.masked_pieces(starts, lengths, at, tokens.shape)
        valid = filled.copy()
        np.add.at(valid, at_rows, goes_on)
        inner = columns > 0
        return RowBlock(tokens, valid, at_rows[inner], columns[inner], np.zeros(len(row_ids), np.int16), masked)

    def _goes_on(
        self, plan: Plan, picked: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], width: int
    ) -> NDArray[np.int64]:
        """1 for pieces that fill a row and are not the end of their document, else 0."""
        result = np.zeros(len(picked), np.int64)
        for i in np.flatnonzero(lengths == width).tolist():
            result[i] = starts[i] + width < self.stream.document_end(int(plan.documents[picked[i]]))
        return result

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        """Tokens and documents of one epoch."""
        return self.plan(row_tokens).tokens, self.stream.documents

    def max_documents(self, row_tokens: int) -> int:
        """The most documents in any one row, padding counted."""
        return self.plan(row_tokens).max_documents


def _rebuild(stream: TokenStream, truncate: bool, seed: int, cache: str | Path | None) -> PackedDocuments:
    return PackedDocuments(stream, truncate=truncate, seed=seed, cache=cache)


def hash_seed(*words: object) -> int:
    """64 bits that depend on every word."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little")


def plan_rows(
    bounds: NDArray[np.int64], row_tokens: int, *, truncate: bool = False, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Pack the documents [bounds[i], bounds[i+1]) into rows of ``row_tokens``.

    Returns the first piece of each row [R], and document, start and length of each piece [P], row after row; int64.
    """
    sizes = np.diff(bounds)
    full = sizes // row_tokens
    rest = sizes - full * row_tokens
    if truncate:
        rest = np.where(full > 0, 0, rest)
        full = np.minimum(full, 1)
    small = np.flatnonzero(rest)
    if len(small):
        small = small[Permutation(len(small), seed=seed)(np.arange(len(small)))]
    small = small[np.argsort(-rest[small], kind="stable")]
    row = best_fit(rest[small], row_tokens)
    by_row = np.argsort(row, kind="stable")
    small, row = small[by_row], row[by_row]
    long = np.repeat(np.arange(len(sizes)), full)
    nth = np.arange(len(long)) - np.repeat(np.cumsum(full) - full, full)
    documents = np.concatenate([small, long])
    starts = np.concatenate([bounds[small] + full[small] * row_tokens, bounds[long] + nth * row_tokens])
    lengths = np.concatenate([rest[small], np.full(len(long), row_tokens, np.int64)])
    first = np.flatnonzero(np.diff(row, prepend=-1))
    return np.concatenate([first, len(small) + np.arange(len(long))]), documents, starts, lengths


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Row of each piece [n], for lengths [n] in descending order, each 1..capacity: best-fit decreasing.

    Pieces of one length are placed together: of all rows with the least sufficient room r, each takes r // length.
    """
    result = np.empty(len(lengths), np.int64)
    room: dict[int, list[NDArray[np.int64]]] = {}  # tokens left -> rows that have so many left
    levels: list[int] = []  # its keys, ascending
    rows = at = 0

    def put(level: int, some: NDArray[np.int64]) -> None:
        if level and len(some):
            if level not in room:
                room[level] = []
                insort(levels, level)
            room[level].append(some)

    edges = np.append(np.flatnonzero(np.diff(lengths)) + 1, len(lengths)).tolist() if len(lengths) else []
    for end in edges:
        length = int(lengths[at])
        while at < end:
            i = bisect_left(levels, length)
            if i < len(levels):
                level = levels[i]
                open_rows = room[level].pop()
                if not room[level]:
                    del room[level], levels[i]
            else:
                level = capacity
                open_rows = np.arange(rows, rows + -(-(end - at) // (capacity // length)))
                rows += len(open_rows)
            each = level // length
            used = min(len(open_rows), -(-(end - at) // each))
            placed = min(end - at, used * each)
            result[at : at + placed] = np.repeat(open_rows[:used], each)[:placed]
            in_last = placed - (used - 1) * each
            put(level - each * length, open_rows[: used - 1])
            put(level - in_last * length, open_rows[used - 1 : used])
            put(level, open_rows[used:])
            at += placed
    return result


def _open(folder: Path, row_tokens: int) -> Plan:
    found = json.loads((folder / "plan.json").read_text())

    def mapped(name: str, kind: str, length: int) -> NDArray[Any]:
        if not length:
            return np.empty(0, kind)
        return np.asarray(np.memmap(folder / name, kind, mode="r", shape=(length,)))

    return Plan(
        mapped("rows", "<i8", found["rows"] + 1),
        mapped("documents", "<i8", found["pieces"]),
        mapped("starts", "<i8", found["pieces"]),
        mapped("lengths", "<i4", found["pieces"]),
        found["max_documents"],
        found["tokens"],
        row_tokens,
    )
