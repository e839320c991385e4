"""What a layout costs each rank, counted from sizes: memory by part, and bytes sent in a step. No process, no torch.

Parameters, gradients and the optimizer's state are counted exactly, shard by shard. The rest is a model of what the
code holds, with T tokens of a microbatch on a rank, R of them on the residual stream (T / tp under sequence_parallel),
D features, H and KV heads of d features here, F hidden features here, b bytes of the compute dtype, w = max(b, 4):

    a block keeps          compiled               not compiled
    ---------------------- ---------------------- ------------------------------------------------------------
    two norms              2 R (b D + w)          2 R (2 w D + w): the input and what is scaled, in fp32
    inputs of products     2 T b D                the same
    attention              T b (2 H + 2 KV) d     T b (3 H + 3 KV) d: v keeps the whole product
    norms of heads         T b (H + KV) d         2 T w (H + KV) d
    its log-sum-exp        T w H                  the same
    feed-forward, gated    3 T b F                4 T b F
    experts, a slot        b (2 D + 3 F)          b (2 D + 4 F)            slots: R times experts a token, on average

Under tensorwise FP8 products keep their inputs in one byte an element. Recomputed blocks keep their input, and what
`recompute_keep` says; the one that runs again has all of it once more. The loss in chunks of C tokens over V rows of
the head keeps w V D for the head's gradient, b C V logits, and 2 T b D for hidden states and their gradient; all logits
at once are T V (b + 3 w). The peak is the greatest of three moments: the end of the last microbatch's forward, where
activations are whole; the beginning of its backward; and its end, where gradients are whole. What the allocator, cuBLAS
and NCCL take beside is not in it: 1 to 3 GB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from kforge_parallel.axes import expert_shard, places, product_text, shard_dim
from kforge_parallel.config import ParallelConfig
from kforge_parallel.layout import check_layout
from kforge_parallel.shape import ModelShape, Parameter, Sizes, decoder_parameters, sizes_of
from kforge_parallel.stages import SCHEDULES, split_layers, stages_of_rank, stages_per_rank

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4, "fp64": 8}
CUT_ALONG = {
    **dict.fromkeys(("colwise", "colwise_kv", "colwise_qkv", "vocab_embedding", "vocab_loss"), 0),
    **dict.fromkeys(("packed_colwise", "rowwise"), 1),
}
"""Word of a plan -> along which dimension it cuts a weight."""
OPTIMIZERS = ("adamw", "lion", "cautious_lion", "muon", "schedule_free", "none")
"""Whose state is known here; none: a state of no bytes."""
MOMENTS = ("fp32", "bf16", "int8")
INT8_BLOCK, INT8_SMALLEST = 256, 4096
"""Elements that share a scale of 8-bit moments, and the tensors below which there are none."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step is made of, beside model and layout."""

    row_tokens: int
    """Tokens of a row."""
    microbatch_rows: int = 1
    """Rows that a data rank computes at a time."""
    microbatches: int = 1
    """Of each data rank in a step."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    moments: str = "fp32"
    """How AdamW keeps its moments: fp32, bf16 or int8 (`MOMENTS`)."""
    row_variance: bool = False
    """Whether muon keeps a second moment of each row."""
    ema: bool = False
    """Whether an average of the weights is kept beside them, on the device."""

    def __post_init__(self) -> None:
        for name in ("row_tokens", "microbatch_rows", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name, known in (("optimizer", OPTIMIZERS), ("moments", MOMENTS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: of its state nothing is known; use one of {', '.join(known)}"
                )


@dataclass(frozen=True)
class Estimate:
    """What one rank needs. Bytes; ``str()`` is a table."""

    rank: int
    axes: dict[str, int]
    """Sizes of all axes."""
    parameters: int
    """Of the weights that the rank stores, its shards."""
    gradients: int
    """Of their gradients, as the optimizer gets them."""
    moments: int
    """Of the optimizer's state, its counters and the other halves of split weights included."""
    activations: int
    """Kept for backward, of all microbatches that are under way."""
    logits: int
    """Of head and loss, on the rank that has the head."""
    gathered: int
    """Whole weights of FSDP units."""
    sums: int
    """Gradients before they are reduced: sums of microbatches, and of the unit that is on its way."""
    working: int
    """What a block needs while it runs (again) in backward."""
    host: int
    """In host memory: what is offloaded."""
    at: dict[str, int]
    """Moment of a step -> what is held then."""
    sent: dict[str, int]
    """Axis -> bytes that the rank sends in a step."""
    block_kept: int = 0
    """What one block keeps of one microbatch; of blocks that differ, the most."""
    recomputed: float = 0.0
    """Floating-point operations that are done again in a step, by this rank."""

    @property
    def peak(self) -> int:
        """The greatest of ``at``."""
        return max(self.at.values())

    @property
    def parts(self) -> dict[str, int]:
        """Part -> its bytes, at its own largest."""
        names = ("parameters", "gradients", "moments", "activations", "logits", "gathered", "sums", "working")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        moment = max(self.at, key=lambda name: self.at[name])
        lines = [f"rank {self.rank} of {product_text(self.axes)}: {gb(self.peak)} at most, at {moment}"]
        lines += [f"  {name:<12} {gb(size):>10}" for name, size in self.parts.items()]
        lines += [f"  {'on the host':<12} {gb(self.host):>10}"] if self.host else []
        sent = ", ".join(f"{axis} {gb(size)}" for axis, size in self.sent.items() if size) or "nothing"
        return "\n".join([*lines, f"  sent in a step: {sent}"])


