"""Paths in an object store, over fsspec: as much of `pathlib.Path` as checkpoints need, each request repeated.

An object appears whole or not at all, replaces another at once, and cannot be renamed; there are no folders, only
common beginnings of names. fsspec, and the package it needs for a kind of URL, are imported with the first path.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from inspect import signature
from typing import Any

from kforge_ckpt import retrying
from kforge_ckpt.errors import CheckpointError
from kforge_ckpt.retrying import CutShort, patiently, redacted

PART_BYTES = 2**25
"""32 MiB: the unit in which objects are written and read. S3 takes 10,000 parts, so an object has up to 312 GiB."""
PARTS_AT_ONCE = 4
"""Of one object; so many parts, and one more, are held in memory."""
WINDOW_BYTES = 2**20
"""At least so much is read at once."""
_memory = threading.Lock()
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def is_url(place: object) -> bool:
    """Whether a place is written as a URL: ``s3://bucket/run``, ``memory://run``."""
    return isinstance(place, RemotePath) or "://" in str(place)


class Store:
    """One file system of fsspec, called with `patiently` and with a time-out."""

    def __init__(self, url: str) -> None:
        protocol = url.partition("://")[0]
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError:
            raise CheckpointError(
                f"{redacted(url)} needs the package fsspec: python -m pip install 'kforge-ckpt[remote]'"
            ) from None
        # Not one that others have made: it would keep the credentials and the endpoint that they found.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol in ("s3", "s3a"):
            # Repeating is done here, and only here.
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10}
        if protocol == "memory":
            options = {}
        try:
            self.fs, self.root = fsspec.core.url_to_fs(url, **options)
        except ImportError:
            package = _PACKAGES.get(protocol, protocol)
            raise CheckpointError(
                f"{redacted(url)} needs the package {package}: python -m pip install "
                + ("'kforge-ckpt[remote]'" if package == "s3fs" else package)
            ) from None
        except Exception as error:
            raise CheckpointError(f"{redacted(url)} cannot be opened: {retrying.describe(error)}") from None
        self.is_s3 = self.fs.protocol == "s3" or "s3" in tuple(self.fs.protocol)
        if self.is_s3:
            self.fs.retries = 1
        # Newer ones of s3fs would ask for the size first, to read in several requests.
        one = self.is_s3 and "max_concurrency" in signature(self.fs._cat_file).parameters
        self.whole: dict[str, Any] = {"max_concurrency": 1} if one else {}

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, once; TimeoutError when the whole answer is not there in time."""
        if self.fs.protocol == "memory":  # whose dict is not made for several threads
            with _memory:
                return getattr(self.fs, method)(*args, **kwargs)
        if not self.fs.async_impl:
            return getattr(self.fs, method)(*args, **kwargs)
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=retrying.PATIENCE.timeout, **kwargs)


@lru_cache(maxsize=64)
def _store(url: str, process: int) -> Store:
    """One for each URL; none is used on after a fork."""
    return Store(url)


class RemotePath:
    """A name in an object store, ``RemotePath("s3://bucket/run/checkpoints")``; its text has no secrets.

    Methods are those of `pathlib.Path`. They raise FileNotFoundError for what is not there, and CheckpointError for
    anything else that keeps failing; at once where the access is denied.
    """

    def __init__(self, url: str, _store_of: Store | None = None, _key: str | None = None) -> None:
        url = url.rstrip("/")
        self.store = _store_of or _store(url, os.getpid())
        self.key = self.store.root.rstrip("/") if _key is None else _key
        self._text = redacted(url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._text}/{name}", self.store, f"{self.key}/{name}")

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"RemotePath({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and (self.key, self._text) == (other.key, other._text)

    def __hash__(self) -> int:
        return hash((self.key, self._text))

    @property
    def name(self) -> str:
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._text.rpartition("/")[0], self.store, self.key.rpartition("/")[0])

    def _ask(self, doing: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return patiently(f"{doing} {self}", lambda: self.store.call(method, *args, **kwargs))

    def entries(self) -> dict[str, int | None]:
        """What is below: name -> size in bytes, or None for what has something below it. All pages of it."""
        try:
            found = self._ask("listing", "ls", self.key, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        sizes: dict[str, int | None] = {}
        for one in sorted(found, key=lambda one: str(one["name"])):
            name = one["name"].rstrip("/")
            if name != self.key:
                sizes[name.rpartition("/")[2]] = None if one["type"] == "directory" else int(one["size"])
        return sizes

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / name for name in self.entries())

    def is_file(self) -> bool:
        try:
            return bool(self._ask("looking at", "info", self.key)["type"] == "file")
        except FileNotFoundError:
            return False

    def size(self) -> int:
        return int(self._ask("looking at", "info", self.key)["size"])

    def read_bytes(self) -> bytes:
        return bytes(self._ask("reading", "cat_file", self.key, **self.store.whole))

    def write_bytes(self, data: bytes) -> None:
        """Make an object, or replace it, whole and at once."""
        try:
            self._ask("writing", "pipe_file", self.key, data)
        except FileNotFoundError:
            raise self._nowhere() from None

    def _nowhere(self) -> CheckpointError:
        return CheckpointError(f"writing {self}: there is no such bucket or container; make it first")

    def create(self, data: bytes) -> bool:
        """Make an object where there was none; whether it was made by this call. Not every store can tell."""
        try:
            self._ask("writing", "pipe_file", self.key, data, mode="create")
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise self._nowhere() from None
        except CheckpointError as error:
            if "412" in str(error) or "PreconditionFailed" in str(error):
                return False
            raise
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask("deleting", "rm_file", self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all that is below, unfinished uploads to S3 too."""
        with suppress(FileNotFoundError):
            self._ask("deleting", "rm", self.key, recursive=True)
        for key, upload in self._unfinished():
            names = {"Bucket": self.store.fs.split_path(self.key)[0], "Key": key, "UploadId": upload}
            with suppress(FileNotFoundError):
                self._ask("aborting an upload to", "call_s3", "abort_multipart_upload", **names)

    def unfinished(self) -> set[str]:
        """The names below which S3 holds parts of uploads that did not end; they are in no listing."""
        prefix = self.store.fs.split_path(self.key)[1] if self.store.is_s3 else ""
        return {key[len(prefix) + 1 :].partition("/")[0] for key, _ in self._unfinished()}

    def _unfinished(self) -> list[tuple[str, str]]:
        """Key and number of each unfinished upload below. Who may not ask is not told of any."""
        if not self.store.is_s3:
            return []
        bucket, prefix, _ = self.store.fs.split_path(self.key)
        where = {"Bucket": bucket, "Prefix": f"{prefix}/"}
        try:
            found = self._ask("listing uploads below", "call_s3", "list_multipart_uploads", **where)
        except (FileNotFoundError, CheckpointError) as error:
            retrying.logger.info("%s", error)
            return []
        return [(one["Key"], one["UploadId"]) for one in found.get("Uploads", [])]

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The object as a file; only the ranges that are read are asked for."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: an object is opened for reading only; `upload` makes one")
        return io.BufferedReader(_Ranges(self), WINDOW_BYTES)

    def upload(self) -> Upload:
        """A new object, from one block after the other."""
        return MultipartUpload(self) if self.store.is_s3 else StreamedUpload(self)


