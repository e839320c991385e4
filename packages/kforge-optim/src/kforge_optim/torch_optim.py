"""Any `torch.optim.Optimizer` by module and class: its arithmetic, with this package's state, scale, gate and shards.

One instance of the class does every parameter's steps: it is handed the local shards, what is remembered of them and
the rate, and steps. Its state lies with the other optimizers', by parameter name.

What a class starts from. Most make their state in the first step. A step with zero gradients on a copy shows it: the
first value that the class files under each key is the fresh one (`_fresh_state`). Numbers become 0-dim tensors, so
that a refused step can put them back on the device.

What a class must be like is tried out when it is built, on a few numbers (`_check`): three steps from the state that
was found must be those of the class on its own. And whether it is elementwise: then a shard is updated as the whole
is, and it is right under any sharding. One that is not (Adafactor, torch.optim.Muon) is refused for sharded parameters.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from kforge_optim._torch import foreach_mul_
from kforge_optim.algorithm import Rates, Slot
from kforge_optim.config import OptimConfig
from kforge_optim.sharding import distinct_shards, like_layout, local, local_gradient, same_strides

_BATCH_ELEMENTS = 2**25
"""Elements of this rank that are updated at one time: with a gate, weights and state of so many are kept twice."""

OURS = ("lr", "weight_decay", "params")
"""Arguments of a class that are not options: groups, rules and schedules say them."""


Make = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Parameters -> an instance of the class over them, with its options."""


class TorchOptimizer:
    """The steps of one class of optimizer; see `Algorithm`. A class that takes no vectors takes matrices only.

    Raises ValueError for a class that cannot be run so, with the reason.
    """

    def __init__(self, name: str, make: Make) -> None:
        self.name = name
        self._make = make
        with torch.device("cpu"):  # also where a model is made on the meta device
            self.elementwise = _check(name, make)
            self.matrices_only = not _takes_vectors(make)
            self._optimizer = make([_leaf(torch.zeros(2, 2))])
        (self._group,) = self._optimizer.param_groups

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What the class starts from. Raises ValueError for a sharded parameter where it is not elementwise."""
        if not self.elementwise and distinct_shards(parameter) > 1:
            raise ValueError(
                f"{self.name} is not elementwise: its step of a shard is not that of the whole parameter, and a "
                f"parameter of shape {tuple(parameter.shape)} is sharded; replicate parameters (dp_shard = 1, tp = 1), "
                "or use an optimizer that is right under sharding: adamw, lion, muon, or an elementwise class"
            )
        weight = local(parameter)
        fresh = _fresh_state(self._make, weight)
        return {
            kind: like_layout(tensor, parameter) if tensor.ndim > 0 and tensor.shape == weight.shape else tensor
            for kind, tensor in fresh.items()
        }

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step of the class; see `Algorithm.update`. A refused one is made as well, and taken back."""
        self.check_rates(rates)
        _set_rates(self._group, rates, slots[0].parameter.device)
        accept = None if gate is None else gate > 0
        for batch in _batches(slots):
            weights = [_leaf(local(slot.parameter)) for slot in batch]
            states = [{kind: local(tensor) for kind, tensor in slot.state.items()} for slot in batch]
            for weight, slot in zip(weights, batch, strict=True):
                grad = local_gradient(slot.parameter).to(weight.dtype)
                weight.grad = grad if same_strides(weight, grad) else torch.empty_like(weight).copy_(grad)
            if scale is not None:
                foreach_mul_([weight.grad for weight in weights if weight.grad is not None], scale.to(weights[0].dtype))
            changed = [*(weight.detach() for weight in weights), *(t for state in states for t in state.values())]
            before = [] if accept is None else [tensor.clone() for tensor in changed]
            after = _step(self._optimizer, weights, states)
            for state, new in zip(states, after, strict=True):
                for kind, tensor in state.items():
                    if new[kind] is not tensor:  # a class may file a new tensor in the place of the old one
                        tensor.copy_(new[kind])
            if accept is not None:
                for tensor, old in zip(changed, before, strict=True):
                    torch.where(accept, tensor, old, out=tensor)

    def check_rates(self, rates: Rates) -> None:
        """Raises ValueError for a decay or a momentum that the class does not have."""
        if "weight_decay" not in self._group and rates.weight_decay != 0:
            raise ValueError(
                f"{self.name} has no weight decay, but some of its parameters have {rates.weight_decay}; set "
                "optim.weight_decay, or that of the rule, to 0"
            )
        if rates.momentum is not None and not {"betas", "momentum"} & self._group.keys():
            raise ValueError(
                f"{self.name} has neither betas nor momentum that optim.momentum_phases could move; leave them out"
            )


def _leaf(tensor: Tensor) -> Tensor:
    """A leaf of its own that shares memory with ``tensor``: torch's optimizers want leaves."""
    return nn.Parameter(tensor.detach(), requires_grad=True)


def _takes_vectors(make: Make) -> bool:
    try:
        make([_leaf(torch.zeros(2))])
    except ValueError:
        return False
    return True


def _set_rates(group: dict[str, Any], rates: Rates, device: torch.device) -> None:
    group["lr"] = rates.lr
    if "weight_decay" in group:
        group["weight_decay"] = rates.weight_decay
    if rates.momentum is not None and "betas" in group:
        group["betas"] = (rates.momentum, *group["betas"][1:])
    elif rates.momentum is not None:
        group["momentum"] = rates.momentum
    if "capturable" in group:
        group["capturable"] = device.type == "cuda"  # counters on the device: the host does not wait for them


