"""FSDP2 over the data axis: which modules form a unit, and how their gradients are reduced."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from kforge_parallel.mesh import Mesh
from kforge_parallel.precision import Precision


def find_blocks(model: nn.Module, name: str | None = None) -> list[nn.Module]:
    """The repeated blocks of a model: the children of ``name``, of its ``block_list``, or of its longest list.

    Raises ValueError when ``name`` is not a ModuleList or ModuleDict of the model.
    """
    name = name or getattr(model, "block_list", None)
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)}
    if name is None:
        if not lists:
            return []
        name = max(lists, key=lambda n: len(lists[n]))
    if name not in lists:
        known = ", ".join(lists) or "none"
        raise ValueError(f"the model has no list of blocks named {name!r}; its module lists are: {known}")
    return list(lists[name].children())


def find_units(model: nn.Module) -> list[list[nn.Module]]:
    """Groups of modules outside the blocks that are gathered together, as the model's ``fsdp_units()`` names them.

    Modules that share a parameter must be in one group. A model without that method gets none: what is in no
    block then belongs to the root.
    """
    units = getattr(model, "fsdp_units", None)
    return [[model.get_submodule(name) for name in group] for group in units()] if units else []


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    precision: Precision,
    blocks: list[nn.Module],
    gradients: str,
    reshard_after_forward: bool = True,
    cast_inputs: bool = True,
) -> None:
    """Shard ``model`` in place: one unit a block, one a group of `find_units`, and the root for the rest.

    ``gradients="sum"``: a gradient is the sum over ranks. The factor and the sum-only reduction are set on every
    unit, as neither of torch's setters reaches the children. ``"mean"``: the mean over ranks, torch's default.
    """
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients = {gradients!r} must be 'sum' or 'mean'")
    policy = precision.policy(cast_inputs)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    units = find_units(model)
    for i, unit in enumerate(units):
        # The last unit is the first that backward needs: to free it in between would be to gather it twice.
        keep = i == len(units) - 1
        fully_shard(unit, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard_after_forward and not keep)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    if gradients == "sum":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
                module.set_gradient_divide_factor(1.0)


def set_last_microbatch(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward (``last``), or keep this rank's sums for one that comes after."""
    if not isinstance(model, FSDPModule):
        raise TypeError("set_last_microbatch wants a model that parallelize returned")
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in full, on the CPU, on every rank. Collective; for tests, exports and small models."""
    return {name: _full(parameter).cpu() for name, parameter in model.named_parameters()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
