"""The safetensors format: a JSON header, then the bytes of each tensor. Written and read here without copies.

A file is ``u64 length | header JSON | data``; the header maps a key to its dtype, shape and byte range in the data
(https://github.com/huggingface/safetensors#format). Any safetensors library reads what is written here. This module
exists because a library call wants all tensors of a file on the CPU at once and refuses tensors that share memory,
while a checkpoint streams them off the device one by one and reads only the rows that a new layout needs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import torch

from kforge_ckpt.errors import DamagedCheckpointError, UnsupportedStateError
from kforge_ckpt.files import Block, FileRecord, Place, write_file
from kforge_ckpt.landing import Landing

DTYPES: dict[str, torch.dtype] = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of a dtype; UnsupportedStateError names ``what`` when it has none (complex128, quantised)."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise UnsupportedStateError(
            f"{what} has dtype {dtype}, which the safetensors format cannot hold; convert it in state_dict()"
        )
    return name


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype and shape, and the bytes ``[begin, end)`` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Spec:
    """A tensor that is to be written: key in the file, dtype, shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(specs: Iterable[Spec], file: str) -> bytes:
    """What a safetensors file with these tensors begins with; their bytes follow without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        if spec.key in header:
            raise UnsupportedStateError(f"two tensors would have the key {spec.key!r} in {file}; rename one")
        header[spec.key] = {
            "dtype": dtype_name(spec.dtype, spec.key),
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedStateError(f"{file} would hold {len(header) - 1} tensors, more than its header may name")
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Place, specs: Sequence[Spec], tensors: Iterable[torch.Tensor]) -> FileRecord:
    """Write a safetensors file and make it durable. ``tensors`` yields one tensor per spec, in their order.

    A tensor may lie on any device and need not be contiguous; it is brought to the CPU when its turn comes.
    """

    def blocks() -> Iterator[Block]:
        yield header_of(specs, path.name)
        for spec, tensor in zip(specs, tensors, strict=True):
            data = memoryview(flat_bytes(tensor).cpu().numpy())  # type: ignore[arg-type] # numpy 2 stubs on 3.11
            if len(data) != spec.nbytes:
                raise UnsupportedStateError(f"{spec.key} changed its size while it was being saved")
            yield data

    return write_file(path, blocks())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as the format has them, [n] uint8, where it lies; shares memory if contiguous."""
    if tensor.layout != torch.strided:
        raise UnsupportedStateError(f"a tensor of layout {tensor.layout} cannot be saved; use .to_dense() first")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def file_order(specs: Iterable[Spec]) -> list[Spec]:
    """Wide dtypes first: the data then stays aligned without padding, which the format does not allow."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


class TensorFile:
    """A safetensors file opened for reading: ``entries`` by key, and `rows` to fetch a range of one of them.

    Raises DamagedCheckpointError, naming the file, for anything that is not a well-formed safetensors file.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        try:
            self._file = path.open("rb")  # closed by close()
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        try:
            self.entries = _read_header(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def rows(self, key: str, first: int, count: int) -> torch.Tensor:
        """Rows ``[first, first + count)`` of dim 0 as a new CPU tensor; a 0-dim tensor has one row, itself."""
        entry = self.entries[key]
        out = torch.empty((count, *entry.shape[1:]) if entry.shape else (), dtype=entry.dtype)
        self.rows_into(out, key, first)
        return out

    def rows_into(self, target: torch.Tensor, key: str, first: int, landing: Landing | None = None) -> None:
        """Fill ``target``, contiguous and of the stored dtype, with whole rows from row ``first`` on: on the CPU
        directly, elsewhere through a ``landing``."""
        entry = self.entries[key]
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        if target.numel() == 0:
            return
        begin = entry.begin + first * row_bytes
        if target.dtype != entry.dtype or begin + target.numel() * target.itemsize > entry.end:
            raise ValueError(f"{key} of {self.path} does not hold what was asked: {target.dtype}, {target.shape}")
        self._file.seek(begin)
        if landing is not None:
            landing.fill(target, self._read_into)
        else:
            self._read_into(memoryview(target.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def _read_into(self, view: memoryview) -> None:
        while view:
            count = self._file.readinto(view)
            if not count:
                raise DamagedCheckpointError(f"{self.path} ends before its tensors do")
            view = view[count:]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the file, on the CPU."""
        for key, entry in self.entries.items():
            yield key, self.rows(key, 0, entry.shape[0] if entry.shape else 1)


class TensorFiles:
    """Files of a folder, opened when one is asked for. The last few stay open: a header is not read anew for each of
    the tensors that it lists."""

    MOST = 8

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._open: dict[str, TensorFile] = {}

    def __getitem__(self, name: str) -> TensorFile:
        """The file, open at least until `MOST` others have been asked for. Raises as `TensorFile`."""
        file = self._open.pop(name, None) or TensorFile(self.folder / name)
        self._open[name] = file
        if len(self._open) > self.MOST:
            self._open.pop(next(iter(self._open))).close()
        return file

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __del__(self) -> None:
        self.close()


def _read_header(file: BufferedReader, path: Place) -> dict[str, Entry]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    damaged = DamagedCheckpointError(f"{path} is not a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise damaged
    text = file.read(length)
    if len(text) != length:
        raise damaged
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {key: _entry(value, 8 + length) for key, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged from error
    end = 8 + length
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise DamagedCheckpointError(f"{path} is damaged: the bytes of {key!r} are not where they should be")
        end = entry.end
    if end != size:
        raise DamagedCheckpointError(f"{path} has {size} bytes where its header promises {end}")
    return entries


def _entry(value: dict[str, Any], base: int) -> Entry:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("a size is not a whole number")
    return Entry(DTYPES[value["dtype"]], shape, base + begin, base + end)
