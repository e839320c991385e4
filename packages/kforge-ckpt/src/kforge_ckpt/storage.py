"""torch.distributed.checkpoint on safetensors files: it plans and reshards, what is here writes and reads.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    StorageReader,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.futures import Future

from kforge_ckpt.errors import DamagedCheckpointError
from kforge_ckpt.files import Place
from kforge_ckpt.landing import Landing
from kforge_ckpt.safetensors import DTYPES, Spec, TensorFile, dtype_name, file_order

INDEX = "tensors.json"


def tensor_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"tensors-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it lies: from the corner of what ``file`` has under ``key``, in ``stored`` shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    stored: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: ``dtype`` by its name in the format (F32, BF16, ...), whole ``shape``, its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Layout:
    """What this rank writes of the tensors of all ranks."""

    rank: int
    items: tuple[WriteItem, ...]
    """In the order of its file; a tensor that several ranks hold alike is among those of one of them."""
    specs: tuple[Spec, ...]
    """Key, dtype and shape of each item."""
    index: dict[str, Any]
    """The content of ``tensors.json``, for all ranks."""

    @property
    def file(self) -> str | None:
        """The name of this rank's file; None for a rank that has nothing to write."""
        return tensor_file(self.rank) if self.items else None

    def pieces(self, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the items hold now, one after the other: the live memory where it lies."""
        planner = _planner()
        planner.set_up_planner(tensors)
        for item in self.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, torch.Tensor)
            yield piece.detach()


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def local_plan(tensors: dict[str, torch.Tensor], first: bool) -> SavePlan:
    """What this rank could write; ``first`` is the coordinator."""
    planner = _planner()
    planner.set_up_planner(tensors, is_coordinator=first)
    return planner.create_local_plan()


def united_layout(plans: list[SavePlan], rank: int) -> Layout:
    """The layout of a rank, from the plans of all: what several could write is dealt out among them."""
    plans, metadata = _planner().create_global_plan(plans)
    places: dict[MetadataIndex, tuple[str, str]] = {}
    own: dict[str, WriteItem] = {}
    for writer, plan in enumerate(plans):
        items = [item for item in plan.items if not _void(item)]
        keys = [_key(item) for item in items]
        if len(set(keys)) != len(keys):
            raise ValueError(f"two shards of rank {writer} have the same key")
        places.update({item.index: (tensor_file(writer), key) for item, key in zip(items, keys, strict=True)})
        if writer == rank:
            own = dict(zip(keys, items, strict=True))
    specs = file_order(_spec(key, item) for key, item in own.items())
    index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # only tensors are given to the planner
        chunks = [
            {"offset": list(chunk.offsets), "shape": list(chunk.sizes), "file": place[0], "key": place[1]}
            for chunk in tensor.chunks
            if (place := places.get(MetadataIndex(name, chunk.offsets))) is not None
        ]
        dtype = dtype_name(tensor.properties.dtype, name)
        index[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return Layout(rank, tuple(own[spec.key] for spec in specs), tuple(specs), index)


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


def read_index(text: bytes, path: Place, files: set[str]) -> dict[str, StoredTensor]:
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
        Chunk(sizes(chunk["offset"]), shape := sizes(chunk["shape"]), str(chunk["file"]), str(chunk["key"]), shape)
        for chunk in value["chunks"]
    )
    return StoredTensor(value["dtype"], sizes(value["shape"]), chunks)


class TensorReader(StorageReader):
    """Reads from a committed folder the parts of ``index`` that a plan asks for, straight into the caller's tensors."""

    def __init__(self, folder: Place, index: dict[str, StoredTensor]) -> None:
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
                    if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.stored):
                        raise DamagedCheckpointError(f"{file.path} does not hold {chunk.key} as {INDEX} says")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file[chunk.file].append((item, chunk))
        landing = Landing()
        for name, reads in by_file.items():
            with TensorFile(self.folder / name) as file:
                # In the order of the file: neighbours come from an object store in one request.
                for item, chunk in sorted(reads, key=lambda read: file.entries[read[1].key].begin):
                    target = planner.resolve_tensor(item).detach()
                    box = tuple(item.storage_offsets), tuple(item.lengths)
                    _read(file, chunk.key, *box, target, None if target.device.type == "cpu" else landing)
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


class WholeReader(TensorReader):
    """As `TensorReader`, of tensors that are not in files of ours: ``read(name)`` gives one whole, on the CPU. Each is
    read once, where a plan asks for it, and one at a time."""

    def __init__(self, index: dict[str, StoredTensor], read: Callable[[str], torch.Tensor]) -> None:
        super().__init__(Path(), index)
        self._whole = read

    def check(self, names: Iterable[str], part: int = 0, parts: int = 1) -> None:
        """Nothing is known before it is read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_key: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_key[chunk.key].append(item)
        for key, items in by_key.items():
            whole = self._whole(key)
            for item in items:
                target = planner.resolve_tensor(item).detach()
                _copy_box(whole, tuple(item.storage_offsets), tuple(item.lengths), target)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _copy_box(whole: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...], target: torch.Tensor) -> None:
    if len(lengths) > whole.ndim:  # one of several copies
        offsets, lengths, target = offsets[1:], lengths[1:], target[0]
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        whole = whole.narrow(dim, offset, length)
    target.copy_(whole)


def _read(
    file: TensorFile,
    key: str,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    target: torch.Tensor,
    landing: Landing | None,
) -> None:
    """Copy the box ``offsets, lengths`` of a stored chunk into ``target``, reading only the rows that it spans."""
    entry = file.entries[key]
    if len(lengths) > len(entry.shape):  # one of several copies
        offsets, lengths, target = offsets[1:], lengths[1:], target[0]
    first, count = (offsets[0], lengths[0]) if offsets else (0, 1)
    if target.is_contiguous() and target.dtype == entry.dtype and lengths[1:] == entry.shape[1:]:
        file.rows_into(target, key, first, landing)  # whole rows go straight where they belong
        return
    rows = file.rows(key, first, count)
    for dim in range(1, len(offsets)):
        rows = rows.narrow(dim, offsets[dim], lengths[dim])
    target.copy_(rows)
