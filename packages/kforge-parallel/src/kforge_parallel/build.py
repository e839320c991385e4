"""`parallelize`: from a function that builds a model to that model, spread over the mesh and filled.

The order is fixed, as each step needs what the one before left: build on meta, cut into stages, FP8, expert, tensor and
context parallelism, recompute, compile, shard, allocate, fill. A model that can say how each of its values starts
(``init_weights``, or the ``init`` argument) is never whole on one device. Any other is built on the CPU, and rank 0's
values are given to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kforge_parallel._torch import keep_donated_buffers, times_written
from kforge_parallel.activation import recompute_blocks
from kforge_parallel.axes import product_text
from kforge_parallel.choice import choose_recompute, memory_of, way
from kforge_parallel.compile import compile_blocks
from kforge_parallel.compress import Compression
from kforge_parallel.config import ParallelConfig
from kforge_parallel.context import check_attention, spread_attention
from kforge_parallel.expert import check_experts, find_mixtures, has_experts, spread_experts
from kforge_parallel.fp8 import check_device, described, multiply_in_fp8, other_matrices
from kforge_parallel.fp8_gather import gather_in_fp8
from kforge_parallel.fp8_kept import keep_in_fp8
from kforge_parallel.fsdp import find_blocks, shard
from kforge_parallel.hugging_face import check_heads, tensor_plan
from kforge_parallel.layout import not_in_fp8
from kforge_parallel.mesh import Mesh
from kforge_parallel.offload import offload_blocks
from kforge_parallel.pipeline import check_stages, cut, find_twins, stages_of, take_own
from kforge_parallel.plan import Resolved, resolve_plan
from kforge_parallel.precision import precision_of
from kforge_parallel.replicas import check_replicas
from kforge_parallel.shape import parameters_of
from kforge_parallel.stages import SCHEDULES, split_layers
from kforge_parallel.sums import sum_gradients
from kforge_parallel.tensor import apply_plan
from kforge_parallel.work import Work

_log = logging.getLogger("kforge_parallel")

LINEAR_SUMS: tuple[str, ...] = ("cuda",)
"""Types of device on which gradients of linear weights are added inside of their products (`linear_sums`), where FSDP2
does not wrap the model. Elsewhere that is slower, and `sums` adds them; tests set it."""


def parallelize(
    build: Callable[[], nn.Module],
    mesh: Mesh,
    config: ParallelConfig | None = None,
    *,
    init: Callable[[nn.Module], None] | None = None,
    gradients: str = "mean",
    blocks: str | None = None,
    cast_inputs: bool = True,
    plan: Mapping[str, str] | None = None,
    work: Work | None = None,
    allocate: bool = True,
    **options: object,
) -> nn.Module:
    """Build a model and spread it over the mesh.

    build: returns the model. Called under the meta device when ``init`` is given, else on the CPU.
    config: precision, recompute, compile and the like; None: the config that `launch` was given. ``options`` change
        single fields of it. The axes are those of the mesh.
    init: fills every parameter and buffer of the sharded model in place, each rank its own part. None: the model
        is built with values on every rank and rank 0's are taken.
    gradients: "mean" over ranks, or "sum" where the loss is already divided by the global token count.
    blocks: name of the list of blocks; None: the model's ``block_list``, or its longest module list.
    cast_inputs: cast floating-point inputs of every unit to the compute dtype. A model that takes care of its own
        dtypes (rotary angles in fp32, say) wants False.
    plan: how tensor parallelism cuts the model (see the README); None: the model's ``plan``. Read where tp > 1.
    work: rows, microbatches and optimizer of a step. Read where recompute is auto, which wants it.
    allocate: False leaves all on the meta device and fills nothing: a look at what a rank would hold (`check_rank`).

    Returns the model, with DTensor parameters in the storage dtype and the names it was built with; where pp > 1 what
    this rank has of it, to be called by a `Pipeline`.
    Raises ValueError when ``init`` leaves a value unset, naming it, and for a plan that does not fit the model.
    """
    config = replace(config or mesh.config, **options)  # type: ignore[arg-type]
    _check_axes(config, mesh)
    precision = precision_of(config.precision, config.storage)
    wrapped = mesh.size > 1 or config.storage == "fp32"
    with torch.device("meta" if init is not None or not allocate else "cpu"):
        model = built_by(build)
    if config.recompute == "auto":
        config = _choose_recompute(model, mesh, config, work, plan, blocks)
    names, tied = _names(model), _tied(model)

    def check(step: str) -> None:
        if _names(model) != names or _tied(model) != tied:
            raise RuntimeError(f"{step} changed the names or the ties of the parameters; this is a fault of kforge")

    convert(model, precision.storage)
    if init is None and allocate:
        _share_values(model, mesh)
        model.to(device=mesh.device)
    _tie(model, tied)
    check("conversion")
    words = _resolve(model, mesh.tp_size, config, plan) if mesh.tp_size > 1 else None
    whole, mixed = model, has_experts(model)
    parts, roots = [model], [model]
    if mesh.pp_size > 1:
        model = cut(model, mesh, config, blocks)
        names, tied = _names(model), _tied(model)
        roots = list(stages_of(model).calls)
        parts = [call.stage for call in stages_of(model).calls]
    compression = None
    if config.compress != "none" and mesh.axes["dp_replicate"] > 1:
        layout = product_text(mesh.axes)
        compression = Compression(config.compress, config.compress_rank, layout, precision.reduce, mesh.device)
        vars(model)["compression"] = compression
    for part, root in zip(parts, roots, strict=True):
        block_list = find_blocks(part, blocks)
        own = words if words is None or part is whole else words.of(part)
        _to_fp8(part, config, mesh, own)
        experts = []
        if part is whole or not mixed or has_experts(part):  # a stage may have none of the model's
            experts = spread_experts(part, mesh, own.parameters if own else {})
        check("expert parallelism")
        if own is not None:
            kv_heads = getattr(part, "shape", {}).get("n_kv_heads")
            apply_plan(part, mesh.tp, own, sequence_parallel=config.sequence_parallel, kv_heads=kv_heads)
            check("tensor parallelism")
        if mesh.cp_group is not None:
            spread_attention(part, block_list, mesh.cp_group, config.cp_style)
        _prepare_blocks(block_list, config, mesh)
        if wrapped:
            shard(
                part,
                mesh,
                precision=precision,
                blocks=block_list,
                gradients=gradients,
                experts=experts,
                reshard_after_forward=config.reshard_after_forward and not keeps_gathered(config, mesh),
                cast_inputs=cast_inputs,
                prefetch=config.prefetch,
                cpu_offload=config.cpu_offload,
                root=root,
                compression=compression,
            )
            check("sharding")
    if not allocate:
        if mesh.pp_size > 1:
            take_own(model)
        return model
    if init is not None:
        untouched: dict[str, tuple[torch.Tensor, int]] = {}
        for part in parts:
            untouched |= _allocate(part, mesh.device, torch.device("cpu") if config.cpu_offload else mesh.device)
        if mesh.pp_size > 1:
            take_own(model)
        check("allocation")
        init(model)
        _check_filled(model, untouched)
        check("init")
    if mesh.pp_size > 1:
        take_own(model)
        find_twins(model)
    if not wrapped:  # FSDP2 gives gradients in the dtype of the weights; alone, they can be fp32 to the optimizer
        sum_gradients(model, precision.reduce)
        keep_in_fp8(model)
        if mesh.device.type in LINEAR_SUMS:
            from kforge_parallel.linear_sums import sum_in_products  # loads the compiler

            sum_in_products(model)
        if cast_inputs:
            model.register_forward_pre_hook(partial(_cast, precision.compute), with_kwargs=True)
    # What is offloaded is copied before it is gathered, and a schedule that computes the gradients of weights apart
    # looks for the weights that it was given: there they travel as they are, and are cast after.
    if wrapped and not config.cpu_offload and not keeps_gathered(config, mesh):
        for root in roots if mesh.pp_size > 1 else [model]:
            gather_in_fp8(root, mesh)
    check_replicas(model)
    if compression is not None and dist.get_rank() == 0:
        _log.info(
            "parallel.compress = %s: each rank sends its replicas %.1f MB a reduction instead of %.1f MB",
            config.compress,
            compression.bytes_sent / 1e6,
            compression.bytes_uncompressed / 1e6,
        )
    return model


def built_by(build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` returns. Raises ValueError for a model in its place, and where it makes none."""
    if isinstance(build, nn.Module):
        raise ValueError(
            f"build is a {type(build).__name__} that is built already; give what builds it, such as lambda: "
            f"{type(build).__name__}(…), which is called where the model is to lie"
        )
    model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"build made {type(model).__name__} {model!r}, and no module; let it return the model")
    return model


