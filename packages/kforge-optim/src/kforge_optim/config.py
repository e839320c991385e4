"""How the model learns, as plain data. Standard library only."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kforge_optim.phases import check_shape, read_phases, read_scales

ROLES = ("matrices", "embeddings", "head", "routers", "norms_and_biases")
"""What a parameter may be; `kforge_optim.groups` says how that is told."""

SCHEDULE_FIELDS = (
    *("schedule_steps", "warmup_steps", "decay_steps", "decay_shape", "decay_power", "decay_from"),
    *("min_lr_ratio", "phases"),
)
"""Fields of `OptimConfig` that a rule may set for a schedule of its own."""


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """What holds for some parameters in place of what their role gives them; what is None stays as it is."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    """Name of the group in tables and metrics. Parameters of several roles make a group each, as name.role, since
    their rate, decay and optimizer may differ."""
    match: str | None = None
    """Regular expression that is looked for anywhere in the clean name of the parameter (`re.search`)."""
    role: str | None = None
    """Only parameters of this role: matrices, embeddings, head, routers or norms_and_biases."""
    lr: float | None = None
    """Peak learning rate."""
    lr_scale: float | None = None
    """Factor on the peak learning rate that the role gives; one of the two."""
    weight_decay: float | None = None
    """Weight decay, also of norms, biases and embeddings that are matched."""
    optimizer: str | None = None
    """Name of the optimizer, as optim.name. It takes what is matched, also what muon leaves to AdamW otherwise."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of that optimizer, as optim.options."""
    schedule: str | None = None
    """Name of a schedule, with the warm-up and the min_lr_ratio of [optim]; what else it reads is in
    schedule_options."""
    schedule_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of [optim] that the schedule of these parameters reads with other values, as {warmup_steps = 50}."""

    def __post_init__(self) -> None:
        said = f"group rule {self.name!r}"
        object.__setattr__(self, "options", copy.deepcopy(dict(self.options)))
        object.__setattr__(self, "schedule_options", copy.deepcopy(dict(self.schedule_options)))
        if not self.name:
            raise ValueError("a group rule has no name; give it one, for tables and metrics")
        if self.match is not None:
            try:
                re.compile(self.match)
            except re.error as error:
                raise ValueError(
                    f"{said}: match = {self.match!r} is no regular expression: {error}; a character such as ( or * "
                    "that means itself wants a backslash before it"
                ) from None
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"{said}: role = {self.role!r} must be one of {', '.join(ROLES)}")
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError(
                f"{said}: lr = {self.lr} and lr_scale = {self.lr_scale} both say the rate; set one of them"
            )
        for key in ("lr", "lr_scale"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{said}: {key} = {value} must be above 0; requires_grad = False freezes a parameter")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"{said}: weight_decay = {self.weight_decay} must not be negative")
        if self.options and self.optimizer is None:
            raise ValueError(f"{said}: options = {self.options} are of an optimizer; name it, as optimizer = ...")
        for key in self.schedule_options:
            if key not in SCHEDULE_FIELDS:
                raise ValueError(f"{said}: schedule_options has {key!r}; it may have {', '.join(SCHEDULE_FIELDS)}")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer, parameter groups, schedule and clipping."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str = "adamw"
    """Which optimizer: adamw, lion, cautious_lion, muon or schedule_free; or a torch.optim.Optimizer by module and
    class, as torch.optim.NAdam. Muon takes the hidden matrices; AdamW the embeddings, head, norms and biases.
    schedule_free (Schedule-Free AdamW) evaluates and saves an average of weights, and wants no descent of the rate: set
    schedule = constant."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of a class that name says by module and class, but for lr and weight_decay. In TOML:
    [optim.options]."""
    lr: float = 3e-4
    """Peak learning rate."""
    adamw_lr: float | None = None
    """Peak learning rate of what AdamW owns when name is muon. None: lr."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices. Norms, biases and embeddings get none."""
    betas: tuple[float, float] | None = None
    """Decay rates of AdamW's first and second moment, or of what Lion steps along and what it remembers. Under
    schedule_free the first is the share of the average in the weights that gradients are taken at. None: the
    optimizer's own, 0.9 and 0.99 for Lion, 0.9 and 0.95 for the others."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    moments: str = "fp32"
    """How AdamW keeps its moments: fp32, bf16 (4 bytes a parameter), or int8 (2, in blocks of 256 with a scale each;
    norms, biases and small tensors keep fp32). Less than fp32 is rounded stochastically. The same for a whole run."""
    cautious_decay: bool = False
    """AdamW decays only elements whose update and weight agree in sign."""
    muon_momentum: float = 0.95
    """Decay rate of Muon's momentum (Nesterov)."""
    muon_method: str = "newton_schulz"
    """How Muon's momentum is orthogonalised: newton_schulz (Jordan's quintic, singular values end between 0.7 and 1.2)
    or polar_express (the best polynomial for each iteration: they converge to 1)."""
    muon_scale: str = "rms"
    """Size of Muon's update: rms (0.2·√max(rows, columns), the root mean square of AdamW's, whose rates carry over) or
    original (√max(1, rows / columns), for rates near 0.02)."""
    muon_variance_beta: float | None = None
    """Decay rate of NorMuon's second moment of each row of the orthogonalised momentum, by whose root the row is
    divided; 0.95 in its paper. None: no such moment."""
    muon_ns_steps: int = 5
    """Iterations that orthogonalise Muon's momentum."""
    muon_ns_dtype: str = "auto"
    """Dtype of those iterations: auto (bfloat16 on a GPU, else float32), bfloat16 or float32. bfloat16 is the faster
    one on CPUs with AVX512-BF16 or AMX. Weights in float64 keep float64."""
    qk_clip: float = 0.0
    """Largest attention score (scale · q · k) of a head: after an accepted step, heads that exceed it have their query
    and key weights scaled down to it, under any optimizer (MuonClip's QK-clip; 100 in its paper). 0: off."""
    qk_clip_every_steps: int = 10
    """How often scores are looked at: each time costs one more forward pass over the rows of the step."""
    schedule: str = "cosine"
    """How the rate moves after warm-up: cosine, linear, polynomial or rex (down over all steps), wsd (flat, then down),
    inverse_sqrt, constant, phases (the list of them), or none (no warm-up)."""
    schedule_steps: int | None = None
    """Horizon of the schedule, in steps: where its descent ends. None: the steps of the run. A run may stop before it,
    or go on after it at the floor."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly; the first step already has 1/warmup_steps of it."""
    warmup_tokens: int = 0
    """The same in tokens of the global batch, rounded up to whole steps; one of the two. 0: warmup_steps says it."""
    decay_steps: int | None = None
    """Length of the descent at the end, in steps. None: all steps after warm-up (cosine, linear, polynomial, rex), a
    fifth of all steps (wsd), none (inverse_sqrt)."""
    decay_shape: str = "linear"
    """How wsd and inverse_sqrt come down over decay_steps, and any schedule from decay_from: linear, cosine, 1-sqrt,
    polynomial or rex."""
    decay_power: float = 2.0
    """Exponent of the polynomial descent, (1 - progress) to this power."""
    decay_from: int | None = None
    """Step from which the rate comes down over decay_steps, from where it stands: resume a run under wsd, constant or
    inverse_sqrt at a checkpoint and cool it down. A later resume keeps it. None: the schedule says when."""
    min_lr_ratio: float = 0.1
    """Rate at the end over the peak rate."""
    phases: tuple[dict[str, Any], ...] = ()
    """Under schedule phases: a list of tables, one after the other from the end of warm-up, each with `steps` or
    `until` (the last may go on to the end), `schedule` (constant, linear, cosine, 1-sqrt, polynomial, rex), and the
    factors of the peak rate that it leads `from` and `to` (by default from where the one before ended, to
    min_lr_ratio)."""
    lr_scales: tuple[dict[str, Any], ...] = ()
    """Factors of what the schedule says, each from a step on, as [{step = 9000, scale = 0.5}]: under any schedule, for
    a part of the run with other data. Steps ascend. Empty: the schedule alone."""
    momentum_phases: tuple[dict[str, Any], ...] = ()
    """How the momentum of optimizer `name` moves (Muon's, or beta1), as phases from step 0 whose `from` and `to` are
    momenta, as [{steps = 300, schedule = "linear", from = 0.85, to = 0.95}]. It stays at the last. Empty: as set."""
    weight_decay_phases: tuple[dict[str, Any], ...] = ()
    """How weight decay moves, as phases from step 0 whose `from` and `to` are factors, in [0, 1], of what each group
    has. It stays at the last. Empty: as set."""
    groups: tuple[GroupRule, ...] = ()
    """Rules for some parameters, in TOML [[optim.groups]]: by `match` (a regular expression) or `role`, another lr (or
    lr_scale), weight_decay, optimizer or schedule. The first that fits a parameter has it; the rest go by role."""
    clip_norm: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping, the norm is still seen."""
    clip_value: float = 0.0
    """Largest absolute value of an element of the gradient; a larger one is cut to it. The norm is that of before.
    0: no element is cut."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights, which evaluation then uses: 0.9999, say. It starts lower,
    at (1+t)/(10+t) after t moves. 0: no average."""
    ema_every_steps: int = 1
    """The average moves once in so many steps, by the same decay each time."""
    ema_device: str = "same"
    """Where the average lies: same as the weights, or cpu, in float32 either way. On the CPU it costs a GPU no memory,
    and a copy each way for each move."""
    offload: bool = False
    """Keep what the optimizer remembers on the CPU and make its steps there: a device holds weights and gradients
    alone, and each step waits for it. For optimizers that go by element, so not for muon."""
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
        for name in ("weight_decay", "clip_norm", "clip_value", "warmup_steps", "warmup_tokens"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optim.{name} = {getattr(self, name)} must not be negative")
        object.__setattr__(self, "options", copy.deepcopy(dict(self.options)))
        names = [rule.name for rule in self.groups]
        for rule in self.groups:
            if rule.match is None and rule.role is None:
                raise ValueError(f"optim.groups: rule {rule.name!r} has neither match nor role; match = '' takes all")
            if names.count(rule.name) > 1 or rule.name in ROLES:
                why = "a role is called that" if rule.name in ROLES else "there are two of that name"
                raise ValueError(f"optim.groups: rule {rule.name!r} must be called otherwise: {why}")
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas = {self.betas} must lie in [0, 1)")
        if self.moments not in ("fp32", "bf16", "int8"):
            raise ValueError(f"optim.moments = {self.moments!r} must be fp32, bf16 or int8")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"optim.muon_momentum = {self.muon_momentum} must lie in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"optim.eps = {self.eps} must be above 0")
        if self.muon_method not in ("newton_schulz", "polar_express"):
            raise ValueError(f"optim.muon_method = {self.muon_method!r} must be newton_schulz or polar_express")
        if self.muon_scale not in ("rms", "original"):
            raise ValueError(f"optim.muon_scale = {self.muon_scale!r} must be rms or original")
        if self.muon_variance_beta is not None and not 0 <= self.muon_variance_beta < 1:
            raise ValueError(f"optim.muon_variance_beta = {self.muon_variance_beta} must lie in [0, 1), or be left out")
        if not 0 <= self.qk_clip < math.inf:
            raise ValueError(f"optim.qk_clip = {self.qk_clip} must be finite and not negative; 0 switches it off")
        if self.qk_clip and self.name == "schedule_free":
            raise ValueError(
                "optim.qk_clip scales the weights that are trained, and schedule_free evaluates an average of others; "
                "leave it out, or bound the scores by the model's qk_norm"
            )
        if self.qk_clip_every_steps < 1:
            raise ValueError(f"optim.qk_clip_every_steps = {self.qk_clip_every_steps} must be at least 1")
        if self.muon_ns_steps < 1:
            raise ValueError(f"optim.muon_ns_steps = {self.muon_ns_steps} must be at least 1")
        if self.muon_ns_dtype not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"optim.muon_ns_dtype = {self.muon_ns_dtype!r} must be auto, bfloat16 or float32")
        for name, least in (("schedule_steps", 1), ("decay_steps", 0), ("decay_from", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"optim.{name} = {value} must be at least {least}")
        if self.warmup_steps and self.warmup_tokens:
            raise ValueError(
                f"optim.warmup_steps = {self.warmup_steps} and optim.warmup_tokens = {self.warmup_tokens} both say how "
                "long the warm-up is; set one of them to 0"
            )
        check_shape("optim.decay_shape", self.decay_shape)
        if not self.decay_power > 0:
            raise ValueError(f"optim.decay_power = {self.decay_power} must be above 0")
        read_phases("optim.momentum_phases", self.momentum_phases, before=None, below_one=True)
        read_phases("optim.weight_decay_phases", self.weight_decay_phases)
        read_phases("optim.phases", self.phases, start=self.warmup_steps, default_to=self.min_lr_ratio)
        read_scales(self.lr_scales)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"optim.min_lr_ratio = {self.min_lr_ratio} must lie in [0, 1]")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"optim.ema_decay = {self.ema_decay} must lie in [0, 1)")
        if self.ema_every_steps < 1:
            raise ValueError(f"optim.ema_every_steps = {self.ema_every_steps} must be at least 1")
        if self.ema_device not in ("same", "cpu"):
            raise ValueError(f"optim.ema_device = {self.ema_device!r} must be same or cpu")
        for name, unused in (("ema_every_steps", 1), ("ema_device", "same")):
            if not self.ema_decay and getattr(self, name) != unused:
                raise ValueError(
                    f"optim.{name} = {getattr(self, name)} is of the average, and optim.ema_decay = 0 keeps none"
                )
        if not 1 <= self.loss_scale_init <= 2**24 or math.frexp(self.loss_scale_init)[0] != 0.5:
            raise ValueError(
                f"optim.loss_scale_init = {self.loss_scale_init} must be a power of two from 1 to 2**24 = 16777216"
            )
        if self.loss_scale_growth_steps < 1:
            raise ValueError(f"optim.loss_scale_growth_steps = {self.loss_scale_growth_steps} must be at least 1")

    def in_steps(self, tokens_per_step: int) -> OptimConfig:
        """The same with ``warmup_tokens`` as ``warmup_steps``: so many that they take at least these tokens.

        tokens_per_step: of the whole global batch.
        """
        if not self.warmup_tokens:
            return self
        return replace(self, warmup_steps=-(-self.warmup_tokens // tokens_per_step), warmup_tokens=0)
