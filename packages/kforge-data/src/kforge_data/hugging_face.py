"""Texts of Hugging Face datasets, by the library `datasets`: whole ones by number, or streams by shard.

A dataset is named as ``datasets://NAME``, and perhaps
``?split=train&subset=en&field=text&revision=main&stream=1&max_bad_lines=10``.
NAME is a folder written by `save_to_disk`, a folder or file of parquet, JSON lines or text, or a name on the hub.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from kforge_data.text_files import Bad, needed, skipped_up_to

logger = logging.getLogger("kforge_data")

SCHEME = "datasets://"
_KEYS = ("split", "subset", "field", "revision", "stream", "max_bad_lines")
_FILES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".arrow": "arrow"}
_READ = 256  # records that are taken from a dataset at a time
_PARTS = 1024  # pieces that a dataset on this disk is cut into for lanes


@dataclass(frozen=True)
class DatasetName:
    """What ``datasets://…`` says."""

    name: str
    split: str = "train"
    subset: str | None = None
    field: str = ""
    """The column of the text; "" takes what the caller has as default."""
    revision: str | None = None
    stream: bool = False
    """Read while training, rather than tokenized into a cache before."""
    max_bad_lines: int = 0
    """So many records whose field holds something that is no text are told of and skipped; one more is an error."""

    def __str__(self) -> str:
        given = {key: getattr(self, key) for key in _KEYS}
        words = "&".join(f"{key}={int(value) if value is True else value}" for key, value in given.items() if value)
        return f"{SCHEME}{self.name}?{words}"


def parse_dataset(place: str) -> DatasetName:
    """ValueError for an empty name and for keys or values that there are not."""
    name, _, query = place.removeprefix(SCHEME).partition("?")
    if not name:
        raise ValueError(f"{place!r} names no dataset; write {SCHEME}NAME, with the name of a folder or on the hub")
    given = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := [key for key in given if key not in _KEYS]:
        raise ValueError(f"{place!r} has no key {unknown[0]!r}; it has {', '.join(_KEYS)}")
    stream = given.pop("stream", "0")
    if stream not in ("0", "1"):
        raise ValueError(
            f"{place!r}: stream = {stream!r} must be 0 (tokenized into a cache) or 1 (read while training)"
        )
    most = given.pop("max_bad_lines", "0")
    if not (most.isascii() and most.isdigit()):
        raise ValueError(f"{place!r}: max_bad_lines = {most!r} must be a number of at least 0")
    if empty := [key for key, value in given.items() if not value]:
        raise ValueError(f"{place!r}: {empty[0]} is empty; leave it out, or give it a value")
    return DatasetName(name, stream=stream == "1", max_bad_lines=int(most), **given)


@lru_cache(maxsize=8)
def open_data(place: DatasetName) -> Any:
    """The library's dataset, downloaded first where it is on the hub. ValueError that says why it cannot be."""
    library = needed("datasets", "datasets", str(place))
    with _explained(place):
        if not _is_saved(Path(place.name)):
            return library.load_dataset(**_arguments(place), split=place.split)
        _refuse_subset(place)
        return library.load_from_disk(str(_saved_split(place)))


def dataset_facts(place: str) -> tuple[int, str]:
    """(bytes as it lies there, fingerprint of the library) of a dataset."""
    data = open_data(parse_dataset(place))
    return int(data.data.nbytes), str(data._fingerprint)


class DatasetTexts:
    """The texts of a dataset that lies on this disk, by number.

    `fingerprint` is the library's. As shards for lanes it is cut into up to 1,024 pieces of neighbours.
    """

    def __init__(self, place: str | DatasetName, *, field: str = "text") -> None:
        self.place = place if isinstance(place, DatasetName) else parse_dataset(place)
        self.field = self.place.field or field
        self.data: Any = open_data(self.place)
        _check_field(self.place, self.field, self.data.column_names)
        self.data = self.data.select_columns([self.field])
        self._skipping = _Skipping(self.place)
        content = [self.data._fingerprint, self.field]
        self.fingerprint = "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.place, self.field)

    def read(self, first: int = 0, last: int | None = None) -> Iterator[str | Bad | None]:
        """Texts from number ``first`` on, up to ``last``; None and "" where there is none, `Bad` for no text."""
        last = len(self) if last is None else last
        for at in range(first, last, _READ):
            with _explained(self.place, "read"):
                column = self.data[at : min(at + _READ, last)][self.field]
            yield from (_text_or_bad(text, self.field) for text in column)

    # As shards.

    @property
    def shards(self) -> int:
        """Pieces of neighbouring documents."""
        return max(1, min(len(self), _PARTS))

    def texts(self, shard: int, first: int = 0) -> Iterator[str | None]:
        """Texts of a shard, from its document ``first`` on."""
        begin, end = shard * len(self) // self.shards, (shard + 1) * len(self) // self.shards
        return self._skipping(self.read(min(begin + first, end), end), shard, first)


