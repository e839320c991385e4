"""Names for parts of a model that users may add: by a decorator in their code, or by an entry point of a package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Parts of one kind by name. What is registered in code comes before an entry point of the same name."""

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._parts: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that files a part under ``name``. Raises ValueError when the name is taken by another part."""

        def add(part: T) -> T:
            if self._parts.get(name, part) is not part:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self._parts[name] = part
            return part

        return add

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._parts, *(point.name for point in entry_points(group=self.entry_point_group))})

    def get(self, name: str) -> T:
        """The part called ``name``. Raises ValueError, which lists the known names, when there is none, and for a name
        of two packages; ImportError, which names the entry point, for a package that does not load."""
        if name in self._parts:
            return self._parts[name]
        points = list(entry_points(group=self.entry_point_group, name=name))
        if not points:
            raise ValueError(f"unknown {self.kind} {name!r}; known are {', '.join(self.names())}")
        if len({point.value for point in points}) > 1:
            both = " and ".join(sorted(point.value for point in points))
            raise ValueError(f"{self.kind} {name!r} is an entry point of {both}; uninstall one of the packages")
        try:
            part: T = points[0].load()
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{self.kind} {name!r} is the entry point {points[0].value} of group {self.entry_point_group}, which "
                f"does not load: {error}"
            ) from error
        return self._parts.setdefault(name, part)


MODELS: Registry[Callable[..., Any]] = Registry("model", "kforge.models")
"""``model(config)`` -> a module that is trained in the Transformer's place; see the README."""
NORMS: Registry[Callable[..., Any]] = Registry("norm", "kforge.norms")
"""``norm(dim, eps)`` -> a module over the last dimension."""
MLPS: Registry[Callable[..., Any]] = Registry("mlp", "kforge.mlps")
"""``mlp(config)`` -> a module from [B,S,D] to [B,S,D]."""
ROUTERS: Registry[Callable[..., Any]] = Registry("router", "kforge.routers")
"""``router(config)`` -> a module from [T,D] to a `Routing`."""
ATTENTION_CORES: Registry[Callable[..., Any]] = Registry("attention core", "kforge.attention_cores")
"""``core(config, window)`` -> a module without parameters, called as `Attention.core` is."""
LOSSES: Registry[Callable[..., Any]] = Registry("loss", "kforge.losses")
"""``loss(hidden, weight, labels, scale, options=…)`` -> (loss, nll)."""