def _choose_recompute(
    model: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    work: Work | None,
    plan: Mapping[str, str] | None,
    blocks: str | None,
) -> ParallelConfig:
    """What recompute = auto comes to for this model and this work; logged."""
    shape = getattr(model, "shape", None)
    if work is None or not isinstance(shape, Mapping):
        lacking = "work=Work(row_tokens=…)" if work is None else f"{type(model).__name__}.shape, a dict of its sizes"
        raise ValueError(
            f"parallel.recompute = auto estimates what a step needs, and `parallelize` lacks {lacking}; give it, or "
            "set recompute to none, selective or full"
        )
    listed = parameters_of(model, blocks=blocks, plan=plan)
    memory = memory_of(config, mesh.device.type)
    here = replace(config, device=mesh.device.type)  # type: ignore[arg-type]
    chosen, told = choose_recompute(shape, here, mesh.size, work, memory, parameters=listed)
    config = replace(chosen, device=config.device)
    if dist.get_rank() == 0:
        _log.info("parallel.recompute = auto: %s\n%s", way(config), told)
    return config


def check_model(model: nn.Module, config: ParallelConfig, axes: Mapping[str, int]) -> None:
    """Raise ValueError for what `parallelize` would refuse of a model because of what it is: a model without stages, a
    plan, attention cores or experts, where ``axes`` (of `check_layout`) ask for them, and selective recomputation of
    compiled blocks with experts. The model may be on meta and is not changed; there need be no process group."""
    blocks = find_blocks(model)
    _several_graphs(blocks, config, axes["cp"])
    if axes["pp"] > 1:
        check_stages(model, axes["pp"])
        split_layers(config, axes["pp"], len(blocks))
        model.stage(first=True, layers=range(len(blocks)), last=True)  # type: ignore[operator]
    if axes["tp"] > 1:
        _resolve(model, axes["tp"], config, None)
    if axes["cp"] > 1:
        check_attention(model, blocks, axes["cp"], config.cp_style)
    if config.ep > 1:
        check_experts(model, config.ep, axes["tp"])


