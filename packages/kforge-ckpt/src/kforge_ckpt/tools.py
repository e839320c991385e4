"""What is done with checkpoints outside of training: look at them, check, compare, copy, delete, average.

One process, a tensor at a time: nothing here needs the memory of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kforge_ckpt import commit, state
from kforge_ckpt.damage import Damage
from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError, StateMismatchError
from kforge_ckpt.files import FileRecord, Place, place
from kforge_ckpt.lock import lock
from kforge_ckpt.mirror import copy_into
from kforge_ckpt.remote import RemotePath, is_url
from kforge_ckpt.restoring import Saved, TensorSource
from kforge_ckpt.retention import Scores, read_scores
from kforge_ckpt.retrying import redacted
from kforge_ckpt.safetensors import DTYPES, Spec, dtype_name, file_order, flat_bytes, write_tensors
from kforge_ckpt.saving import META, write_shared
from kforge_ckpt.state import Json
from kforge_ckpt.storage import StoredTensor, tensor_file


def open_checkpoint(where: str | Place) -> Saved:
    """A committed checkpoint: a folder of checkpoints (its newest), ``folder@step``, or the folder of one step.

    Raises CheckpointError when there is none.
    """
    return Saved(find(where))


def find(where: str | Place) -> Place:
    """The folder of the checkpoint that `open_checkpoint` would open."""
    whole = place(where)
    if (whole / commit.MARKER).is_file():
        return whole
    text, at, step = (str(where), "", "") if isinstance(where, RemotePath) else str(where).rpartition("@")
    if "/" in step or (is_url(where) and not text.partition("://")[2]) or (isinstance(whole, Path) and whole.is_dir()):
        at = ""  # of user@host, or of a folder's own name
    if at and not step.isdigit():
        raise CheckpointError(f"{redacted(str(where))}: what follows @ must be a step, as in {redacted(text)}@1000")
    root = place(text) if at else whole
    found = commit.committed(root)
    if not found:
        raise CheckpointError(f"{root} holds no committed checkpoint")
    if at and int(step) not in found:
        raise CheckpointError(f"{root} holds no committed checkpoint of step {step}; there are {_list(found)}")
    return found[int(step) if at else max(found)]


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, steps))


@dataclass(frozen=True)
class Row:
    """A line of a listing. ``fault``: what keeps it from being opened, or None. ``scores``: None where they were
    lost."""

    step: int
    folder: Place
    nbytes: int
    saved_at: str
    world: int
    temporary: bool
    scores: dict[str, float] | None
    fault: str | None


def listing(root: Place) -> list[Row]:
    """The committed checkpoints of a folder, by step. Damaged scores are told of in the log."""
    scores: Scores = {}
    try:
        scores = read_scores(root)
    except CheckpointError as error:
        commit.logger.error("%s", error)
    rows = []
    for step, folder in commit.committed(root).items():
        nbytes, saved_at, world, fault = 0, "", 0, None
        try:
            contents = commit.Contents(folder)
            nbytes = sum(record.size for record in contents.files.values())
            about = contents.json(META)
            saved_at, world = str(about.get("saved_at", "")), int(about.get("world_size", 0))
            contents.check()
        except CheckpointError as error:
            fault = str(error)
        rows.append(
            Row(step, folder, nbytes, saved_at, world, commit.is_temporary(folder), scores.get(step, {}), fault)
        )
    return rows


def read_tensor(saved: Saved, name: str) -> torch.Tensor:
    """A whole tensor of a checkpoint, on the CPU."""
    stored = saved.index[name]
    whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    for chunk in stored.chunks:
        file = saved.files[chunk.file]
        if chunk.key not in file.entries or file.entries[chunk.key].shape != chunk.stored:
            raise DamagedCheckpointError(f"{file.path} does not hold {chunk.key} as the index says")
        part = file.rows(chunk.key, 0, chunk.shape[0] if chunk.shape else 1)
        box = tuple(slice(o, o + size) for o, size in zip(chunk.offset, chunk.shape, strict=True))
        whole[box] = part
    return whole


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ: a tensor, with the greatest difference of its elements and that over
    the greatest magnitude (both None where they cannot be compared), or another value."""

    name: str
    text: str
    absolute: float | None = None
    relative: float | None = None


