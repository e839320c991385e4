"""How the model learns, as plain data. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer, parameter groups, schedule and clipping."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str = "adamw"
    """Which optimizer: adamw or muon. Muon takes the hidden matrices; AdamW the embeddings, head, norms and biases."""
    lr: float = 3e-4
    """Peak learning rate."""
    adamw_lr: float | None = None
    """Peak learning rate of what AdamW owns when name is muon. None: lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices. Norms, biases and embeddings get none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's momentum (Nesterov)."""
    muon_ns_steps: int = 5
    """Newton-Schulz iterations that orthogonalise Muon's momentum."""
    muon_ns_dtype: str = "auto"
    """Dtype of those iterations: auto (bfloat16 on a GPU, else float32), bfloat16 or float32. bfloat16 is the faster
    one on CPUs with AVX512-BF16 or AMX. Weights in float64 keep float64."""
    schedule: str = "cosine"
    """How the rate moves after warm-up: cosine, linear, wsd (flat, then down), constant, or none (no warm-up)."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly; the first step already has 1/warmup_steps of it."""
    decay_steps: int | None = None
    """Length of the descent at the end, in steps. None: all steps after warm-up (cosine, linear), a fifth of all
    steps (wsd)."""
    min_lr_ratio: float = 0.1
    """Rate at the end over the peak rate."""
    clip_norm: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping, the norm is still seen."""
    loss_scale_init: float = 65536.0
    """What the loss is multiplied by at first, under float16 compute only: a power of two from 1 to 2**24. It halves
    after a step whose gradients are not finite."""
    loss_scale_growth_steps: int = 2000
    """Accepted steps in a row after which the loss scale doubles, under float16 compute only."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optim.lr = {self.lr} must be above 0")
        if self.adamw_lr is not None and not self.adamw_lr > 0:
            raise ValueError(f"optim.adamw_lr = {self.adamw_lr} must be above 0")
        if self.adamw_lr is not None and self.name == "adamw":
            raise ValueError(
                "optim.adamw_lr is for optimizers that share the model with AdamW; with adamw set optim.lr"
            )
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optim.{name} = {getattr(self, name)} must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas = {self.betas} must lie in [0, 1)")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"optim.muon_momentum = {self.muon_momentum} must lie in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"optim.eps = {self.eps} must be above 0")
        if self.muon_ns_steps < 1:
            raise ValueError(f"optim.muon_ns_steps = {self.muon_ns_steps} must be at least 1")
        if self.muon_ns_dtype not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"optim.muon_ns_dtype = {self.muon_ns_dtype!r} must be auto, bfloat16 or float32")
        if self.decay_steps is not None and self.decay_steps < 0:
            raise ValueError(f"optim.decay_steps = {self.decay_steps} must not be negative")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optim.min_lr_ratio = {self.min_lr_ratio} must lie in [0, 1]")
        if not 1 <= self.loss_scale_init <= 2**24 or math.frexp(self.loss_scale_init)[0] != 0.5:
            raise ValueError(
                f"optim.loss_scale_init = {self.loss_scale_init} must be a power of two from 1 to 2**24 = 16777216"
            )
        if self.loss_scale_growth_steps < 1:
            raise ValueError(f"optim.loss_scale_growth_steps = {self.loss_scale_growth_steps} must be at least 1")
