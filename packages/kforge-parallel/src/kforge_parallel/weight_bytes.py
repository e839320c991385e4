"""What a rank holds of weights, gradients and the optimizer's state, counted shard by shard. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from kforge_parallel.axes import expert_shard, places, shard_dim
from kforge_parallel.config import ParallelConfig
from kforge_parallel.shape import Parameter, Sizes
from kforge_parallel.stages import SCHEDULES, split_layers, stages_of_rank, stages_per_rank
from kforge_parallel.work import COMPUTE_BYTES, Work, storage_bytes

CUT_ALONG = {
    **dict.fromkeys(("colwise", "colwise_join", "colwise_kv", "colwise_qkv", "experts_sum"), 0),
    **dict.fromkeys(("vocab_embedding", "vocab_loss"), 0),
    **dict.fromkeys(("packed_colwise", "rowwise", "rowwise_part"), 1),
}
"""Word of a plan -> along which dimension it cuts a weight."""
INT8_BLOCK, INT8_SMALLEST = 256, 4096
"""Elements that share a scale of 8-bit moments and gradients, and tensors below which moments have none."""


@dataclass(frozen=True)
class Model:
    """A model's sizes and its parameters."""

    sizes: Sizes
    parameters: Sequence[Parameter]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Of `hold`: layouts that differ in other things hold the same weights."""

    def __post_init__(self) -> None:
        layers = 1 + max((p.layer for p in self.parameters if p.layer is not None), default=-1)
        blocks: list[list[Parameter]] = [[] for _ in range(layers)]
        for p in self.parameters:
            if p.layer is not None:
                blocks[p.layer].append(p)
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "mixed", [any(p.expert for p in block) for block in blocks])
        sums = {any(p.expert for p in block): sum(map(self.met_of, block)) for block in blocks}
        object.__setattr__(self, "met", sums)

    blocks: list[list[Parameter]] = field(init=False, repr=False)
    """The parameters of each block."""
    mixed: list[bool] = field(init=False, repr=False)
    """Whether each block has experts."""
    met: dict[bool, float] = field(init=False, repr=False)
    """Whether a block has experts -> elements of its matrices that a token meets; of several, the last's."""

    def met_of(self, p: Parameter) -> float:
        """Elements that a token meets on average; 0 of what is no matrix."""
        if len(p.shape) < 2:
            return 0.0
        return p.count * (self.sizes.top_k / self.sizes.experts if p.expert else 1.0)


@dataclass(frozen=True)
class Held:
    """What one rank holds."""

    parameters: int
    """Bytes of the weights that it stores."""
    gradients: int
    """Bytes of their gradients, as the optimizer gets them."""
    state: int
    """Bytes of the optimizer's state."""
    units: dict[str, int]
    """FSDP unit -> elements of it, whole but for tp and ep."""
    travelling: dict[str, int]
    """FSDP unit -> bytes of it when it is gathered."""
    in_blocks: frozenset[str]
    """The units that are blocks, or experts of one."""
    in_8_bits: int
    """Bytes of weights that are kept in FP8 beside those stored, where nothing is gathered."""
    summed: int
    """Bytes of gradients that tensor-parallel ranks sum in each backward: of weights that each of them has whole."""
    copied: int
    """Bytes that it sends to replicas in one reduction."""
    feedback: int
    """Bytes of what compressed gradients have left over."""
    twins: int
    """Elements of second copies: of what both ends of a pipeline need, where both lie on this rank."""
    wrapped: bool
    """Whether FSDP wraps the model."""
    stages: list[list[int]]
    """The blocks of each of its stages."""
    first: bool
    last: bool
    """Whether it has the first, and the last stage."""


def hold(model: Model, config: ParallelConfig, axes: dict[str, int], work: Work, rank: int) -> Held:
    """What ``rank`` holds of a model."""
    # What weights depend on; a layout is asked for many times, with other ways of keeping activations.
    asked = (
        config.sequence_parallel,
        config.precision,
        config.storage,
        config.fp8,
        config.fp8_skip,
        config.cpu_offload,
    )
    cut = (config.pp_schedule, config.pp_stages, config.pp_split, config.pp_layers)
    optimizer = (work.optimizer, work.moments, work.row_variance, work.ema)
    key = (asked, cut, (config.compress, config.compress_rank), tuple(axes.items()), optimizer, rank)
    if key not in model.cache:
        model.cache[key] = _hold(model, config, axes, work, rank)
    found: Held = model.cache[key]
    return found


