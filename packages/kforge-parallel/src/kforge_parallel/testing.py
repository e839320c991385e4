"""Whether a layout computes what one process computes, on a model of your own: `compare`.

    result = compare(ParallelConfig(dp_shard=2, tp=2), MyModel, batch=batch, loss=loss, plan=plan)
    print(result)      # a table: kind, worst error, limit, where
    result.check()     # AssertionError that names the parameters which differ

Runs on CPU with gloo, in float64: between rounding (1e-15) and the smallest fault seen in practice (1e-3) lie twelve
orders of magnitude, so the limits need no tuning. A loss alone proves little (most faults of a layout leave the first
loss as it is, and move later ones by a percent), so every gradient and every weight is gathered and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_parallel._processes import run_processes
from kforge_parallel.config import ParallelConfig
from kforge_parallel.precision import precision_of

SMALLEST = 1e-6
"""A tensor counts as at least this large, as a part of the largest of its kind, when its error is measured."""
KINDS = ("loss", "norm", "gradients", "weights", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a layout may be from one process before it counts as wrong."""

    loss: float
    """Relative error of the loss of every step, and of the evaluation at the end."""
    norm: float
    """Relative error of the gradient norm of every step."""
    gradients: float
    """Error of each gathered gradient, in the measure."""
    weights: float
    """Error of each gathered weight after the last step, in the measure."""
    measure: str = "max"
    """max: max|a - b| / max|b| of a tensor (or `SMALLEST` × the largest one's). norm: ‖a - b‖ / ‖b‖ likewise, for
    precisions in which single elements may differ (AdamW turns a gradient that is all rounding into a whole step)."""

    def of(self, kind: str) -> float:
        """The limit of one of `KINDS`."""
        limit: float = getattr(self, "loss" if kind == "evaluation" else kind)
        return limit


FLOAT64 = Limits(loss=1e-12, norm=1e-12, gradients=1e-10, weights=1e-10)
FLOAT32 = Limits(loss=2e-6, norm=2e-6, gradients=2e-6, weights=1e-5, measure="norm")
LIMITS = {"fp64": FLOAT64, "fp32": FLOAT32}


@dataclass
class Trajectory:
    """What a short training run left: whole tensors, whatever the layout."""

    losses: list[float] = field(default_factory=list)
    """Loss of every step, over the whole batch."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of every step, before clipping."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Name -> whole gradient, of every step; a parameter without one is left out."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Name -> whole weight, after the last step."""
    evaluation: float = math.nan
    """Loss without gradients, after the last step."""


def differences(got: Trajectory, want: Trajectory, measure: str = "max") -> dict[str, dict[str, float]]:
    """Kind (`KINDS`) -> where -> error of ``got``. What is missing on either side, or is NaN, has the error inf."""
    errors: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for kind, a, b in (("loss", got.losses, want.losses), ("norm", got.norms, want.norms)):
        for step in range(max(len(a), len(b))):
            both = step < len(a) and step < len(b)
            errors[kind][f"step {step + 1}"] = _number_error(a[step], b[step]) if both else math.inf
    for step in range(max(len(got.gradients), len(want.gradients))):
        mine, theirs = (t.gradients[step] if step < len(t.gradients) else {} for t in (got, want))
        errors["gradients"] |= {f"{name} (step {step + 1})": e for name, e in _errors(mine, theirs, measure)}
    errors["weights"] |= dict(_errors(got.weights, want.weights, measure))
    errors["evaluation"]["at the end"] = _number_error(got.evaluation, want.evaluation)
    return errors


def _number_error(a: float, b: float) -> float:
    return _relative(abs(a - b), abs(b))


def _errors(a: Mapping[str, Tensor], b: Mapping[str, Tensor], measure: str) -> Iterator[tuple[str, float]]:
    # A tensor that is zero but for rounding (the gradient of a bias on keys) has no size of its own to be measured by.
    sizes = {name: float(_size(tensor.to(torch.float64), measure)) for name, tensor in b.items() if tensor.numel()}
    least = SMALLEST * max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
    for name in {**b, **a}:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            yield name, math.inf
            continue
        x, y = a[name].to(torch.float64), b[name].to(torch.float64)
        yield name, _relative(float(_size(x - y, measure)), max(sizes[name], least)) if y.numel() else 0.0


