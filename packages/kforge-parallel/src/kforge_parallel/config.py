"""How a model is spread over processes, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The axes of the mesh, and what is done to the model on it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    dp_shard: int = -1
    """Processes over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all that are left."""
    dp_replicate: int = 1
    """Copies of each sharded group (HSDP). Only 1 for now."""
    tp: int = 1
    """Processes that split each matrix (tensor parallelism). Only 1 for now."""
    cp: int = 1
    """Processes that split each row of tokens (context parallelism). Only 1 for now."""
    pp: int = 1
    """Processes that split the blocks (pipeline parallelism). Only 1 for now."""
    ep: int = 1
    """Processes that split the experts (expert parallelism). Only 1 for now."""
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Compute dtype. bf16: fp32 weights, bf16 made at the all-gather, gradients reduced in fp32. fp64 also stores
    the weights in float64: for proofs, not for training."""
    recompute: Literal["none", "full"] = "none"
    """Activations kept for backward: all of them, or only each block's input (the block runs again in backward)."""
    compile: bool = False
    """Compile each block with torch.compile. Names of parameters do not change."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again in backward. False: faster, and one
    full copy of the weights stays in memory through backward."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: CUDA where a device is visible, else CPU."""
    init_timeout_s: float = 300.0
    """How long processes wait for each other at start-up, in seconds."""
    step_timeout_s: float = 1800.0
    """How long a collective may take once training runs, in seconds."""

    def __post_init__(self) -> None:
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"parallel.dp_shard = {self.dp_shard} must be -1 (all that are left) or at least 1")
        for name in ("dp_replicate", "tp", "cp", "pp", "ep"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"parallel.{name} = {value} must be at least 1")
            if value > 1:
                raise ValueError(f"parallel.{name} = {value} is not available in this version; set it to 1")
        for name in ("init_timeout_s", "step_timeout_s"):
            if not 0 < getattr(self, name) <= 1e8:
                raise ValueError(f"parallel.{name} = {getattr(self, name)} must be above 0 and at most 1e8 seconds")
