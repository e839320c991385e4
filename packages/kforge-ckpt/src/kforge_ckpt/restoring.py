"""The parts of a restore: open what was saved, compare it with what is here, fill, hand over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp

from kforge_ckpt import state
from kforge_ckpt.commit import Contents, logger
from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError, StateMismatchError
from kforge_ckpt.files import Place
from kforge_ckpt.fitting import Fit
from kforge_ckpt.modules import keys_without_tensors
from kforge_ckpt.optimizer import check_groups, state_like_saved
from kforge_ckpt.ranks import Ranks, plain_errors
from kforge_ckpt.rng import RngState
from kforge_ckpt.safetensors import Spec, TensorFile, TensorFiles, dtype_name
from kforge_ckpt.saving import META, STATE, named, rank_file
from kforge_ckpt.state import Json, Stateful, enter_forms
from kforge_ckpt.storage import INDEX, Chunk, StoredTensor, TensorReader, WholeReader, read_index

_WRONG = (KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError)
"""What reading a file raises whose JSON is not the JSON that we write."""


def read_meta(contents: Contents) -> dict[str, Any]:
    """The caller's own meta data of a checkpoint."""
    try:
        meta = state.decode(contents.json(META)["meta"])
        if not isinstance(meta, dict):
            raise TypeError("meta is not an object")
    except CheckpointError:
        raise
    except _WRONG as error:
        raise DamagedCheckpointError(f"{contents.folder / META} is not what is written there: {error!r}") from error
    return meta


class Saved:
    """A committed checkpoint, opened: ``index`` of its tensors, ``tree`` of its values, and its PerRank values.

    threads: how many files a `reader` reads at once.
    """

    def __init__(self, folder: Place, threads: int = 1) -> None:
        self.folder = folder
        self.threads = threads
        self.contents = Contents(folder)
        self.files = TensorFiles(folder)
        self.index = read_index(self.contents.content(INDEX), folder / INDEX, set(self.contents.files))
        self.tree = self.contents.json(STATE)
        world = self.contents.json(META).get("world_size")
        if not isinstance(world, int) or world < 1:
            raise DamagedCheckpointError(f"{folder / META} does not say how many ranks wrote it")
        self.world = world
        self._rank_trees: list[dict[str, Json] | None] | None = None

    def reader(self, index: dict[str, StoredTensor]) -> TensorReader:
        """What reads the tensors of ``index``, those of this checkpoint as they are laid onto others."""
        return TensorReader(self.folder, index, self.threads)

    def tensors_of(self, name: str) -> set[str]:
        """The names of the tensors in the state saved under ``name``."""
        try:
            names = set(state.leaves(self.tree[name], "$tensor"))
        except _WRONG as error:
            raise DamagedCheckpointError(f"{self.folder / STATE} is not what is written there: {error!r}") from error
        if lost := names - self.index.keys():
            raise DamagedCheckpointError(f"{self.folder / INDEX} does not tell where {min(lost)} is")
        return names

    def per_rank(self, path: str) -> list[Any]:
        """The values of all ranks that saved, for the PerRank at ``path``; None where a rank had none."""
        if self._rank_trees is None:
            names = [rank_file(rank, "json") for rank in range(self.world)]
            self._rank_trees = [self.contents.json(name) if name in self.contents.files else None for name in names]
        return [
            None if tree is None or path not in tree else self._value_of(rank, tree[path])
            for rank, tree in enumerate(self._rank_trees)
        ]

    def _value_of(self, rank: int, node: Json) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        if any(state.leaves(node, "$tensor")):
            name = rank_file(rank, "safetensors")
            if name not in self.contents.files:
                raise DamagedCheckpointError(f"the manifest of {self.folder} does not name {name}")
            with TensorFile(self.folder / name) as file:
                tensors = dict(file.tensors())

        def leaf(kind: str, name: str) -> Any:
            if kind != "$tensor" or name not in tensors:
                raise DamagedCheckpointError(f"{self.folder / rank_file(rank, 'safetensors')} does not hold {name}")
            return tensors[name]

        try:
            return state.decode(node, leaf)
        except CheckpointError:
            raise
        except _WRONG as error:
            path = self.folder / rank_file(rank, "json")
            raise DamagedCheckpointError(f"{path} is not what is written there: {error!r}") from error


class TensorSource(Protocol):
    """Tensors by name, each made or read, whole, when it is asked for. `export.SafetensorsFolder` is one."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Name -> dtype and shape, of all of them."""

    def __getitem__(self, key: str, /) -> torch.Tensor: ...


