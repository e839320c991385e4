"""What the benchmarks of checkpoints save, and how they time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Box:
    """A state of tensors by name, which are filled in place where it is restored."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do."""


def seconds(work: Callable[[], Any]) -> float:
    """Time that the work takes, on the host."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
