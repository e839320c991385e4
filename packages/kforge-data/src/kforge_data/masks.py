"""What is read but not scored: repetition, prompts, documents that are too short or there twice.

A mask takes nothing away. Rows, their order and the tokens that a model attends to stay what they are; labels of masked
tokens become -100. So a mask may be changed at any resume.

`MaskRepetition` and `AnswersOnly` look at raw rows, of whatever source, and go to the `Loader` as ``transforms``.
`mask_documents` marks whole documents of a stream, once, from their lengths and hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.cache import build_once, cache_folder
from kforge_data.duplicates import duplicate_documents
from kforge_data.sources import RowBlock
from kforge_data.streams import TokenStream, check_known

if TYPE_CHECKING:
    from numpy.typing import NDArray

Transform = Callable[[RowBlock], RowBlock]
"""What a `Loader` does to raw rows before they become a batch: a pure function, that can be pickled."""


def with_masked(block: RowBlock, masked: NDArray[np.bool_]) -> RowBlock:
    """The block with these tokens [R, S+1] masked beside those that are."""
    return replace(block, masked=masked if block.masked is None else block.masked | masked)


def document_numbers(block: RowBlock) -> NDArray[np.int32]:
    """[R, S+1]: number of each token's document in its row, from 0."""
    begins = np.zeros(block.tokens.shape, np.int32)
    begins[block.start_rows, block.start_columns] = 1
    numbers: NDArray[np.int32] = np.cumsum(begins, axis=1, dtype=np.int32)
    return numbers


@dataclass(frozen=True)
class MaskRepetition:
    """Mask tokens that say again what was just said: a stretch of ``repeats`` periods or more, of one to ``period``
    tokens each, inside one document. Its first period stays scored; a stretch counts as far as it lies in the row."""

    repeats: int
    period: int = 13

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(f"repeats = {self.repeats} must be at least 2; a stretch said once repeats nothing")
        if self.period < 1:
            raise ValueError(f"period = {self.period} must be at least 1 token")

    def __call__(self, block: RowBlock) -> RowBlock:
        """The block with its repetitions masked."""
        tokens, width = block.tokens, block.tokens.shape[1]
        masked: NDArray[np.bool_] | None = None
        numbers: NDArray[np.int32] | None = None
        for period in range(1, self.period + 1):
            least = (self.repeats - 1) * period  # tokens in a row that equal the one a period before
            if period + least > width:
                break
            # A stretch that long holds one of the columns period + least - 1, period + 2 * least - 1, …
            columns = np.arange(period + least - 1, width, least)
            probed = tokens[:, columns] == tokens[:, columns - period]
            rows = np.flatnonzero(probed.any(axis=1) & (block.valid > period + least - 1))
            if not rows.size:
                continue
            numbers = document_numbers(block) if numbers is None else numbers
            same = np.zeros((len(rows), width), np.bool_)
            same[:, period:] = tokens[rows, period:] == tokens[rows, :-period]
            same[:, period:] &= numbers[rows, period:] == numbers[rows, :-period]
            same &= np.arange(width) < block.valid[rows, None]
            long = _long_runs(same, least)
            if long.any():
                masked = np.zeros(tokens.shape, np.bool_) if masked is None else masked
                masked[rows] |= long
        return block if masked is None else with_masked(block, masked)


def _long_runs(flags: NDArray[np.bool_], least: int) -> NDArray[np.bool_]:
    """[R, N]: the runs of at least ``least`` true flags in a row."""
    edges = np.diff(flags.astype(np.int8), axis=1, prepend=0, append=0)
    rows, begins = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    keep = ends - begins >= least
    marks = np.zeros((flags.shape[0], flags.shape[1] + 1), np.int8)
    marks[rows[keep], begins[keep]] = 1
    marks[rows[keep], ends[keep]] -= 1
    return np.cumsum(marks[:, :-1], axis=1, dtype=np.int8) > 0