def _step(
    optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Step ``weights``, which have gradients, in place from ``states``; return what the states are afterwards."""
    (group,) = optimizer.param_groups
    group["params"] = list(weights)
    optimizer.state = defaultdict(dict, {w: dict(s) for w, s in zip(weights, states, strict=True)})
    optimizer.step()
    after = [dict(optimizer.state[weight]) for weight in weights]
    group["params"], optimizer.state = [], defaultdict(dict)
    return after


class _FirstValues(dict[str, Any]):
    """A dict that keeps a copy of the first value of each key: what it was before anything was added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


@torch.no_grad()
def _fresh_state(make: Make, weight: Tensor) -> dict[str, Tensor]:
    """The state that a class gives a parameter like ``weight`` before its first step, on the device of ``weight``."""
    copy = _leaf(weight.clone())
    copy.grad = torch.zeros_like(weight)
    optimizer = make([copy])
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = weight.is_cuda
    found = dict(optimizer.state[copy])
    if not found:
        recorder = _FirstValues()
        optimizer.state[copy] = recorder
        optimizer.step()
        found = recorder.first
    return {key: _as_tensor(value, weight.device) for key, value in found.items() if value is not None}


def _as_tensor(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, device=device, dtype=torch.float64 if isinstance(value, float) else None)
    raise ValueError(f"its state has a {type(value).__name__}, and only tensors and numbers can be saved and put back")


def _check(name: str, make: Make) -> bool:
    """Whether the class is elementwise. Raises ValueError where it cannot be run from a state made beforehand."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 6)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Small, huge, small again: what clips or normalises by a whole parameter shows itself.
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**power for power in (-3, 3, -1)]
    try:
        whole = _alone(make, start, grads)
        parts = [
            torch.cat(
                [
                    _alone(make, piece, [grad.tensor_split(2, dim)[half] for grad in grads])
                    for half, piece in enumerate(start.tensor_split(2, dim))
                ],
                dim,
            )
            for dim in (0, 1)
        ]
        ours, fresh = _leaf(start.clone()), _fresh_state(make, start)
        optimizer, state = make([ours]), dict(fresh)
        before = _memory(optimizer)
        for grad in grads:
            ours.grad = grad.clone()
            (after,) = _step(optimizer, [ours], [state])
            state = {kind: value for kind, value in after.items() if value is not None}
    except Exception as error:
        raise ValueError(
            f"{name} cannot be run here: {error}. It must step without a closure, on dense gradients, and keep what it "
            "remembers of a parameter in state[parameter], as tensors and numbers"
        ) from error
    if state.keys() != fresh.keys() or _memory(optimizer) != before:
        raise ValueError(
            f"{name} remembers more than what it has in state[parameter] from the first step on (a counter of the "
            "whole optimizer, say), which would be lost when a step is refused or a run resumed"
        )
    if not torch.allclose(ours.detach(), whole, rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"{name} with these options does not start from a state that can be made before its first step, as SGD "
            "with dampening, whose first step is another one; use other options"
        )
    return all(torch.allclose(part, whole, rtol=1e-9, atol=1e-12) for part in parts)


def _memory(optimizer: torch.optim.Optimizer) -> list[str]:
    """Numbers and tensors that a class has outside of the state of its parameters."""
    (group,) = optimizer.param_groups
    held = [item for item in (*group.items(), *vars(optimizer).items()) if item[0] != "params"]
    return [f"{key}={value}" for key, value in held if isinstance(value, (bool, int, float, complex, tuple, Tensor))]


def _alone(make: Make, start: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """What the class itself makes of ``start``."""
    weight = _leaf(start.clone())
    optimizer = make([weight])
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots of one dtype, at most `_BATCH_ELEMENTS` elements of this rank each, but one slot at least."""
    by_dtype: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        by_dtype.setdefault(slot.parameter.dtype, []).append(slot)
    for members in by_dtype.values():
        batch: list[Slot] = []
        elements = 0
        for slot in members:
            size = local(slot.parameter).numel()
            if batch and elements + size > _BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(slot)
            elements += size
        yield batch


def build_torch_optimizer(name: str, options: Mapping[str, Any], config: OptimConfig) -> TorchOptimizer:
    """The class ``name``, as ``torch.optim.NAdam``, with keyword arguments ``options``.

    Raises ValueError where there is no such class, where it is no optimizer, takes no such option or has no rate, and
    where it cannot be run under this package (see the module).
    """
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer {name!r} is no class that can be imported: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer):
        raise ValueError(f"optimizer {name!r} is no torch.optim.Optimizer; register other rules by name")
    known = inspect.signature(cls).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in options:
        if key in OURS:
            raise ValueError(f"options of {name} have {key!r}; set optim.{key}, or that of a rule")
        if key not in known and not free:
            raise ValueError(f"{name} takes no option {key!r}; it takes {', '.join(k for k in known if k not in OURS)}")
    if "lr" not in known:
        raise ValueError(f"{name} takes no lr, so no schedule can move its rate")

    built: Callable[..., torch.optim.Optimizer] = cls

    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return built(parameters, lr=config.lr, **options)

    return TorchOptimizer(name, make)