def differences(one: Saved, other: Saved) -> Iterator[Difference]:
    """All in which two checkpoints differ: tensors, then other values, then those of ranks. NaN is equal to NaN."""
    for name in sorted(one.index.keys() | other.index.keys()):
        a, b = one.index.get(name), other.index.get(name)
        if a is None or b is None:
            yield Difference(name, "only in the second" if a is None else "only in the first")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield Difference(name, f"{_kind(a)} and {_kind(b)}")
        elif (difference := _compared(name, read_tensor(one, name), read_tensor(other, name))) is not None:
            yield difference
    left, right = (dict(_values(saved.tree, "")) for saved in (one, other))
    for path in sorted(left.keys() | right.keys()):
        if left.get(path, _absent) != right.get(path, _absent):
            texts = [state.short(values[path]) if path in values else "nothing" for values in (left, right)]
            yield Difference(path, f"{texts[0]} and {texts[1]}")
    for path in sorted({path for saved in (one, other) for path in state.leaves(saved.tree, "$per_rank")}):
        if (text := _of_ranks(path, one.per_rank(path), other.per_rank(path))) is not None:
            yield Difference(path, text)


def _of_ranks(path: str, ours: list[Any], theirs: list[Any]) -> str | None:
    """In what the PerRank values of two checkpoints differ, in words."""
    if len(ours) != len(theirs):
        return f"of {len(ours)} ranks and of {len(theirs)}"
    differing = [str(rank) for rank, pair in enumerate(zip(ours, theirs, strict=True)) if not _same(path, *pair)]
    return f"differs on rank {', '.join(differing[:8])}{' …' if len(differing) > 8 else ''}" if differing else None