def _size(tensor: Tensor, measure: str) -> Tensor:
    return tensor.abs().max() if measure == "max" else tensor.norm()


def _relative(distance: float, size: float) -> float:
    if math.isnan(distance) or math.isinf(size):
        return math.inf
    return distance / size if size else (math.inf if distance else 0.0)


@dataclass(frozen=True)
class Comparison:
    """How far a layout was from one process; `str` of it is a table."""

    layout: ParallelConfig
    """What was compared."""
    errors: dict[str, dict[str, float]]
    """Kind -> where (step, or name of the parameter) -> largest error that any rank saw."""
    limits: Limits
    """What is allowed."""

    @property
    def worst(self) -> dict[str, float]:
        """Kind -> largest error."""
        return {kind: max(places.values(), default=0.0) for kind, places in self.errors.items()}

    @property
    def differing(self) -> dict[str, list[str]]:
        """Kind -> where the error is above its limit, worst first. Empty when all is well."""
        wrong = {}
        for kind, places in self.errors.items():
            above = [place for place in places if not places[place] <= self.limits.of(kind)]
            if above:
                wrong[kind] = sorted(above, key=lambda place: -places[place])
        return wrong

    @property
    def ok(self) -> bool:
        """Whether every error is within its limit."""
        return not self.differing

    def check(self) -> Comparison:
        """Return self. Raises AssertionError, with the table and every place that differs, when not `ok`."""
        if self.ok:
            return self
        lines = [str(self), "", "not what one process computes:"]
        for kind, places in self.differing.items():
            shown = [f"{place}: {self.errors[kind][place]:.2g}" for place in places]
            lines.append(f"  {kind}: " + ", ".join(shown[:12]) + (f", … ({len(shown)})" if len(shown) > 12 else ""))
        raise AssertionError("\n".join(lines))

    def __str__(self) -> str:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        sizes = [f"{name} {size}" for name in axes if (size := getattr(self.layout, name)) > 1]
        lines = [f"{' × '.join(sizes) or 'one process'} against one plain process"]
        lines.append(f"{'':<12}{'worst':>10}{'limit':>10}  where")
        for kind, places in self.errors.items():
            place = max(places, key=lambda name: places[name], default="")
            lines.append(f"{kind:<12}{places.get(place, 0.0):>10.2g}{self.limits.of(kind):>10.2g}  {place}")
        return "\n".join(lines)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `compare` by default: torch's AdamW at a rate of 1e-3, with an eps of 1e-6: with 1e-8 a gradient
    that is zero but for rounding would become a step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def scored(batch: Mapping[str, Tensor]) -> int:
    """What `compare` divides the loss by, by default: the labels that are not -100, or the rows without ``labels``."""
    if "labels" in batch:
        return int((batch["labels"] != -100).sum())
    return len(next(iter(batch.values())))


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """All that both sides need to know; sent to every process."""

    model: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]
    init: Callable[[nn.Module], None] | None
    optimizer: Callable[[nn.Module], Any]
    count: Callable[[Mapping[str, Tensor]], float]
    norm: Callable[[nn.Module], Tensor] | None
    clip_norm: float
    microbatches: int
    steps: int
    precision: str
    seed: int
    options: dict[str, Any]


