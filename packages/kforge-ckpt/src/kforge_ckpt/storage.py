"""torch.distributed.checkpoint on safetensors files: it plans and reshards, these two classes write and read.

Each rank writes one file, ``tensors-<rank>.safetensors``, with its shards; the coordinator writes ``tensors.json``:
for every tensor its dtype, whole shape and chunks (offset, shape, file, key). A whole tensor's key is its name, a
shard's is the name with its range, ``model.head.weight[0:512,0:256]``.

torch's own writer and reader keep the same knowledge in ``.metadata``, a pickle; reading one can run anything.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from kforge_ckpt.errors import DamagedCheckpointError
from kforge_ckpt.safetensors import DTYPES, FileRecord, Spec, TensorFile, dtype_name, file_order, write_tensors

INDEX = "tensors.json"


def tensor_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"tensors-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it lies."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: ``dtype`` by its name in the format (F32, BF16, ...), whole ``shape``, its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class TensorWriter(StorageWriter):
    """Writes this rank's tensors into a folder.

    After the save, ``files`` holds the record of what this rank wrote, and on the coordinator ``index`` the content
    of ``tensors.json`` (the caller writes it: it is small, and part of the commit).
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.files: dict[str, FileRecord] = {}
        self.index: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {_key(item): item for item in plan.items if not _void(item)}
        if len(items) != sum(not _void(item) for item in plan.items):
            raise ValueError("two shards of this rank have the same key")
        name = tensor_file(self.rank)
        if items:
            specs = file_order(_spec(key, item) for key, item in items.items())
            # One after the other, so that no more than one tensor is copied off the device at a time.
            data = (planner.resolve_data(items[spec.key]) for spec in specs)
            self.files[name] = write_tensors(self.folder / name, specs, data)  # type: ignore[arg-type]
        results = [WriteResult(item.index, item.tensor_storage_size() or 0, [name, key]) for key, item in items.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for per_rank in results for result in per_rank}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)  # only tensors are given to the planner
            chunks = [
                {"offset": list(chunk.offsets), "shape": list(chunk.sizes), "file": place[0], "key": place[1]}
                for chunk in tensor.chunks
                if (place := places.get(MetadataIndex(name, chunk.offsets))) is not None
            ]
            self.index[name] = {
                "dtype": dtype_name(tensor.properties.dtype, name),
                "shape": list(tensor.size),
                "chunks": chunks,
            }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _void(item: WriteItem) -> bool:
    """The empty shard of a rank that a tensor does not reach. An empty tensor as a whole is kept."""
    data = item.tensor_data
    assert data is not None and data.chunk is not None
    return math.prod(data.chunk.sizes) == 0 and math.prod(data.size) != 0


def _spec(key: str, item: WriteItem) -> Spec:
    data = item.tensor_data
    assert data is not None and data.chunk is not None
    return Spec(key, data.properties.dtype, tuple(data.chunk.sizes))


def _key(item: WriteItem) -> str:
    data = item.tensor_data
    assert data is not None and data.chunk is not None
    if data.chunk.sizes == data.size:
        return item.index.fqn
    ranges = ",".join(f"{o}:{o + s}" for o, s in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
    return f"{item.index.fqn}[{ranges}]"


def read_index(text: bytes, path: Path, files: set[str]) -> dict[str, StoredTensor]:
    """``tensors.json`` as tensors by name. DamagedCheckpointError names the file when it is not what we write."""
    try:
        index = {name: _stored(value) for name, value in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not an index of tensors: {error!r}") from error
    for name, tensor in index.items():
        for chunk in tensor.chunks:
            inside = len(chunk.offset) == len(chunk.shape) == len(tensor.shape) and all(
                o + s <= whole for o, s, whole in zip(chunk.offset, chunk.shape, tensor.shape, strict=True)
            )
            if not inside or chunk.file not in files:
                raise DamagedCheckpointError(f"{path} is damaged: a chunk of {name} cannot be right: {chunk}")
        if sum(math.prod(chunk.shape) for chunk in tensor.chunks) != math.prod(tensor.shape):
            raise DamagedCheckpointError(f"{path} is damaged: the chunks of {name} do not make up the whole tensor")
    return index


def _stored(value: dict[str, Any]) -> StoredTensor:
    def sizes(numbers: list[int]) -> tuple[int, ...]:
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{numbers} are not sizes")
        return tuple(numbers)

    if value["dtype"] not in DTYPES:
        raise ValueError(f"{value['dtype']} is not a dtype")
    chunks = tuple(
        Chunk(sizes(chunk["offset"]), sizes(chunk["shape"]), str(chunk["file"]), str(chunk["key"]))
        for chunk in value["chunks"]
    )
    return StoredTensor(value["dtype"], sizes(value["shape"]), chunks)


class TensorReader(StorageReader):
    """Reads from a committed folder the parts of ``index`` that a plan asks for, straight into the caller's tensors."""

    def __init__(self, folder: Path, index: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.index = index
        self._chunks = {(name, chunk.offset): chunk for name, t in index.items() for chunk in t.chunks}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:  # type: ignore[override] # without **kwargs: no per-rank metadata
        return Metadata({name: _metadata(tensor) for name, tensor in self.index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def check(self, names: Iterable[str], part: int = 0, parts: int = 1) -> None:
        """Compare the files' headers with the index, for the tensors ``names``; of ``parts`` readers each its share."""
        files = defaultdict(list)
        for name in names:
            for chunk in self.index[name].chunks:
                files[chunk.file].append((DTYPES[self.index[name].dtype], chunk))
        for name in sorted(files)[part::parts]:
            with TensorFile(self.folder / name) as file:
                for dtype, chunk in files[name]:
                    entry = file.entries.get(chunk.key)
                    if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.shape):
                        raise DamagedCheckpointError(f"{file.path} does not hold {chunk.key} as {INDEX} says")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file[chunk.file].append((item, chunk))
        for name, reads in by_file.items():
            with TensorFile(self.folder / name) as file:
                for item, chunk in reads:
                    target = planner.resolve_tensor(item).detach()
                    _read(file, chunk.key, tuple(item.storage_offsets), tuple(item.lengths), target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]),
        torch.Size(tensor.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)) for chunk in tensor.chunks],
    )


def _read(file: TensorFile, key: str, offsets: tuple[int, ...], lengths: tuple[int, ...], target: torch.Tensor) -> None:
    """Copy the box ``offsets, lengths`` of a stored chunk into ``target``, reading only the rows that it spans."""
    first, count = (offsets[0], lengths[0]) if offsets else (0, 1)
    if lengths[1:] == file.entries[key].shape[1:] and target.device.type == "cpu" and target.is_contiguous():
        file.rows_into(target, key, first)  # whole rows go where they belong without a copy between
        return
    rows = file.rows(key, first, count)
    for dim in range(1, len(offsets)):
        rows = rows.narrow(dim, offsets[dim], lengths[dim])
    target.copy_(rows)
