"""Writing token shards: files grow as documents come, and the index that makes them a set comes last."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from kforge_data.shards import (
    INDEX,
    OFFSET_DTYPE,
    TOKEN_DTYPES,
    ShardIndex,
    ShardInfo,
    TokenShards,
    read_index,
    token_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

_OWN_FILE = re.compile(r"^\d+-\d{5,}\.(bin|docs)$")


class ShardWriter:
    """Writes a folder of token shards, document by document. Nothing counts until `finish`.

        with ShardWriter("shards", vocab_size=50_000) as writer:
            writer.add([17, 4, 0])

    Leaving the block finishes the set; leaving it by an exception removes all that was written.

    Args:
        path: the folder. Created when the first document comes.
        vocab_size: ids are 0..vocab_size-1; an id outside is refused.
        tokenizer: fingerprint of the tokenizer that made the ids ("" if there is none).
        eos_id, bos_id: the ids that end and begin each document, recorded for readers; the writer adds nothing.
        dtype: "auto", "uint16" or "uint32". One that cannot hold the vocabulary is refused before any file.
        shard_tokens: a shard is closed rather than grown past this. A document is never split, so a longer one
            makes a longer shard.
        overwrite: replace the set that lies at `path`. The old one stays whole until the new one is finished.
        meta: anything JSON can hold, for people.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        tokenizer: str = "",
        eos_id: int | None = None,
        bos_id: int | None = None,
        dtype: str = "auto",
        shard_tokens: int = 1 << 28,
        overwrite: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.dtype = token_dtype(vocab_size, dtype)
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens = {shard_tokens} must be at least 1")
        for name, value in (("eos_id", eos_id), ("bos_id", bos_id)):
            if value is not None and not 0 <= value < vocab_size:
                raise ValueError(f"{name} = {value} is not an id of a vocabulary of {vocab_size}")
        self.path = Path(path)
        if (self.path / INDEX).exists() and not overwrite:
            raise ValueError(f"{self.path} already holds token shards; remove it, or pass overwrite (--overwrite)")
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and token shards need a folder")
        self._vocab_size, self._tokenizer, self._eos_id, self._bos_id = vocab_size, tokenizer, eos_id, bos_id
        self._shard_tokens, self._meta = shard_tokens, dict(meta or {})
        self._revision = 1 + max(self._listed_revisions(), default=-1)
        self._shards: list[ShardInfo] = []
        self._open: _OpenShard | None = None
        self._made: list[Path] = []  # folders to remove again on abort, innermost first
        self._skipped = 0
        self._done = False

    def _listed_revisions(self) -> list[int]:
        try:
            return [int(shard.name.split("-")[0]) for shard in read_index(self.path).shards]
        except ValueError:  # none there, or damaged: its files may go
            return []

    def add(self, tokens: ArrayLike, text_bytes: int = 0) -> None:
        """Append one document of ids [n], made from `text_bytes` bytes of UTF-8. An empty one is counted as skipped."""
        flat = np.asarray(tokens)
        if flat.ndim != 1:
            raise ValueError(f"ids of shape {list(flat.shape)}; one document is ids [n], several are for add_batch")
        self.add_batch(flat, np.array([flat.size], np.int64), np.array([text_bytes], np.int64))

    def add_batch(self, tokens: ArrayLike, lengths: ArrayLike, text_bytes: ArrayLike) -> None:
        """Append documents laid end to end: ids [n], their lengths [d] (sum n), bytes of text of each [d]."""
        if self._done:
            raise ValueError(f"the shards at {self.path} are finished; nothing can be added")
        flat = np.asarray(tokens).reshape(-1)
        sizes, weights = np.asarray(lengths, np.int64).reshape(-1), np.asarray(text_bytes, np.int64).reshape(-1)
        if sizes.sum() != flat.size or sizes.shape != weights.shape:
            raise ValueError(f"lengths sum to {sizes.sum()}, and there are {flat.size} tokens; or text_bytes differs")
        if flat.size:
            if not np.issubdtype(flat.dtype, np.integer):
                raise ValueError(f"ids must be integers, not {flat.dtype}")
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high >= self._vocab_size:
                raise ValueError(f"id {high if low >= 0 else low} is outside of a vocabulary of {self._vocab_size}")
        filled = sizes > 0
        self._skipped += int((~filled).sum())
        sizes, weights = sizes[filled], weights[filled]
        flat = flat.astype(TOKEN_DTYPES[self.dtype], copy=False)
        ends = np.cumsum(sizes)
        first, token = 0, 0
        while first < len(sizes):
            shard = self._open or self._start_shard()
            room = self._shard_tokens - shard.tokens
            last = int(np.searchsorted(ends, token + room, side="right"))
            if last <= first:
                if shard.tokens:
                    self._close_shard()
                    continue
                last = first + 1
            shard.write(flat[token : int(ends[last - 1])], sizes[first:last], int(weights[first:last].sum()))
            first, token = last, int(ends[last - 1])

    def skip(self, documents: int = 1) -> None:
        """Count documents that were left out (empty ones); they appear in the index as skipped."""
        self._skipped += documents

    def commit(self) -> dict[str, Any]:
        """Put on disk what was added so far. Plain data for `resume`, from which a later writer goes on after it."""
        return {
            "revision": self._revision,
            "shards": [asdict(shard) for shard in self._shards],
            "open": self._open.commit() if self._open else None,
            "skipped": self._skipped,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on after what `commit` told, of a writer with the same arguments that was killed; what it wrote later is
        cut off. ValueError where the files are not there any more, or are not what was written."""
        self._revision, self._skipped = int(state["revision"]), int(state["skipped"])
        self._shards = [ShardInfo(**shard) for shard in state["shards"]]
        for shard in self._shards:
            _check_size(self.path / f"{shard.name}.bin", shard.tokens * TOKEN_DTYPES[self.dtype].itemsize)
            _check_size(self.path / f"{shard.name}.docs", (shard.documents + 1) * OFFSET_DTYPE.itemsize)
        if state["open"] is not None:
            name = f"{self._revision}-{len(self._shards):05d}"
            self._open = _OpenShard(self.path, name, state["open"], TOKEN_DTYPES[self.dtype].itemsize)

    def keep(self) -> None:
        """Close the files and leave them as they are, for a later writer that goes on from the last `commit`."""
        if self._open and not self._done:
            self._open.close_files()
        self._done = True

    def finish(self) -> TokenShards:
        """Close the files, write index.json and return the set. Older revisions are removed after that."""
        if self._done:
            raise ValueError(f"the shards at {self.path} are finished already")
        if self._open:
            self._close_shard()
        index = ShardIndex(
            dtype=self.dtype,
            vocab_size=self._vocab_size,
            eos_id=self._eos_id,
            tokenizer=self._tokenizer,
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            text_bytes=sum(shard.text_bytes for shard in self._shards),
            skipped_documents=self._skipped,
            shards=tuple(self._shards),
            meta=self._meta,
            bos_id=self._bos_id,
        )
        text = index.to_json()
        self._make_folder()
        temporary = self.path / (INDEX + ".partial")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / INDEX)
        _sync_folder(self.path)
        self._done = True
        listed = {f"{shard.name}.{kind}" for shard in self._shards for kind in ("bin", "docs")}
        for file_path in self.path.iterdir():
            if _OWN_FILE.match(file_path.name) and file_path.name not in listed:
                file_path.unlink()
        return TokenShards(self.path)

    def abort(self) -> None:
        """Remove everything that this writer wrote, folders that it made included. Harmless after `finish`."""
        if self._done:
            return
        self._done = True
        if self._open:
            self._open.discard()
        for shard in self._shards:
            for kind in ("bin", "docs"):
                (self.path / f"{shard.name}.{kind}").unlink(missing_ok=True)
        (self.path / (INDEX + ".partial")).unlink(missing_ok=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:  # another writer has put something there
                break

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._done:
            try:
                self.finish()
            except BaseException:
                self.abort()
                raise

    def _make_folder(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._made = self._made or missing

    def _start_shard(self) -> _OpenShard:
        self._make_folder()
        self._open = _OpenShard(self.path, f"{self._revision}-{len(self._shards):05d}")
        return self._open

    def _close_shard(self) -> None:
        if self._open:
            self._shards.append(self._open.close())
            self._open = None


class _OpenShard:
    """The two files of the shard being written, hashed as they grow."""

    def __init__(self, folder: Path, name: str, begun: Mapping[str, Any] | None = None, itemsize: int = 0) -> None:
        begun = begun or {"tokens": 0, "documents": 0, "text_bytes": 0, "sums": None}
        self.name, self.tokens = name, begun["tokens"]
        self._documents, self._text_bytes = begun["documents"], begun["text_bytes"]
        self._paths = [folder / f"{name}.bin", folder / f"{name}.docs"]
        self._hashes = [hashlib.sha256(), hashlib.sha256()]
        sizes = [self.tokens * itemsize, self._documents * OFFSET_DTYPE.itemsize]
        for path, digest, size in zip(self._paths, self._hashes, sizes, strict=True):
            if size:
                _check_size(path, size, longer=True)
                os.truncate(path, size)
                with path.open("rb") as file:
                    while chunk := file.read(1 << 20):
                        digest.update(chunk)
            if begun["sums"] and digest.hexdigest() != begun["sums"][path.suffix]:
                raise ValueError(f"{path} is not what was written; what was begun cannot be gone on with")
        self._files: list[BinaryIO] = [
            path.open("ab" if size else "wb") for path, size in zip(self._paths, sizes, strict=True)
        ]

    def _put(self, which: int, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data
        self._files[which].write(data)
        self._hashes[which].update(data)

    def write(self, tokens: NDArray[Any], sizes: NDArray[np.int64], text_bytes: int) -> None:
        self._put(0, tokens)
        self._put(1, (self.tokens + np.cumsum(sizes) - sizes).astype(OFFSET_DTYPE))
        self.tokens += len(tokens)
        self._documents += len(sizes)
        self._text_bytes += text_bytes

    def commit(self) -> dict[str, Any]:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        sums = {path.suffix: digest.hexdigest() for path, digest in zip(self._paths, self._hashes, strict=True)}
        return {"tokens": self.tokens, "documents": self._documents, "text_bytes": self._text_bytes, "sums": sums}

    def close_files(self) -> None:
        for file in self._files:
            file.close()

    def close(self) -> ShardInfo:
        self._put(1, np.array([self.tokens], OFFSET_DTYPE))
        self.commit()
        self.close_files()
        sums = [digest.hexdigest() for digest in self._hashes]
        return ShardInfo(self.name, self.tokens, self._documents, self._text_bytes, *sums)

    def discard(self) -> None:
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)


def _check_size(path: Path, size: int, *, longer: bool = False) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size or (found > size and not longer):
        raise ValueError(f"{path} has {found} bytes, and {size} were written; what was begun cannot be gone on with")


def _sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power cut, where the system lets a folder be opened."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
