"""Text files -> token shards: read documents, encode them in batches, split off the held-out part, write.

Each document ends with the tokenizer's end-of-text token, and may begin with another, added here and nowhere else.
Documents come out in the order in which they lie. A run that is killed is gone on with, and writes what it would have.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from kforge_data.documents import ReadCounts, Reading
from kforge_data.progress import Progress
from kforge_data.shard_writer import ShardWriter
from kforge_data.shards import INDEX, TokenShards, read_index
from kforge_data.text_files import file_name, list_files
from kforge_data.tokenizer import Tokenizer
from kforge_data.unfinished import CannotGoOn, check_note, describe_files, held, read_note, remove_note, write_note

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

# A batch is what one call of the encoder gets: enough to keep its threads busy, little enough to hold a few.
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 22
# So many bytes of text, or seconds, come between two notes of how far the work is.
NOTE_BYTES, NOTE_SECONDS = 1 << 26, 15.0


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_files` wrote."""

    train: TokenShards
    heldout: TokenShards | None
    empty: int
    bad_lines: int


def is_heldout(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part: decided by a hash of its text, so copies stay together."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def tokenize_files(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    heldout: float = 0.0,
    field: str = "text",
    txt_documents: str = "file",
    dtype: str = "auto",
    shard_tokens: int = 1 << 28,
    workers: int = 0,
    parse_special: bool = False,
    begin_of_text: str | None = None,
    strict: bool = False,
    max_bad_lines: int = 0,
    overwrite: bool = False,
    resume: bool = True,
    progress: TextIO | None = None,
) -> TokenizeReport:
    """Turn text files into token shards at `out`; with `heldout` > 0 into `out`/train and `out`/heldout.

    Args:
        inputs, field, txt_documents, strict, max_bad_lines: as in `read_documents`.
        heldout: share of documents, by hash of the text, that go to the held-out set.
        workers: processes that encode; 0 encodes here, on all cores. What is written does not depend on it.
        parse_special: turn special-token strings inside the text into their ids (off: they stay text).
        begin_of_text: a token that each document begins with. None: documents only end with one.
        dtype, shard_tokens, overwrite: as in `ShardWriter`.
        resume: go on where an earlier run with the same arguments was killed or failed; what comes out is the same,
            byte for byte, as if it had not been. False begins anew.
        progress: where to tell how far it is, usually sys.stderr.

    What is done is noted every 64 MB of text, or 15 seconds, from where the next run goes on; before the first note
    nothing is left behind by a failure. ValueError for what the user can mend, for an unfinished run of other
    arguments, and if there is no text at all.
    """
    if not 0.0 <= heldout < 1.0:
        raise ValueError(f"heldout = {heldout} must be a share of documents from 0 up to, not including, 1")
    if workers < 0:
        raise ValueError(f"workers = {workers} must be 0 (encode in this process) or more")
    frame = Frame(tokenizer.eos_id, None if begin_of_text is None else tokenizer.token_id(begin_of_text), parse_special)
    out, files = Path(out), list_files(inputs)
    paths = [out / "train", out / "heldout"] if heldout else [out]
    options = {
        "tokenizer": tokenizer.fingerprint,
        "eos_id": frame.eos_id,
        "bos_id": frame.bos_id,
        "heldout": heldout,
        "field": field,
        "txt_documents": txt_documents,
        "parse_special": parse_special,
        "dtype": dtype,
        "shard_tokens": shard_tokens,
    }

    def open_writers(overwrite: bool) -> list[ShardWriter]:
        return [
            ShardWriter(
                path,
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer.fingerprint,
                eos_id=frame.eos_id,
                bos_id=frame.bos_id,
                dtype=dtype,
                shard_tokens=shard_tokens,
                overwrite=overwrite,
                meta={
                    "inputs": [file_name(file) for file in files],
                    "heldout": heldout,
                    "part": path.name if heldout else "",
                },
            )
            for path in paths
        ]

    if not resume or read_note(out) is None:
        open_writers(overwrite)  # refuses what cannot be before a folder exists
    out_was_there = out.exists()
    with held(out):
        note = read_note(out) if resume else None
        if note is None:
            remove_note(out)
        else:
            check_note(note, options, files, out)
            if _all_written(note, paths):  # it was stopped between its last two moves
                remove_note(out)
                sets = [TokenShards(path) for path in paths]
                return TokenizeReport(
                    sets[0], sets[1] if heldout else None, sets[0].index.skipped_documents, note["bad_lines"]
                )
        at = note or {"file": 0, "part": 0, "empty": 0, "bad_lines": 0, "documents": 0}
        writers = open_writers(overwrite or note is not None)
        for writer, state in zip(writers, note["writers"] if note else [], strict=False):
            try:
                writer.resume(state)
            except ValueError as error:
                raise CannotGoOn(f"{error}; start anew with resume off (--no-resume)") from error
        counts = ReadCounts(at["empty"], at["bad_lines"])
        reading = Reading(
            files,
            field=field,
            txt_documents=txt_documents,
            strict=strict,
            max_bad_lines=max_bad_lines,
            counts=counts,
            file=at["file"],
            part=at["part"],
        )
        work = _Work(out, options, files, reading, writers, documents=at["documents"], noted=note is not None)
        try:
            work.run(tokenizer, frame, heldout, workers, Progress(progress) if progress is not None else None)
            if not work.documents:
                raise ValueError(f"no text in {', '.join(map(str, inputs))}: all {counts.empty} documents are empty")
            writers[0].skip(counts.empty)
            # Held-out first: where train exists, all does.
            sets = [writer.finish() for writer in reversed(writers)][::-1]
            remove_note(out)
        except BaseException:
            for writer in reversed(writers):
                writer.keep() if work.noted else writer.abort()
            if not work.noted and not out_was_there and out.is_dir() and not any(out.iterdir()):
                out.rmdir()
            raise
    return TokenizeReport(sets[0], sets[1] if heldout else None, counts.empty, counts.bad_lines)