class _Ranges(io.RawIOBase):
    """Reads ranges of an object, several parts of a large one at once."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._size = path.size()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(0, self._size - self._at)]
        begins = range(0, len(view), PART_BYTES)
        if len(begins) > 1:
            with ThreadPoolExecutor(PARTS_AT_ONCE, "ckpt-read") as pool:
                list(pool.map(lambda begin: self._fetch(view, begin), begins))
        elif begins:
            self._fetch(view, 0)
        self._at += len(view)
        return len(view)

    def readall(self) -> bytes:
        data = bytearray(max(0, self._size - self._at))
        self.readinto(data)
        return bytes(data)

    def _fetch(self, view: memoryview, begin: int) -> None:
        end = min(begin + PART_BYTES, len(view))

        def fetched() -> bytes:
            path = self._path
            data = path.store.call("cat_file", path.key, start=self._at + begin, end=self._at + end)
            if len(data) != end - begin:
                raise CutShort(f"{len(data)} bytes came of {end - begin}")
            return bytes(data)

        view[begin:end] = patiently(f"reading {self._path}", fetched)


class Upload:
    """An object that is being written. It is not there before `complete`; left by an error, it is given up."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def write(self, block: bytes | memoryview) -> None:
        raise NotImplementedError

    def complete(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class StreamedUpload(Upload):
    """By the file system's own means; one of up to a part is sent, and repeated, as a whole."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path)
        self._held = bytearray()
        self._file: Any = None

    def write(self, block: bytes | memoryview) -> None:
        self._held += block
        if len(self._held) > PART_BYTES:
            self._send()

    def _send(self) -> None:
        what, fs = f"writing {self.path}", self.path.store.fs
        if self._file is None:
            self._file = patiently(what, lambda: fs.open(self.path.key, "wb", PART_BYTES))
        data, self._held = bytes(self._held), bytearray()
        # What the library has taken cannot be given to it again: it repeats its requests itself.
        _once(what, lambda: self._file.write(data))

    def complete(self) -> None:
        if self._file is None:
            self.path.write_bytes(bytes(self._held))
            return
        self._send()
        _once(f"writing {self.path}", self._file.close)

    def abort(self) -> None:
        if self._file is None:
            return
        try:
            self._file.discard()
            self.path.unlink(missing_ok=True)  # in some stores an object grows where it is seen
        except Exception as error:
            retrying.logger.info("giving up %s: %s", self.path, retrying.describe(error))


def _once(what: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception as error:
        raise CheckpointError(f"{what}: {retrying.describe(error)}") from None


class MultipartUpload(Upload):
    """By S3's requests: each part is sent, and repeated, alone; `PARTS_AT_ONCE` are under way."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path)
        self._held = bytearray()
        self._sent: list[Future[dict[str, Any]]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._room = threading.Semaphore(PARTS_AT_ONCE)
        self._id = ""
        bucket, key, _ = path.store.fs.split_path(path.key)
        self._names = {"Bucket": bucket, "Key": key}

    def _s3(self, doing: str, method: str, **kwargs: Any) -> Any:
        return self.path._ask(doing, "call_s3", method, **self._names, **kwargs)

    def write(self, block: bytes | memoryview) -> None:
        view = memoryview(block).cast("B")
        while view:
            taken = view[: PART_BYTES - len(self._held)]
            self._held += taken
            view = view[len(taken) :]
            if len(self._held) == PART_BYTES:
                self._send()

    def _send(self) -> None:
        if self._pool is None:
            try:
                self._id = self._s3("writing", "create_multipart_upload")["UploadId"]
            except FileNotFoundError:
                raise self.path._nowhere() from None
            self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, "ckpt-upload")
        self._room.acquire()
        for one in self._sent:
            if one.done():
                one.result()  # raises what it failed with
        data, self._held = bytes(self._held), bytearray()
        self._sent.append(self._pool.submit(self._part, len(self._sent) + 1, data))

    def _part(self, number: int, data: bytes) -> dict[str, Any]:
        try:
            place = {"UploadId": self._id, "PartNumber": number}
            answer = self._s3(f"writing part {number} of", "upload_part", **place, Body=data)
            sums = {name: answer[name] for name in answer if name.startswith("Checksum") and name != "ChecksumType"}
            return {"PartNumber": number, "ETag": answer["ETag"], **sums}
        finally:
            self._room.release()

    def complete(self) -> None:
        if self._pool is None:
            self.path.write_bytes(bytes(self._held))
            return
        if self._held:
            self._send()
        parts = [one.result() for one in self._sent]
        self._pool.shutdown()
        try:
            self._s3("completing", "complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # the answer to an earlier attempt was lost, or somebody aborted it
            if not self.path.is_file():
                raise CheckpointError(f"writing {self.path}: its upload was aborted by somebody else") from None

    def abort(self) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        try:
            self._s3("aborting an upload to", "abort_multipart_upload", UploadId=self._id)
        except (FileNotFoundError, CheckpointError) as error:
            retrying.logger.info("%s", error)
