"""What a job needs of each device, from its config alone: nothing is started, and no weight is made."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import kforge_model
from kforge_model import model_shape
from kforge_parallel import (
    Estimate,
    Work,
    check_layout,
    check_rank,
    choose_recompute,
    estimate_layout,
    parameters_of,
    resolve_axes,
)
from kforge_parallel.choice import memory_of, way
from kforge_parallel.estimate import gb
from kforge_parallel.work import OF_ADAMW, OPTIMIZERS
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError


def work_of(config: JobConfig, world_size: int) -> Work:
    """A step of a job, for estimates: the longest rows and the most of them, where these change. An optimizer of
    torch.optim is taken to keep as much as AdamW in fp32."""
    axes, data, optim = resolve_axes(config.parallel, world_size), config.data, config.optim
    rows = math.ceil(max(rows for _, rows in data.batch_size().sizes()) / (axes["dp_replicate"] * axes["dp_shard"]))
    at_a_time = min(rows, data.microbatch_rows or rows)
    known = optim.name in OPTIMIZERS and not optim.offload
    return Work(
        row_tokens=max(length for _, length in data.row_lengths()),
        microbatch_rows=at_a_time,
        microbatches=math.ceil(rows / at_a_time),
        optimizer="none" if optim.offload else optim.name if known else "adamw",
        moments=optim.moments if known and optim.name in OF_ADAMW else "fp32",
        row_variance=known and optim.name == "muon" and optim.muon_variance_beta is not None,
        ema=optim.ema_decay > 0 and optim.ema_device != "cpu",
    )


def check_rows(config: JobConfig, world_size: int) -> None:
    """Refuse steps that data ranks cannot share, and microbatches that a schedule cannot have. Raises ConfigError, and
    ValueError as `check_layout`."""
    axes, data = resolve_axes(config.parallel, world_size), config.data
    ranks = axes["dp_replicate"] * axes["dp_shard"]
    for name, rows in data.batch_size().sizes():
        if rows % ranks:
            raise ConfigError(
                f"data.{name} = {rows} cannot be shared evenly by {ranks} data ranks; use a multiple of {ranks}"
            )
        microbatches = math.ceil(rows / ranks / (data.microbatch_rows or rows))
        check_layout(config.parallel, world_size, microbatches=microbatches)


def on_this_machine(config: JobConfig) -> JobConfig:
    """The job with parallel.device decided, where it is auto: one that runs here, not elsewhere."""
    if config.parallel.device != "auto":
        return config
    return replace(config, parallel=replace(config.parallel, device="cuda" if torch.cuda.is_available() else "cpu"))


def estimate_job(config: JobConfig, world_size: int) -> tuple[JobConfig, Estimate]:
    """The estimate of the rank that needs the most, and the job with recompute decided where it is auto.

    Raises ValueError as `choose_recompute`, `check_layout` and `check_rows`, and for a model that is not kforge's own.
    """
    if config.model.kind != "transformer":
        raise ValueError(
            f"what a step of model.kind = {config.model.kind!r} needs cannot be estimated: sizes are known of the "
            "Transformer only; under parallel.recompute = auto, set it to none or full"
        )
    check_rows(config, world_size)
    shape = model_shape(config.model)
    work, parallel = work_of(config, world_size), config.parallel
    with torch.device("meta"):
        listed = parameters_of(kforge_model.build_model(config.model))
    if parallel.recompute != "auto":
        return config, estimate_layout(shape, parallel, world_size, work, parameters=listed)
    cpu = parallel.device == "cpu" or not torch.cuda.is_available()
    memory = memory_of(parallel, "cpu" if cpu else "cuda")
    chosen, told = choose_recompute(shape, parallel, world_size, work, memory, parameters=listed)
    return replace(config, parallel=chosen), told


def in_one_line(told: Estimate) -> str:
    """``12.3 GB at the end of forward: activations 7.0 GB, …``, the largest part first."""
    moment = max(told.at, key=lambda name: told.at[name])
    parts = sorted(told.parts.items(), key=lambda item: -item[1])
    return f"{gb(told.peak)} at {moment}: " + ", ".join(f"{name} {gb(size)}" for name, size in parts if size)


def main(config: JobConfig, world_size: int, rank: int | None = None) -> str:
    """What `kforge estimate` prints. rank: build what this rank would hold, on the meta device, and list it, too."""
    from kforge_train.build import check_spread  # which asks for estimates, too

    decided, told = estimate_job(config, world_size)
    if config.parallel.device == "auto":  # the machine that asks need not be the one that trains
        check_spread(replace(config, parallel=replace(config.parallel, device="cuda")), world_size)
    else:
        check_spread(config, world_size)
    if rank is not None:
        seen = check_rank(lambda: kforge_model.build_model(config.model), decided.parallel, world_size, rank)
        return f"{told}\n\n{seen}\n"
    chosen = ""
    if config.parallel.recompute == "auto":
        chosen = f"recompute = {way(decided.parallel)}\n"
    return f"{chosen}{told}\n"
