"""Megatron's indexed datasets: `NAME.bin` with tokens and `NAME.idx` with sizes, read through memory maps, and written.

    bytes 0-8     b"MMIDIDX\\x00\\x00"
    uint64        version, 1
    uint8         code of the integer type
    uint64 [2]    numbers n of sequences and d of document boundaries
    int32 [n]     tokens of each sequence
    int64 [n]     byte of NAME.bin at which each begins
    int64 [d]     number of the sequence at which each document begins, and n as the last

All little-endian. A document may have several sequences; here they are one.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.raw import _sample, _unsigned, check_sign, largest_id
from kforge_data.streams import TokenStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MAX_SEQUENCE = np.iinfo(np.int32).max


def pair_of(path: str | Path) -> tuple[Path, Path]:
    """NAME.idx and NAME.bin of either of them, or of NAME, which may have dots of its own."""
    place = Path(path)
    name = place.stem if place.suffix in (".idx", ".bin") else place.name
    return place.with_name(name + ".idx"), place.with_name(name + ".bin")


class MegatronTokens(TokenStream):
    """The pair `NAME.bin`, `NAME.idx`, opened by either name or by NAME.

    Args:
        vocab_size: ids are 0..vocab_size-1. None: one more than the largest id, which is found by one pass.
        eos_id: the id that ends each document, recorded for readers.
        cache: folder for what that pass found (default: `cache_folder`).

    Empty documents are left out. ValueError for files that are no such pair.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._arguments = (path, vocab_size, eos_id, cache)
        index, tokens = pair_of(path)
        for file in (index, tokens):
            if not file.is_file():
                raise ValueError(f"{file} does not exist; {index.name} and {tokens.name} belong together")
        kind, docs = _read_index(index, tokens)
        bins = _unsigned(np.asarray(np.memmap(tokens, kind, mode="r")))
        key = hashlib.sha256(_sample(bins).encode() + docs.tobytes()).hexdigest()
        if vocab_size is None:
            vocab_size = 1 + largest_id([bins], key, cache)
            check_sign(np.dtype(kind), vocab_size - 1, str(tokens))
        super().__init__(
            [bins],
            [docs],
            dtype=bins.dtype,
            vocab_size=vocab_size,
            eos_id=eos_id,
            fingerprint="sha256:" + key,
            name=str(index),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._arguments


def _reopen(path: str | Path, vocab_size: int | None, eos_id: int | None, cache: str | Path | None) -> MegatronTokens:
    return MegatronTokens(path, vocab_size=vocab_size, eos_id=eos_id, cache=cache)


def _read_index(index: Path, tokens: Path) -> tuple[str, NDArray[np.int64]]:
    """Integer type of the tokens, and where documents begin, in tokens, with the total as last entry."""
    raw = index.read_bytes()
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise ValueError(f"{index} is no Megatron index: it does not begin with MMIDIDX")
    _, version, code, sequences, boundaries = _HEADER.unpack_from(raw)
    if version != 1:
        raise ValueError(f"{index} has version {version}; this kforge-data reads version 1")
    if code not in _CODES:
        raise ValueError(f"{index} names type {code}, which is no integer type; known are {sorted(_CODES)}")
    if (need := _HEADER.size + 12 * sequences + 8 * boundaries) > len(raw):
        raise ValueError(f"{index} has {len(raw)} bytes; {sequences} sequences need {need}: it was cut short")
    sizes = np.frombuffer(raw, "<i4", sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", boundaries, _HEADER.size + 12 * sequences)
    width = np.dtype(_CODES[code]).itemsize
    ends = np.concatenate([[0], np.cumsum(sizes)])
    if (sizes < 0).any() or not np.array_equal(pointers, ends[:-1] * width):
        raise ValueError(f"{index}: its sequences do not lie end to end; write the pair anew")
    if tokens.stat().st_size != ends[-1] * width or not ends[-1]:
        raise ValueError(f"{tokens} has {tokens.stat().st_size} bytes; {index.name} says {ends[-1] * width}")
    if not boundaries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise ValueError(f"{index}: document boundaries do not run from 0 to {sequences} in ascending order")
    return _CODES[code], np.unique(ends[documents])


def write_megatron(source: TokenStream, path: str | Path) -> None:
    """Write `NAME.bin` and `NAME.idx` of a stream, one sequence a document. The index, which makes it a set, is last.

    Types are uint16 up to 65,536 ids and int32 above, as Megatron's own. ValueError for a document of 2**31 tokens.
    """
    index, tokens = pair_of(path)
    code = 8 if source.vocab_size <= 1 << 16 else 4
    index.unlink(missing_ok=True)
    tokens.parent.mkdir(parents=True, exist_ok=True)
    sizes = np.diff(source.document_bounds(0, source.documents))
    if sizes.size and sizes.max() > _MAX_SEQUENCE:
        raise ValueError(f"{source.name} has a document of {sizes.max()} tokens; an .idx counts up to 2**31 - 1")
    with open(tokens, "wb") as out:
        for at in range(0, source.tokens, 1 << 24):
            out.write(source.read(at, min(at + (1 << 24), source.tokens)).astype(_CODES[code]).tobytes())
    width = np.dtype(_CODES[code]).itemsize
    partial = index.with_name(index.name + ".partial")
    with open(partial, "wb") as out:
        out.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
        out.write(sizes.astype("<i4").tobytes())
        out.write(((np.cumsum(sizes) - sizes) * width).astype("<i8").tobytes())
        out.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
    os.replace(partial, index)
