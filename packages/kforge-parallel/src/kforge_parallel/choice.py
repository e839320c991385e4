"""``parallel.recompute = auto``: the way of keeping activations that fits and computes the least again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kforge_parallel.config import ParallelConfig
from kforge_parallel.estimate import Estimate, gb, of_all
from kforge_parallel.layout import check_layout
from kforge_parallel.planner import FREE, check_memory
from kforge_parallel.shape import ModelShape, Parameter, decoder_parameters, sizes_of
from kforge_parallel.stages import SCHEDULES
from kforge_parallel.weight_bytes import Model
from kforge_parallel.work import Work


def choose_recompute(
    shape: ModelShape,
    config: ParallelConfig,
    world_size: int,
    work: Work,
    memory: float,
    *,
    parameters: Sequence[Parameter] | None = None,
) -> tuple[ParallelConfig, Estimate]:
    """The config with recompute and recompute_blocks decided, and the estimate of the rank that needs the most.

    Of those ways whose peak is at most 92 % of ``memory`` (bytes of a device), the one with the fewest floating-point
    operations computed again; of several, the one that runs the fewest blocks again. A selective recomputation keeps
    what it does by default, so that no product and no attention is computed again.

    parameters: as of `estimate_layout`. Raises ValueError as that, and where no way fits, with the leanest.
    """
    check_memory(memory)
    plain = replace(config, recompute="none", memory_gb=0.0)
    axes = check_layout(replace(plain, device="cuda") if plain.device == "auto" else plain, world_size, shape)
    model = Model(sizes_of(shape), decoder_parameters(shape) if parameters is None else parameters)
    found = [(one, of_all(model, one, axes, work)) for one in _ways(plain, model, axes)]
    fitting = [pair for pair in found if pair[1].peak <= (1 - FREE) * memory]
    if not fitting:
        leanest = min(found, key=lambda pair: pair[1].peak)[1]
        raise ValueError(
            f"parallel.recompute = auto: no way of keeping activations fits into {1 - FREE:.0%} of {gb(memory)}; the "
            f"leanest needs {gb(leanest.peak)}. Use a smaller data.microbatch_rows, more ranks, or storage = split\n"
            f"{leanest}"
        )
    return min(fitting, key=lambda pair: pair[1].recomputed)  # the first of several, which runs the fewest again


def _ways(plain: ParallelConfig, model: Model, axes: dict[str, int]) -> Iterator[ParallelConfig]:
    """Those that the layout can have, the fewest blocks run again first."""
    yield plain
    if axes["pp"] > 1 and SCHEDULES[plain.pp_schedule].splits_backward:
        return
    ring = axes["cp"] > 1 and plain.cp_style == "ring"
    whole_graphs = not plain.compile or not (ring or any(model.mixed))
    for mode in ("selective", "full"):
        # What is offloaded is not kept on the device beside, and no operation is seen in a block of several graphs.
        if mode == "selective" and (plain.offload_activations or not whole_graphs):
            continue
        for count in (*range(1, len(model.blocks) // axes["pp"]), 0):
            yield replace(plain, recompute=mode, recompute_blocks=count)  # type: ignore[arg-type]


def way(config: ParallelConfig) -> str:
    """What a config keeps, for people: its recompute, and of how many blocks."""
    return config.recompute + (f" of {config.recompute_blocks} blocks a stage" if config.recompute_blocks else "")


def memory_of(config: ParallelConfig, device_type: str) -> float:
    """Bytes of a device that recompute = auto may fill. Raises ValueError where nobody has said how many."""
    if config.memory_gb:
        return config.memory_gb * 1e9
    if device_type == "cpu":
        raise ValueError(
            "parallel.recompute = auto fits activations into the memory of a device, and a CPU has none of its own; "
            "set parallel.memory_gb to what a process may take, or recompute to none, selective or full"
        )
    import torch

    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
