"""What a job needs of each device, from its config alone: nothing is started, and no weight is made."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

import kforge_model
from kforge_model import model_shape
from kforge_parallel import Estimate, Work, check_rank, choose_recompute, estimate_layout, parameters_of, resolve_axes
from kforge_parallel.choice import memory_of, way
from kforge_parallel.estimate import gb
from kforge_parallel.work import OPTIMIZERS
from kforge_train.config import JobConfig


def work_of(config: JobConfig, world_size: int) -> Work:
    """A step of a job, for estimates: the longest rows and the most of them, where these change. An optimizer of
    torch.optim is taken to keep as much as AdamW in fp32."""
    axes, data, optim = resolve_axes(config.parallel, world_size), config.data, config.optim
    rows = math.ceil(max(rows for _, rows in data.batch_size().sizes()) / (axes["dp_replicate"] * axes["dp_shard"]))
    at_a_time = min(rows, data.microbatch_rows or rows)
    known = optim.name in OPTIMIZERS
    return Work(
        row_tokens=max(length for _, length in data.row_lengths()),
        microbatch_rows=at_a_time,
        microbatches=math.ceil(rows / at_a_time),
        optimizer="none" if optim.offload else optim.name if known else "adamw",
        moments=optim.moments if known else "fp32",
        row_variance=optim.muon_variance_beta is not None,
        ema=optim.ema_decay > 0 and optim.ema_device != "cpu",
    )


def estimate_job(config: JobConfig, world_size: int) -> tuple[JobConfig, Estimate]:
    """The estimate of the rank that needs the most, and the job with recompute decided where it is auto.

    Raises ValueError as `choose_recompute` and `check_layout`, and for a model that is not kforge's own.
    """
    if config.model.kind != "transformer":
        raise ValueError(
            f"what a step of model.kind = {config.model.kind!r} needs cannot be estimated: sizes are known of the "
            "Transformer only; under parallel.recompute = auto, set it to none or full"
        )
    shape, work, parallel = model_shape(config.model), work_of(config, world_size), config.parallel
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
    decided, told = estimate_job(config, world_size)
    if rank is not None:
        seen = check_rank(lambda: kforge_model.build_model(config.model), decided.parallel, world_size, rank)
        return f"{told}\n\n{seen}\n"
    chosen = ""
    if config.parallel.recompute == "auto":
        chosen = f"recompute = {way(decided.parallel)}\n"
    return f"{chosen}{told}\n"