@dataclass(frozen=True)
class AnswersOnly:
    """Score only what lies between the ids ``start``, which begin an answer, and ``end``, which end it: the loss of
    chats, of which prompts are read but not learned. ``start`` is not scored, ``end`` is, so that a model learns to
    stop. A document may have many answers. The part of one that a row continues counts as prompt, as where its answer
    began is in another row; best-fit packing cuts none that fits."""

    start: tuple[int, ...]
    end: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name the ids that {name} an answer")

    def __call__(self, block: RowBlock) -> RowBlock:
        """The block with all but its answers masked."""
        rows, width = block.tokens.shape
        numbers = document_numbers(block)
        # What happens just before a token: 2 an answer begins, 1 it ends, or a document begins.
        happens = np.zeros((rows, width + 1), np.int8)
        happens[:, 0] = 1
        happens[block.start_rows, block.start_columns] = 1
        for ids, what in ((self.end, 1), (self.start, 2)):
            length = len(ids)
            if length > width:
                continue
            found = np.ones((rows, width - length + 1), np.bool_)
            for i, token in enumerate(ids):
                found &= block.tokens[:, i : width - length + 1 + i] == token
            found &= numbers[:, : width - length + 1] == numbers[:, length - 1 :]
            row, column = np.nonzero(found)
            row, column = row[column + length < width], column[column + length < width]
            inside = numbers[row, column + length] == numbers[row, column]
            happens[row[inside], column[inside] + length] = what
        latest = np.where(happens[:, :width] > 0, np.arange(width), 0)
        np.maximum.accumulate(latest, axis=1, out=latest)
        answer = np.take_along_axis(happens, latest, axis=1) == 2
        return with_masked(block, ~answer)


class _MaskedStream(TokenStream):
    """A stream of which some documents are masked: the same tokens, rows and fingerprint."""

    def __init__(self, stream: TokenStream, arguments: tuple[Any, ...], begins: Any, ends: Any) -> None:
        super().__init__(
            stream._bins,
            stream._docs,
            dtype=stream.dtype,
            vocab_size=stream.vocab_size,
            eos_id=stream.eos_id,
            text_bytes=stream.text_bytes,
            tokenizer=stream.tokenizer,
            fingerprint=stream.fingerprint,
            name=stream.name,
        )
        self._arguments, self._begins, self._ends = arguments, begins, ends

    def __reduce__(self) -> tuple[Any, ...]:
        return mask_documents, self._arguments

    @property
    def masked_tokens(self) -> int:
        """Tokens of the documents that are masked."""
        return int((self._ends - self._begins).sum())

    def masked_pieces(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64], shape: tuple[int, ...]
    ) -> NDArray[np.bool_] | None:
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._begins, starts + lengths, side="left")
        touched = np.flatnonzero(last > first)
        if not touched.size:
            return None
        masked = np.zeros(shape, np.bool_)
        flat = masked.reshape(-1)
        for i in touched.tolist():
            start, length, to = int(starts[i]), int(lengths[i]), int(at[i])
            for begin, end in zip(
                self._begins[first[i] : last[i]].tolist(), self._ends[first[i] : last[i]].tolist(), strict=True
            ):
                flat[to + max(begin - start, 0) : to + min(end - start, length)] = True
        return masked


def mask_documents(
    stream: TokenStream, min_tokens: int = 0, duplicates: bool = False, cache: str | Path | None = None
) -> TokenStream:
    """The stream with some documents masked: those of fewer than ``min_tokens`` tokens (what begins and ends them
    counted), and with ``duplicates`` those that equal an earlier one of the stream. The stream itself if neither.

    Which they are is found once by one process of a machine, and kept in ``cache`` (default: `cache_folder`).
    """
    if min_tokens < 0:
        raise ValueError(f"min_tokens = {min_tokens} must be 0 (none is too short) or more")
    if min_tokens <= 1 and not duplicates:
        return stream
    check_known(stream, "masking documents")
    text = json.dumps(["masked documents", 1, stream.fingerprint, min_tokens, duplicates])
    key = hashlib.sha256(text.encode()).hexdigest()

    def build(folder: Path) -> None:
        bounds = stream.document_bounds(0, stream.documents)
        bad = np.diff(bounds) < min_tokens
        if duplicates:
            bad |= duplicate_documents([stream])
        edges = np.diff(bad.astype(np.int8), prepend=0, append=0)
        np.save(folder / "begins.npy", bounds[np.flatnonzero(edges == 1)])
        np.save(folder / "ends.npy", bounds[np.flatnonzero(edges == -1)])

    folder = build_once(cache_folder(cache) / "masks" / key, build)
    begins, ends = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("begins", "ends"))
    return _MaskedStream(stream, (stream, min_tokens, duplicates, cache), begins, ends)


def apply(transforms: Sequence[Transform], block: RowBlock) -> RowBlock:
    """All of them, one after the other."""
    for transform in transforms:
        block = transform(block)
    return block