def gb(size: float) -> str:
    """Bytes as text, in units of 10⁹."""
    return f"{size / 1e9:.2f} GB" if size >= 5e6 else f"{size / 1e6:.2f} MB"


def estimate_layout(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    work: Work,
    *,
    rank: int | None = None,
    parameters: Sequence[Parameter] | None = None,
) -> Estimate:
    """What a rank of a layout needs; rank None: of the one that needs the most.

    parameters: of the whole model, as `parameters_of` reads them off a module; None: of a decoder of ``shape``
        (`decoder_parameters`). Activations are those of such a decoder in either case.

    Raises ValueError as `check_layout` and `decoder_parameters` do.
    """
    # The machine that asks need not be the one that trains.
    axes = check_layout(replace(config, device="cuda") if config.device == "auto" else config, world_size, shape)
    listed = decoder_parameters(shape) if parameters is None else parameters
    model = Model(sizes_of(shape), listed)
    if rank is not None:
        return _of_rank(model, config, axes, work, rank)
    # Shards differ by one part of a tensor, the first being the largest; stages differ in what they have.
    step = world_size // axes["pp"]
    return max((_of_rank(model, config, axes, work, pp * step) for pp in range(axes["pp"])), key=lambda e: e.peak)


@dataclass(frozen=True)
class Model:
    """A model's sizes and its parameters."""

    sizes: Sizes
    parameters: Sequence[Parameter]
    by_place: dict[str, list[Parameter]] = field(default_factory=dict)

    def of_stages(self, config: ParallelConfig, pp: int, pp_rank: int) -> tuple[list[Parameter], list[list[int]]]:
        """The parameters of a pipeline rank, and the blocks of each of its stages."""
        layers = 1 + max((p.layer for p in self.parameters if p.layer is not None), default=-1)
        if pp == 1:
            return list(self.parameters), [list(range(layers))]
        costs = [0.0] * layers
        for p in self.parameters:
            if p.layer is not None:
                costs[p.layer] += p.count * (self.sizes.top_k / self.sizes.experts if p.expert else 1.0)
        after = sum(p.count for p in self.parameters if p.last) * (1.0 + self.sizes.mtp)
        split = split_layers(config, pp, layers, costs, float(after))
        own = stages_of_rank(pp_rank, config, pp)
        blocks = [list(split[number]) for number in own]
        held = {layer for part in blocks for layer in part}
        first, last = 0 in own, pp * stages_per_rank(config) - 1 in own
        mine = [p for p in self.parameters if p.layer in held or (p.first and first) or (p.last and last)]
        return mine, blocks


# ---------------------------------------------------------------------------------------------- weights and their kin


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


def storage_bytes(config: ParallelConfig) -> int:
    """Bytes of an element of a stored weight."""
    return 2 if config.storage != "fp32" else max(4, COMPUTE_BYTES[config.precision])


def _travels_in_8_bits(parameter: Parameter, shape: Sequence[int], config: ParallelConfig, pp: int) -> bool:
    """Whether the weight of a linear module of this shape on a rank is gathered, or kept, as FP8."""
    owner = parameter.name.rpartition(".")[0]
    if config.fp8 != "tensorwise" or pp > 1 or config.cpu_offload:
        return False
    if len(shape) < 2 or parameter.layer is None or parameter.expert:
        return False
    even = math.prod(shape[:-1]) % 16 == 0 and shape[-1] % 16 == 0
    return even and not any(fnmatchcase(owner, pattern) for pattern in config.fp8_skip)


