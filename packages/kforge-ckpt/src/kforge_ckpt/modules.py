"""Modules under the names of what they wrap: a checkpoint of a compiled model, or one in DDP, is that of the model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from kforge_ckpt import state
from kforge_ckpt.errors import UnsupportedStateError
from kforge_ckpt.state import Json, Stateful

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch calls the one child of a compiled module, and of a recomputed one. Not FSDP1's: what such a model holds is
known to its own state_dict() alone, which names it plainly."""


def plain(name: str, obj: Stateful) -> Stateful:
    """The object itself, or a module without what wraps it, or parts of it. UnsupportedStateError when two of its names
    are one then."""
    while isinstance(obj, nn.Module):
        inner = _wrapped(obj)
        if inner is None:
            return PlainModule(name, obj) if any(_wrapped(module) for module in obj.modules()) else obj
        obj = inner
    return obj


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module that this one is but a wrapper of."""
    ddp = torch.distributed.is_available() and isinstance(module, nn.parallel.DistributedDataParallel)
    for name, child in module.named_children():
        if name in WRAPPERS or (ddp and name == "module"):
            return child
    return None


def plain_name(name: str) -> str:
    """``a.b`` for ``a._orig_mod.b``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class PlainModule:
    """A module of which parts are wrapped, under the names that it would have without."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module
        prefixes = {
            f"{path}.module." if path else "module.": f"{path}." if path else ""
            for path, one in module.named_modules(remove_duplicate=False)
            if _wrapped(one) is not None and isinstance(one, nn.parallel.DistributedDataParallel)
        }
        self._prefixes = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))  # the innermost first
        self._name = name

    def _plain(self, key: str) -> str:
        for prefix, instead in self._prefixes:
            if key.startswith(prefix):
                key = instead + key.removeprefix(prefix)
        return plain_name(key)

    def _names(self, keys: Any) -> dict[str, str]:
        names: dict[str, str] = {}
        for key in keys:
            new = self._plain(key)
            if new in names:
                raise UnsupportedStateError(
                    f"{names[new]} and {key} of {self._name} are both {new} without what wraps them; rename one"
                )
            names[new] = key
        return names

    def state_dict(self) -> dict[str, Any]:
        """The module's, under plain names."""
        found = self.module.state_dict()
        result: OrderedDict[str, Any] = OrderedDict((new, found[key]) for new, key in self._names(found).items())
        result._metadata = getattr(found, "_metadata", {})  # type: ignore[attr-defined]
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """The module's, with its own names."""
        names = self._names(self.module.state_dict())
        given: OrderedDict[str, Any] = OrderedDict((names.get(new, new), value) for new, value in state_dict.items())
        given._metadata = getattr(state_dict, "_metadata", {})  # type: ignore[attr-defined]
        return self.module.load_state_dict(given)


def keys_without_tensors(obj: Stateful, node: Json) -> set[str] | None:
    """What a module's state holds beside tensors, by key; None for what is no module, or one that takes a state in its
    own way. node: the state as JSON."""
    module = obj.module if isinstance(obj, PlainModule) else obj
    if not isinstance(module, nn.Module) or type(module).load_state_dict is not nn.Module.load_state_dict:
        return None
    if not isinstance(node, dict) or state.tagged(node)[0] is not None:
        return None
    if any(one._load_state_dict_pre_hooks for one in module.modules()):
        return None
    return {key for key, item in node.items() if not any(state.leaves(item, "$tensor"))}
