"""What a layout costs each rank, counted from sizes: memory by part, and bytes sent in a step. No process, no torch.

Weights, gradients and the optimizer's state are counted shard by shard (`weight_bytes`); activations, head and loss are
a model of what the code holds (`activation_bytes`). The peak is the greatest of three moments: the end of the last
microbatch's forward, where activations are whole; the beginning of its backward; and its end, where gradients are
whole. What the allocator, cuBLAS and NCCL take beside is not in it: 1 to 3 GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kforge_parallel.activation_bytes import block_kept, head_bytes, in_flight
from kforge_parallel.axes import places, product_text
from kforge_parallel.config import ParallelConfig
from kforge_parallel.layout import check_layout
from kforge_parallel.sent_bytes import keeps_gathered, recomputed_flops, sent_bytes
from kforge_parallel.shape import ModelShape, Parameter, decoder_parameters, sizes_of
from kforge_parallel.weight_bytes import Held, Model, hold
from kforge_parallel.work import COMPUTE_BYTES, Work, storage_bytes


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
    """Gradients before they are reduced: sums of microbatches, of the unit that is on its way, and what compression has
    left over."""
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
    if config.recompute == "auto":
        raise ValueError("parallel.recompute = auto is what an estimate decides; take what `choose_recompute` returns")
    # The machine that asks need not be the one that trains.
    axes = check_layout(replace(config, device="cuda") if config.device == "auto" else config, world_size, shape)
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank} is none of {world_size} processes; use 0 to {world_size - 1}")
    model = Model(sizes_of(shape), decoder_parameters(shape) if parameters is None else parameters)
    return of_rank(model, config, axes, work, rank) if rank is not None else of_all(model, config, axes, work)


def of_all(model: Model, config: ParallelConfig, axes: dict[str, int], work: Work) -> Estimate:
    """The estimate of the rank that needs the most: of the first shards, which are the largest, on each stage."""
    stage = axes["dp_replicate"] * axes["dp_shard"] * axes["cp"] * axes["tp"]
    return max((of_rank(model, config, axes, work, pp * stage) for pp in range(axes["pp"])), key=lambda e: e.peak)


def of_rank(model: Model, config: ParallelConfig, axes: dict[str, int], work: Work, rank: int) -> Estimate:
    """The estimate of one rank of a layout that has been checked."""
    held = hold(model, config, axes, work, rank)
    stored, b = storage_bytes(config), COMPUTE_BYTES[config.precision]
    w, several = max(4, b), work.microbatches > 1
    sums = 0
    if several and (not held.wrapped or config.accumulate == "sharded"):
        sums = held.gradients  # they are there since the first microbatch
    elif several:
        sums = w * sum(held.units.values())
    largest = max(held.units.values(), default=0)
    on_the_way = (b + w) * largest if held.wrapped else b * largest

    at = places(rank, axes)["pp"]
    kinds = Counter(
        (model.mixed[layer], config.recompute if again else "none")
        for stage in held.stages
        for layer, again in zip(stage, config.run_again(len(stage)), strict=True)
    )
    if held.last and model.sizes.mtp:  # blocks of further tokens, of which none is run again
        kinds[model.mixed[-1], "none"] += model.sizes.mtp
    kept = {kind: block_kept(model.sizes, kind[0], config, axes, work, kind[1]) for kind in kinds}
    whole = sum(count * kept[kind].kept for kind, count in kinds.items())
    activations = int(in_flight(config, axes["pp"], at, work.microbatches) * whole)
    host = 0
    if config.offload_activations:
        host, activations = activations, min(activations, 2 * max(k.kept for k in kept.values()))
    forward, backward = head_bytes(model.sizes, config, axes, work) if held.last else (0, 0)
    again = max((k.whole for k in kept.values() if k.kept < k.whole), default=0)
    working = max((k.working for k in kept.values()), default=0) + again

    static = held.parameters + held.state + held.feedback + held.twins * stored
    ready = held.gradients + held.twins * stored
    if config.cpu_offload:
        host, static, ready = host + static + ready, 0, 0
    gathered = _gathered(held, config, axes)
    before = static + sums + activations
    return Estimate(
        rank=rank,
        axes=axes,
        parameters=held.parameters,
        gradients=held.gradients,
        moments=held.state,
        activations=activations,
        logits=max(forward, backward),
        gathered=max(gathered),
        sums=sums + on_the_way + held.feedback,
        working=working,
        host=host,
        at={
            "the end of forward": before + gathered[0] + forward,
            "the beginning of backward": before + gathered[1] + max(backward, working + on_the_way),
            "the end of backward": static + ready + gathered[2] + (on_the_way if held.wrapped else 0),
        },
        sent=sent_bytes(model, held, config, axes, work, rank),
        block_kept=max((k.kept for k in kept.values()), default=0),
        recomputed=recomputed_flops(model, held, config, axes, work),
    )


def _gathered(held: Held, config: ParallelConfig, axes: dict[str, int]) -> tuple[int, int, int]:
    """Whole weights at the end of forward, while backward runs, and at its end."""
    if not held.wrapped:
        return (held.in_8_bits,) * 3
    ends = max((size for unit, size in held.travelling.items() if unit not in held.in_blocks), default=0)
    if keeps_gathered(config, axes["pp"]):
        every = sum(held.travelling.values())
        return every, every, ends
    block = max(
        (held.travelling[unit] + held.travelling.get(f"{unit} experts", 0) for unit in held.in_blocks), default=0
    )
    return ends + block, ends + (1 + max(1, config.prefetch)) * block, ends
