"""Layouts of a model on so many GPUs, the fastest first, by a simple model of what a step costs. No process, no torch.

A step of a rank takes, in seconds,

    (compute + blocked) (1 + bubble) + max(0, hidden - compute)

    compute   operations, those of recomputation included, at `Machine.efficiency` of the peak
    blocked   transfers that computation waits for: those of tp, cp and ep
    hidden    transfers beside computation: gathers and reductions of shards, sums over copies, hidden states of stages
    bubble    (pp - 1) / microbatches, divided by the stages of a rank, and by 3 where gradients of weights fill it

Bytes go over links inside a host where all ranks of the group are on one, else over the network. What is left out:
latencies, uneven stages and experts, transfers that share a link. Good for the order of layouts, not for promises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kforge_parallel.axes import expert_shard, product_text
from kforge_parallel.config import ParallelConfig
from kforge_parallel.estimate import Estimate, gb, of_all
from kforge_parallel.layout import check_layout, not_in_fp8
from kforge_parallel.sent_bytes import step_flops
from kforge_parallel.shape import ModelShape, Parameter, decoder_parameters, sizes_of
from kforge_parallel.stages import SCHEDULES, check_schedule, stages_per_rank
from kforge_parallel.weight_bytes import Model, hold
from kforge_parallel.work import Work

FREE = 0.08
"""Share of the memory that an estimate leaves to the allocator and to libraries."""
MODES = ("none", "selective", "full")
MOST = {"peak_flops": 1e18, "host_bytes_per_s": 1e14, "network_bytes_per_s": 1e14}
"""A second; what is more was meant in another unit."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What GPUs and links do. The defaults are an H100 or H200 on hosts of 8, with 400 Gbit/s a GPU between them."""

    gpus_per_host: int = 8
    """Ranks 0 to this - 1 are on the first host, and so on."""
    peak_flops: float = 989e12
    """Of a GPU in the compute dtype, dense, a second."""
    efficiency: float = 0.55
    """Share of it that a block reaches where nothing is sent: 0.5 of it were measured for whole steps on an H200."""
    host_bytes_per_s: float = 370e9
    """That a GPU sends to others of its host (NVLink 4: 450e9 on paper)."""
    network_bytes_per_s: float = 45e9
    """That a GPU sends to another host (400 Gbit/s: 50e9 on paper)."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_host", "peak_flops", "efficiency", "host_bytes_per_s", "network_bytes_per_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be above 0")
            if value > MOST.get(name, math.inf):
                raise ValueError(
                    f"{name} = {value:g} is more than any device has, by far: {value:g} a second; mind the unit"
                )
        if type(self.gpus_per_host) is not int:
            raise ValueError(f"gpus_per_host = {self.gpus_per_host!r} must be a whole number")
        if self.efficiency > 1:
            raise ValueError(f"efficiency = {self.efficiency} is a share of the peak, so at most 1")


@dataclass(frozen=True)
class Candidate:
    """One layout, and what it costs."""

    config: ParallelConfig
    work: Work
    estimate: Estimate
    """Of the rank that needs the most memory."""
    seconds: float
    """Of a step, predicted."""
    mfu: float
    """Predicted share of the peak that the model's own operations are."""

    @property
    def name(self) -> str:
        """``dp_shard 8 × tp 2``."""
        return product_text(self.estimate.axes)


@dataclass(frozen=True)
class LayoutPlan:
    """Layouts, ranked; ``str()`` is two tables."""

    memory: float
    """Bytes of a GPU."""
    fitting: list[Candidate]
    """Those that fit, the fastest first; of each set of axes the fastest."""
    beyond: list[tuple[Candidate, str]]
    """Those that do not, the nearest to fitting first, each with why."""
    refused: dict[str, int]
    """Why layouts cannot be -> how many of them."""

    def __str__(self) -> str:
        return "\n".join(_draw(self))