def _all_written(note: Mapping[str, Any], paths: Sequence[Path]) -> bool:
    """Whether the sets of a noted run are there, and are not those of an earlier one that it replaces."""
    if not all((path / INDEX).exists() for path in paths):
        return False
    try:
        revisions = [
            max((int(shard.name.split("-")[0]) for shard in read_index(path).shards), default=-1) for path in paths
        ]
    except ValueError as error:
        raise CannotGoOn(f"{error}; start anew with resume off (--no-resume)") from error
    return revisions == [writer["revision"] for writer in note["writers"]]


class _Work:
    """The loop: encode, write, and note from time to time how far it is."""

    def __init__(
        self,
        out: Path,
        options: dict[str, Any],
        files: Sequence[str | Path],
        reading: Reading,
        writers: Sequence[ShardWriter],
        *,
        documents: int,
        noted: bool,
    ) -> None:
        self._out, self._options, self._files, self._reading = out, options, files, reading
        self._writers, self.documents, self.noted = writers, documents, noted

    def run(self, tokenizer: Tokenizer, frame: Frame, heldout: float, workers: int, progress: Progress | None) -> None:
        new_bytes = tokens = 0
        noted_at = monotonic()
        try:
            for batch in _encode_batches(_batches(self._reading, heldout), tokenizer, frame, workers):
                for part, writer in enumerate(self._writers):
                    _write_part(writer, batch, part)
                self.documents += len(batch.lengths)
                tokens += len(batch.tokens)
                new_bytes += int(batch.text.text_bytes.sum())
                if new_bytes >= NOTE_BYTES or monotonic() - noted_at >= NOTE_SECONDS:
                    self._note(batch.text)
                    new_bytes, noted_at = 0, monotonic()
                if progress is not None and progress.due():
                    progress.show(*self._reading.bytes_done(), f"{self.documents:,} documents, {tokens:,} tokens")
            if progress is not None:
                total = self._reading.bytes_done()[1]
                progress.show(total, total, f"{self.documents:,} documents, {tokens:,} tokens")
        finally:
            if progress is not None:
                progress.close()

    def _note(self, batch: _TextBatch) -> None:
        write_note(
            self._out,
            {
                "options": self._options,
                "files": describe_files(self._files[: batch.file + 1]),
                "file": batch.file,
                "part": batch.part,
                "empty": batch.empty,
                "bad_lines": batch.bad_lines,
                "documents": self.documents,
                "writers": [writer.commit() for writer in self._writers],
            },
        )
        self.noted = True


@dataclass(frozen=True)
class Frame:
    """What surrounds each document, and whether names of special tokens inside it count."""

    eos_id: int
    bos_id: int | None
    parse_special: bool = False


@dataclass(frozen=True)
class _TextBatch:
    texts: list[str]
    parts: NDArray[np.int8]
    """0: train, 1: held out."""
    text_bytes: NDArray[np.int64]
    file: int
    """Where the last of these documents ended, and what had been left out by then."""
    part: int
    empty: int
    bad_lines: int


