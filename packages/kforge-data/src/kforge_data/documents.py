"""Documents of files of text, in the order in which they lie, and where in the files reading stands.

A document is one line of a .jsonl file, one row of a .parquet, or one .txt file (or each line or paragraph of it).
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from kforge_data.text_files import (
    Bad,
    check_all_read,
    file_size,
    is_dataset,
    kind_of,
    list_files,
    needed,
    open_bytes,
    skipped_up_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger("kforge_data")

TXT_DOCUMENTS = ("file", "line", "paragraph")


@dataclass
class ReadCounts:
    """What reading left out."""

    empty: int = 0
    """Documents without text: empty, null, or records that lack the field."""
    bad_lines: int = 0
    """Lines that are not JSON records, or text that is not Unicode."""


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
    yield from Reading(
        list_files(inputs),
        field=field,
        txt_documents=txt_documents,
        strict=strict,
        max_bad_lines=max_bad_lines,
        counts=counts,
    )


class Reading:
    """Texts of documents, and where in the files the last one ended, so that another reading can go on from there.

    Args:
        files: as `list_files` gives them; the others as in `read_documents`.
        file, part: where to begin: so many whole files, and so many parts of the next one, are passed over. A part is
            a document, a record without text, or a bad line.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        field: str = "text",
        txt_documents: str = "file",
        strict: bool = False,
        max_bad_lines: int = 0,
        counts: ReadCounts | None = None,
        file: int = 0,
        part: int = 0,
    ) -> None:
        if txt_documents not in TXT_DOCUMENTS:
            raise ValueError(f"txt_documents = {txt_documents!r} is not one of {', '.join(TXT_DOCUMENTS)}")
        self.files, self.file, self.part = list(files), file, part
        self.counts = counts if counts is not None else ReadCounts()
        self._field, self._txt_documents = field, txt_documents
        self._strict, self._max_bad_lines = strict, max_bad_lines
        self._sizes: list[int] | None = None
        self._open: list[IO[bytes]] = []

    def __iter__(self) -> Iterator[str]:
        """Each text, with `file` and `part` just behind it while it is looked at."""
        for number in range(self.file, len(self.files)):
            passed = self.part if number == self.file else 0
            self.file, self.part = number, passed
            file = self.files[number]
            first = passed if is_dataset(file) else 0  # which can be read from anywhere
            for i, (place, text) in enumerate(self._parts(file, first), first):
                if i < passed:
                    continue
                self.part = i + 1
                if isinstance(text, Bad):
                    self.counts.bad_lines += 1
                    if self.counts.bad_lines > (most := self._most_bad_lines(file)):
                        raise ValueError(f"{place}: {text.reason}; {skipped_up_to(most, '--max-bad-lines')}")
                    logger.warning("%s: %s; skipped", place, text.reason)
                elif not text:
                    if self._strict:
                        raise ValueError(f"{place}: the document has no text")
                    self.counts.empty += 1
                else:
                    yield text

    def _most_bad_lines(self, file: str | Path) -> int:
        """How many may be skipped: of a dataset as many as its name says, if that is more."""
        if not is_dataset(file):
            return self._max_bad_lines
        from kforge_data.hugging_face import parse_dataset

        return max(self._max_bad_lines, parse_dataset(str(file)).max_bad_lines)

    def _parts(self, file: str | Path, first: int) -> Iterator[tuple[str, str | Bad]]:
        if is_dataset(file):
            return _read_dataset(str(file), self._field, first)
        kind = kind_of(file)
        if kind == ".txt":
            return _read_txt(file, self._txt_documents, self._open)
        if kind == ".jsonl":
            return _read_jsonl(file, self._field, self._open)
        return _read_parquet(file, self._field)

    def bytes_done(self) -> tuple[int, int]:
        """Bytes of the files that have been read, packed as they are, and bytes in all."""
        if self._sizes is None:
            self._sizes = [file_size(file) for file in self.files]
        if self.file < len(self.files) and is_dataset(self.files[self.file]):
            from kforge_data.hugging_face import DatasetTexts

            count = len(DatasetTexts(str(self.files[self.file]), field=self._field))
            return sum(self._sizes[: self.file]) + self._sizes[self.file] * self.part // max(count, 1), sum(self._sizes)
        try:
            inside = min(self._open[-1].tell(), self._sizes[self.file]) if self._open else 0
        except ValueError:  # closed: at its end
            inside = self._sizes[self.file]
        return sum(self._sizes[: self.file]) + inside, sum(self._sizes)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(raw: bytes) -> str | Bad:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 ({error.reason} at byte {error.start})")


def _read_txt(file: str | Path, unit: str, opened: list[IO[bytes]]) -> Iterator[tuple[str, str | Bad]]:
    if unit == "file":
        with open_bytes(file, opened) as content:
            whole = content.read()
            check_all_read(file, opened[-1])
            yield str(file), _decode(whole)
        return
    with open_bytes(file, opened) as lines:
        paragraph: list[str] = []
        for number, raw in enumerate(lines, 1):
            text = _decode(raw)
            if isinstance(text, Bad):
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
        check_all_read(file, opened[-1])
        if paragraph:
            yield f"{file}:{number}", "\n".join(paragraph)


def _read_jsonl(file: str | Path, field: str, opened: list[IO[bytes]]) -> Iterator[tuple[str, str | Bad]]:
    records = having = 0
    others: list[str] = []
    with open_bytes(file, opened) as lines:
        for number, raw in enumerate(lines, 1):
            raw = raw.strip()
            if not raw:
                continue
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one too
                yield f"{file}:{number}", Bad(f"not JSON ({error})")
                continue
            if not isinstance(record, dict):
                yield f"{file}:{number}", Bad(f"a JSON {type(record).__name__}, not a record")
                continue
            records += 1
            having += field in record
            others = others or list(record)
            text = record.get(field)
            if text is not None and not isinstance(text, str):
                yield f"{file}:{number}", Bad(f"field {field!r} is a {type(text).__name__}, not text")
                continue
            if text and not _is_unicode(text):
                yield f"{file}:{number}", Bad("half of a surrogate pair, which is not Unicode text")
                continue
            yield f"{file}:{number}", text or ""
        check_all_read(file, opened[-1])
    if records and not having:
        raise ValueError(f"{file}: no record has the field {field!r}; the first one has {', '.join(others) or 'none'}")


def _read_dataset(place: str, field: str, first: int) -> Iterator[tuple[str, str | Bad]]:
    from kforge_data.hugging_face import DatasetTexts

    for number, text in enumerate(DatasetTexts(place, field=field).read(first), first + 1):
        yield f"{place}:{number}", text or ""


def _read_parquet(file: str | Path, field: str) -> Iterator[tuple[str, str | Bad]]:
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
                        yield f"{file}:{number}", Bad(f"column {field!r} holds a {type(text).__name__}, not text")
                    else:
                        yield f"{file}:{number}", text or ""
        except (OSError, UnicodeDecodeError) as error:  # what the library raises for a damaged file
            raise ValueError(f"{file} is no whole parquet file: {error}") from error
        except Exception as error:
            if type(error).__module__.startswith("pyarrow"):
                raise ValueError(f"{file} is no whole parquet file: {error}") from error
            raise