def plan_layouts(
    shape: ModelShape,
    gpus: int,
    memory: float,
    *,
    row_tokens: int,
    global_rows: int,
    config: ParallelConfig | None = None,
    work: Work | None = None,
    machine: Machine | None = None,
    parameters: Sequence[Parameter] | None = None,
) -> LayoutPlan:
    """Rank the layouts of a model on ``gpus`` devices of ``memory`` bytes each.

    row_tokens, global_rows: of a step.
    config: what all layouts have alike: precision, storage, compile, schedule, and so on; its axes, recomputation and
        reshard_after_forward are chosen here. None: bf16, compiled.
    work: optimizer and moments; its rows are chosen here. None: AdamW in fp32.
    parameters: as of `estimate_layout`.

    Raises ValueError as `estimate_layout`.
    """
    for name, value in (("gpus", gpus), ("global_rows", global_rows)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} = {value!r} must be a whole number above 0")
    check_memory(memory)
    machine = machine or Machine()
    config = replace(config or ParallelConfig(compile=True), device="cuda", recompute="none", dp_shard=-1)
    if config.fp8 != "none" and config.precision != "bf16":
        raise ValueError(not_in_fp8(config))
    work = work or Work(row_tokens=row_tokens)
    model = Model(sizes_of(shape), decoder_parameters(shape) if parameters is None else parameters)
    best: dict[tuple[int, ...], Candidate] = {}
    nearest: dict[tuple[int, ...], Candidate] = {}
    refused: dict[str, int] = {}
    for sizes in _axes(model, gpus, machine.gpus_per_host):
        rows = global_rows / (sizes["dp_replicate"] * sizes["dp_shard"])
        if rows != int(rows):
            why = f"{global_rows} rows a step cannot be shared evenly by the data ranks; take a multiple of those"
            refused[why] = refused.get(why, 0) + 1
            continue
        try:
            layout = replace(config, **sizes)  # type: ignore[arg-type]
            axes = check_layout(layout, gpus, shape, row_tokens)
        except ValueError as error:
            why = str(error)
            refused[why] = refused.get(why, 0) + 1
            continue
        key = tuple(axes.values())
        for candidate in _ways(model, layout, axes, replace(work, row_tokens=row_tokens), int(rows), machine):
            if candidate.estimate.peak > (1 - FREE) * memory:
                if key not in nearest or candidate.estimate.peak < nearest[key].estimate.peak:
                    nearest[key] = candidate
            elif key not in best or _slowness(candidate) < _slowness(best[key]):
                best[key] = candidate
    fitting = sorted(best.values(), key=_slowness)
    far = sorted((one for key, one in nearest.items() if key not in best), key=lambda one: one.estimate.peak)
    return LayoutPlan(memory, fitting, [(one, _why(one, memory)) for one in far], refused)


def check_memory(memory: float) -> None:
    """Raise ValueError for what is no number of bytes of a device."""
    if isinstance(memory, bool) or not 0 < memory < math.inf:
        raise ValueError(f"memory = {memory} must be bytes of a device, above 0 and finite")


