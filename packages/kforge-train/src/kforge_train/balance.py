"""Experts between two steps: what each was given is summed over all ranks and told, and the routers' biases move."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from kforge_parallel import Mesh


def update_balance(model: nn.Module, mesh: Mesh, gate: Tensor, step: int, steps: int) -> dict[str, Tensor]:
    """After optimizer step ``step`` of ``steps``, from 0: move what keeps the experts' load even, unless ``gate`` is 0.

    Every rank calls it; every rank has seen other tokens, as tensor-parallel ranks share rows out. Returns numbers
    about the load by name, on the device (`Transformer.update_balance`); none for a model without experts.
    """
    update = getattr(model, "update_balance", None)
    if update is None:
        return {}
    reduce = dist.all_reduce if mesh.size > 1 else None
    stats: dict[str, Tensor] = update(reduce, gate=gate, step=step, steps=steps)
    return stats