def _hold(model: Model, config: ParallelConfig, axes: dict[str, int], work: Work, rank: int) -> Held:
    at = places(rank, axes)
    pp, world = axes["pp"], math.prod(axes.values()) // axes["ep"]
    wrapped = world > 1 or config.storage == "fp32"
    stages, first, last = stages_of(model, config, pp, at["pp"])
    held = {layer for stage in stages for layer in stage}
    mine = [p for p in model.parameters if p.layer in held or (p.first and first) or (p.last and last)]
    stored, b = storage_bytes(config), COMPUTE_BYTES[config.precision]
    places_ = {"shard": at["dp_shard"] * axes["cp"] + at["cp"], "part": at["expert_shard"]}
    # What is offloaded, parts of unequal size and schedules that split the backward are cast after the gather.
    can_travel = not config.cpu_offload and not (pp > 1 and SCHEDULES[config.pp_schedule].splits_backward)
    shards = axes["dp_shard"] * axes["cp"]
    elements = state = in_8_bits = twins = feedback = summed = 0
    copied = 0.0
    units: dict[str, int] = {}
    travelling: dict[str, int] = {}
    in_blocks = set()
    for p in mine:
        here = local_shape(p, axes, model.sizes.kv_heads, **places_)
        whole = local_shape(p, axes, model.sizes.kv_heads, shard=None, part=0)
        unit = p.unit + (" experts" if p.expert and axes["ep"] > 1 else "")
        kept_bytes = {"tensorwise": 1, "rowwise": 2}.get(config.fp8, 0) * _multiplies_in_fp8(p, whole, config)
        travels = kept_bytes == 1 and can_travel and whole[shard_dim(whole, shards)] % shards == 0
        elements += math.prod(here)
        state += state_bytes(p, here, config, work)
        units[unit] = units.get(unit, 0) + math.prod(whole)
        travelling[unit] = travelling.get(unit, 0) + math.prod(whole) * (1 if travels else b)
        in_8_bits += 0 if wrapped else kept_bytes * math.prod(here)
        twins += math.prod(here) if pp > 1 and first and last and p.first and p.last else 0
        values, kept = _compressed(here, config, axes["dp_replicate"], max(4, b))
        copied, feedback = copied + values, feedback + kept
        if axes["tp"] > 1 and _used_apart(p, config, axes, model.sizes.kv_heads):
            summed += max(4, b) * math.prod(whole)
        if p.layer is not None:
            in_blocks.add(unit)
    return Held(
        parameters=stored * elements,
        gradients=(stored if wrapped else max(4, b)) * elements,
        state=state,
        units=units,
        travelling=travelling,
        in_blocks=frozenset(in_blocks),
        in_8_bits=in_8_bits,
        summed=summed,
        copied=int(copied),
        feedback=feedback,
        twins=twins,
        wrapped=wrapped,
        stages=stages,
        first=first,
        last=last,
    )


def _used_apart(p: Parameter, config: ParallelConfig, axes: dict[str, int], kv_heads: int) -> bool:
    """Whether tensor-parallel ranks have a weight whole, and use it on other data each."""
    if p.expert and axes["ep"] > 1:
        return False
    if p.word in ("colwise_kv", "colwise_qkv"):
        return kv_heads % axes["tp"] > 0
    on_rows = p.word == "sequence" or (p.word == "rowwise" and p.name.endswith("bias"))
    return p.word in ("replicate", "experts") or (config.sequence_parallel and on_rows)


