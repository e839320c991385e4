"""Files of text, wherever they lie and however they are packed: local or of any URL of fsspec, .gz or .zst."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".jsonl", ".txt", ".parquet")
PACKED = (".gz", ".zst")


@dataclass(frozen=True)
class Bad:
    """What stands in the place of a text that cannot be read as one."""

    reason: str


def skipped_up_to(most: int, flag: str) -> str:
    """What an error of a bad line says of the limit."""
    return f"up to max_bad_lines = {most} ({flag}) are skipped"


def needed(module: str, extra: str, what: str) -> Any:
    """An optional module. ValueError that says what to type where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs {module.split('.')[0]}: pip install 'kforge-data[{extra}]'") from error


def is_dataset(place: str | Path) -> bool:
    """Whether a place is a dataset of Hugging Face, as datasets://name; see `kforge_data.hugging_face`."""
    return isinstance(place, str) and place.startswith("datasets://")


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL, as s3://bucket/key, and not a local path."""
    return isinstance(place, str) and "://" in place


def file_name(file: str | Path) -> str:
    """The last part of a path or URL."""
    return str(file).rstrip("/").rsplit("/", 1)[-1]


def kind_of(file: str | Path) -> str:
    """ ".jsonl", ".txt", ".parquet", or "" for anything else; a .gz or .zst behind it does not count."""
    name = file_name(file)
    for packed in PACKED:
        name = name.removesuffix(packed)
    suffix = Path(name).suffix
    return suffix if suffix in SUFFIXES else ""


def list_files(inputs: Sequence[str | Path]) -> list[str | Path]:
    """The files named, and those of a known kind inside the folders named, sorted. ValueError for others. A dataset of
    Hugging Face counts as one file."""
    files: list[str | Path] = []
    for given in inputs:
        if is_dataset(given):
            files.append(given)
            continue
        if is_url(given):
            with _explained(given, "looked at"):
                filesystem, path = _filesystem(given)
                is_folder, exists = filesystem.isdir(path), filesystem.exists(path)
                found = sorted(filesystem.find(path)) if is_folder else []
            inside = [filesystem.unstrip_protocol(file) for file in found]
        else:
            given = Path(given)
            is_folder, exists = given.is_dir(), given.exists()
            inside = sorted(path for path in given.rglob("*") if path.is_file()) if is_folder else []
        if is_folder:
            inside = [file for file in inside if kind_of(file)]
            if not inside:
                raise ValueError(f"{given} holds no {' or '.join(SUFFIXES)} file")
            files += inside
        elif not exists:
            raise ValueError(f"{given} does not exist")
        elif not kind_of(given):
            raise ValueError(f"{given} is neither {' nor '.join(SUFFIXES)}, and its format is not guessed; rename it")
        else:
            files.append(given)
    if not files:
        raise ValueError("no input files")
    return files


def file_size(file: str | Path) -> int:
    """Bytes of a file as it lies there, packed or not; 0 where its store does not tell."""
    if is_dataset(file):
        from kforge_data.hugging_face import dataset_facts

        return dataset_facts(str(file))[0]
    if not is_url(file):
        return Path(file).stat().st_size
    return int(_info(file).get("size") or 0)


def file_version(file: str | Path) -> int | str:
    """What becomes another one when a file is changed: when that was, or what its store says of it; of a dataset its
    fingerprint. "" where a store says nothing."""
    if is_dataset(file):
        from kforge_data.hugging_face import dataset_facts

        return dataset_facts(str(file))[1]
    if not is_url(file):
        return Path(file).stat().st_mtime_ns
    info = _info(file)
    return next((str(info[key]) for key in _VERSIONS if info.get(key)), "")


_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "updated", "mtime", "created")
"""Entries of what a store of fsspec says of a file, that are alike however it is asked."""


def _info(file: str | Path) -> dict[str, Any]:
    with _explained(file, "looked at"):
        filesystem, path = _filesystem(file)
        found: dict[str, Any] = filesystem.info(path)
        return found


def _filesystem(file: str | Path) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. ValueError where its library is missing."""
    try:
        found: tuple[Any, str] = needed("fsspec.core", "remote", str(file)).url_to_fs(str(file))
    except ImportError as error:  # of the store, as s3fs; its words say which
        raise ValueError(f"{file} needs a library of its store: {error}") from error
    except ValueError as error:
        raise error if str(file) in str(error) else ValueError(f"{file} cannot be opened: {error}") from error
    return found


@contextmanager
def _explained(file: str | Path, done: str = "read") -> Iterator[None]:
    """Errors of a store as a ValueError that names the file."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__ == "builtins":
            raise  # no store raises these
        raise ValueError(f"{file} cannot be {done}: {type(error).__name__}: {error}") from error


@contextmanager
def open_bytes(file: str | Path, opened: list[IO[bytes]] | None = None) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked. ValueError that names the file where it is damaged, or its store fails. ``opened``
    becomes the list of the file as it lies there, whose position says how far reading has come."""
    if is_url(file):
        with (
            _explained(file),
            _filesystem(file)[0].open(str(file), "rb") as raw,
            _unpacked(file, raw, opened) as content,
        ):
            yield content
    else:
        with open(file, "rb") as raw, _unpacked(file, raw, opened) as content:
            yield content


def check_all_read(file: str | Path, raw: IO[bytes]) -> None:
    """ValueError where a store gave fewer bytes than it has of a file that was read to its end, so that what is missing
    is not taken for the end of the text."""
    size = getattr(raw, "size", None)
    if is_url(file) and size is not None and raw.tell() < size:
        raise ValueError(f"{file} cannot be read: its store has {size} bytes of it, and gave {raw.tell()}")


@contextmanager
def _unpacked(file: str | Path, raw: Any, opened: list[IO[bytes]] | None) -> Iterator[IO[bytes]]:
    if opened is not None:
        opened[:] = [raw]
    name = file_name(file)
    if name.endswith(".gz"):
        with gzip.open(raw, "rb") as unpacked:
            try:
                yield unpacked  # type: ignore[misc]
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{file} is damaged: {error}") from error
    elif name.endswith(".zst"):
        zstandard = needed("zstandard", "zst", str(file))
        with io.BufferedReader(_Checked(raw, zstandard), 1 << 20) as checked:
            try:
                yield checked
            except (EOFError, zstandard.ZstdError) as error:
                raise ValueError(f"{file} is damaged: {error}") from error
    else:
        yield raw


class _Checked(io.RawIOBase):
    """The frames of a .zst, one after the other, and an error where the last one is cut."""

    def __init__(self, raw: Any, library: Any) -> None:
        self._raw, self._library = raw, library
        self._frame: Any = None
        self._packed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._packed and not (new := self._raw.read(1 << 18)):
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            elif not self._packed:
                self._packed = new
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = b""
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