# ---------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Kept:
    """What a block holds of one microbatch, in bytes."""

    whole: int
    """Where nothing is recomputed."""
    kept: int
    """As the mode has it."""
    working: int
    """Gradients of its activations, while its backward runs."""


def block_kept(s: Sizes, mixed: bool, config: ParallelConfig, axes: dict[str, int], work: Work, mode: str) -> Kept:
    """What one block holds of one microbatch under a mode of recomputation."""
    b = COMPUTE_BYTES[config.precision]
    w = max(4, b)
    tp, cp, ep = axes["tp"], axes["cp"], axes["ep"]
    lean = config.compile
    t = work.microbatch_rows * work.row_tokens // cp
    r = t // tp if config.sequence_parallel else t
    d, dh = s.dim, s.head_dim
    h, kv = s.heads // tp, max(1, s.kv_heads // tp)
    norms = 2 * r * (b * d + w) if lean else 2 * r * (2 * w * d + w)
    e = 1 if config.fp8 == "tensorwise" else b  # an element of what a product keeps of its input
    # Experts get the sequence shard; a gathered input is the product's own.
    inputs = d * (e * t + (b * r if mixed else e * t))
    if cp == 1:
        attention = t * b * ((2 * h + 2 * kv) if lean else (3 * h + 3 * kv)) * dh
    elif config.cp_style == "allgather":
        attention = t * b * (3 * h if config.device != "cpu" else 2 * h) * dh + t * cp * b * 2 * kv * dh
    elif config.cp_style == "ulysses":
        repeated = kv if kv % cp == 0 else max(kv, cp)
        attention = t * b * (3 * h + 2 * repeated) * dh
    else:
        attention = t * b * (3 * h + 2 * kv) * dh
    if e != b:
        attention += t * e * h * dh  # the output, in bits beside what attention keeps of it
    if s.qk_norm:
        attention += t * (b if lean else 2 * w) * (h + kv) * dh
    lse = t * w * h
    gated = s.matrices == 3
    wide = (3 if lean else 4) if gated else 2
    up = 2 if gated else 1
    slots = r * s.top_k
    if mixed:
        routing = r * (w * s.experts + w + 2 * w * s.top_k) + 24 * slots + (16 * slots if ep > 1 else 0)
        mlp = slots * b * (2 * d + wide * s.expert_ffn) + routing + r * b * wide * s.shared_ffn
        grads = slots * b * (d + 3 * s.expert_ffn)
    else:
        mlp = t * (b * (wide - 1) + e) * (s.ffn // tp)
        grads = t * b * (up + 1) * (s.ffn // tp)
    whole = norms + inputs + attention + lse + mlp
    working = grads + 2 * t * b * d
    if mode == "none":
        return Kept(whole, whole, working)
    kept = r * b * d + (slots * 24 + r * w * s.experts if mixed else 0)
    if mode == "selective":
        keep = config.recompute_keep
        if "products" in keep:
            kept += t * b * ((h + 2 * kv) * dh + d)
            kept += slots * b * (up * s.expert_ffn + d) if mixed else t * b * (up * (s.ffn // tp) + d)
            kept += r * b * (up * s.shared_ffn + d) if mixed and s.shared_ffn else 0
        if "attention" in keep:
            kept += t * b * h * dh + lse
        if "transfers" in keep:
            kept += b * d * (t * (1 if mixed else 2) + 2 * r) if tp > 1 else 0
            kept += 2 * slots * b * d if mixed and ep > 1 else 0
            kept += t * cp * b * 2 * kv * dh if cp > 1 and config.cp_style == "allgather" else 0
    return Kept(whole, min(kept, whole), working)


def in_flight(config: ParallelConfig, pp: int, pp_rank: int, microbatches: int) -> float:
    """How many microbatches' activations a pipeline rank holds at most, each counted for all its stages.

    gpipe: all. 1f1b: pp - rank. Interleaved with v stages a rank: (2 (pp - rank - 1) + (v - 1) pp + 1) / v (Narayanan
    et al. 2021). zbv and dualpipev: pp and pp + 1 (Qi et al. 2024; DeepSeek-V3, table 2).
    """
    kind, word, v = SCHEDULES[config.pp_schedule], config.pp_schedule, stages_per_rank(config)
    if pp == 1:
        return 1.0
    if word == "gpipe":
        held = float(microbatches)
    elif word == "1f1b":
        held = float(pp - pp_rank)
    elif kind.v:
        held = float(pp + (1 if word == "dualpipev" else 0))
    else:
        held = (2 * (pp - pp_rank - 1) + (v - 1) * pp + 1) / v
    return min(held, float(microbatches))


# ---------------------------------------------------------------------------------------------- all of it


def _of_rank(model: Model, config: ParallelConfig, axes: dict[str, int], work: Work, rank: int) -> Estimate:
    s, at = model.sizes, places(rank, axes)
    world = math.prod(axes[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    wrapped = world > 1 or config.storage == "fp32"
    shard, part = at["dp_shard"] * axes["cp"] + at["cp"], at["expert_shard"]
    mine, stages = model.of_stages(config, axes["pp"], at["pp"])
    stored, b = storage_bytes(config), COMPUTE_BYTES[config.precision]
    w = max(4, b)
    blocks = [layer for stage in stages for layer in stage]
    has_first, has_last = any(p.first for p in mine), any(p.last for p in mine)

    def local(p: Parameter, sharded: bool = True) -> list[int]:
        return local_shape(p, axes, s.kv_heads, shard=shard if sharded else None, part=part)

    here = {p: local(p) for p in mine}
    counts = {p: math.prod(shape) for p, shape in here.items()}
    # A copy that lies on the same rank twice (both ends of a V) is one parameter of the model, and two tensors.
    twins = sum(counts[p] for p in mine if p.first and p.last and axes["pp"] > 1 and has_first and has_last)
    parameters = stored * sum(counts.values())
    gradients = (stored if wrapped else w) * sum(counts.values())
    moments = sum(state_bytes(p, here[p], config, work) for p in mine)

    units: dict[str, int] = {}
    travelling: dict[str, int] = {}
    for p in mine:
        shape = local(p, sharded=False)
        unit = p.unit + (" experts" if p.expert and axes["ep"] > 1 else "")
        count = math.prod(shape)
        units[unit] = units.get(unit, 0) + count
        travelling[unit] = travelling.get(unit, 0) + count * (
            1 if _travels_in_8_bits(p, shape, config, axes["pp"]) else b
        )
    unsharded = sum(units.values())
    in_blocks = {unit for p in mine if p.layer is not None for unit in (p.unit, f"{p.unit} experts")}
    others = [unit for unit in units if unit not in in_blocks]
    largest_block = max((_with_experts(travelling, u) for u in in_blocks if u in units), default=0)
    keeps = not config.reshard_after_forward or (axes["pp"] > 1 and SCHEDULES[config.pp_schedule].splits_backward)
    if not wrapped:
        gathered = sum(counts[p] for p in mine if _travels_in_8_bits(p, here[p], config, 1))  # beside the weights
        gathered_at = dict.fromkeys(("forward", "backward", "end"), gathered)
    elif keeps:
        gathered = sum(travelling.values())
        gathered_at = {"forward": gathered, "backward": gathered, "end": max(travelling.values(), default=0)}
    else:
        ends = max((travelling[u] for u in others), default=0)
        ahead = (1 + max(1, config.prefetch)) * largest_block
        gathered = ends + ahead
        gathered_at = {"forward": ends + largest_block, "backward": ahead + ends, "end": ends}

    accumulates = work.microbatches > 1 and config.accumulate == "unsharded"
    held_sums = w * unsharded if accumulates and wrapped else 0
    if not wrapped:
        held_sums = gradients if work.microbatches > 1 else 0
    elif work.microbatches > 1 and not accumulates:
        held_sums = gradients  # sharded, and there since the first microbatch
    largest_unit = max(units.values(), default=0)
    on_the_way = (b + w) * largest_unit if wrapped else b * largest_unit

    live = in_flight(config, axes["pp"], at["pp"], work.microbatches)
    kept = [_kept_of(model, layer, i, config, axes, work) for stage in stages for i, layer in enumerate(stage)]
    one_microbatch = sum(k.kept for k in kept)
    activations, host = int(live * one_microbatch), 0
    if config.offload_activations:
        two = 2 * max((k.kept for k in kept), default=0)
        host, activations = activations, min(activations, two)
    logits_forward, logits_backward = _loss(s, config, axes, work) if has_last else (0, 0)
    again = max((k.whole for k in kept if k.kept < k.whole), default=0)
    working = max((k.working for k in kept), default=0) + again

    twin_bytes = twins * (stored + (stored if wrapped else w))
    static = parameters + moments + twins * stored
    if config.cpu_offload:
        host += parameters + moments + gradients + twin_bytes
        static = 0
    moments_of = {
        "the end of forward": static + held_sums + gathered_at["forward"] + activations + logits_forward,
        "the beginning of backward": static
        + held_sums
        + gathered_at["backward"]
        + activations
        + max(logits_backward, working + on_the_way // (2 if accumulates else 1)),
        "the end of backward": static
        + (0 if config.cpu_offload else gradients + twins * stored)
        + gathered_at["end"]
        + (on_the_way if wrapped else 0),
    }
    return Estimate(
        rank=rank,
        axes=axes,
        parameters=parameters,
        gradients=gradients,
        moments=moments,
        activations=activations,
        logits=max(logits_forward, logits_backward),
        gathered=gathered,
        sums=held_sums + on_the_way,
        working=working,
        host=host,
        at=moments_of,
        sent=_sent(model, mine, units, travelling, config, axes, work, at, stages, wrapped),
        block_kept=max((k.kept for k in kept), default=0),
        recomputed=_recomputed(model, blocks, stages, config, axes, work),
    )


def _with_experts(travelling: Mapping[str, int], unit: str) -> int:
    return travelling[unit] + travelling.get(f"{unit} experts", 0)


def _kept_of(model: Model, layer: int, place: int, config: ParallelConfig, axes: dict[str, int], work: Work) -> Kept:
    """Of a block by its number; place: in its stage, of which the first of each so many is recomputed."""
    mode = config.recompute if place % config.recompute_every == 0 else "none"
    return block_kept(model.sizes, is_mixed(model, layer), config, axes, work, mode)


def is_mixed(model: Model, layer: int) -> bool:
    """Whether a block has experts, by its parameters."""
    return any(p.expert for p in model.parameters if p.layer == layer)


def _loss(s: Sizes, config: ParallelConfig, axes: dict[str, int], work: Work) -> tuple[int, int]:
    """What head and loss hold in forward, and at the beginning of backward."""
    b = COMPUTE_BYTES[config.precision]
    tokens = work.microbatch_rows * work.row_tokens // axes["cp"] * (1 + s.mtp)
    residual = tokens // (axes["tp"] if config.sequence_parallel else 1)
    hidden = tokens * b * s.dim + 2 * residual * max(4, b) * s.dim  # the last norm's, which is not compiled
    forward, backward = loss_bytes(tokens, s.dim, s.vocab // axes["tp"], s.chunk, b)
    return hidden + forward, hidden + backward


def loss_bytes(tokens: int, dim: int, rows: int, chunk: int, b: int) -> tuple[int, int]:
    """What `linear_cross_entropy` holds of kforge-model beside its inputs, in forward and in backward: gradients of the
    head's weight [rows, dim], wide and then rounded, and again times that of the loss; of the hidden states; logits.
    chunk 0: all logits, the same and their logarithms wide, and in backward their gradient."""
    of_hidden, w = tokens * b * dim, max(4, b)
    if not chunk:
        return tokens * rows * (b + 2 * w), tokens * rows * (b + 3 * w) + of_hidden
    forward = w * rows * dim + b * min(chunk, tokens) * rows + of_hidden
    return forward, 2 * (b * rows * dim + of_hidden)


# ---------------------------------------------------------------------------------------------- operations


def block_flops(model: Model, layer: int, work: Work, axes: dict[str, int]) -> tuple[float, float]:
    """Operations of one forward of a block over one microbatch, of this rank: of its products, of its attention."""
    s = model.sizes
    tokens = work.microbatch_rows * work.row_tokens / axes["cp"]
    matrices = sum(
        p.count * (s.top_k / s.experts if p.expert else 1.0)
        for p in model.parameters
        if p.layer == layer and len(p.shape) > 1
    )
    attention = 2 * s.heads * 2 * s.head_dim * (work.row_tokens + 1) / 2
    return 2 * matrices * tokens / axes["tp"], attention * tokens / axes["tp"]


def _recomputed(
    model: Model,
    blocks: Iterable[int],
    stages: Sequence[Sequence[int]],
    config: ParallelConfig,
    axes: dict[str, int],
    work: Work,
) -> float:
    total = 0.0
    for stage in stages:
        for layer in stage[:: config.recompute_every]:
            products, attention = block_flops(model, layer, work, axes)
            if config.recompute == "full":
                total += products + attention
            elif config.recompute == "selective":
                total += 0.0 if "products" in config.recompute_keep else products
                total += 0.0 if "attention" in config.recompute_keep else attention
    return total * work.microbatches


# ---------------------------------------------------------------------------------------------- transfers


def _sent(
    model: Model,
    mine: Sequence[Parameter],
    units: Mapping[str, int],
    travelling: Mapping[str, int],
    config: ParallelConfig,
    axes: dict[str, int],
    work: Work,
    at: Mapping[str, int],
    stages: Sequence[Sequence[int]],
    wrapped: bool,
) -> dict[str, int]:
    """Axis -> bytes that a rank sends in a step; a gather or a reduction over n ranks of B bytes in all sends
    B (n - 1) / n from each, as rings do."""
    s, b = model.sizes, COMPUTE_BYTES[config.precision]
    w = max(4, b)
    tp, cp, ep, replicas = axes["tp"], axes["cp"], axes["ep"], axes["dp_replicate"]
    rows, micro = work.microbatch_rows, work.microbatches
    t = rows * work.row_tokens // cp
    shards = {False: axes["dp_shard"] * cp, True: expert_shard(axes)}
    others = {u for u in units if not any(p.layer is not None for p in mine if u.removesuffix(" experts") == p.unit)}
    fsdp = 0.0
    copies = 0.0
    keeps = not config.reshard_after_forward or (axes["pp"] > 1 and SCHEDULES[config.pp_schedule].splits_backward)
    for unit, count in units.items():
        n = shards[unit.endswith(" experts")]
        times = micro * (1 if keeps or unit in others else 2)
        if axes["pp"] > 1 and keeps:
            times = 1
        fsdp += travelling[unit] * (n - 1) / n * times
        reductions = micro if config.accumulate == "sharded" else 1
        fsdp += w * count * (n - 1) / n * reductions
        copies += 2 * w * count / n * (replicas - 1) / replicas * reductions
    blocks = [layer for stage in stages for layer in stage]
    experts = [layer for layer in blocks if is_mixed(model, layer)]
    again = _again(config)
    one = t * b * s.dim * (tp - 1) / tp if tp > 1 else 0.0
    ends = sum(1 for flag in (any(p.first for p in mine), any(p.last for p in mine)) if flag)
    # gather and scatter around each half, and their transposes in backward; experts have no such half
    tensor = one * micro * ((4 + 2 * again) * (2 * len(blocks) - len(experts)) + 2 * ends)
    context = 0.0
    if cp > 1:
        kv = 2 * t * b * max(1, s.kv_heads // tp) * s.head_dim
        q = 2 * t * b * (s.heads // tp) * s.head_dim
        each = kv * (cp - 1) if config.cp_style != "ulysses" else (q + kv) * (cp - 1) / cp
        back = each * (2 if config.cp_style == "ring" else 1)
        context = micro * len(blocks) * (each * (1 + again) + back)
    residual = t // tp if config.sequence_parallel else t
    exchange = residual * s.top_k * b * s.dim * (ep - 1) / ep if ep > 1 else 0.0
    pipeline = 0.0
    if axes["pp"] > 1:
        total = axes["pp"] * stages_per_rank(config)
        own = stages_of_rank(at["pp"], config, axes["pp"])
        on = set(own)
        hops = sum((n + 1 < total and n + 1 not in on) + (n > 0 and n - 1 not in on) for n in own)
        pipeline = hops * micro * residual * b * s.dim
    return {
        "dp_shard": int(fsdp) if wrapped else 0,
        "dp_replicate": int(copies),
        "tp": int(tensor),
        "cp": int(context),
        "ep": int(exchange * micro * len(experts) * (4 + 2 * again)),
        "pp": int(pipeline),
    }


def _again(config: ParallelConfig) -> float:
    """How often transfers inside of blocks are made again in backward, on average over blocks."""
    made_again = config.recompute == "full" or (
        config.recompute == "selective" and "transfers" not in config.recompute_keep
    )
    return 1 / config.recompute_every if made_again else 0.0
