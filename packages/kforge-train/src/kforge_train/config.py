"""The whole job as one typed value: each package's own config, side by side. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from kforge_ckpt.config import CkptConfig
from kforge_data.config import DataConfig
from kforge_metrics.config import MetricsConfig
from kforge_model.config import ModelConfig
from kforge_optim.config import OptimConfig
from kforge_parallel.config import ParallelConfig
from kforge_resilience.config import ResilienceConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run itself."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    run_dir: str = "runs/default"
    """Folder of the run: its config, events, log and checkpoints."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    max_minutes: float = 0.0
    """Stop after so many minutes of this process, with a checkpoint; the schedule still spans `steps`. 0: no limit."""
    seed: int = 1
    """Chooses the initial weights. The order of data has its own seed."""
    eval_every_steps: int = 0
    """Evaluate on the held-out text after each so many steps. 0: only at the end."""
    eval_rows: int = 256
    """Held-out rows of one evaluation, over all processes. 0: all of them."""
    deterministic: bool = False
    """Use deterministic kernels only; one that torch has no such kernel for is an error that names it, and so is an
    environment that leaves the order of sums open (CUBLAS_WORKSPACE_CONFIG, NCCL_ALGO). Two runs on the same machine
    then have the same bits. CPU runs have them without it."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"train.steps = {self.steps} must be at least 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"train.seed = {self.seed} does not fit into 64 bits")
        if not self.run_dir:
            raise ValueError("train.run_dir is empty; name the folder that the run may write to")
        for name in ("eval_every_steps", "eval_rows", "max_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} = {getattr(self, name)} must not be negative")


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """One training job. Each section belongs to the package of its name."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    model: ModelConfig = field(default_factory=ModelConfig)
    """What is trained (kforge-model)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How it is spread (kforge-parallel)."""
    data: DataConfig = field(default_factory=DataConfig)
    """What it reads (kforge-data)."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How it learns (kforge-optim)."""
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    """What survives (kforge-ckpt)."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """What keeps it alive (kforge-resilience)."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """What is seen (kforge-metrics)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The run itself (kforge-train)."""

    def __post_init__(self) -> None:
        if (longest := max(length for _, length in self.data.row_lengths())) > self.model.max_seq_len:
            raise ValueError(
                f"data.row_tokens = {longest} is longer than model.max_seq_len = "
                f"{self.model.max_seq_len}; raise --model.max_seq_len or shorten the rows"
            )
        if self.optim.offload and self.parallel.cpu_offload:
            raise ValueError(
                "optim.offload and parallel.cpu_offload: the second keeps the weights on the CPU too, and so the step; "
                "set one of them"
            )
        if self.optim.qk_clip:
            self._check_qk_clip()

    def _check_qk_clip(self) -> None:
        if self.model.kind != "transformer":
            raise ValueError(f"optim.qk_clip knows the weights of model.kind = transformer, not of {self.model.kind!r}")
        if self.model.qk_norm != "none":
            raise ValueError(
                f"optim.qk_clip changes nothing under model.qk_norm = {self.model.qk_norm!r}, which bounds the scores "
                "already; leave one of them out"
            )
        if self.parallel.pp > 1:
            raise ValueError(
                f"optim.qk_clip does not work with parallel.pp = {self.parallel.pp}, as no rank has all layers; bound "
                "the scores by model.qk_norm instead"
            )


def optim_config(config: JobConfig) -> OptimConfig:
    """How a job learns, with every length in steps."""
    optim, data = config.optim, config.data
    if optim.warmup_tokens and len(data.row_lengths()) > 1:
        step, tokens = 0, 0
        while tokens < optim.warmup_tokens:
            tokens += data.batch_size().at(step) * data.row_tokens_at(step)
            step += 1
        return replace(optim, warmup_steps=step, warmup_tokens=0)
    if optim.warmup_tokens and data.batch_phases:
        rows = -(-optim.warmup_tokens // data.row_tokens)
        return replace(optim, warmup_steps=data.batch_size().step_at(rows), warmup_tokens=0)
    return optim.in_steps(data.global_rows * data.row_tokens)