def compare(
    layout: ParallelConfig,
    model: Callable[[], nn.Module],
    *,
    batch: Mapping[str, Tensor],
    loss: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor],
    init: Callable[[nn.Module], None] | None = None,
    optimizer: Callable[[nn.Module], Any] = adamw,
    count: Callable[[Mapping[str, Tensor]], float] = scored,
    norm: Callable[[nn.Module], Tensor] | None = None,
    clip_norm: float = 0.0,
    microbatches: int = 1,
    same_microbatches: bool = False,
    steps: int = 3,
    precision: str = "fp64",
    limits: Limits | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
    run: Callable[..., list[Any]] | None = None,
    **options: Any,
) -> Comparison:
    """Train ``model`` in a layout and on one plain process, on CPU, and compare all that comes out.

    layout: how many processes are started is the product of its axes, -1 counting as 1; ``recompute``, ``compile``
        and whatever else it says is done in the layout only. Its precision and device are not used; pp must be 1.
    model: builds the model; a class or a function at the top of a module, as it is sent to other processes. Under the
        layout it goes through `parallelize`; on one process it is used as it is.
    batch: name -> tensor with the rows of the whole batch on dimension 0; floating-point ones are brought to the
        precision. Data rank r of n gets the r-th of n equal
        parts, cut into ``microbatches``, and of those the tokens that `shard_rows` gives it. The same batch serves in
        every step.
    loss: ``loss(model, batch, scale) -> scalar``: the sum of ``scale`` × the loss of every row or token in a batch.
        Sums, so that unequal microbatches and ranks add up; ``scale`` is 1 / ``count(whole batch)``, a 0-dim tensor.
    same_microbatches: one process sees the microbatches of all ranks, one after the other; for models in which the rows
        of a microbatch know of one another. False: the whole batch at once, which also finds a loss that depends on
        how the batch is cut.
    init: fills the model in place, as for `parallelize`. None: rank 0's random values under ``seed``.
    optimizer: builds the optimizer of a model.
    count: what the loss is divided by; by default the labels other than -100, or the rows where nothing is called
        ``labels``.
    norm: the gradient norm to be judged, such as the one that you clip by; None: that of the gathered gradients.
    clip_norm: scale gradients down to this norm before a step; 0: do not.
    precision, limits: fp64 with `FLOAT64`, or fp32 with `FLOAT32`, unless other limits are given.
    timeout_s: how long the processes of either side may take.
    run: starts the processes: ``run(fn, world, *args, timeout_s=...)`` calls ``fn(rank, world, *args)`` on each, with
        a process group and torchrun's variables, and returns the results by rank. None: new ones by multiprocessing.
    options: more for `parallelize`: plan, blocks, cast_inputs.

    A script that calls this needs the ``if __name__ == "__main__":`` guard, as for all of multiprocessing.
    Raises ValueError for arguments that do not fit, RuntimeError when a process fails or runs out of time.
    """
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    sizes = {name: max(1, getattr(layout, name)) for name in axes}
    layout = replace(layout, **sizes, precision=precision, device="cpu")  # type: ignore[arg-type]
    if sizes["pp"] > 1:
        raise ValueError(
            f"the layout has pp = {sizes['pp']}, and loss(model, …) wants the whole model, which no process has there; "
            "compare the layout with pp = 1, and the losses and gradients of a `Pipeline` with those of a plain model"
        )
    if isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__} already; pass the class, or a function that builds it")
    if not isinstance(batch, Mapping) or not all(isinstance(t, Tensor) and t.ndim for t in batch.values()) or not batch:
        raise ValueError("batch must be a dict of tensors, each with the rows of the batch on dimension 0")
    if steps < 1 or microbatches < 1:
        raise ValueError(f"steps = {steps} and microbatches = {microbatches} must be at least 1")
    if not count(batch) > 0:
        raise ValueError("the batch has nothing to score: every label is -100; pass count= if the loss goes by others")
    limits = limits or LIMITS.get(precision)
    if limits is None:
        raise ValueError(f"precision = {precision!r} has no limits of its own; pass limits, or use fp64 or fp32")
    rows = {name: len(tensor) for name, tensor in batch.items()}
    parts = sizes["dp_replicate"] * sizes["dp_shard"] * microbatches
    if len(set(rows.values())) != 1 or next(iter(rows.values())) % parts:
        raise ValueError(
            f"a batch of {rows} rows cannot be cut into {parts} microbatches (data ranks × microbatches); all "
            f"tensors must have the same number of rows, a multiple of {parts}"
        )
    recipe = _Recipe(
        model=model,
        batch={n: t.to(precision_of(precision).storage) if t.is_floating_point() else t for n, t in batch.items()},
        loss=loss,
        init=init,
        optimizer=optimizer,
        count=count,
        norm=norm,
        clip_norm=clip_norm,
        microbatches=microbatches,
        steps=steps,
        precision=precision,
        seed=seed,
        options=options,
    )
    run = run or run_processes
    (want,) = run(_train_plain, 1, recipe, parts if same_microbatches else 1, timeout_s=timeout_s)
    by_rank = run(_train_spread, math.prod(sizes.values()), recipe, layout, want, limits.measure, timeout_s=timeout_s)
    errors: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for rank_errors in by_rank:
        for kind, places in rank_errors.items():
            for place, error in places.items():
                errors[kind][place] = max(error, errors[kind].get(place, 0.0))
    return Comparison(layout, errors, limits)