@dataclass(frozen=True)
class _TokenBatch:
    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    text: _TextBatch


def _batches(reading: Reading, heldout: float) -> Iterator[_TextBatch]:
    batch: list[str] = []
    characters = 0
    for text in reading:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield _describe(batch, heldout, reading)
            batch, characters = [], 0
    if batch:
        yield _describe(batch, heldout, reading)


def _describe(texts: list[str], heldout: float, reading: Reading) -> _TextBatch:
    parts = [heldout > 0 and is_heldout(text, heldout) for text in texts]
    sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
    counts = reading.counts
    return _TextBatch(
        texts,
        np.array(parts, np.int8),
        np.array(sizes, np.int64),
        reading.file,
        reading.part,
        counts.empty,
        counts.bad_lines,
    )


def _encode_batches(
    batches: Iterable[_TextBatch], tokenizer: Tokenizer, frame: Frame, workers: int
) -> Iterator[_TokenBatch]:
    """Encode in order. A few batches are in flight at a time, so memory does not grow with the input."""
    pool: ThreadPoolExecutor | ProcessPoolExecutor
    if workers:
        # Spawned, not forked: the encoder's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(tokenizer, frame))
    else:  # one thread, which reads and writes beside the encoder's own
        pool = ThreadPoolExecutor(1, "kforge-data-encode")
    flying: deque[tuple[_TextBatch, Future[tuple[NDArray[np.uint32], NDArray[np.int64]]]]] = deque()
    with pool:
        try:
            for batch in batches:
                if workers:
                    flying.append((batch, pool.submit(_encode_in_worker, batch.texts)))
                else:
                    flying.append((batch, pool.submit(encode_documents, batch.texts, tokenizer, frame)))
                if len(flying) >= 2 * max(workers, 1):
                    yield _landed(*flying.popleft())
            while flying:
                yield _landed(*flying.popleft())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _landed(batch: _TextBatch, future: Future[tuple[NDArray[np.uint32], NDArray[np.int64]]]) -> _TokenBatch:
    tokens, lengths = future.result()
    return _TokenBatch(tokens, lengths, batch)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: Tokenizer, frame: Frame) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.update(tokenizer=tokenizer, frame=frame)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: killed, that one tells nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return encode_documents(texts, **_worker)


def encode_documents(
    texts: Sequence[str], tokenizer: Tokenizer, frame: Frame
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Ids of all texts laid end to end, each between its begin- and end-of-text tokens, and lengths with these.

    ValueError where a text itself has such an id, and special tokens are not to be found in text: documents would be
    cut in two.
    """
    flat, lengths = tokenizer.encode_batch(texts, parse_special=frame.parse_special)
    for what, number in (("ends", frame.eos_id), ("begins", frame.bos_id)):
        if number is not None and not frame.parse_special and (found := np.flatnonzero(flat == number)).size:
            text = texts[int(np.searchsorted(np.cumsum(lengths), found[0], side="right"))]
            raise ValueError(
                f"the tokenizer makes {tokenizer.decode([number])!r}, which {what} documents, of the text of one, "
                f"which begins {text[:60]!r}; take another token for that (--end-of-text, --begin-of-text), or "
                "have such tokens found in text (--parse-special)"
            )
    return frame_documents(flat, lengths, eos_id=frame.eos_id, bos_id=frame.bos_id)


def frame_documents(
    flat: NDArray[np.uint32], lengths: NDArray[np.int64], *, eos_id: int, bos_id: int | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Put what begins (if anything) and ends a document around each of these, laid end to end, whose lengths these
    are. The only place where such tokens are added."""
    framed_lengths = lengths + 1 + (bos_id is not None)
    framed = np.empty(len(flat) + int((framed_lengths - lengths).sum()), np.uint32)
    ends = np.cumsum(framed_lengths)
    is_text = np.ones(len(framed), np.bool_)
    is_text[ends - 1] = False
    framed[ends - 1] = eos_id
    if bos_id is not None:
        is_text[ends - framed_lengths] = False
        framed[ends - framed_lengths] = bos_id
    framed[is_text] = flat
    return framed, framed_lengths


def _write_part(writer: ShardWriter, batch: _TokenBatch, part: int) -> None:
    mine = batch.text.parts == part
    if mine.all():
        writer.add_batch(batch.tokens, batch.lengths, batch.text.text_bytes)
    elif mine.any():
        tokens = batch.tokens[np.repeat(mine, batch.lengths)]
        writer.add_batch(tokens, batch.lengths[mine], batch.text.text_bytes[mine])
