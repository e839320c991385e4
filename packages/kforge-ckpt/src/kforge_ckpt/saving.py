"""The parts of a save: collect the states, agree on them over the ranks, write each rank's files."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from kforge_ckpt import commit, state
from kforge_ckpt._version import __version__
from kforge_ckpt.errors import CheckpointError, UnsupportedStateError
from kforge_ckpt.ranks import Ranks, plain_errors
from kforge_ckpt.safetensors import FileRecord, Spec, dtype_name, file_order, write_tensors
from kforge_ckpt.state import Json, Parts, Stateful
from kforge_ckpt.storage import INDEX, TensorWriter

STATE = "state.json"
META = "meta.json"


def rank_file(rank: int, kind: str) -> str:
    """``rank-00000.json`` and ``rank-00000.safetensors`` hold a rank's PerRank values and the tensors in them."""
    return f"rank-{rank:05d}.{kind}"


@dataclass
class Collected:
    """What this rank has to save: its states taken apart, and the meta data as JSON."""

    parts: Parts
    meta: Json


def named(states: Mapping[str, Stateful]) -> Mapping[str, Stateful]:
    """The states themselves, or UnsupportedStateError for a name or an object that cannot be one."""
    for name, obj in states.items():
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise UnsupportedStateError(
                f"{name!r} cannot be the name of a state: a string that does not start with '$' can"
            )
        if not isinstance(obj, Stateful):
            raise UnsupportedStateError(f"{name} is a {type(obj).__name__}, without state_dict() and load_state_dict()")
    return states


def collect(states: Mapping[str, Stateful], meta: dict[str, Any] | None) -> Collected:
    """Call each ``state_dict()`` and take the results apart."""
    whole = Parts(tree={})
    for name, obj in named(states).items():
        parts = state.take_apart(name, obj.state_dict())
        whole.tree[name] = parts.tree
        twice = (whole.tensors.keys() & parts.tensors.keys()) | (whole.per_rank.keys() & parts.per_rank.keys())
        if twice:
            raise UnsupportedStateError(f"two values are both called {min(twice)!r}; rename one of the states")
        whole.tensors.update(parts.tensors)
        whole.per_rank.update(parts.per_rank)
    return Collected(whole, state.encode(dict(meta or {}), "meta"))


def agree(ranks: Ranks, what: str, step: int, collected: Collected) -> Json:
    """The tree of all ranks. Mostly all have the same, so digests are compared before trees travel."""
    parts = collected.parts
    specs = {name: f"{dtype_name(t.dtype, name)} {list(t.shape)}" for name, t in parts.tensors.items()}
    digest = hashlib.sha256(json.dumps([parts.tree, specs], sort_keys=True).encode()).hexdigest()
    steps, digests = zip(*ranks.gather((step, digest)), strict=True)
    if len(set(steps)) > 1:
        raise CheckpointError(f"{what}: the ranks are at different steps, {sorted(set(steps))}")
    if len(set(digests)) == 1:
        return parts.tree
    everyone = ranks.gather((parts.tree, specs))

    def united() -> Json:
        state.merge([specs for _, specs in everyone])
        return state.merge([tree for tree, _ in everyone])

    return ranks.all(what, united)


def write(ranks: Ranks, what: str, folder: Path, collected: Collected) -> tuple[dict[str, FileRecord], dict[str, Any]]:
    """Every rank writes its files. Returns the records of all ranks' files and, on rank 0, the index of tensors."""
    writer = TensorWriter(folder, ranks.rank)
    with plain_errors(what, ranks.world):
        dcp.save(
            dict(collected.parts.tensors),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
            no_dist=not ranks.joined,
        )

    def own() -> dict[str, FileRecord]:
        commit.reached("tensors written")
        files = {**writer.files, **_write_per_rank(folder, ranks.rank, collected.parts.per_rank)}
        commit.sync_folder(folder)
        commit.reached("rank written")
        return files

    own_files = ranks.all(what, own)
    files = {name: record for one in ranks.gather(own_files) for name, record in one.items()}
    return files, writer.index


def _write_per_rank(folder: Path, rank: int, per_rank: dict[str, Parts]) -> dict[str, FileRecord]:
    if not per_rank:
        return {}
    files = {}
    tensors = {name: tensor for parts in per_rank.values() for name, tensor in parts.tensors.items()}
    if tensors:
        specs = file_order(Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        name = rank_file(rank, "safetensors")
        files[name] = write_tensors(folder / name, specs, (tensors[spec.key] for spec in specs))
    name = rank_file(rank, "json")
    files[name] = commit.write_json(folder / name, {path: parts.tree for path, parts in per_rank.items()})
    return files


def write_shared(
    folder: Path, step: int, world: int, index: dict[str, Any], tree: Json, meta: Json
) -> dict[str, FileRecord]:
    """Rank 0's part: the index of tensors, the tree of values, and what is known of the save."""
    about = {
        "format": commit.FORMAT,
        "step": step,
        "world_size": world,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"kforge-ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "meta": meta,
    }
    return {
        name: commit.write_json(folder / name, value) for name, value in ((INDEX, index), (STATE, tree), (META, about))
    }