class DatasetStream:
    """The texts of a dataset as it is read, by shard: the files it consists of, or the row groups of parquet files.

    Only the shards that are asked for are downloaded, as far as they are read.
    """

    def __init__(self, place: str | DatasetName, *, field: str = "text") -> None:
        self.place = place if isinstance(place, DatasetName) else parse_dataset(place)
        self.field = self.place.field or field
        library = needed("datasets", "datasets", str(self.place))
        with _explained(self.place):
            builder = library.load_dataset_builder(**_arguments(self.place))
            data = builder.as_streaming_dataset(split=self.place.split)
        if data.column_names is not None:
            _check_field(self.place, self.field, data.column_names)
        self.data: Any = data.reshard()
        self._skipping = _Skipping(self.place)
        content = [self.place.split, self.place.subset, self.field, self.shards, _content_of(builder, self.place)]
        self.fingerprint = "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def shards(self) -> int:
        """Files, or row groups of parquet files."""
        return int(self.data.num_shards)

    def texts(self, shard: int, first: int = 0) -> Iterator[str | None]:
        """Texts of a shard, from its document ``first`` on; what lies before is passed over as tables."""
        return self._skipping(self._read(shard, first), shard, first)

    def _read(self, shard: int, first: int) -> Iterator[str | Bad | None]:
        one = self.data.shard(num_shards=self.shards, index=shard).with_format("arrow")
        # By `iter`, as iteration itself would leave part of the shard to other workers of torch's DataLoader.
        passed, tables = 0, iter(one.iter(batch_size=_READ))
        while True:
            column: list[Any] = []
            with _explained(self.place, "read"):
                if (table := next(tables, None)) is None:
                    return
                _check_field(self.place, self.field, table.column_names)
                if passed + len(table) > first:
                    found = table.column(self.field).slice(max(first - passed, 0))
                    column = found.to_pylist()
                    if str(found.type) == "extension<arrow.json>":  # as the library keeps values of several types
                        column = [None if text is None else json.loads(text) for text in column]
            yield from (_text_or_bad(text, self.field) for text in column)
            passed += len(table)


def open_shards(place: str | DatasetName, *, field: str = "text") -> DatasetTexts | DatasetStream:
    """The texts of a dataset by shard, from this disk where `save_to_disk` has written it, else as a stream."""
    parsed = place if isinstance(place, DatasetName) else parse_dataset(place)
    return (DatasetTexts if _is_saved(Path(parsed.name)) else DatasetStream)(parsed, field=field)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved_split(place: DatasetName) -> Path:
    """The folder of the split that is asked for; the library opens none, of several, if one of them is empty."""
    folder = Path(place.name)
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text()).get("splits", [])
        if place.split not in splits:
            raise ValueError(f"{place} has no split {place.split!r}; it has {', '.join(splits)}")
        folder /= place.split
    if not json.loads((folder / "state.json").read_text()).get("_data_files"):
        raise ValueError(f"{place}: the split {place.split!r} holds no documents; name another one, or leave it out")
    return folder


def _refuse_subset(place: DatasetName) -> None:
    for key in ("subset", "revision"):
        if getattr(place, key):
            raise ValueError(f"{place}: a folder of save_to_disk has no {key}; leave it out")


def _arguments(place: DatasetName) -> dict[str, Any]:
    path = Path(place.name)
    if path.is_file():
        _refuse_subset(place)
        name = path.name.removesuffix(".gz").removesuffix(".zst")
        kind = _FILES.get(Path(name).suffix)
        if kind is None:
            raise ValueError(f"{place.name} is neither {' nor '.join(_FILES)}, and its format is not guessed")
        return {"path": kind, "data_files": {place.split: str(path)}}
    return {"path": place.name, "name": place.subset, "revision": place.revision}


def _content_of(builder: Any, place: DatasetName) -> Any:
    """What names the content of a stream: names and sizes of local files, or the commit that the hub has."""
    files = (builder.config.data_files or {}).get(place.split)
    if files is None:
        return [builder.dataset_name, str(builder.config.version), builder.hash]
    if all(Path(str(file)).is_file() for file in files):
        return sorted([Path(str(file)).name, Path(str(file)).stat().st_size] for file in files)
    origins = [list(map(str, origin)) for origin in files.origin_metadata]
    return [[str(file) for file in files], origins]


class _explained:
    """Errors of the library, and of what it reads, as a ValueError that names the dataset."""

    def __init__(self, place: DatasetName, done: str = "opened") -> None:
        self._place, self._done = place, done

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, StopIteration):  # what the library lets out where the first file holds nothing
            raise ValueError(f"{self._place} cannot be {self._done}: it is empty") from error
        of_library = type(error).__module__.partition(".")[0] == "datasets"
        known = of_library or isinstance(error, OSError | ValueError | RuntimeError | EOFError | zlib.error)
        if known and not str(error).startswith(str(self._place)):
            said = error.__cause__ if of_library and error is not None and error.__cause__ else error
            lines = str(said).strip().splitlines() or [type(said).__name__]
            raise ValueError(f"{self._place} cannot be {self._done}: {lines[0]}") from error


def _check_field(place: DatasetName, field: str, columns: list[str]) -> None:
    if field not in columns:
        raise ValueError(f"{place} has no column {field!r}; it has {', '.join(columns)}. Name one: ?field=…")


def _text_or_bad(text: object, field: str) -> str | Bad | None:
    if text is None or isinstance(text, str):
        return text
    return Bad(f"column {field!r} holds a {type(text).__name__}, not text")


class _Skipping:
    """Texts of a shard, with None in the place of a bad one, which is told of and counted once, however many lanes come
    upon it. ValueError for more of them than the name of the dataset allows."""

    def __init__(self, place: DatasetName) -> None:
        self._place = place
        self.found: set[tuple[int, int]] = set()
        """(shard, document) of each, as far as this process has read."""

    def __call__(self, texts: Iterator[str | Bad | None], shard: int, first: int) -> Iterator[str | None]:
        for number, text in enumerate(texts, first):
            if not isinstance(text, Bad):
                yield text
                continue
            if (shard, number) not in self.found:
                what = f"{self._place}: document {number + 1} of shard {shard + 1}: {text.reason}"
                if len(self.found) >= self._place.max_bad_lines:
                    raise ValueError(f"{what}; {skipped_up_to(self._place.max_bad_lines, '?max_bad_lines=…')}")
                self.found.add((shard, number))
                logger.warning("%s; skipped", what)
            yield None


def _open_again(place: DatasetName, field: str) -> DatasetTexts:
    return DatasetTexts(place, field=field)
