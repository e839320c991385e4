"""torch.distributed.checkpoint on safetensors files: it plans and reshards, what is here writes and reads.

Each rank writes its shards into one file, ``tensors-<rank>.safetensors``, or deals them out to several that are
written at once; the coordinator writes ``tensors.json``: for every tensor its dtype, whole shape and chunks (offset,
shape, file, key). A whole tensor's key is its name, a shard's is the name with its range,
``model.head.weight[0:512,0:256]``.

torch's own writer and reader keep the same knowledge in ``.metadata``, a pickle; reading one can run anything.
"""

from __future__ import annotations

import heapq
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

from kforge_ckpt.background import at_once
from kforge_ckpt.errors import DamagedCheckpointError
from kforge_ckpt.files import Place
from kforge_ckpt.landing import Landing
from kforge_ckpt.safetensors import DTYPES, Spec, TensorFile, dtype_name, file_order

INDEX = "tensors.json"


def tensor_file(rank: int, part: int = 0) -> str:
    """The name of the file that a rank writes, or of one of several: ``tensors-00000-1.safetensors``."""
    return f"tensors-{rank:05d}{f'-{part}' if part else ''}.safetensors"


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
class PlannedFile:
    """A file that this rank writes."""

    name: str
    items: tuple[WriteItem, ...]
    """In the order of the file."""
    specs: tuple[Spec, ...]
    """Key, dtype and shape of each item."""

    def pieces(self, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """What the items hold now, one after the other: the live memory where it lies."""
        planner = _planner()
        planner.set_up_planner(tensors)
        for item in self.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, torch.Tensor)
            yield piece.detach()


@dataclass(frozen=True)
class Layout:
    """What this rank writes of the tensors of all ranks."""

    files: tuple[PlannedFile, ...]
    """None for a rank that has nothing to write. A tensor that several ranks hold alike is in a file of one of them."""
    index: dict[str, Any]
    """The content of ``tensors.json``, for all ranks."""


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def local_plan(tensors: dict[str, torch.Tensor], first: bool) -> SavePlan:
    """What this rank could write; ``first`` is the coordinator."""
    planner = _planner()
    planner.set_up_planner(tensors, is_coordinator=first)
    return planner.create_local_plan()


def united_layout(plans: list[tuple[SavePlan, int]], rank: int) -> Layout:
    """The layout of a rank, from the plans of all, and into how many files each rank writes at most: what several could
    write is dealt out among them, and then among the files of each."""
    parts = [count for _, count in plans]
    dealt, metadata = _planner().create_global_plan([plan for plan, _ in plans])
    places: dict[MetadataIndex, tuple[str, str]] = {}
    files: list[PlannedFile] = []
    for writer, plan in enumerate(dealt):
        own = {_key(item): item for item in plan.items if not _void(item)}
        if len(own) != sum(not _void(item) for item in plan.items):
            raise ValueError(f"two shards of rank {writer} have the same key")
        for part, specs in enumerate(_dealt([_spec(key, item) for key, item in own.items()], parts[writer])):
            name = tensor_file(writer, part)
            places.update({own[spec.key].index: (name, spec.key) for spec in specs})
            if writer == rank:
                files.append(PlannedFile(name, tuple(own[spec.key] for spec in specs), tuple(specs)))
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
    return Layout(tuple(files), index)


def _dealt(specs: list[Spec], files: int) -> list[list[Spec]]:
    """What is written, in the order of the file; or of up to so many files, of about the same size."""
    if files == 1 or len(specs) < 2:
        return [file_order(specs)] if specs else []
    hands: list[list[Spec]] = [[] for _ in range(min(files, len(specs)))]
    # The largest first, each to the file that has least.
    fill = [(0, 0, number) for number in range(len(hands))]
    for spec in sorted(specs, key=lambda spec: -spec.nbytes):
        nbytes, count, number = heapq.heappop(fill)
        hands[number].append(spec)
        heapq.heappush(fill, (nbytes + spec.nbytes, count + 1, number))
    return [file_order(hand) for hand in hands]


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
    """Reads from a committed folder the parts of ``index`` that a plan asks for, straight into the caller's tensors;
    ``threads`` files at once."""

    def __init__(self, folder: Place, index: dict[str, StoredTensor], threads: int = 1) -> None:
        self.folder = folder
        self.threads = threads
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
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def read(name: str) -> None:
            landing = Landing()
            with torch.no_grad(), torch.cuda.stream(stream), TensorFile(self.folder / name) as file:
                # In the order of the file: neighbours come from an object store in one request.
                for item, chunk in sorted(by_file[name], key=lambda read: file.entries[read[1].key].begin):
                    target = planner.resolve_tensor(item).detach()
                    box = tuple(item.storage_offsets), tuple(item.lengths)
                    _read(file, chunk.key, *box, target, None if target.device.type == "cpu" else landing)
                    planner.commit_tensor(item, target)

        at_once(read, list(by_file), self.threads)
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
