"""Text that is tokenized and cut into rows while it is read, in lanes: an order that no number of processes changes.

The documents are dealt to L lanes. A lane reads its own, a block at a time, permutes each block by a key of (seed,
lane, where the block begins), and lays the documents end to end into rows. Position p of the sequence is row p // L of
lane p mod L. A process of W has the lanes l with l mod W = its rank, and reads nothing of the others.

Where a lane stands is five integers, `LaneState`: going on from there re-reads one block and nothing else. A row is
still a pure function of its number; a state only saves the way to it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from kforge_data.best_fit import hash_seed
from kforge_data.order import Permutation
from kforge_data.shards import TOKEN_DTYPES, token_dtype
from kforge_data.sources import ENDLESS, RowBlock
from kforge_data.streams import check_alike
from kforge_data.tokenize import Frame, encode_documents

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kforge_data.streams import Tokenized
    from kforge_data.tokenizer import Tokenizer

_VERSION = 1
LANES = 64
BLOCK_DOCUMENTS = 128
# A row ends early rather than hold more documents than one for so many tokens: boundaries have room for that many.
TOKENS_A_DOCUMENT = 16
_KEPT_ROWS = 64


class TextShards(Protocol):
    """Texts in numbered shards, each of which can be read from any document on; see `kforge_data.hugging_face`."""

    @property
    def fingerprint(self) -> str:
        """Names the content."""
        ...

    @property
    def shards(self) -> int:
        """How many there are."""
        ...

    def texts(self, shard: int, first: int = 0) -> Iterator[str | None]:
        """Texts of a shard from its document ``first`` on; None and "" where a document has none."""
        ...


class LaneState(NamedTuple):
    """Where a lane stands: what its next row begins with."""

    row: int
    """Number of that row in the lane, from 0."""
    shard: int
    """Where the block begins that is being laid into rows: shard of the lane, counted on over the epochs."""
    document: int
    """Document of the lane in that shard."""
    used: int
    """Documents of the block, in their permuted order, that have been used up."""
    offset: int
    """Tokens of the next document that have been used."""


class StreamedDocuments:
    """Texts, tokenized while they are read, as a `Source` in lanes for the `Loader` and for a `Mixture`.

    Args:
        texts: where the texts are, e.g. ``DatasetStream("datasets://name?subset=en")``.
        tokenizer: what makes tokens of them; each document ends with its end-of-text token.
        lanes: L. The number of data-parallel processes must divide it. It belongs to the sequence: a resume with
            another one is refused.
        block_documents: documents of a lane that are shuffled among one another.
        begin_of_text: a token that each document begins with. None: there is none.

    How long it is, is not known before it is read: its rows are numbered on and on, each lane beginning a new epoch,
    in another order, when it has read all its documents. Rows are cut where they are full, as those of token shards.
    """

    def __init__(
        self,
        texts: TextShards,
        tokenizer: Tokenizer,
        *,
        lanes: int = LANES,
        block_documents: int = BLOCK_DOCUMENTS,
        begin_of_text: str | None = None,
    ) -> None:
        for name, value in (("lanes", lanes), ("block_documents", block_documents)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if texts.shards < 1:
            raise ValueError(f"{texts!r} has no shards, so there is nothing to read")
        self.texts, self.lanes, self.block_documents = texts, lanes, block_documents
        self._tokenizer = tokenizer
        self.name = str(getattr(texts, "place", texts))
        self.tokenizer, self.vocab_size, self.eos_id = tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id
        self.bos_id = None if begin_of_text is None else tokenizer.token_id(begin_of_text)
        self.dtype = TOKEN_DTYPES[token_dtype(self.vocab_size)]
        content = ["lanes", _VERSION, texts.fingerprint, texts.shards, self.tokenizer, self.eos_id, self.bos_id]
        text = json.dumps([*content, lanes, block_documents])
        self.fingerprint = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
        self.seed, self.shuffle = 0, False
        self._starts: dict[int, LaneState] = {}
        self._open: dict[tuple[int, int], _Lane] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"StreamedDocuments({self.name!r}: {self.texts.shards} shards in {self.lanes} lanes)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def describe(self) -> dict[str, Any]:
        """What the fingerprint is of, for people: plain data."""
        return {
            "content": self.texts.fingerprint,
            "tokenizer": self.tokenizer,
            "begins with": self.bos_id,
            "lanes": self.lanes,
            "block_documents": self.block_documents,
        }

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """ValueError unless this is the tokenizer that is used."""
        if self.tokenizer != tokenizer.fingerprint:
            raise ValueError(f"{self.name} is tokenized with {self.tokenizer[:19]}, not {tokenizer.fingerprint[:19]}")

    def check_alike(self, other: Tokenized) -> None:
        """ValueError if the other was made with another tokenizer."""
        check_alike(self, other)

    # What makes it a source in lanes.

    @property
    def laned(self) -> dict[int, StreamedDocuments]:
        """Itself, as source number 0."""
        return {0: self}

    def ordered(self, *, seed: int, shuffle: bool) -> StreamedDocuments:
        """The same in the order of a seed, not begun. A `Loader` calls it with its own."""
        other = copy.copy(self)
        other.seed, other.shuffle, other._starts, other._open = seed, shuffle, {}, {}
        return other

    def start_at(self, states: dict[int, LaneState]) -> None:
        """Go on from these states of lanes, from their beginning in others. What is open is forgotten."""
        with self._lock:
            self._starts, self._open = dict(states), {}

    def lane_rows(self, position: int, row_tokens: int) -> dict[int, NDArray[np.int64]]:
        """Rows [L] that each lane has given before a position, by number of the source."""
        return {0: -((np.arange(self.lanes) - position) // self.lanes)}

    # What makes it a Source.

    def row_count(self, row_tokens: int) -> int:
        """`ENDLESS`: it is not known before all has been read."""
        if row_tokens < 1:
            raise ValueError(f"row_tokens = {row_tokens} must be at least 1")
        return ENDLESS

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        """Tokens of `ENDLESS` full rows; how many documents they hold is not known, and 0 here."""
        return ENDLESS * row_tokens, 0

    def rows_at(self, positions: NDArray[np.int64], *, row_tokens: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Row ids at these positions, which are the positions. ValueError unless it is `ordered` so."""
        if (seed, shuffle) != (self.seed, self.shuffle):
            raise ValueError(
                f"{self.name} is in the order of seed {self.seed}, shuffle {self.shuffle}, and rows of seed {seed}, "
                f"shuffle {shuffle} are asked for; take ordered(seed=…, shuffle=…) of it"
            )
        return np.array(positions, np.int64)

    def max_documents(self, row_tokens: int) -> int:
        """The most documents in any one row, padding counted; a row that would hold more ends early."""
        return _most(row_tokens) + 1

    def read_rows(self, row_ids: NDArray[np.int64], row_tokens: int) -> RowBlock:
        """Rows of these ids, and in `resume` the state of each one's lane after it."""
        row_ids = np.asarray(row_ids, np.int64).reshape(-1)
        if row_ids.size and row_ids.min() < 0:
            raise ValueError(f"row {row_ids.min()} asked for; they are counted from 0")
        tokens = np.zeros((len(row_ids), row_tokens + 1), self.dtype)
        valid = np.zeros(len(row_ids), np.int64)
        resume = np.empty((len(row_ids), len(LaneState._fields)), np.int64)
        rows, columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for i, number in enumerate(row_ids.tolist()):
            row, lane = divmod(number, self.lanes)
            made = self._lane(lane, row_tokens).read(row)
            tokens[i, : len(made.tokens)], valid[i], resume[i] = made.tokens, len(made.tokens), made.after
            rows.append(np.full(len(made.starts), i, np.int64))
            columns.append(np.array(made.starts, np.int64))
        sources = np.zeros(len(row_ids), np.int16)
        return RowBlock(tokens, valid, np.concatenate(rows), np.concatenate(columns), sources, resume=resume)

    def _lane(self, lane: int, row_tokens: int) -> _Lane:
        with self._lock:
            if (lane, row_tokens) not in self._open:
                start = self._starts.get(lane, LaneState(0, 0, 0, 0, 0))
                self._open[lane, row_tokens] = _Lane(self, lane, row_tokens, start)
            return self._open[lane, row_tokens]