def keeps_gathered(config: ParallelConfig, mesh: Mesh) -> bool:
    """Whether no unit may be freed between forward and backward. A schedule that computes the gradients of weights
    apart looks them up among the parameters, and finds shards where FSDP has freed what it gathered: their gradients
    would be wrong or missing, and nothing would say so."""
    return mesh.pp_size > 1 and SCHEDULES[config.pp_schedule].splits_backward


def _to_fp8(part: nn.Module, config: ParallelConfig, mesh: Mesh, words: Resolved | None) -> None:
    """Let linear modules multiply in FP8, and log which do and which do not."""
    if config.fp8 == "none":
        return
    check_device(config.fp8, mesh.device)
    if mesh.device.type == "cuda" and config.precision != "bf16":
        raise ValueError(not_in_fp8(config))
    for name, module in part.named_modules():
        if type(module).__module__.startswith("torchao."):
            raise ValueError(
                f"parallel.fp8 = {config.fp8}, but the model has torchao's {type(module).__name__} at {name}, which "
                "multiplies as torchao has set it; set parallel.fp8 to none, or build the model without"
            )
    named = {} if words is None else words.parameters
    reasons = multiply_in_fp8(part, config.fp8, config.fp8_skip, named, mesh.tp_size)
    mixtures = {f"{name}.experts".lstrip("."): "experts stay in the compute dtype" for name in find_mixtures(part)}
    reasons = {**reasons, **other_matrices(part, config.fp8_skip), **mixtures}
    if not any(not reason for reason in reasons.values()) and mesh.pp_size == 1:
        raise ValueError(
            f"parallel.fp8 = {config.fp8}, but no module would multiply in it: {described(reasons)}; set it to "
            "none, or change fp8_skip or the sizes"
        )
    if dist.get_rank() == 0:
        _log.info("parallel.fp8 = %s: %s", config.fp8, described(reasons))


def _prepare_blocks(blocks: list[nn.Module], config: ParallelConfig, mesh: Mesh) -> None:
    """Recompute, compile and offload."""
    mixed = _several_graphs(blocks, config, mesh.cp_size)
    if config.compile:
        if mixed:
            compile_blocks(mixed, constants=True)
        if SCHEDULES[config.pp_schedule].splits_backward:
            keep_donated_buffers()
    whole = [block for block in blocks if block not in mixed] if config.compile else []
    recompute_blocks(
        blocks,
        config.recompute,
        again=config.run_again(len(blocks)),
        keep=config.recompute_keep,
        compiled=whole,
        in_parts=mixed if config.compile else (),
    )
    compile_blocks(whole)
    if config.offload_activations:
        offload_blocks(blocks)