def _train_plain(rank: int, world: int, recipe: _Recipe, parts: int) -> Trajectory:
    """The reference: the model as its author wrote it, brought to the precision and otherwise untouched."""
    from kforge_parallel.build import convert

    torch.manual_seed(recipe.seed)
    model = recipe.model()
    convert(model, precision_of(recipe.precision).storage)
    if recipe.init is not None:
        recipe.init(model)
    return _train(model, recipe, _cut(recipe.batch, parts), lambda value: value, lambda model, last: None)


def _train_spread(
    rank: int, world: int, recipe: _Recipe, layout: ParallelConfig, want: Trajectory, measure: str
) -> dict[str, dict[str, float]]:
    """What this rank has to say about the layout: its differences from the reference."""
    from kforge_parallel.build import parallelize
    from kforge_parallel.context import shard_rows
    from kforge_parallel.fsdp import set_last_microbatch
    from kforge_parallel.world import launch

    mesh = launch(layout)
    torch.manual_seed(recipe.seed + rank)  # a layout that takes each rank's own values is found out
    model = parallelize(recipe.model, mesh, layout, init=recipe.init, gradients="sum", **recipe.options)
    mine = _cut(recipe.batch, mesh.data_size)[mesh.data_rank]

    def total(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / mesh.copies  # ranks that have the same tokens have counted them all

    window = [shard_rows(part, mesh) for part in _cut(mine, recipe.microbatches)]
    got = _train(model, recipe, window, total, set_last_microbatch)
    return differences(got, want, measure)


def _train(
    model: nn.Module,
    recipe: _Recipe,
    window: list[dict[str, Tensor]],
    total: Callable[[Tensor], Tensor],
    set_last: Callable[[nn.Module, bool], None],
) -> Trajectory:
    from kforge_parallel.fsdp import full

    optimizer = recipe.optimizer(model)
    scale = 1.0 / torch.as_tensor(recipe.count(recipe.batch), dtype=precision_of(recipe.precision).storage)
    seen = Trajectory()
    for _ in range(recipe.steps):
        losses = []
        for i, part in enumerate(window):
            set_last(model, i == len(window) - 1)
            loss = recipe.loss(model, part, scale)
            loss.backward()
            losses.append(loss.detach())
        gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm() if recipe.norm is None else recipe.norm(model)
        seen.losses.append(total(torch.stack(losses).sum()).item())
        seen.norms.append(norm.item())
        seen.gradients.append(gradients)
        if recipe.clip_norm:
            factor = min(1.0, recipe.clip_norm / (seen.norms[-1] + 1e-6))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        seen.weights = {name: full(p) for name, p in model.named_parameters()}
        seen.evaluation = total(torch.stack([recipe.loss(model, part, scale) for part in window]).sum()).item()
    return seen


def _cut(batch: Mapping[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    rows = len(next(iter(batch.values()))) // parts
    return [{name: tensor[i * rows : (i + 1) * rows] for name, tensor in batch.items()} for i in range(parts)]