class _Given:
    """Sources by the name of a state, in the place of a checkpoint: tensors, and nothing else."""

    folder = Path()

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        self.places = {f"{name}.{key}": (name, key) for name, source in sources.items() for key in source.specs}
        self.sources = sources
        self.tree: dict[str, Json] = dict.fromkeys(sources)
        self.index = {full: _whole(full, sources[name].specs[key]) for full, (name, key) in self.places.items()}

    def tensors_of(self, name: str) -> set[str]:
        return {full for full, (state_name, _) in self.places.items() if state_name == name}

    def reader(self, index: dict[str, StoredTensor]) -> TensorReader:
        def read(full: str) -> torch.Tensor:
            name, key = self.places[full]
            return self.sources[name][key]

        return WholeReader(index, read)

    def per_rank(self, path: str) -> list[Any]:
        return []


def _whole(name: str, spec: Spec) -> StoredTensor:
    chunk = Chunk((0,) * len(spec.shape), spec.shape, "", name, spec.shape)
    return StoredTensor(dtype_name(spec.dtype, name), spec.shape, (chunk,))


def load_tensors(
    states: Mapping[str, Stateful], sources: Mapping[str, TensorSource], fit: Fit | None = None
) -> list[str]:
    """Fill the tensors of ``states``, in place and in whatever layout they are, from ``sources`` of the same names.

    A source is a folder of safetensors files (`export.SafetensorsFolder`), or anything that gives tensors by name. Each
    rank asks for those that it has a part of, one at a time. No ``load_state_dict`` is called. ``fit`` says in what the
    two may differ, by names that begin with that of the state. Collective over the default process group, where there
    is one. Returns what was not simply the same, as lines for people.

    Raises on all ranks, before anything is changed, StateMismatchError naming the tensors that are missing, too many,
    of another shape or dtype.
    """
    ranks, fit = Ranks(), fit or Fit()
    what = "no tensor was loaded"
    with ExitStack() as stack:
        ranks.all(what, lambda: enter_forms(states, stack))
        plan = ranks.all(what, lambda: Plan(_Given(sources), states, stack, fit))
        plan.compare(ranks, what)
        plan.fill(ranks, what)
    return fit.told(plan.stored, plan.wanted, plan.unclaimed)


