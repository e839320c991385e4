"""What a rank sends in a step, and what it computes. Standard library only.

A gather or a reduction over n ranks of B bytes in all sends B (n - 1) / n from each, as rings do; a sum that all get
sends twice that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kforge_parallel.axes import expert_shard, places
from kforge_parallel.config import ParallelConfig
from kforge_parallel.stages import SCHEDULES, stages_of_rank, stages_per_rank
from kforge_parallel.weight_bytes import Held, Model
from kforge_parallel.work import COMPUTE_BYTES, Work


def keeps_gathered(config: ParallelConfig, pp: int) -> bool:
    """Whether units stay gathered from forward to backward."""
    return not config.reshard_after_forward or (pp > 1 and SCHEDULES[config.pp_schedule].splits_backward)


def sent_bytes(
    model: Model, held: Held, config: ParallelConfig, axes: dict[str, int], work: Work, rank: int
) -> dict[str, int]:
    """Axis -> bytes that a rank sends in a step."""
    s, b = model.sizes, COMPUTE_BYTES[config.precision]
    w, micro = max(4, b), work.microbatches
    tp, cp, ep, pp = axes["tp"], axes["cp"], axes["ep"], axes["pp"]
    blocks = [layer for stage in held.stages for layer in stage]
    mixed = sum(model.mixed[layer] for layer in blocks)
    t = work.microbatch_rows * work.row_tokens // cp
    residual = t // tp if config.sequence_parallel else t
    again = _again(config, held.stages)

    shards = 0.0
    keeps = keeps_gathered(config, pp)
    reductions = micro if config.accumulate == "sharded" else 1
    for unit, count in held.units.items():
        n = expert_shard(axes) if unit.endswith(" experts") else axes["dp_shard"] * cp
        freed = unit in held.in_blocks and not keeps
        gathers = micro * (2 if freed else 1)
        if pp > 1:  # what a backward has gathered stays for the next forward
            gathers = micro + 1 if freed else 1
        shards += (held.travelling[unit] * gathers + w * count * reductions) * (n - 1) / n
    n = axes["dp_shard"] * cp
    shards += (b + w) * held.twins * (n - 1)  # of which this rank has the n-th part
    # A gather and a scatter around each half of a block, and their transposes; experts have none, and the ends one.
    times = (4 + 2 * again) * (2 * len(blocks) - mixed) + 2 * (held.first + held.last)
    tensor = (t * b * s.dim * times + 2 * held.summed) * (tp - 1) / tp
    context = 0.0
    if cp > 1:
        queries, keys = (2 * t * b * max(1, heads // tp) * s.head_dim for heads in (s.heads, s.kv_heads))
        ulysses = config.cp_style == "ulysses"
        once = (queries + keys) * (cp - 1) / cp if ulysses else float(keys * (cp - 1))
        context = len(blocks) * once * (1 + again + (2 if config.cp_style == "ring" else 1))
    exchanged = residual * s.top_k * b * s.dim * (ep - 1) / ep * mixed * (4 + 2 * again)
    hops = 0
    if pp > 1:
        total, own = pp * stages_per_rank(config), {*stages_of_rank(places(rank, axes)["pp"], config, pp)}
        hops = sum((n + 1 < total and n + 1 not in own) + (n > 0 and n - 1 not in own) for n in own)
    return {
        "dp_shard": int(shards) if held.wrapped else 0,
        "dp_replicate": held.copied * reductions,
        "tp": int(tensor * micro),
        "cp": int(context * micro),
        "ep": int(exchanged * micro),
        "pp": hops * micro * residual * b * s.dim,
    }


def _again(config: ParallelConfig, stages: Sequence[Sequence[int]]) -> float:
    """How often transfers inside of blocks are made again in backward, on average over blocks."""
    made_again = config.recompute == "full" or (
        config.recompute == "selective" and "transfers" not in config.recompute_keep
    )
    again = [one for stage in stages for one in config.run_again(len(stage))]
    return sum(again) / max(1, len(again)) if made_again else 0.0


def block_flops(model: Model, mixed: bool, axes: dict[str, int], work: Work) -> tuple[float, float]:
    """Operations of one forward of a block over one microbatch, by this rank: of its products, and of its attention, in
    which a token sees half of its row."""
    s = model.sizes
    tokens = work.microbatch_rows * work.row_tokens / (axes["cp"] * axes["tp"])
    return 2 * model.met[mixed] * tokens, 4 * s.heads * s.head_dim * (work.row_tokens + 1) / 2 * tokens


def step_flops(model: Model, held: Held, axes: dict[str, int], work: Work) -> float:
    """Operations of a step by this rank, forward and backward, without what is recomputed: of its blocks, and of the
    head where it has it."""
    s = model.sizes
    tokens = work.microbatch_rows * work.row_tokens / (axes["cp"] * axes["tp"])
    head = 2 * (1 + s.mtp) * s.vocab * s.dim * tokens if held.last else 0.0
    kinds = Counter(model.mixed[layer] for stage in held.stages for layer in stage)
    blocks = sum(count * sum(block_flops(model, mixed, axes, work)) for mixed, count in kinds.items())
    return 3 * (head + blocks) * work.microbatches


def recomputed_flops(model: Model, held: Held, config: ParallelConfig, axes: dict[str, int], work: Work) -> float:
    """Operations that this rank does again in backward, in a step."""
    if config.recompute == "none":
        return 0.0
    keep = config.recompute_keep if config.recompute == "selective" else ()
    total = 0.0
    run_again = (
        layer
        for stage in held.stages
        for layer, again in zip(stage, config.run_again(len(stage)), strict=True)
        if again
    )
    for mixed, count in Counter(model.mixed[layer] for layer in run_again).items():
        products, attention = block_flops(model, mixed, axes, work)
        total += count * (products * ("products" not in keep) + attention * ("attention" not in keep))
    return total * work.microbatches
