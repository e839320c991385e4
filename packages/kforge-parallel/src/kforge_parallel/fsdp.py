"""FSDP2 over the data axes: which modules form a unit, along which dimension a parameter is sharded, and how
gradients are reduced. With ``dp_replicate`` above 1 (HSDP) shards are reduced over a group and then over its copies."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kforge_parallel.axes import shard_dim
from kforge_parallel.compress import Compression
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
    if units is None:
        return []
    known = dict(model.named_modules())
    if missing := [name for group in units() for name in group if name not in known]:
        raise ValueError(f"fsdp_units() names {', '.join(missing)}, which the model does not have")
    return [[known[name] for name in group] for group in units()]


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    precision: Precision,
    blocks: list[nn.Module],
    gradients: str,
    experts: list[nn.Module] | None = None,
    reshard_after_forward: bool = True,
    cast_inputs: bool = True,
    prefetch: int = 0,
    cpu_offload: bool = False,
    root: nn.Module | None = None,
    compression: Compression | None = None,
) -> None:
    """Shard ``model`` in place: one unit a block, one a group of `find_units`, and the root for the rest.

    ``gradients="sum"``: a gradient is the sum over ranks. The factor and the sum-only reduction are set on every
    unit, as neither of torch's setters reaches the children. ``"mean"``: the mean over ranks, torch's default.

    experts: modules whose parameters ep has dealt out, a unit each, on the expert root. A gradient comes to them with
    the tokens of a whole ep group in it, so they know sums only; for ``"mean"`` each sum is divided by the number of
    data ranks, as the other gradients are.

    root: a module with the model in it that is called instead of it, and so is the root; None: the model.

    compression: how replicas sum up, which is told of each unit; None: torch's own all-reduce.
    """
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients = {gradients!r} must be 'sum' or 'mean'")
    dealt = experts or []

    def unit(modules: nn.Module | list[nn.Module], reshard: bool, data: DeviceMesh = mesh.fsdp) -> None:
        if compression is not None:
            data = data[data.mesh_dim_names[-1]]  # type: ignore[index]
        shards = data.size(data.ndim - 1)
        fully_shard(  # type: ignore[call-overload]
            modules,
            mesh=data,
            mp_policy=precision.policy(cast_inputs),
            reshard_after_forward=reshard,
            shard_placement_fn=lambda parameter: Shard(shard_dim(_local_shape(parameter), shards)),
            offload_policy=CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        )

    groups = find_units(model)
    _check_units(model, [*([block] for block in blocks), *groups], len(blocks))
    for module in dealt:
        unit(module, reshard_after_forward, mesh.expert_fsdp)
    for block in blocks:
        unit(block, reshard_after_forward)
    for i, group in enumerate(groups):
        # The last unit is the first that backward needs: to free it in between would be to gather it twice.
        unit(group, reshard_after_forward and i < len(groups) - 1)
    root = model if root is None else root
    unit(root, False)
    _set_prefetch(blocks, dealt, prefetch)
    for module in root.modules():
        if isinstance(module, FSDPModule) and (gradients == "sum" or module in dealt or compression is not None):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
            module.set_gradient_divide_factor(1.0)
            ranks = mesh.data_size * mesh.cp_size if gradients == "mean" else 1
            if compression is not None:
                compression.add(module, mesh.replicas(experts=module in dealt), ranks)
            elif ranks > 1:  # no factor: torch 2.13 divides by it twice where there is one shard
                module.set_all_reduce_hook(partial(_divide, ranks))


def _divide(by: int, total: torch.Tensor) -> None:
    total.div_(by)


def _set_prefetch(blocks: list[nn.Module], dealt: list[nn.Module], ahead: int) -> None:
    """Gather blocks ``ahead`` of the one that runs; and with each block its own experts, which would else be gathered
    when their tokens are there, with nothing to compute meanwhile."""
    units = [[block, *(module for module in block.modules() if module in dealt)] for block in blocks]
    for i, (block, *experts) in enumerate(units):
        later = [module for unit in units[i + 1 : i + 1 + ahead] for module in unit]
        if experts or later:
            block.set_modules_to_forward_prefetch(experts + later)  # type: ignore[operator]
        earlier = [module for unit in units[max(0, i - ahead) : i][::-1] for module in unit]
        if earlier:
            block.set_modules_to_backward_prefetch(experts + earlier)  # type: ignore[operator]


def _check_units(model: nn.Module, units: list[list[nn.Module]], blocks: int) -> None:
    """Raise ValueError for a parameter that two units hold: torch gathers it for one, or takes it for two. The first
    ``blocks`` units are blocks."""
    inside = {module: i for i, unit in enumerate(units) for top in unit for module in top.modules()}
    holders: dict[nn.Parameter, tuple[int, str]] = {}
    for owner, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            name, unit = f"{owner}.{leaf}".lstrip("."), inside.get(module, len(units))
            first, where = holders.setdefault(parameter, (unit, name))
            if first != unit and max(first, unit) < blocks:
                raise ValueError(
                    f"{where} and {name} are one parameter in two blocks, which are gathered and freed one by one; "
                    "keep it in a module beside the blocks that both call, or use one block twice"
                )
            if first != unit:
                raise ValueError(
                    f"{where} and {name} are one parameter in two FSDP units; name both modules in one list of the "
                    "model's fsdp_units(), as in [['embed', 'norm', 'head']]"
                )
    for module, count in Counter(module for unit in units for top in unit for module in {*top.modules()}).items():
        if count > 1 and any(True for _ in module.parameters(recurse=False)):
            raise ValueError(
                f"a {type(module).__name__} is used in {count} FSDP units, each of which would gather and free its "
                "weights; use it inside one block, or make a module for each and tie nothing"
            )


def _local_shape(parameter: nn.Parameter) -> torch.Size:
    return parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape


def set_last_microbatch(model: nn.Module, last: bool) -> None:
    """Reduce gradients in the next backward (``last``), or keep this rank's sums for one that comes after.

    A model that is not sharded (one process, split storage) has nothing to reduce.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    if "fp8_weights" in vars(model):
        vars(model)["fp8_weights"].last = last


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in full, on the CPU, on every rank. Collective; for tests and small models."""
    return {name: full(parameter).cpu() for name, parameter in model.named_parameters()}


@torch.no_grad()
def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, buffers included, with every tensor in full, on the CPU, on every rank: what is exported.
    Collective."""
    return {name: full(tensor).cpu() for name, tensor in model.state_dict().items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, or of the whole that a DTensor is a part of; detached. Collective for DTensors."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        # One mesh dimension after the other, from the slowest: torch warns of what it does in one go.
        placements = list(tensor.placements)
        for dim in range(len(placements)):
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    return tensor.clone()