def _compressed(here: Sequence[int], config: ParallelConfig, replicas: int, w: int) -> tuple[float, int]:
    """Bytes that a rank sends to replicas of the gradient of a parameter of which it has the shape ``here``, and bytes
    that it keeps of what was lost, for the steps before and for the last."""
    count, share = math.prod(here), 2 * (replicas - 1) / replicas
    if config.compress in ("bf16", "int8"):
        room = -(-count // INT8_BLOCK) * INT8_BLOCK
        if config.compress == "bf16":
            return share * room * 2, 0
        return share * (room + 4 * room // INT8_BLOCK), 2 * w * (room + room // replicas)
    thin = config.compress_rank * (math.prod(here[:-1]) + here[-1]) if len(here) > 1 else count
    if config.compress == "powersgd" and 2 * thin <= count:
        return share * w * thin, 2 * w * (count + config.compress_rank * here[-1])
    return share * w * count, 0


def stages_of(model: Model, config: ParallelConfig, pp: int, pp_rank: int) -> tuple[list[list[int]], bool, bool]:
    """The blocks of each stage of a pipeline rank, and whether it has the first stage and the last."""
    if pp == 1:
        return [[*range(len(model.blocks))]], True, True

    def cost(parameters: Iterable[Parameter]) -> float:
        return sum(p.count if len(p.shape) < 2 else model.met_of(p) for p in parameters)

    further = cost(p for p in model.parameters if p.name.startswith("mtp.") and ".block." in p.name)
    after = further + (1.0 + model.sizes.mtp) * model.sizes.vocab * model.sizes.dim
    costs = [cost(block) for block in model.blocks]
    split = split_layers(config, pp, len(model.blocks), costs, after)
    own = stages_of_rank(pp_rank, config, pp)
    return [[*split[number]] for number in own], 0 in own, pp * stages_per_rank(config) - 1 in own


def local_shape(
    parameter: Parameter, axes: dict[str, int], kv_heads: int, *, shard: int | None, part: int
) -> list[int]:
    """The shape that a rank has of a parameter: after tp and ep with shard None, else its FSDP shard too. shard: place
    among the ranks that share it; part: the same on the expert root."""
    shape = list(parameter.shape)
    shards = axes["dp_shard"] * axes["cp"]
    if parameter.expert and axes["ep"] > 1:
        shape[0] //= axes["ep"]
        shards, shard = expert_shard(axes), None if shard is None else part
    elif axes["tp"] > 1:
        if parameter.word is None:
            raise ValueError(
                f"parallel.tp = {axes['tp']}, and nothing says how it cuts {parameter.name}; give the model a plan"
            )
        dim = CUT_ALONG.get(parameter.word)
        whole = parameter.word in ("colwise_kv", "colwise_qkv") and kv_heads % axes["tp"]
        if dim is not None and not whole and not (dim == 1 and parameter.name.endswith("bias") and len(shape) == 1):
            shape[dim] //= axes["tp"]
    if shard is not None and shards > 1 and shape:
        dim = shard_dim(shape, shards)
        each = -(-shape[dim] // shards)
        shape[dim] = max(0, min(each, shape[dim] - shard * each))
    return shape


def held_shapes(
    parameters: Iterable[Parameter], axes: dict[str, int], kv_heads: int, rank: int
) -> dict[str, tuple[int, ...]]:
    """Name -> the shape of what ``rank`` stores of each parameter."""
    at = places(rank, axes)
    place = {"shard": at["dp_shard"] * axes["cp"] + at["cp"], "part": at["expert_shard"]}
    return {p.name: tuple(local_shape(p, axes, kv_heads, **place)) for p in parameters}


def state_bytes(parameter: Parameter, here: Sequence[int], config: ParallelConfig, work: Work) -> int:
    """The optimizer's state of a parameter of which a rank has the shape ``here``."""
    count, stored = math.prod(here), storage_bytes(config)
    wide = max(4, stored)
    total = 2 * count if config.storage == "split" else 0
    total += wide * count if work.ema else 0
    rule = work.optimizer
    if rule == "muon":
        if _is_matrix(parameter):
            rows = math.prod(here[:-1]) if work.row_variance else 0
            return total + wide * (count + rows)
        rule = "adamw"
    if rule == "adamw":
        small = len(parameter.shape) < 2 or parameter.count < INT8_SMALLEST
        if work.moments == "fp32" or (work.moments == "int8" and small):
            return total + 4 + 2 * wide * count
        if work.moments == "bf16":
            return total + 4 + 4 * count
        scales = math.prod(here[:-1]) * -(-parameter.shape[-1] // INT8_BLOCK)
        return total + 4 + 2 * (count + 4 * scales)
    if rule == "schedule_free":
        return total + 3 * 8 + 2 * wide * count
    return total if rule == "none" else total + wide * count  # lion


def _is_matrix(parameter: Parameter) -> bool:
    """Whether muon takes it: matrices inside of blocks, but for routers."""
    leaf = parameter.name
    inside = parameter.layer is not None or ".block." in leaf or leaf.endswith("proj.weight")
    return inside and len(parameter.shape) > 1 and not any(word in leaf for word in ("router", "bias"))


def _multiplies_in_fp8(parameter: Parameter, shape: Sequence[int], config: ParallelConfig) -> bool:
    """Whether it is the weight of a linear module that multiplies in FP8, being of this shape on a rank."""
    owner = parameter.name.rpartition(".")[0]
    if config.fp8 == "none" or len(shape) < 2 or parameter.layer is None or parameter.expert:
        return False
    even = math.prod(shape[:-1]) % 16 == 0 and shape[-1] % 16 == 0
    return even and not any(fnmatchcase(owner, pattern) for pattern in config.fp8_skip)