def _most(row_tokens: int) -> int:
    return max(8, row_tokens // TOKENS_A_DOCUMENT)


class _Row(NamedTuple):
    tokens: NDArray[Any]
    starts: list[int]
    """Columns at which documents begin, but for column 0."""
    after: LaneState


class _Block(NamedTuple):
    shard: int
    document: int
    """Where it begins."""
    documents: list[NDArray[Any]]
    """Tokens of each document, in the order in which they are laid into rows."""
    next_shard: int
    next_document: int


class _Lane:
    """One lane, read in order. Rows that were passed over are kept for a while, for threads that ask for them late."""

    def __init__(self, source: StreamedDocuments, lane: int, row_tokens: int, start: LaneState) -> None:
        self._source, self._lane, self._row_tokens, self._start = source, lane, row_tokens, start
        shards, lanes = source.texts.shards, source.lanes
        # A lane has every L-th shard; where there are fewer shards than lanes, every n-th document of one of them.
        self._shards = list(range(lane, shards, lanes)) if shards >= lanes else [lane % shards]
        self._part, self._parts = (
            (0, 1) if shards >= lanes else (lane // shards, len(range(lane % shards, lanes, shards)))
        )
        self._lock = threading.Lock()
        self._marks: deque[LaneState] = deque(maxlen=_KEPT_ROWS)
        self._kept: OrderedDict[int, _Row] = OrderedDict()
        self._reading: Iterator[str | None] | None = None
        self._reading_at = (-1, -1)
        self._state, self._block = start, _Block(-1, -1, [], -1, -1)

    def read(self, row: int) -> _Row:
        """A row by its number in the lane."""
        with self._lock:
            if row in self._kept:
                return self._kept.pop(row)
            if row < self._state.row:
                earlier = [state for state in (*self._marks, self._start) if state.row <= row]
                self._state = max(earlier, default=LaneState(0, 0, 0, 0, 0))
            while True:
                self._marks.append(self._state)
                made = self._next()
                self._state = made.after
                if made.after.row == row + 1:
                    return made
                self._kept[made.after.row - 1] = made
                if len(self._kept) > _KEPT_ROWS:
                    self._kept.popitem(last=False)

    def _next(self) -> _Row:
        row, shard, document, used, offset = self._state
        size, most = self._row_tokens, _most(self._row_tokens)
        parts: list[NDArray[Any]] = []
        starts: list[int] = []
        filled = count = 0
        while True:
            if (self._block.shard, self._block.document) != (shard, document):
                self._block = self._read_block(shard, document)
            block = self._block
            if used == len(block.documents):
                shard, document, used = block.next_shard, block.next_document, 0
                if filled == size:
                    break
                continue
            if filled == size or (offset == 0 and count == most):
                break
            if filled and offset == 0:
                starts.append(filled)
            count += 1
            piece = block.documents[used][offset : offset + size - filled]
            parts.append(piece)
            filled += len(piece)
            offset += len(piece)
            if offset == len(block.documents[used]):
                used, offset = used + 1, 0
        if offset:  # the document goes on: its next token is the label of the last column
            parts.append(self._block.documents[used][offset : offset + 1])
        return _Row(np.concatenate(parts), starts, LaneState(row + 1, shard, document, used, offset))

    def _read_block(self, shard: int, document: int) -> _Block:
        source, begin, found = self._source, (shard, document), list[str]()
        count = len(self._shards)
        while len(found) < source.block_documents:
            if self._reading is None or self._reading_at != (shard, document):
                self._reading = self._texts(shard, document)
            try:
                text = next(self._reading)
            except StopIteration:
                self._reading, epoch = None, shard // count
                shard, document = shard + 1, 0
                if shard // count > epoch and found:
                    break  # a block lies in one epoch
                if shard // count > begin[0] // count + 1:
                    raise ValueError(
                        f"{source.name}: lane {self._lane} of {source.lanes} has no document with text; set fewer lanes"
                    ) from None
                continue
            except BaseException:
                self._reading = None  # what failed is opened anew
                raise
            document += 1
            self._reading_at = (shard, document)
            if text:
                found.append(text)
        framed, lengths = encode_documents(found, source._tokenizer, Frame(source.eos_id, source.bos_id))
        documents = np.split(framed.astype(source.dtype), np.cumsum(lengths)[:-1])
        if source.shuffle:
            key = Permutation(len(documents), seed=hash_seed(source.seed, "block", self._lane, *begin))
            documents = [documents[i] for i in key(np.arange(len(documents))).tolist()]
        return _Block(*begin, documents, shard, document)

    def _texts(self, shard: int, document: int) -> Iterator[str | None]:
        """Texts of a shard of the lane, from a document of the lane on."""
        epoch, number = divmod(shard, len(self._shards))
        if self._source.shuffle:
            key = Permutation(len(self._shards), seed=hash_seed(self._source.seed, "shards", self._lane), epoch=epoch)
            number = int(key(np.array([number]))[0])
        self._reading_at = (shard, document)
        texts = self._source.texts.texts(self._shards[number], document * self._parts + self._part)
        return itertools.islice(texts, 0, None, self._parts)