def _several_graphs(blocks: list[nn.Module], config: ParallelConfig, cp: int) -> list[nn.Module]:
    """The blocks that experts, or a ring, break into several graphs where they are compiled: a checkpoint in what is
    compiled may hold none. Raises ValueError for a selective recomputation of them."""
    ring = cp > 1 and config.cp_style == "ring"
    mixed = [block for block in blocks if ring or find_mixtures(block)]
    if config.compile and mixed and config.recompute == "selective":
        raise ValueError(
            "parallel.recompute = selective sees no operation inside of a compiled graph, and with parallel.compile = "
            "true a block with experts, or with a ring, is several graphs; set recompute to full, or compile to false"
        )
    return mixed


def _check_axes(config: ParallelConfig, mesh: Mesh) -> None:
    for name, size in mesh.axes.items():
        if getattr(config, name) not in (-1, size):
            raise ValueError(
                f"the mesh has {name} = {size}, but the config says {getattr(config, name)}; give `launch` the config, "
                "and `parallelize` the same one or none"
            )
    if mesh.cp_size > 1 and config.cp_style != mesh.config.cp_style:
        raise ValueError(
            f"the mesh cuts rows for cp_style = {mesh.config.cp_style}, but the config says {config.cp_style}; give "
            "`launch` the config, and `parallelize` the same one or none"
        )


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Floating-point tensors among the arguments of a model that is not wrapped, in the dtype that it computes in."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}


def _resolve(model: nn.Module, tp: int, config: ParallelConfig, plan: Mapping[str, str] | None) -> Resolved:
    """The plan given, or the model's own, laid over the model."""
    if plan is None:
        plan = getattr(model, "plan", None)
    if plan is None and hasattr(model, "tp_plan"):
        plan = tensor_plan(model)
        if config.sequence_parallel:
            raise ValueError(
                f"{type(model).__name__} is cut by its Hugging Face plan, under which every rank of tp = "
                f"{tp} has whole rows; set parallel.sequence_parallel to false"
            )
        check_heads(model, tp)
    if plan is None:
        raise ValueError(
            f"parallel.tp = {tp} needs to know how to cut {type(model).__name__}: give the class an attribute `plan`, "
            "or pass plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise', …}, or set parallel.tp to 1"
        )
    return resolve_plan(model, plan)


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def convert(model: nn.Module, storage: torch.dtype) -> None:
    """Bring floating-point values to the storage dtype; buffers to float32 or wider only (a table of angles in bf16
    takes positions 256 and 257 for one). Complex buffers keep both parts, and widen with float64."""
    wide = torch.promote_types(storage, torch.float32)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(storage)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(wide)
            elif buffer is not None and buffer.is_complex() and wide == torch.float64:
                module._buffers[name] = buffer.to(torch.complex128)


def _tied(model: nn.Module) -> list[list[str]]:
    """Names that belong to one parameter, for every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(model: nn.Module, tied: list[list[str]]) -> None:
    """Make the names of each group one parameter again: a conversion may have made copies."""
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, parameter)


def _share_values(model: nn.Module, mesh: Mesh) -> None:
    """Give rank 0's values to all ranks, tensor by tensor, on the CPU."""
    if mesh.size > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)


def _allocate(model: nn.Module, device: torch.device, parameters: torch.device) -> dict[str, tuple[torch.Tensor, int]]:
    """Give every meta tensor storage, filled with NaN so that a value that nobody sets is found: buffers on ``device``,
    parameters on theirs.

    Parameters keep their identity (swapped, not replaced): ties and FSDP2's own references stay true. Returns the
    tensors that have no NaN (of integers, say), and how often each has been written to.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=parameters)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    untouched = {}
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            if tensor.is_floating_point():
                _local(tensor).fill_(torch.nan)
            else:
                untouched[name] = (tensor, times_written(_local(tensor)))
    return untouched


def _check_filled(model: nn.Module, untouched: dict[str, tuple[torch.Tensor, int]]) -> None:
    unset = [n for n, t in _tensors(model).items() if t.is_floating_point() and bool(_local(t).isnan().any())]
    for name, tensor in _tensors(model).items():
        if name in untouched and untouched[name][0] is tensor and untouched[name][1] == times_written(_local(tensor)):
            unset.append(name)
    if unset:
        raise ValueError(
            f"init did not set {', '.join(unset[:8])}{' …' if len(unset) > 8 else ''}; a model built on the meta "
            "device has no values until init gives it some, to buffers and 1-D parameters too"
        )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
