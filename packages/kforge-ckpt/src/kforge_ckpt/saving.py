"""The parts of a save: collect the states, agree on them over the ranks, write each rank's files."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kforge_ckpt import commit, state
from kforge_ckpt._version import __version__
from kforge_ckpt.background import at_once
from kforge_ckpt.errors import CheckpointError, UnsupportedStateError
from kforge_ckpt.files import FileRecord, Place, write_json
from kforge_ckpt.modules import plain
from kforge_ckpt.ranks import Ranks
from kforge_ckpt.remote import RemotePath
from kforge_ckpt.safetensors import Spec, dtype_name, file_order, write_tensors
from kforge_ckpt.state import Json, Parts, Stateful
from kforge_ckpt.storage import INDEX, Layout, local_plan, united_layout

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
    """The states, modules without what wraps them; or UnsupportedStateError for a name or an object that cannot be
    one."""
    for name, obj in states.items():
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise UnsupportedStateError(
                f"{name!r} cannot be the name of a state: a string that does not start with '$' can"
            )
        if not isinstance(obj, Stateful):
            raise UnsupportedStateError(f"{name} is a {type(obj).__name__}, without state_dict() and load_state_dict()")
    return {name: plain(name, obj) for name, obj in states.items()}


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


class Agreement:
    """What the ranks agree on before they write, kept for the next save: as a rule only numbers in it change.

    files: into how many files this rank writes its tensors at most.
    """

    def __init__(self, files: int = 1) -> None:
        self._files = files
        self.hosts = 1
        """On how many hosts the ranks of the last agreement were."""
        self._planned: str | None = None
        self._layout: Layout | None = None

    def reach(
        self, ranks: Ranks, what: str, step: int, collect: Callable[[], Collected]
    ) -> tuple[Collected, Json, Layout]:
        """What this rank saves, the tree of all ranks, and the layout of the files. Raises on all ranks alike.

        Digests are compared first, so that trees and plans travel only where ranks differ, or differ from before.
        """

        def digested() -> tuple[Collected, str, str]:
            collected = collect()
            parts = collected.parts
            tree = json.dumps([parts.tree, _specs(parts.tensors)], sort_keys=True)
            placed = json.dumps([[name, *_place(tensor)] for name, tensor in parts.tensors.items()])
            return collected, hashlib.sha256(tree.encode()).hexdigest(), hashlib.sha256(placed.encode()).hexdigest()

        result, told, error = ranks.attempt(digested)
        digest = placed = ""
        if result is not None:
            _, digest, placed = result
        everyone = ranks.gather((told, step, digest, socket.gethostname(), placed == self._planned))
        ranks.raise_if_any(what, [told for told, *_ in everyone], error)
        assert result is not None
        collected = result[0]
        self.hosts = len({host for *_, host, _ in everyone})
        steps = {step for _, step, *_ in everyone}
        if len(steps) > 1:
            raise CheckpointError(f"{what}: the ranks are at different steps, {sorted(steps)}")
        tree = collected.parts.tree
        if len({digest for _, _, digest, *_ in everyone}) > 1:
            tree = self._united(ranks, what, collected.parts)
        if self._layout is None or not all(same for *_, same in everyone):
            plan = ranks.all(what, lambda: local_plan(collected.parts.tensors, ranks.rank == 0))
            plans = ranks.gather((plan, self._files))
            self._layout = ranks.all(what, lambda: united_layout(plans, ranks.rank))
            self._planned = placed
        return collected, tree, self._layout

    def _united(self, ranks: Ranks, what: str, parts: Parts) -> Json:
        everyone = ranks.gather((parts.tree, _specs(parts.tensors)))

        def united() -> Json:
            state.merge([specs for _, specs in everyone])
            return state.merge([tree for tree, _ in everyone])

        return ranks.all(what, united)


def _specs(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{dtype_name(tensor.dtype, name)} {list(tensor.shape)}" for name, tensor in tensors.items()}


def _place(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """Dtype, shape and layout of a tensor: what a plan of writing follows from."""
    layout = f"{tensor.placements} of {tensor.device_mesh}" if isinstance(tensor, DTensor) else ""
    return str(tensor.dtype), list(tensor.shape), layout


WriteTensors = Callable[[int, Place], FileRecord]
"""Writes one of the files of this rank's tensors, by its number in the layout."""


def write(
    ranks: Ranks, what: str, folder: Place, layout: Layout, per_rank: dict[str, Parts], write_own: WriteTensors
) -> dict[str, FileRecord]:
    """Every rank writes its files, those of tensors at once. Returns the records of all ranks' files."""

    def own() -> dict[str, FileRecord]:
        names = [file.name for file in layout.files]
        places = [(number, folder / name) for number, name in enumerate(names)]
        records = at_once(lambda place: write_own(*place), places, max(1, len(places)))
        files = dict(zip(names, records, strict=True))
        commit.reached("tensors written")
        files |= _write_per_rank(folder, ranks.rank, per_rank)
        commit.sync_folder(folder)
        commit.reached("rank written")
        return files

    def own_if_seen() -> dict[str, FileRecord]:
        try:
            return own()
        except FileNotFoundError:
            if isinstance(folder, RemotePath) or folder.is_dir():
                raise
            raise CheckpointError(
                f"this rank does not see {folder}, which rank 0 made: all ranks must save to one folder that they "
                "share; where each host has a disk of its own, save to an object store: each rank sends its files there"
            ) from None

    own_files = ranks.all(what, own_if_seen)
    return {name: record for one in ranks.gather(own_files) for name, record in one.items()}


def _write_per_rank(folder: Place, rank: int, per_rank: dict[str, Parts]) -> dict[str, FileRecord]:
    if not per_rank:
        return {}
    files = {}
    tensors = {name: tensor for parts in per_rank.values() for name, tensor in parts.tensors.items()}
    if tensors:
        specs = file_order(Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        name = rank_file(rank, "safetensors")
        files[name] = write_tensors(folder / name, specs, (tensors[spec.key] for spec in specs))
    name = rank_file(rank, "json")
    files[name] = write_json(folder / name, {path: parts.tree for path, parts in per_rank.items()})
    return files


def write_shared(
    folder: Place, step: int, world: int, hosts: int, index: dict[str, Any], tree: Json, meta: Json
) -> dict[str, FileRecord]:
    """Rank 0's part: the index of tensors, the tree of values, and what is known of the save."""
    about = {
        "format": commit.FORMAT,
        "step": step,
        "world_size": world,
        "hosts": hosts,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"kforge-ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "meta": meta,
    }
    return {name: write_json(folder / name, value) for name, value in ((INDEX, index), (STATE, tree), (META, about))}
