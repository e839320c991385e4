"""Text files -> token shards: read documents, encode them in batches, split off the held-out part, write.

A document is one line of a .jsonl file, one row of a .parquet, or one .txt file (or each line or paragraph of it). It
ends with the tokenizer's end-of-text token, added here and nowhere else. Documents come out in the order in which they
lie.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.shard_writer import ShardWriter
from kforge_data.shards import TokenShards
from kforge_data.text_files import file_name, kind_of, list_files, needed, open_bytes
from kforge_data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

logger = logging.getLogger("kforge_data")

TXT_DOCUMENTS = ("file", "line", "paragraph")
# A batch is what one call of the encoder gets: enough to keep its threads busy, little enough to hold a few.
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 1 << 22


@dataclass
class ReadCounts:
    """What reading left out."""

    empty: int = 0
    """Documents without text: empty, null, or records that lack the field."""
    bad_lines: int = 0
    """Lines that are not JSON records, or text that is not Unicode."""


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_files` wrote."""

    train: TokenShards
    heldout: TokenShards | None
    empty: int
    bad_lines: int


def read_documents(
    inputs: Sequence[str | Path],
    *,
    field: str = "text",
    txt_documents: str = "file",
    strict: bool = False,
    max_bad_lines: int = 0,
    counts: ReadCounts | None = None,
) -> Iterator[str]:
    """Texts of the documents in these files or folders, in order, none of them empty. Files are local or URLs of fsspec
    (s3://…), .jsonl, .txt or .parquet, and .jsonl and .txt may be packed as .gz or .zst.

    Args:
        field: the key of the text in a JSONL record, or the column of a parquet file. Records without text are skipped
            and counted; if no record of a file has the field, that is an error.
        txt_documents: what a document is in a .txt file: the "file", each "line", or each "paragraph" (parts between
            empty lines).
        strict: a document without text is an error that names file and line.
        max_bad_lines: so many lines that are no JSON record, or no Unicode, are logged, counted and skipped; one more
            is an error that names file and line.
        counts: filled with what was left out.
    """
    if txt_documents not in TXT_DOCUMENTS:
        raise ValueError(f"txt_documents = {txt_documents!r} is not one of {', '.join(TXT_DOCUMENTS)}")
    counts = counts if counts is not None else ReadCounts()
    for file in list_files(inputs):
        kind = kind_of(file)
        if kind == ".txt":
            parts = _read_txt(file, txt_documents)
        else:
            parts = (_read_jsonl if kind == ".jsonl" else _read_parquet)(file, field)
        for place, text in parts:
            if isinstance(text, _Bad):
                counts.bad_lines += 1
                if counts.bad_lines > max_bad_lines:
                    skipped = f"up to max_bad_lines = {max_bad_lines} (--max-bad-lines) are skipped"
                    raise ValueError(f"{place}: {text.reason}; {skipped}")
                logger.warning("%s: %s; skipped", place, text.reason)
            elif not text:
                if strict:
                    raise ValueError(f"{place}: the document has no text")
                counts.empty += 1
            else:
                yield text


@dataclass(frozen=True)
class _Bad:
    reason: str


def _decode(raw: bytes) -> str | _Bad:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return _Bad(f"not UTF-8 ({error.reason} at byte {error.start})")


def _read_txt(file: str | Path, unit: str) -> Iterator[tuple[str, str | _Bad]]:
    if unit == "file":
        with open_bytes(file) as content:
            yield str(file), _decode(content.read())
        return
    with open_bytes(file) as lines:
        paragraph: list[str] = []
        for number, raw in enumerate(lines, 1):
            text = _decode(raw)
            if isinstance(text, _Bad):
                yield f"{file}:{number}", text
                continue
            text = text.removesuffix("\n").removesuffix("\r")
            if unit == "line":
                yield f"{file}:{number}", text
            elif text.strip():
                paragraph.append(text)
            elif paragraph:
                yield f"{file}:{number}", "\n".join(paragraph)
                paragraph = []
        if paragraph:
            yield f"{file}:{number}", "\n".join(paragraph)


