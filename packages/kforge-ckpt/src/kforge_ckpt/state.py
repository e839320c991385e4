"""A state taken apart and put together again: tensors here, everything else as JSON, without pickle.

`take_apart` turns the nested result of a ``state_dict()`` into

- ``tensors``: name -> tensor, the name being the path joined by dots (``model.layers.0.attn.wq.weight``);
- ``tree``: the same nesting as JSON values, each tensor replaced by ``{"$tensor": name}``;
- ``per_rank``: path -> what a `PerRank` held, itself taken apart; in the tree ``{"$per_rank": path}``.

JSON has no tuples, no keys but strings, no NaN and no bytes. They are written as an object with one key that starts
with ``$`` and come back as what they were; a dict that has such a key itself is written as ``$dict``.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from kforge_ckpt.errors import StateMismatchError, UnsupportedStateError
from kforge_ckpt.safetensors import dtype_name

Json = Any  # None, bool, int, float, str, list[Json], dict[str, Json]


@runtime_checkable
class Stateful(Protocol):
    """Whatever can be saved: a module, an optimizer, a loader, or any object with these two methods.

    ``state_dict()`` gives nested dicts, lists and tuples of tensors (plain or DTensor), numbers, strings, bytes,
    booleans, None and `PerRank`. Its tensors are the live ones: restoring copies into them, in place, and then calls
    ``load_state_dict`` with the restored nesting that holds the same tensors.

    An object may have a third method, ``checkpoint_form()``: a context manager that is entered before any state of a
    save or a restore is looked at, and left when all is copied, written or handed over. An optimizer whose averages are
    what readers should find puts them into its model there. It may yield False when no tensor changes by leaving it: a
    save in the background then need not wait for its copy.

    And it may have ``check_state_dict(state_dict)``: called before anything is changed, with what ``load_state_dict``
    will be given (its tensors are not filled yet); it raises for what the object would not take.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def enter_forms(states: Mapping[str, Stateful], stack: ExitStack) -> bool:
    """Enter the ``checkpoint_form()`` of each object that has one; ``stack`` leaves them. Returns whether tensors may
    change by leaving them."""
    changing = False
    for obj in states.values():
        form = getattr(obj, "checkpoint_form", None)
        if form is not None:
            changing |= stack.enter_context(form()) is not False
    return changing


@dataclass(frozen=True)
class PerRank:
    """Marks a value that differs by rank. Each rank's is saved; on load its place holds the list of all of them.

    The list is in order of the ranks that saved, whatever the number of ranks now; None stands for a rank that had
    no such value. ``value`` may nest like a state and hold plain tensors, which come back on the CPU.
    """

    value: Any


@dataclass
class Parts:
    """A state taken apart."""

    tree: Json = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    per_rank: dict[str, Parts] = field(default_factory=dict)


def take_apart(name: str, state: Any) -> Parts:
    """Split the state saved under ``name``. UnsupportedStateError names the path of a value that has no JSON form."""
    parts = Parts()

    def leaf(value: Any, path: str) -> Json:
        if isinstance(value, torch.Tensor):
            if path in parts.tensors:
                raise UnsupportedStateError(f"two tensors are both called {path!r}: a key with a dot in it? Rename one")
            parts.tensors[path] = check_tensor(value, path)
            return {"$tensor": path}
        if isinstance(value, PerRank):
            if path in parts.per_rank:
                raise UnsupportedStateError(f"two PerRank values are both at {path!r}; rename one")
            parts.per_rank[path] = _own_parts(path, value.value)
            return {"$per_rank": path}
        return _refuse(value, path)

    parts.tree = encode(state, name, leaf)
    return parts


def _own_parts(path: str, value: Any) -> Parts:
    parts = take_apart(path, value)
    if parts.per_rank:
        raise UnsupportedStateError(f"{min(parts.per_rank)} is a PerRank inside a PerRank; one is enough")
    for name, tensor in parts.tensors.items():
        if isinstance(tensor, DTensor):
            raise UnsupportedStateError(f"{name} is a DTensor inside a PerRank; use .to_local(), or no PerRank")
    return parts


