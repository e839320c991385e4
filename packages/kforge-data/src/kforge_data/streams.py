"""A stream of tokens that knows its documents, cut into rows: what every kind of token file on disk becomes.

The files are memory-mapped arrays; the documents laid end to end, over all files, are one stream. Row i of S tokens is
stream[i*S : (i+1)*S], and the token after it as look-ahead; the last row is padded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kforge_data.order import epoch_order
from kforge_data.sources import RowBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kforge_data.tokenizer import Tokenizer


class Tokenized(Protocol):
    """What was made with a tokenizer."""

    name: str
    tokenizer: str
    """Its fingerprint, "" where that is not known."""


def check_alike(one: Tokenized, other: Tokenized) -> None:
    """ValueError if two were made with different tokenizers, where both know with which."""
    if one.tokenizer and other.tokenizer and one.tokenizer != other.tokenizer:
        raise ValueError(
            f"{other.name} was made with the tokenizer {other.tokenizer[:19]}, and {one.name} with "
            f"{one.tokenizer[:19]}: the same ids say different things. Tokenize one of them again"
        )


def check_known(stream: object, what: str) -> None:
    """ValueError unless it is a stream whose documents are known before the first row is read."""
    if not isinstance(stream, TokenStream):
        raise ValueError(
            f"{what} looks at all documents before the first row, and {stream!r} is read while training or rows "
            "already; take token shards, or tokenize it into some"
        )


class TokenStream:
    """Tokens of several files laid end to end, and where documents begin. A `Source`; reading is safe from threads.

    Args:
        bins: the tokens of each file, [n_i] of one unsigned integer type.
        docs: for each file int64 [d_i + 1]: where each of its documents begins in it, and as last entry n_i. A
            document lies in one file and is not empty.
        vocab_size: ids are 0..vocab_size-1.
        eos_id: the id that ends each document, if one does.
        text_bytes: bytes of UTF-8 text that the tokens stand for; 0 where that is not known.
        tokenizer: fingerprint of the tokenizer that made the ids, "" where that is not known.
        fingerprint: names the content.
        name: what errors call it.
    """

    def __init__(
        self,
        bins: Sequence[NDArray[Any]],
        docs: Sequence[NDArray[np.int64]],
        *,
        dtype: np.dtype[Any],
        vocab_size: int,
        eos_id: int | None,
        text_bytes: int = 0,
        tokenizer: str = "",
        fingerprint: str,
        name: str,
    ) -> None:
        self._bins, self._docs = list(bins), list(docs)
        self.name, self.fingerprint = name, fingerprint
        self.dtype = dtype
        """Integer type of the ids on disk."""
        self.vocab_size, self.eos_id, self.text_bytes, self.tokenizer = vocab_size, eos_id, text_bytes, tokenizer
        # Stream position and document number at which each file begins; the totals as last entries.
        self._first_token = np.cumsum([0, *map(len, self._bins)], dtype=np.int64)
        self._first_document = np.cumsum([0, *(len(docs) - 1 for docs in self._docs)], dtype=np.int64)
        self._max_documents: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {self.documents:,} documents, {self.tokens:,} tokens)"

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self._first_token[-1])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self._first_document[-1])

    def describe(self) -> dict[str, Any]:
        """What the fingerprint is of, for people: plain data."""
        return {"tokens": self.tokens, "documents": self.documents, "content": self.fingerprint}

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError unless these tokens were made with this tokenizer, or by whom nobody wrote down."""
        if self.tokenizer and self.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f"{self.name} was made with the tokenizer {self.tokenizer[:19]}, "
                f"not with {tokenizer.fingerprint[:19]}; tokenize again, or name the tokenizer that made it"
            )

    def check_alike(self, other: Tokenized) -> None:
        """ValueError if two streams were made with different tokenizers, where both know with which."""
        check_alike(self, other)

    def document_bounds(self, first: int, last: int) -> NDArray[np.int64]:
        """Stream positions at which documents first..last-1 begin, and the end of the last; int64 [last-first+1].

        ValueError where they are damaged."""
        parts = []
        for shard, docs in enumerate(self._docs):
            base = int(self._first_document[shard])
            low, high = max(first - base, 0), min(last - base, len(docs) - 1)
            if low < high:
                self._check_bounds(shard, low, high)
                parts.append(docs[low:high] + self._first_token[shard])
        return np.append(np.concatenate([np.empty(0, np.int64), *parts]), self.document_end(last - 1))

    def check_documents(self) -> None:
        """ValueError where the boundaries of documents are damaged. One pass over them."""
        for shard, docs in enumerate(self._docs):
            for at in range(0, len(docs) - 1, 1 << 20):
                self._check_bounds(shard, at, min(at + (1 << 20), len(docs) - 1))

    def _check_bounds(self, shard: int, first: int, last: int) -> None:
        """ValueError unless documents first..last-1 of a file lie in it, in ascending order, none of them empty."""
        docs, tokens = self._docs[shard], len(self._bins[shard])
        whole = (first or docs[0] == 0) and (last < len(docs) - 1 or docs[-1] == tokens)
        if not whole or (docs[first + 1 : last + 1] <= docs[first:last]).any():
            raise ValueError(
                f"{self.name}: where documents begin in its file number {shard} does not run from 0 to {tokens} in "
                "ascending order; the set is damaged (kforge-data verify says where), make it again"
            )

    def document_end(self, document: int) -> int:
        """Stream position at which a document ends; 0 for document -1."""
        if document < 0:
            return 0
        shard = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return int(self._docs[shard][document - self._first_document[shard] + 1] + self._first_token[shard])

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A mean loss in nats per token as bits per byte of text: nats * tokens / (ln 2 * bytes).

        Every token is priced at the mean, also the few that no row scores (the first of each document).
        """
        if not self.text_bytes:
            raise ValueError(f"{self.name} does not know its bytes of text, so bits per byte cannot be told")
        return nats_per_token * self.tokens / (math.log(2) * self.text_bytes)

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

    def copy_pieces(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy stream[starts[i] : starts[i] + lengths[i]] to out[at[i]:], for pieces that lie in one file each."""
        shards = np.searchsorted(self._first_token, starts, side="right") - 1
        begins = starts - self._first_token[shards]
        bins = self._bins
        for shard, lo, hi, to, end in zip(
            shards.tolist(),
            begins.tolist(),
            (begins + lengths).tolist(),
            at.tolist(),
            (at + lengths).tolist(),
            strict=True,
        ):
            out[to:end] = bins[shard][lo:hi]

    def masked_pieces(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64], shape: tuple[int, ...]
    ) -> NDArray[np.bool_] | None:
        """Which tokens are not scored, as [R, S+1] of ``shape``, where stream[starts[i] : starts[i] + lengths[i]] lies
        at at[i] of R*(S+1); None: all are scored. See `mask_documents`."""
        return None

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

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        """Tokens and documents of one epoch."""
        return self.tokens, self.documents

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
        rows, width = self.row_count(row_tokens), row_tokens + 1
        numbers = row_ids.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < rows:
            raise ValueError(f"row {min(numbers)}..{max(numbers)} asked for; there are {rows} of {row_tokens} tokens")
        starts = row_ids * row_tokens
        valid = np.minimum(self.tokens - starts, width)
        row, column, shard, low, high = self._parts(starts, valid)
        first, last = self._documents_in(shard, low + (column == 0), high)  # one at column 0 needs no mark
        tokens, begins = np.empty((len(row_ids), width), self.dtype), [np.empty(0, np.int64)]
        flat, bins, docs = tokens.reshape(-1), self._bins, self._docs
        at = row * width + column
        parts = zip(*(x.tolist() for x in (shard, at, low, high, first, last)), strict=True)
        for s, to, lo, hi, i, j in parts:
            flat[to : to + hi - lo] = bins[s][lo:hi]
            begins.append(docs[s][i:j])
        for i, count in enumerate(valid.tolist()):
            if count < width:
                tokens[i, count:] = 0
        counts = last - first
        at_rows, at_columns = np.repeat(row, counts), np.concatenate(begins) + np.repeat(column - low, counts)
        masked = self.masked_pieces(starts, valid, np.arange(0, tokens.size, width), tokens.shape)
        return RowBlock(tokens, valid, at_rows, at_columns, np.zeros(len(row_ids), np.int16), masked)

    def _parts(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Of each part of stream[starts[i] : starts[i] + lengths[i]] that lies in one file, in order: i, where in i it
        is, the file, and from where to where in that."""
        bounds, i = self._first_token, np.arange(len(starts))
        if len(self._bins) == 1:
            zero = np.zeros(len(i), np.int64)
            return i, zero, zero, starts, starts + lengths
        stops = starts + lengths
        first = bounds.searchsorted(starts, side="right") - 1
        files = bounds.searchsorted(stops) - first
        i = np.repeat(i, files)
        shard = first[i] + np.arange(len(i)) - i.searchsorted(i)
        low, high = np.maximum(starts[i], bounds[shard]), np.minimum(stops[i], bounds[shard + 1])
        return i, low - starts[i], shard, low - bounds[shard], high - bounds[shard]

    def _documents_in(
        self, shard: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """[2, P]: of each part low..high-1 of a file the first document that begins in it, and the one after the last;
        as the file numbers them."""
        edges = np.array((low, high))
        for number in set(shard.tolist()):
            here = slice(None) if len(self._bins) == 1 else np.flatnonzero(shard == number)
            edges[:, here] = self._docs[number][:-1].searchsorted(edges[:, here])
        return edges

    def max_documents(self, row_tokens: int) -> int:
        """The most documents that any one row holds, parts and padding counted. One pass over the offsets, kept.

        ValueError where they are damaged."""
        if row_tokens not in self._max_documents:
            rows = self.row_count(row_tokens)
            most = 1 + int(self.tokens % row_tokens != 0)
            carried_row, carried = -1, 0
            for shard, docs in enumerate(self._docs):
                for at in range(0, len(docs) - 1, 1 << 20):
                    to = min(at + (1 << 20), len(docs) - 1)
                    self._check_bounds(shard, at, to)
                    begins = docs[at:to] + self._first_token[shard]
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