def _read_jsonl(file: str | Path, field: str) -> Iterator[tuple[str, str | _Bad]]:
    records = having = 0
    others: list[str] = []
    with open_bytes(file) as lines:
        for number, raw in enumerate(lines, 1):
            raw = raw.strip()
            if not raw:
                continue
            try:
                record = json.loads(raw)
            except ValueError as error:  # UnicodeDecodeError is one too
                yield f"{file}:{number}", _Bad(f"not JSON ({error})")
                continue
            if not isinstance(record, dict):
                yield f"{file}:{number}", _Bad(f"a JSON {type(record).__name__}, not a record")
                continue
            records += 1
            having += field in record
            others = others or list(record)
            text = record.get(field)
            if text is not None and not isinstance(text, str):
                yield f"{file}:{number}", _Bad(f"field {field!r} is a {type(text).__name__}, not text")
                continue
            if text and any("\ud800" <= character <= "\udfff" for character in text):
                yield f"{file}:{number}", _Bad("half of a surrogate pair, which is not Unicode text")
                continue
            yield f"{file}:{number}", text or ""
    if records and not having:
        raise ValueError(f"{file}: no record has the field {field!r}; the first one has {', '.join(others) or 'none'}")


def _read_parquet(file: str | Path, field: str) -> Iterator[tuple[str, str | _Bad]]:
    library = needed("pyarrow.parquet", "parquet", str(file))
    with open_bytes(file) as content:
        try:
            table = library.ParquetFile(content)
            names = table.schema_arrow.names
            if field not in names:
                raise ValueError(f"{file} has no column {field!r}; it has {', '.join(names)}")
            number = 0
            for batch in table.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if text is not None and not isinstance(text, str):
                        yield f"{file}:{number}", _Bad(f"column {field!r} holds a {type(text).__name__}, not text")
                    else:
                        yield f"{file}:{number}", text or ""
        except (OSError, UnicodeDecodeError) as error:  # what the library raises for a damaged file
            raise ValueError(f"{file} is no whole parquet file: {error}") from error
        except Exception as error:
            if type(error).__module__.startswith("pyarrow"):
                raise ValueError(f"{file} is no whole parquet file: {error}") from error
            raise


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
    strict: bool = False,
    max_bad_lines: int = 0,
    overwrite: bool = False,
) -> TokenizeReport:
    """Turn text files into token shards at `out`; with `heldout` > 0 into `out`/train and `out`/heldout.

    Args:
        inputs, field, txt_documents, strict, max_bad_lines: as in `read_documents`.
        heldout: share of documents, by hash of the text, that go to the held-out set.
        workers: processes that encode; 0 encodes here, on all cores. What is written does not depend on it.
        parse_special: turn special-token strings inside the text into their ids (off: they stay text).
        dtype, shard_tokens, overwrite: as in `ShardWriter`.

    Nothing is left behind when it fails. ValueError for what the user can mend, and if there is no text at all.
    """
    if not 0.0 <= heldout < 1.0:
        raise ValueError(f"heldout = {heldout} must be a share of documents from 0 up to, not including, 1")
    if workers < 0:
        raise ValueError(f"workers = {workers} must be 0 (encode in this process) or more")
    out, eos_id, counts = Path(out), tokenizer.eos_id, ReadCounts()
    files = list_files(inputs)
    texts = read_documents(
        files, field=field, txt_documents=txt_documents, strict=strict, max_bad_lines=max_bad_lines, counts=counts
    )
    paths, out_was_there = [out / "train", out / "heldout"] if heldout else [out], out.exists()
    writers = [
        ShardWriter(
            path,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer.fingerprint,
            eos_id=eos_id,
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
    try:
        documents = 0
        for batch in _encode_batches(_batches(texts, heldout), tokenizer, eos_id, parse_special, workers):
            documents += len(batch.lengths)
            for part, writer in enumerate(writers):
                _write_part(writer, batch, part)
        if not documents:
            raise ValueError(f"no text in {', '.join(map(str, inputs))}: all {counts.empty} documents are empty")
        writers[0].skip(counts.empty)
        # Held-out first: where train exists, all does.
        sets = [writer.finish() for writer in reversed(writers)][::-1]
    except BaseException:
        for writer in reversed(writers):
            writer.abort()
        if not out_was_there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise
    return TokenizeReport(sets[0], sets[1] if heldout else None, counts.empty, counts.bad_lines)


@dataclass(frozen=True)
class _TextBatch:
    texts: list[str]
    parts: NDArray[np.int8]
    """0: train, 1: held out."""
    text_bytes: NDArray[np.int64]


@dataclass(frozen=True)
class _TokenBatch:
    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    parts: NDArray[np.int8]
    text_bytes: NDArray[np.int64]


def _batches(texts: Iterable[str], heldout: float) -> Iterator[_TextBatch]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield _describe(batch, heldout)
            batch, characters = [], 0
    if batch:
        yield _describe(batch, heldout)


def _describe(texts: list[str], heldout: float) -> _TextBatch:
    parts = [heldout > 0 and is_heldout(text, heldout) for text in texts]
    return _TextBatch(texts, np.array(parts, np.int8), np.array([len(text.encode()) for text in texts], np.int64))


def _encode_batches(
    batches: Iterable[_TextBatch], tokenizer: Tokenizer, eos_id: int, parse_special: bool, workers: int
) -> Iterator[_TokenBatch]:
    """Encode in order. With workers, a few batches are in flight at a time, so memory does not grow with the input."""
    if not workers:
        for batch in batches:
            tokens, lengths = _encode(batch.texts, tokenizer, eos_id, parse_special)
            yield _TokenBatch(tokens, lengths, batch.parts, batch.text_bytes)
        return
    # Spawned, not forked: the encoder's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    flying: deque[tuple[_TextBatch, Future[tuple[NDArray[np.uint32], NDArray[np.int64]]]]] = deque()
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(tokenizer, eos_id, parse_special)
    ) as pool:
        try:
            for batch in batches:
                flying.append((batch, pool.submit(_encode_in_worker, batch.texts)))
                if len(flying) >= 2 * workers:
                    yield _landed(*flying.popleft())
            while flying:
                yield _landed(*flying.popleft())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _landed(batch: _TextBatch, future: Future[tuple[NDArray[np.uint32], NDArray[np.int64]]]) -> _TokenBatch:
    tokens, lengths = future.result()
    return _TokenBatch(tokens, lengths, batch.parts, batch.text_bytes)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: Tokenizer, eos_id: int, parse_special: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.update(tokenizer=tokenizer, eos_id=eos_id, parse_special=parse_special)


def _encode_in_worker(texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    return _encode(texts, **_worker)


def _encode(
    texts: list[str], tokenizer: Tokenizer, eos_id: int, parse_special: bool
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Ids of all texts laid end to end, each followed by the end-of-text token, and lengths with that token."""
    flat, lengths = tokenizer.encode_batch(texts, parse_special=parse_special)
    with_end = np.empty(len(flat) + len(texts), np.uint32)
    ends = np.cumsum(lengths + 1) - 1
    is_text = np.ones(len(with_end), np.bool_)
    is_text[ends] = False
    with_end[is_text] = flat
    with_end[ends] = eos_id
    return with_end, lengths + 1


def _write_part(writer: ShardWriter, batch: _TokenBatch, part: int) -> None:
    mine = batch.parts == part
    if mine.all():
        writer.add_batch(batch.tokens, batch.lengths, batch.text_bytes)
    elif mine.any():
        tokens = batch.tokens[np.repeat(mine, batch.lengths)]
        writer.add_batch(tokens, batch.lengths[mine], batch.text_bytes[mine])