class Plan:
    """What of a checkpoint goes where. Nothing of the caller's is changed before `handed_first` and `fill`.

    The one exception are torch optimizers without state: ``stack`` takes them back if the restore fails.
    """

    def __init__(self, saved: Saved | _Given, states: Mapping[str, Stateful], stack: ExitStack, fit: Fit) -> None:
        self.saved = saved
        self.fit = fit
        self.states = named(states)
        self.targets: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.present: dict[str, state.Parts] = {}
        """What each object holds now."""
        for name, obj in self.states.items():
            if name not in saved.tree:
                held = ", ".join(map(repr, saved.tree))
                raise StateMismatchError(f"no state was saved under the name {name!r}; there are {held}")
            numbers = _numbered_states(obj, saved.tree[name])
            if numbers is not None and isinstance(obj, torch.optim.Optimizer):
                stack.enter_context(state_like_saved(obj, numbers, name))
            self.targets[name] = obj.state_dict()
            self.present[name] = state.take_apart(name, self.targets[name])
            self.tensors.update(self.present[name].tensors)
        asked = {tensor for name in states for tensor in saved.tensors_of(name)}
        self.stored = fit.renamed(saved.index, asked)
        self.tensors = {name: _writable(tensor, name) for name, tensor in self.tensors.items() if fit.wants(name)}
        self.wanted = {name: (dtype_name(t.dtype, name), tuple(t.shape)) for name, t in self.tensors.items()}
        laid = {
            name: fit.laid(stored, self.wanted[name]) for name, stored in self.stored.items() if name in self.wanted
        }
        self.unclaimed: set[str] = set()
        """Saved tensors that no rank wants, once they have been compared."""
        self.laid = {name: stored for name, stored in laid.items() if stored is not None}
        self.reader = saved.reader({**self.stored, **self.laid})

    def compare(self, ranks: Ranks, what: str) -> None:
        """StateMismatchError on all ranks unless saved and present tensors fit, by name, shape and dtype."""
        wanted = self.wanted
        specs: dict[str, state.Spec] = {name: (stored.dtype, stored.shape) for name, stored in self.stored.items()}
        # A stage of a pipeline wants only its layers: too many are those that nobody wants.
        lacking, beyond = self._keys_of_modules()
        gathered = ranks.gather((specs.keys() - wanted.keys(), beyond))
        unclaimed = self.unclaimed = set.intersection(*(names for names, _ in gathered))
        nobodys = set.intersection(*(keys for _, keys in gathered))
        if self.fit.partial:
            wanted, unclaimed = {name: spec for name, spec in wanted.items() if name in specs}, set()
        specs |= {name: wanted[name] for name in self.laid}

        def compared() -> None:
            text = state.difference(specs, wanted, unclaimed, lacking, nobodys)
            if text is not None:
                raise StateMismatchError(f"its tensors do not fit those to be restored: {text}. Nothing was changed")

        ranks.all(what, compared)

    def _keys_of_modules(self) -> tuple[set[str], set[str]]:
        """What modules hold beside tensors: what is not in the checkpoint, and what is only there."""
        lacking: set[str] = set()
        beyond: set[str] = set()
        for name, parts in self.present.items() if self.fit.strict else ():
            here = keys_without_tensors(self.states[name], parts.tree)
            there = keys_without_tensors(self.states[name], self.saved.tree[name])
            if here is not None and there is not None:
                lacking |= {f"{name}.{key}" for key in here - there}
                beyond |= {f"{name}.{key}" for key in there - here}
        return lacking, beyond

    def ready(self, ranks: Ranks) -> dict[str, Any]:
        """What each ``load_state_dict`` will be given: the saved nesting around the live tensors, not yet filled; each
        object that can say beforehand that it does not take it is asked. In a fit none is called: only tensors
        change."""
        self.reader.check(self.stored, ranks.rank, ranks.world)
        if not self.fit.strict:
            return {}
        _, beyond = self._keys_of_modules()
        given = {}
        try:
            for name, target in self.targets.items():
                given[name] = state.put_together(self.saved.tree[name], target, self.tensors, self.saved.per_rank)
                for key in [key for key in given[name] if f"{name}.{key}" in beyond]:
                    del given[name][key]  # another stage's
        except CheckpointError:
            raise
        except _WRONG as error:
            path = self.saved.folder / STATE
            raise DamagedCheckpointError(f"{path} is not what is written there: {error!r}") from error
        for name, obj in self.states.items():
            if isinstance(obj, torch.optim.Optimizer):
                check_groups(obj, given[name], name)
            if (check := getattr(obj, "check_state_dict", None)) is not None:
                check(given[name])
        return given

    @contextmanager
    def handed_first(self, ranks: Ranks, what: str, ready: dict[str, Any]) -> Iterator[None]:
        """Objects without tensors are given what is ``ready`` for them, before any tensor is filled: only they know
        whether they take it. If one does not, on whatever rank, or if the block raises, all of them are given back
        what they had."""
        names = [name for name in ready if self._is_light(name)]
        begun: list[str] = []

        def hand() -> None:
            for name in names:
                begun.append(name)
                self.states[name].load_state_dict(ready[name])

        try:
            ranks.all(what, hand)
            yield
        except Exception:
            self._put_back(ranks, begun)
            raise
        for name in names:
            del ready[name]

    def _is_light(self, name: str) -> bool:
        parts = self.present[name]
        return not parts.tensors and not any(own.tensors for own in parts.per_rank.values())

    def _put_back(self, ranks: Ranks, names: list[str]) -> None:
        """Collective. An object takes the PerRank values of all ranks, as from a checkpoint."""
        light = [parts.per_rank for name, parts in self.present.items() if self._is_light(name)]
        everyone = ranks.gather({path: own.tree for per_rank in light for path, own in per_rank.items()})

        def leaf(kind: str, path: str) -> Any:
            return [state.decode(trees[path]) if path in trees else None for trees in everyone]

        for name in names:
            try:
                self.states[name].load_state_dict(state.decode(self.present[name].tree, leaf))
            except Exception as error:
                logger.error("%s is not what it was before the restore: %s: %s", name, type(error).__name__, error)

    def fill(self, ranks: Ranks, what: str) -> None:
        """Read the tensors, each rank its part of them in its own layout."""
        with plain_errors(what, ranks.world), torch.no_grad():
            dcp.load(
                {name: self.tensors[name] for name in self.laid},
                storage_reader=self.reader,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
                no_dist=not ranks.joined,
            )

    def hand_over(self, ready: dict[str, Any]) -> None:
        """Call each ``load_state_dict`` that is left; random streams come last, so that no other draws from them."""
        for name in sorted(ready, key=lambda name: isinstance(self.states[name], RngState)):
            self.states[name].load_state_dict(ready[name])


def _writable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor itself, or StateMismatchError for one that cannot be filled in place."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise StateMismatchError(f"{name} was made in inference mode and cannot be filled; use its .clone()")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise StateMismatchError(f"{name} has elements that share memory and cannot be filled; use its .contiguous()")
    return tensor


def _numbered_states(obj: Stateful, node: Json) -> set[int] | None:
    """The parameter numbers with a saved state, for an optimizer that saves as torch's do; else None."""
    if not isinstance(obj, torch.optim.Optimizer) or type(obj).state_dict is not torch.optim.Optimizer.state_dict:
        return None
    inner = node.get("state") if isinstance(node, dict) else None
    if inner == {}:
        return set()
    kind, pairs = state.tagged(inner) if isinstance(inner, dict) else (None, None)
    keys = [pair[0] for pair in pairs] if kind == "$dict" and isinstance(pairs, list) else []
    return set(keys) if keys and all(type(key) is int for key in keys) else None
