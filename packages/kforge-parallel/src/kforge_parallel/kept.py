"""What a block keeps of its forward for when it is run again in backward: a result that other ranks took part in is not
asked of them twice, and a token goes to the experts that it went to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kforge_parallel._torch import TorchDispatchMode, times_written, tree_map_only

_now = threading.local()  # what is run again in backward is on autograd's own thread


class Kept:
    """The results of one forward, in order. kinds: which are kept: "routes" of tokens to experts, "transfers",
    "operations"."""

    def __init__(self, *kinds: str) -> None:
        self.kinds, self.results, self.place = kinds, [], -1  # type: ignore[var-annotated]

    def recording(self) -> _During:
        """Around the forward."""
        return _During(self, -1)

    def replaying(self) -> _During:
        """Around the forward that is run again."""
        return _During(self, 0)


class _During:
    def __init__(self, kept: Kept, place: int) -> None:
        self.kept, self.start = kept, place

    def __enter__(self) -> None:
        self.before = getattr(_now, "kept", None)
        self.kept.place = self.start
        _now.kept = self.kept

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _now.kept = self.before


def keep(kind: str, make: Callable[[], Any]) -> Any:
    """make(), or what it gave when this block ran before: a tensor, tuples of them, or what holds tensors that nobody
    changes.

    Raises RuntimeError where a tensor was changed in place since.
    """
    if torch.compiler.is_compiling():
        return make()
    kept: Kept | None = getattr(_now, "kept", None)
    if kept is None or kind not in kept.kinds:
        return make()
    if kept.place >= 0:
        value = kept.results[kept.place]
        kept.place += 1
        return tree_map_only(_Result, _Result.get, value)
    _now.kept = None  # what is kept as a whole is not kept in parts, too
    try:
        value = make()
    finally:
        _now.kept = kept
    kept.results.append(tree_map_only(Tensor, _Result, value))
    return value


class _Result:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.written = tensor.detach(), times_written(tensor)

    def get(self) -> Tensor:
        if times_written(self.tensor) != self.written:
            raise RuntimeError(
                "a result was changed in place after it was kept for backward; compute into a new tensor, or leave "
                "what makes it (products, attention, transfers) out of parallel.recompute_keep"
            )
        return self.tensor.detach()


class Operations(TorchDispatchMode):
    """Keeps the outputs of some operations. torch's own selective contexts number all operations of a block, and FSDP
    computes other ones around a part of it when it is run again."""

    def __init__(self, operations: frozenset[Any]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.operations:
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return keep("operations", lambda: func(*args, **(kwargs or {})))
        device = next((x.device for x in args if isinstance(x, Tensor) and x.is_cuda), None)
        out, generator = keep("operations", lambda: (func(*args, **(kwargs or {})), _Generator(device)))
        generator.put_back()
        return out


class _Generator:
    """Where the random numbers of a device are; None: the CPU."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.state = torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)

    def put_back(self) -> None:
        if self.device is None:
            torch.set_rng_state(self.state)
        else:
            torch.cuda.set_rng_state(self.state, self.device)