def check_tensor(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor itself, or UnsupportedStateError: sparse, quantised, on the meta device, or an unfinished sum."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedStateError(f"{path} is a sparse or quantised tensor, which cannot be saved; make it dense")
    if tensor.device.type == "meta":
        raise UnsupportedStateError(f"{path} lies on the meta device and has no values; materialise it first")
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        raise UnsupportedStateError(f"{path} is a partial sum over ranks ({tensor.placements}); reduce it first")
    dtype_name(tensor.dtype, path)
    return tensor


def _refuse(value: Any, path: str) -> Json:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = "use torch.from_numpy(...)" if kind == "numpy.ndarray" else "turn it into numbers, strings or tensors"
    raise UnsupportedStateError(f"{path} is a {kind}, which cannot be saved without pickle; {hint} in state_dict()")


def encode(value: Any, path: str, leaf: Callable[[Any, str], Json] = _refuse) -> Json:
    """A nested value as JSON; ``leaf(value, path)`` has the word on what JSON does not know.

    Subclasses come back as their base (an IntEnum as int, a defaultdict as dict), NumPy numbers as Python numbers.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encode(item, f"{path}.{i}", leaf) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{path}.{i}", leaf) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): encode(item, f"{path}.{key}", leaf) for key, item in value.items()}
        return {"$dict": [[encode(k, f"{path} (key)"), encode(v, f"{path}.{k}", leaf)] for k, v in value.items()]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), bool | int | float):
        return encode(value.item(), path, leaf)
    return leaf(value, path)


def decode(node: Json, leaf: Callable[[str, str], Any] | None = None) -> Any:
    """What `encode` was given; ``leaf(kind, name)`` supplies tensors and per-rank values. ValueError: not our JSON."""
    if isinstance(node, list):
        return [decode(item, leaf) for item in node]
    if not isinstance(node, dict):
        return node
    kind, inner = tagged(node)
    if kind is None:
        return {key: decode(item, leaf) for key, item in node.items()}
    if kind == "$tuple":
        return tuple(decode(item, leaf) for item in inner)
    if kind == "$dict":
        return {decode(key): decode(item, leaf) for key, item in inner}
    if kind == "$float":
        return float(inner)
    if kind == "$bytes":
        return base64.b64decode(inner, validate=True)
    if leaf is not None and kind in ("$tensor", "$per_rank") and isinstance(inner, str):
        return leaf(kind, inner)
    raise ValueError(f"{kind} is not known here")


def tagged(node: dict[str, Json]) -> tuple[str | None, Any]:
    """``("$tuple", [...])`` and so on for the objects that stand for something else; ``(None, None)`` for dicts."""
    if len(node) == 1:
        ((key, inner),) = node.items()
        if key.startswith("$"):
            return key, inner
    return None, None


def leaves(node: Json, kind: str) -> Iterator[str]:
    """The names in all ``{kind: name}`` of a tree."""
    if isinstance(node, list):
        for item in node:
            yield from leaves(item, kind)
    elif isinstance(node, dict):
        tag, inner = tagged(node)
        if tag is None:
            for item in node.values():
                yield from leaves(item, kind)
        elif tag == kind:
            if not isinstance(inner, str):
                raise ValueError(f"{inner!r} is not a name")
            yield inner
        elif tag in ("$tuple", "$dict"):
            yield from leaves(inner, kind)


def merge(trees: list[Json]) -> Json:
    """One tree from those of all ranks: dicts are united (stages own different layers), all else must be equal."""
    merged = trees[0]
    for rank, tree in enumerate(trees[1:], start=1):
        merged = _merge(merged, tree, "", rank)
    return merged


def _merge(ours: Json, theirs: Json, path: str, rank: int) -> Json:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        tag, inner = tagged(ours)
        other_tag, other = tagged(theirs)
        if tag is None and other_tag is None:
            return {
                key: _merge(ours[key], theirs[key], f"{path}.{key}", rank)
                if key in ours and key in theirs
                else (ours if key in ours else theirs)[key]
                for key in [*ours, *(key for key in theirs if key not in ours)]
            }
        if tag == other_tag == "$tuple":
            return {"$tuple": _merge(inner, other, path, rank)}
        if tag in (None, "$dict") and other_tag in (None, "$dict"):
            return {"$dict": _merge_pairs(_pairs(ours), _pairs(theirs), path, rank)}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [_merge(a, b, f"{path}.{i}", rank) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    if ours == theirs and type(ours) is type(theirs):
        return ours
    raise UnsupportedStateError(
        f"the ranks disagree about {path.lstrip('.')}: {short(ours)} before, {short(theirs)} on rank {rank}; "
        "wrap what differs by rank in PerRank(...)"
    )


def _pairs(node: dict[str, Json]) -> list[list[Json]]:
    tag, inner = tagged(node)
    return [list(pair) for pair in (node.items() if tag is None else inner)]


def _merge_pairs(ours: list[list[Json]], theirs: list[list[Json]], path: str, rank: int) -> list[list[Json]]:
    for key, value in theirs:
        for pair in ours:
            if pair[0] == key and type(pair[0]) is type(key):
                pair[1] = _merge(pair[1], value, f"{path}.{key}", rank)
                break
        else:
            ours.append([key, value])
    return ours


def short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def put_together(node: Json, target: Any, tensors: dict[str, torch.Tensor], per_rank: Callable[[str], Any]) -> Any:
    """The saved nesting with the target's own tensors in it, ready for ``load_state_dict``.

    A rank need not own all that was saved (pipeline stages): an entry with tensors that the target lacks is left
    out. Values that are not tensors are those of the checkpoint. A module's ``_metadata`` is carried over.
    """

    def leaf(kind: str, name: str) -> Any:
        if kind == "$per_rank":
            return per_rank(name)
        if name not in tensors:  # inside a list, where leaving it out would move the others
            raise StateMismatchError(f"{name} is in the checkpoint, but this rank has no such tensor to fill")
        return tensors[name]

    def build(node: Json, target: Any) -> Any:
        if isinstance(node, list):
            return [build(item, _get(target, i)) for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kind, inner = tagged(node)
        if kind == "$tuple":
            return tuple(build(item, _get(target, i)) for i, item in enumerate(inner))
        if kind not in (None, "$dict"):
            return decode(node, leaf)
        pairs = [(decode(k), v) for k, v in inner] if kind == "$dict" else list(node.items())
        result: dict[Any, Any] = OrderedDict() if hasattr(target, "_metadata") else {}
        if hasattr(target, "_metadata"):
            result._metadata = target._metadata  # type: ignore[attr-defined]
        for key, item in pairs:
            names = list(leaves(item, "$tensor"))
            if names and not any(name in tensors for name in names):
                continue
            result[key] = build(item, _get(target, key))
        return result

    return build(node, target)


def _get(target: Any, key: Any) -> Any:
    try:
        return target[key]
    except (KeyError, IndexError, TypeError):
        return None


Spec = tuple[str, tuple[int, ...]]
"""The dtype (by its name in the format) and the whole shape of a tensor."""


def difference(
    saved: dict[str, Spec],
    wanted: dict[str, Spec],
    unclaimed: Iterable[str],
    lacking: Iterable[str] = (),
    beyond: Iterable[str] = (),
) -> str | None:
    """What keeps the ``saved`` tensors from filling the ``wanted`` ones, in words; None when they fit.

    ``unclaimed`` are the saved ones that no rank wants. ``lacking`` and ``beyond``: what the checkpoint lacks, and has
    too many, of values that are no tensors.
    """
    both = [key for key in wanted if key in saved]
    lines = [
        *_listed("not in the checkpoint", [*(key for key in wanted if key not in saved), *sorted(lacking)]),
        *_listed("only in the checkpoint", sorted({*unclaimed, *beyond})),
    ]
    for what, i in (("dtype", 0), ("shape", 1)):
        differing = [f"{k} (saved {saved[k][i]}, here {wanted[k][i]})" for k in both if saved[k][i] != wanted[k][i]]
        lines += _listed(f"of another {what}", differing)
    return "; ".join(lines) or None


def _listed(what: str, names: list[str], most: int = 8) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{len(names)} {what}: {', '.join(names[:most])}{more}"]
