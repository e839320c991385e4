"""Which dtype weights are kept in, computed in and reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Precision:
    """The three dtypes of a run."""

    storage: torch.dtype
    """Of the sharded weights that the optimizer sees."""
    compute: torch.dtype
    """Of the weights that a forward sees; made at the all-gather."""
    reduce: torch.dtype
    """In which gradients are summed over ranks, and of ``.grad``."""

    def policy(self, cast_inputs: bool) -> MixedPrecisionPolicy:
        """The FSDP2 policy. ``cast_inputs``: floating-point inputs of every unit are cast to the compute dtype."""
        return MixedPrecisionPolicy(
            param_dtype=None if self.compute == self.storage else self.compute,
            reduce_dtype=self.reduce,
            cast_forward_inputs=cast_inputs,
        )


PRECISIONS = {
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
}


def precision_of(name: str) -> Precision:
    """The Precision of a config word. Raises ValueError that lists the known ones."""
    if name not in PRECISIONS:
        raise ValueError(f"parallel.precision = {name!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