def _same(path: str, one: Any, other: Any) -> bool:
    a, b = state.take_apart(path, one), state.take_apart(path, other)
    if a.tree != b.tree or a.tensors.keys() != b.tensors.keys():
        return False
    return all(_alike(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and flat_bytes(a).equal(flat_bytes(b))


_absent = object()


def _kind(stored: StoredTensor) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _compared(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    if _alike(a, b):
        return None
    whole = None if a.is_floating_point() or a.is_complex() else (a.numpy(), b.numpy())
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    gap = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    absolute = gap.max().item()
    if absolute == 0 and whole is not None:  # numbers so large that float64 tells them not apart
        differ = whole[0] != whole[1]
        absolute = float(max(abs(x - y) for x, y in zip(*(one[differ].tolist() for one in whole), strict=True)))
    if absolute == 0:
        return None
    scale = max(a.abs().nan_to_num(0.0).max().item(), b.abs().nan_to_num(0.0).max().item())
    relative = absolute / scale if scale else 0.0
    return Difference(name, f"by up to {absolute:.3g}, {relative:.3g} of the greatest", absolute, relative)


def _values(node: Json, path: str) -> Iterator[tuple[str, Any]]:
    """What a tree holds beside tensors, by path."""
    if isinstance(node, dict) and set(node) & {"$tensor", "$per_rank"}:
        return
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _values(item, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield from _values(item, f"{path}.{number}".lstrip("."))
    else:
        yield path, node


def copy(where: str | Place, root: Place) -> Place:
    """Copy a checkpoint into another folder of checkpoints, by the same commit; each byte is compared with its checksum
    on the way. Returns the new folder. Raises CheckpointError when the step is there already, DamagedCheckpointError
    for what is not as it was written."""
    source = find(where)
    with lock(root) as held:
        made = copy_into(source, root, held)
        _point_latest(root)
    return made


def _point_latest(root: Place) -> None:
    found, damaged = commit.committed(root), Damage(root)
    if found:
        newest = sorted(found, reverse=True)
        commit.point_latest(root, found[next((step for step in newest if not damaged(step)), newest[0])])
    else:
        (root / commit.LATEST).unlink(missing_ok=True)


def remove(root: Place, steps: Sequence[int], *, all_of_them: bool = False) -> None:
    """Delete committed checkpoints. Raises CheckpointError, before any is deleted, for a step that is not there, and
    for the last ones of the folder, or the last that are whole, unless ``all_of_them``."""
    found = commit.committed(root)
    for step in steps:
        if step not in found:
            raise CheckpointError(f"{root} holds no committed checkpoint of step {step}; there are {_list(found)}")
    left, damaged = found.keys() - set(steps), Damage(root)
    if not left and not all_of_them:
        raise CheckpointError(f"{root} would hold no checkpoint any more; say --all if that is meant")
    if not all_of_them and all(map(damaged, left)) and not all(map(damaged, steps)):
        raise CheckpointError(f"{root} would hold none that is whole, only {_list(left)}; say --all if that is meant")
    with lock(root):
        for step in dict.fromkeys(steps):
            commit.remove(commit.put_aside(root, found[step]))
        _point_latest(root)


def average(
    places: Sequence[str | Place],
    root: Place,
    *,
    weights: Sequence[float] | None = None,
    names: Sequence[str] = ("model",),
) -> Place:
    """The weighted mean of checkpoints, as one checkpoint in ``root`` of the last one's step. Returns its folder.

    names: the states that are averaged, and all that the result holds. Floating-point tensors are averaged in float64;
    other tensors and values are those of the last one. weights: one a checkpoint, of any sum but 0; None: alike.
    Raises StateMismatchError for tensors that differ in name, dtype or shape.
    """
    if len(places) < 2:
        raise CheckpointError("an average wants two checkpoints at least")
    weights = [1.0] * len(places) if weights is None else list(weights)
    if len(weights) != len(places) or not sum(weights):
        raise CheckpointError(f"{len(places)} checkpoints want as many weights, of a sum that is not 0, not {weights}")
    opened = [open_checkpoint(one) for one in places]
    last = opened[-1]
    if missing := [name for name in names if name not in last.tree]:
        raise StateMismatchError(f"{last.folder} holds no state {missing[0]!r}; there are {', '.join(last.tree)}")
    for name in names:
        if (path := next(iter(state.leaves(last.tree[name], "$per_rank")), None)) is not None:
            raise StateMismatchError(f"{path} differs by rank, and has no mean; leave {name!r} out")
    wanted = sorted(tensor for name in names for tensor in last.tensors_of(name))
    for saved in opened:
        for name in wanted:
            if name not in saved.index or _kind(saved.index[name]) != _kind(last.index[name]):
                there = _kind(saved.index[name]) if name in saved.index else "nothing"
                raise StateMismatchError(f"{name} is {there} in {saved.folder}, {_kind(last.index[name])} in the last")
    step = last.contents.step
    if step in commit.committed(root):
        raise CheckpointError(f"{root} holds a checkpoint of step {step} already")

    def mean(name: str) -> torch.Tensor:
        if not DTYPES[last.index[name].dtype].is_floating_point:
            return read_tensor(last, name)
        total = sum(
            read_tensor(saved, name).to(torch.float64) * weight for saved, weight in zip(opened, weights, strict=True)
        )
        assert isinstance(total, torch.Tensor)
        return (total / sum(weights)).to(DTYPES[last.index[name].dtype])

    tree = {name: last.tree[name] for name in names}
    meta = {"averaged": [str(saved.folder) for saved in opened], "weights": weights}
    return write_checkpoint(root, step, {name: last.index[name] for name in wanted}, mean, tree, meta)


def write_checkpoint(
    root: Place, step: int, stored: dict[str, StoredTensor], read: Any, tree: Json, meta: dict[str, Any]
) -> Place:
    """A checkpoint of one file, whose tensors come from ``read(name)`` one after the other."""
    specs = file_order(Spec(name, DTYPES[one.dtype], one.shape) for name, one in stored.items())
    held = lock(root)
    folder = commit.stage(root, step)
    try:
        files: dict[str, FileRecord] = {}
        if specs:
            name = tensor_file(0)
            files[name] = write_tensors(folder / name, specs, (read(spec.key) for spec in specs))
        index = {
            spec.key: {
                "dtype": stored[spec.key].dtype,
                "shape": list(spec.shape),
                "chunks": [
                    {
                        "offset": [0] * len(spec.shape),
                        "shape": list(spec.shape),
                        "file": tensor_file(0),
                        "key": spec.key,
                    }
                ],
            }
            for spec in specs
        }
        files |= write_shared(folder, step, 1, 1, index, tree, state.encode(meta, "meta"))
        made = commit.commit(root, folder, step, files)
    except BaseException:
        commit.discard(folder)
        raise
    else:
        _point_latest(root)
        return made
    finally:
        held.release()


def import_tensors(root: Place, step: int, sources: Mapping[str, TensorSource], meta: dict[str, Any]) -> Place:
    """A checkpoint of tensors that lie elsewhere, by the name of a state; returns its folder. Each is asked for once,
    and let go of when it is written. Raises CheckpointError when the step is there already."""
    if step in commit.committed(root):
        raise CheckpointError(f"{root} holds a checkpoint of step {step} already")
    names = {f"{state_name}.{key}": (state_name, key) for state_name, source in sources.items() for key in source.specs}
    stored = {}
    for full, (state_name, key) in names.items():
        spec = sources[state_name].specs[key]
        stored[full] = StoredTensor(dtype_name(spec.dtype, full), spec.shape, ())
    tree: dict[str, Json] = {name: {} for name in sources}
    for full, (state_name, key) in names.items():
        tree[state_name][key] = {"$tensor": full}

    def read(full: str) -> torch.Tensor:
        state_name, key = names[full]
        return sources[state_name][key]

    return write_checkpoint(root, step, stored, read, tree, meta)