def _axes(model: Model, gpus: int, host: int) -> Iterator[dict[str, int]]:
    """Sizes worth looking at: of tp (within a host), cp and pp all that divide the devices, up to 16 of the latter two;
    of the others powers of two and what is left."""
    heads, experts = model.sizes.heads, model.sizes.experts

    def powers(most: int) -> list[int]:
        return [n for n in (2**i for i in range(most.bit_length())) if n <= most]

    def divisors(of: int, most: int) -> list[int]:
        return [n for n in range(1, min(of, most) + 1) if of % n == 0]

    for tp in divisors(gpus, min(host, heads)):
        for cp in divisors(gpus // tp, 16):
            for pp in divisors(gpus // (tp * cp), min(16, len(model.blocks))):
                left = gpus // (tp * cp * pp)
                for shard in sorted({left, *(n for n in powers(left) if left % n == 0)}):
                    for ep in powers(min(experts, shard * cp * tp)) if experts else [1]:
                        if shard * cp * tp % ep == 0 and experts % ep == 0:
                            yield {
                                "pp": pp,
                                "dp_replicate": left // shard,
                                "dp_shard": shard,
                                "cp": cp,
                                "tp": tp,
                                "ep": ep,
                            }


def _slowness(one: Candidate) -> tuple[float, int, int]:
    """Of two that take equally long, the one that runs less again is the better, then the leaner."""
    return float(f"{one.seconds:.3g}"), MODES.index(one.config.recompute), one.estimate.peak


def _ways(
    model: Model,
    layout: ParallelConfig,
    axes: dict[str, int],
    work: Work,
    rows: int,
    machine: Machine,
) -> Iterator[Candidate]:
    """A layout with each size of a microbatch, and each way of keeping activations and weights."""
    world = math.prod(axes.values()) // axes["ep"]
    firsts = _first_ranks(axes)
    # A compiled block with experts is several graphs, in which no operation can be told from others.
    modes = [mode for mode in MODES if not (mode == "selective" and layout.compile and any(model.mixed))]
    ways = []
    for mode in modes:
        for reshard in (False, True):
            try:
                config = replace(layout, recompute=mode, reshard_after_forward=reshard)  # type: ignore[arg-type]
                check_layout(config, world)
            except ValueError:
                continue
            ways.append(config)
    for size in (2**i for i in range(5)):
        if size > rows or rows % size:
            return
        step = replace(work, microbatch_rows=size, microbatches=rows // size)
        for config in ways:
            try:
                check_schedule(config, axes["pp"], step.microbatches)
            except ValueError:
                continue
            flops = [step_flops(model, hold(model, config, axes, step, rank), axes, step) for rank in firsts]
            estimate = of_all(model, config, axes, step)
            seconds = step_seconds(config, axes, step, estimate, max(flops), machine)
            mfu = sum(flops) / len(flops) / (seconds * machine.peak_flops)
            yield Candidate(config, step, estimate, seconds, mfu)


def _first_ranks(axes: dict[str, int]) -> list[int]:
    """The first rank of each stage."""
    stage = axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"]
    return [pp * stage for pp in range(axes["pp"])]


def step_seconds(
    config: ParallelConfig, axes: dict[str, int], work: Work, estimate: Estimate, flops: float, machine: Machine
) -> float:
    """How long a step takes, as this module's docstring says it. estimate: of any rank; what it sends counts. flops: of
    the stage that has the most, without recomputation."""
    compute = (flops + estimate.recomputed) / (machine.efficiency * machine.peak_flops)
    span: dict[str, float] = {"tp": axes["tp"], "cp": axes["cp"] * axes["tp"], "ep": axes["ep"]}
    span["dp_shard"] = max(axes["dp_shard"] * span["cp"], expert_shard(axes) * axes["ep"])
    span["dp_replicate"] = span["pp"] = math.inf if math.prod(axes.values()) > machine.gpus_per_host else 1
    took = {
        axis: size / (machine.network_bytes_per_s if span[axis] > machine.gpus_per_host else machine.host_bytes_per_s)
        for axis, size in estimate.sent.items()
    }
    blocked = took["tp"] + took["cp"] + took["ep"]
    hidden = took["dp_shard"] + took["dp_replicate"] + took["pp"]
    return (compute + blocked) * (1 + bubble(config, axes["pp"], work.microbatches)) + max(0.0, hidden - compute)


def bubble(config: ParallelConfig, pp: int, microbatches: int) -> float:
    """Time that a pipeline waits, as a part of the time that it works."""
    kind = SCHEDULES[config.pp_schedule]
    return (pp - 1) / microbatches / stages_per_rank(config) / (3 if kind.splits_backward else 1)


# ---------------------------------------------------------------------------------------------- for people


def _why(candidate: Candidate, memory: float) -> str:
    """Why a layout does not fit, though it is the leanest way of it."""
    parts = candidate.estimate.parts
    first, second, *_ = sorted(parts, key=lambda name: -parts[name])
    over = candidate.estimate.peak - (1 - FREE) * memory
    advice = {
        "activations": "split rows over cp or tp, or take smaller microbatches",
        "logits": "split the vocabulary over tp, or take smaller chunks",
        "sums": "split the weights over tp or pp" + (", or accumulate = sharded" if candidate.config.pp == 1 else ""),
        "gathered": "split the weights over tp or pp",
        "working": "split rows over cp or tp",
    }.get(first, "more dp_shard, or storage = split and moments in bf16")
    return f"{gb(over)} too much, {first} {gb(parts[first])} and {second} {gb(parts[second])} the most of it; {advice}"


def _draw(plan: LayoutPlan, most: int = 10, near: int = 5) -> Iterator[str]:
    fit = "fits" if len(plan.fitting) == 1 else "fit"
    yield f"{_layouts(len(plan.fitting))} {fit} into {1 - FREE:.0%} of {gb(plan.memory)}"
    if plan.fitting:
        head = ("layout", "rows", "recompute", "reshard", "mfu", "step", "peak", "weights", "state", "gradients")
        yield from _table([(*head, "activations", "gathered"), *map(_row, plan.fitting[:most])])
    if plan.beyond:
        yield ""
        yield "nearest of those that do not fit, each in its leanest way:"
        for candidate, why in plan.beyond[:near]:
            yield f"  {candidate.name}, {candidate.config.recompute}: {gb(candidate.estimate.peak)}, {why}"
    if plan.refused:
        yield ""
        yield f"{_layouts(sum(plan.refused.values()))} cannot be:"
        for why, count in sorted(plan.refused.items(), key=lambda item: -item[1])[:near]:
            yield f"  {count} × {why}"


def _layouts(count: int) -> str:
    return f"{count} layout{'' if count == 1 else 's'}"


def _row(one: Candidate) -> tuple[str, ...]:
    e = one.estimate
    rows = f"{one.work.microbatches}×{one.work.microbatch_rows}"
    sizes = (e.peak, e.parameters, e.moments, e.gradients + e.sums, e.activations, e.gathered)
    reshard = "yes" if one.config.reshard_after_forward else "no"
    texts = (f"{size / 1e9:.1f}" for size in sizes)
    return (one.name, rows, one.config.recompute, reshard, f"{one.mfu:.1%}", f"{one.seconds:.2f} s", *texts)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
