"""Which dtype weights are kept in, computed in and reduced in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from kforge_parallel.axes import resolve_axes
from kforge_parallel.config import ParallelConfig
from kforge_parallel.stages import SCHEDULES


@dataclass(frozen=True)
class Precision:
    """The three dtypes of a run."""

    storage: torch.dtype
    """Of the sharded weights that the optimizer sees."""
    compute: torch.dtype
    """Of the weights that a forward sees; made at the all-gather."""
    reduce: torch.dtype
    """In which gradients are summed, over microbatches and over ranks. ``.grad`` is in the storage dtype."""
    matmul: str = "highest"
    """For ``torch.set_float32_matmul_precision``: how products of fp32 tensors are taken. Theirs are few in bf16."""

    def policy(self, cast_inputs: bool) -> MixedPrecisionPolicy:
        """The FSDP2 policy. ``cast_inputs``: floating-point inputs of every unit are cast to the compute dtype."""
        return MixedPrecisionPolicy(
            param_dtype=self.compute,  # also where storage is that already: inputs are cast to it
            reduce_dtype=self.reduce,
            cast_forward_inputs=cast_inputs,
        )


PRECISIONS = {
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32, "high"),
    "fp16": Precision(torch.float32, torch.float16, torch.float32, "high"),
    "tf32": Precision(torch.float32, torch.float32, torch.float32, "high"),
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "fp64": Precision(torch.float64, torch.float64, torch.float64),
}


def precision_of(name: str, storage: str = "fp32") -> Precision:
    """The Precision of a config word. ``storage = "split"``: bf16 weights, whose other half the optimizer keeps;
    ``"stochastic"``: bf16 weights alone.

    Raises ValueError that lists the known words, and for either of them in another precision than bf16.
    """
    if name not in PRECISIONS:
        raise ValueError(f"parallel.precision = {name!r} is unknown; use one of {', '.join(PRECISIONS)}")
    precision = PRECISIONS[name]
    if storage == "fp32":
        return precision
    if storage not in ("split", "stochastic") or name != "bf16":
        raise ValueError(
            f"parallel.storage = {storage!r} with precision {name!r} is unknown; split and stochastic go with bf16"
        )
    return replace(precision, storage=torch.bfloat16)


def precision_table(config: ParallelConfig, world_size: int) -> dict[str, str]:
    """What is done to weights and gradients, for people: one line a row."""
    short = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
    precision = precision_of(config.precision, config.storage)
    summed = short[precision.reduce]
    remark = {"tf32": " (products in TF32)", "fp16": " (loss scaled)"}.get(config.precision, "")
    how = {"split": ", the bits missing to fp32 with the optimizer", "stochastic": ", rounded stochastically"}
    replicas = {"bf16": ", bf16 between replicas", "int8": ", int8 between replicas with error feedback"}
    replicas["powersgd"] = f", rank {config.compress_rank} between replicas (PowerSGD) with error feedback"
    products = {}
    if config.fp8 != "none":
        products["linear modules"] = (
            f"fp8 {config.fp8}, weights {_gathered(config, world_size, short[precision.compute])}"
        )
    return {
        "weights": short[precision.storage] + how.get(config.storage, ""),
        "compute": short[precision.compute] + remark,
        **products,
        "gradients over microbatches": f"{summed}, {config.accumulate}",
        "gradients over ranks": "one rank"
        if world_size == 1
        else summed
        + replicas.get(config.compress, "")
        + (", then rounded to bf16 once" if config.storage in how else ""),
    }


def _gathered(config: ParallelConfig, world_size: int, compute: str) -> str:
    """In which dtype the weights of modules that multiply in FP8 come to a rank."""
    if world_size == 1:
        return "cast on their rank"
    if config.fp8 == "rowwise":
        return f"gathered in {compute} and cast after"
    if config.cpu_offload:
        return f"gathered in {compute} and cast after, as parallel.cpu_offload asks"
    if resolve_axes(config, world_size)["pp"] > 1 and SCHEDULES[config.pp_schedule].splits_backward:
        return f"gathered in {compute} and cast after, as parallel.pp_schedule = {config.pp_schedule} asks"
    return f"gathered in 8 bits, those of unequal parts in {compute}"
