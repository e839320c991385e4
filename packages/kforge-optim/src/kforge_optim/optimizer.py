"""The optimizer object: several algorithms over named parameters, one schedule, one state keyed by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kforge_optim import adamw as _adamw  # noqa: F401  (registers itself)
from kforge_optim import lion as _lion
from kforge_optim import muon as _muon
from kforge_optim import schedule_free as _schedule_free
from kforge_optim import split
from kforge_optim.algorithm import Algorithm, Rates, Slot, SplitAlgorithm, build_algorithm
from kforge_optim.config import GroupRule, OptimConfig
from kforge_optim.ema import Ema
from kforge_optim.groups import (
    Group,
    Rules,
    algorithm_name,
    build_groups,
    check_owned_once,
    clean_name,
    groups_of_stage,
    groups_table,
    scaled_rates,
    unwrapped,
)
from kforge_optim.offload import Offload, Work, on_host
from kforge_optim.rounding import noise_key
from kforge_optim.scalars import on_device
from kforge_optim.schedules import (
    Schedule,
    build_momentum_schedule,
    build_schedule,
    build_weight_decay_schedule,
)
from kforge_optim.sharding import copy_into, drop_gathered, local, local_part, part_of
from kforge_optim.torch_optim import TorchOptimizer

Storage = Literal["fp32", "split", "stochastic"]


class Optimizer:
    """Updates parameters in place from their ``.grad``; build it with `build_optimizer`, after sharding.

    ``schedule_step`` (int, on the host) counts the calls of `step`, accepted or not; it alone drives the rate, so
    after a resume the rate is that of the next step.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        algorithms: Mapping[str, Algorithm],
        schedule: Schedule,
        *,
        storage: Storage = "fp32",
        seed: int = 0,
        momentum_schedules: Mapping[str, Schedule] | None = None,
        weight_decay_schedule: Schedule | None = None,
        model: nn.Module | None = None,
        ema: Callable[[Sequence[Slot]], Ema] | None = None,
        offload: bool = False,
    ) -> None:
        """momentum_schedules: name of an algorithm -> its momentum at a step; one that is not there keeps its own.
        weight_decay_schedule: factor of every group's decay at a step; None: 1.
        model: whose weights these are, where FSDP may have gathered some of them; None: it has not.
        ema: makes the moving average of the weights in all slots; None: there is none.
        offload: state and step on the CPU, whatever the device of the weights; see `offload`."""
        if storage not in ("fp32", "split", "stochastic"):
            raise ValueError(f"storage = {storage!r} must be fp32, split or stochastic")
        check_owned_once(groups)
        self.storage = storage
        self.seed = seed
        self.groups = list(groups)
        self.schedule_step = 0
        self._held: dict[str, Tensor] | None = None  # the trained weights, while averaged ones are in their place
        self._model = model
        self._offload = Offload() if offload else None
        self._algorithms = dict(algorithms)
        self._initialised: set[str] = set()
        self._schedule = schedule
        self._momentum_schedules = dict(momentum_schedules or {})
        self._weight_decay_schedule = weight_decay_schedule
        self._slots = {
            group.name: [Slot(*item, fused=group.fused_weights.get(item[0])) for item in group.parameters.items()]
            for group in self.groups
        }
        for slot in self._all_slots():
            if slot.parameter.dtype not in (torch.float32, torch.float64) and not self._is_narrow(slot):
                raise ValueError(
                    f"parameter {slot.name!r} is {slot.parameter.dtype}, in which a step of 3e-4 does not move a "
                    "weight of 1.0; keep weights in float32 and compute in bfloat16 (FSDP's MixedPrecisionPolicy "
                    "with param_dtype, or autocast)"
                )
        self.ema = None if ema is None else ema(list(self._all_slots()))
        """The moving average of the weights, a state of its own to save; None without ``optim.ema_decay``."""
        averaging = [name for name, rule in self._algorithms.items() if hasattr(rule, "evaluation_weight")]
        if self.ema is not None and averaging:
            raise ValueError(f"optim.ema_decay: {averaging[0]} evaluates an average already; set it to 0")
        if storage != "fp32" and not any(self._is_narrow(slot) for slot in self._all_slots()):
            raise ValueError(
                f"storage = {storage!r} keeps weights in bfloat16 parameters, but no trainable parameter is bfloat16; "
                "convert the model to bfloat16 before it is sharded, or use storage = 'fp32'"
            )

    @property
    def offloads(self) -> bool:
        """Whether state and step are on the CPU, whatever the device of the weights."""
        return self._offload is not None

    def _is_narrow(self, slot: Slot) -> bool:
        return self.storage != "fp32" and slot.parameter.dtype == torch.bfloat16

    def _all_slots(self) -> Iterator[Slot]:
        for slots in self._slots.values():
            yield from slots

    def _slot(self, name: str) -> Slot:
        for slot in self._all_slots():
            if slot.name == clean_name(name):
                return slot
        raise KeyError(f"no trainable parameter is called {name!r}")

    @torch.no_grad()
    def step(self, scale: Tensor | None = None, gate: Tensor | None = None) -> None:
        """One update of every parameter that has a gradient.

        scale: 0-dim tensor that multiplies the gradients (the clip factor). None: 1.
        gate: 0-dim tensor, 1 to accept the step, 0 to leave weights, moments and counters as they are, bit for bit,
            even if gradients are inf or NaN. None: 1.

        Both are read on the device; the host does not wait, but where `offloads`. The schedule advances either way.
        ``.grad`` is used up: it may hold scaled values afterwards. Every rank must call it. Raises RuntimeError within
        `evaluation_weights` that holds averages: there the gradients are those of other weights.
        """
        if self._held:
            raise RuntimeError(
                "a step within evaluation_weights(): leave it first, so that the trained weights are back"
            )
        self.init_state()
        if self.ema is not None:
            self.ema.before_step()
        rates = self.rates()
        self.schedule_step += 1
        scale, gate = _scalar("scale", scale), _scalar("gate", gate)
        work = self._work(scale, gate)
        for group, slots, here_scale, here_gate in work if self._offload is None else self._offload.chunks(work):
            self._update(group, slots, rates=rates[group.name], scale=here_scale, gate=here_gate)
        if self.ema is not None:
            self.ema.after_step(self.schedule_step, gate)

    def _work(self, scale: Tensor | None, gate: Tensor | None) -> Iterator[Work]:
        """What has gradients, by group and device."""
        for group in self.groups:
            by_device: dict[torch.device, list[Slot]] = {}
            for slot in self._slots[group.name]:
                if slot.parameter.grad is not None:
                    by_device.setdefault(slot.parameter.device, []).append(slot)
            for device, slots in by_device.items():
                here = [None if scalar is None else on_device(scalar, device) for scalar in (scale, gate)]
                yield group, slots, here[0], here[1]

    def _update(
        self, group: Group, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None
    ) -> None:
        """One step of slots on one device, in any storage."""
        algorithm = self._algorithms[group.algorithm]
        given: dict[str, Any] = {"rates": rates, "scale": scale, "gate": gate}
        narrow = [slot for slot in slots if self._is_narrow(slot)]
        whole = [slot for slot in slots if not self._is_narrow(slot)]
        if whole:
            algorithm.update(whole, **given)
        if narrow and isinstance(algorithm, SplitAlgorithm):
            algorithm.update_split(narrow, **given)
            return
        for batch in split.batches(narrow):
            full = [split.widened(slot) for slot in batch]
            algorithm.update(full, **given)
            for slot, wide in zip(batch, full, strict=True):
                if slot.remainder is not None:
                    split.store(slot, local(wide.parameter))
                else:
                    split.store_rounded(slot, local(wide.parameter), noise_key(self.seed, rates.step, slot.name))

    def zero_grad(self) -> None:
        """Drop all gradients (``.grad = None``)."""
        for slot in self._all_slots():
            slot.parameter.grad = None

    def lrs(self) -> dict[str, float]:
        """Group name -> learning rate that the next step will use."""
        return {group.name: group.lr * (group.schedule or self._schedule)(self.schedule_step) for group in self.groups}

    def rates(self) -> dict[str, Rates]:
        """Group name -> rate, decay and momentum that the next step will use."""
        step, lrs = self.schedule_step, self.lrs()
        decay = 1.0 if self._weight_decay_schedule is None else self._weight_decay_schedule(step)
        momentum = {name: schedule(step) for name, schedule in self._momentum_schedules.items()}
        return {
            group.name: Rates(
                lrs[group.name], group.weight_decay * decay, momentum.get(group.algorithm), step, self.seed
            )
            for group in self.groups
        }

    def groups_table(self) -> str:
        """The groups as a table for people."""
        return groups_table(self.groups)

    def init_state(self) -> None:
        """Allocate the state that is not there yet, without a step. Raises ValueError on the meta device."""
        for group in self.groups:
            for slot in self._slots[group.name]:
                if slot.name in self._initialised:
                    continue
                self._allocate_remainder(slot)
                algorithm = self._algorithms[group.algorithm]
                as_it_is = isinstance(algorithm, SplitAlgorithm) or not self._is_narrow(slot)
                stepped = self._stepped(slot)
                slot.state = algorithm.init_state((stepped if as_it_is else split.widened(stepped)).parameter)
                self._initialised.add(slot.name)

    def _allocate_remainder(self, slot: Slot) -> None:
        if slot.parameter.is_meta:
            raise ValueError(f"parameter {slot.name!r} is on the meta device; materialise the model first")
        if self.storage == "split" and self._is_narrow(slot) and slot.remainder is None:
            slot.remainder = split.new_remainder(self._stepped(slot).parameter)

    def _stepped(self, slot: Slot) -> Slot:
        """The slot where its steps are made, on the host if they are offloaded; without its gradient there."""
        return slot if self._offload is None else on_host(slot)

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {parameter name: {"exp_avg": tensor, …}}, "schedule_step": int}``.

        The tensors are the live ones (DTensors keep their placement), allocated first if need be. Under split storage
        each bfloat16 parameter has a ``remainder``, int16, beside what its algorithm keeps. Where the model holds an
        average, within `evaluation_weights`, ``trained`` is the weight at full precision that training goes on from.
        """
        self.init_state()
        return {
            "state": {slot.name: self._kept(slot) for slot in self._all_slots()},
            "schedule_step": self.schedule_step,
        }

    def _kept(self, slot: Slot) -> dict[str, Tensor]:
        """What a checkpoint holds of a slot, by kind."""
        kept = dict(slot.state)
        if slot.remainder is not None:
            kept["remainder"] = slot.remainder
        if self._held and slot.name in self._held:
            kept["trained"] = self._held[slot.name]
        return kept

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a saved state into this one's tensors, in place, whatever the layout it was saved from.

        Tensors are whole ones or DTensors on any mesh. Load the model first: a state that was taken within
        `evaluation_weights`, as checkpoints are, holds the trained weights too, and they go into the model.

        Raises ValueError, before anything is changed, when parameter names, kinds of state or shapes differ, and when
        one was saved under split storage and this is not, or the reverse: the weights are in other parts then. Raises
        RuntimeError within `evaluation_weights` for a state that was not taken there.
        """
        self.init_state()
        saved: Mapping[str, Mapping[str, Tensor]] = state_dict["state"]
        slots = {slot.name: slot for slot in self._all_slots()}
        missing, unknown = sorted(slots.keys() - saved.keys()), sorted(saved.keys() - slots.keys())
        if missing or unknown:
            raise ValueError(f"the saved optimizer state lacks parameters {missing} and has unknown ones {unknown}")
        for name, slot in slots.items():
            kept = self._kept(slot)
            if "trained" in kept and "trained" not in saved[name]:
                raise RuntimeError(
                    f"the saved state lacks the trained {name!r}; load it outside of evaluation_weights()"
                )
            if "trained" in saved[name]:
                kept["trained"] = slot.parameter
            if ("remainder" in saved[name]) != ("remainder" in kept):
                was, now = ("split", self.storage) if "remainder" in saved[name] else ("fp32", self.storage)
                raise ValueError(
                    f"the weight {name!r} was saved under {was} storage and this run keeps it under {now} storage; "
                    f"resume with storage = {was!r}"
                )
            if kept.keys() != saved[name].keys():
                raise ValueError(
                    f"the saved state of {name!r} has {sorted(saved[name])}, this optimizer keeps "
                    f"{sorted(kept)}; was optim.name, optim.moments or optim.muon_variance_beta changed?"
                )
            for kind, tensor in kept.items():
                if tensor.shape != saved[name][kind].shape:
                    shapes = f"{tuple(saved[name][kind].shape)}, here it is {tuple(tensor.shape)}"
                    raise ValueError(f"the saved {kind} of {name!r} has shape {shapes}; was the model changed?")
                if kind != "trained" and tensor.dtype != saved[name][kind].dtype:
                    raise ValueError(
                        f"the saved {kind} of {name!r} is {saved[name][kind].dtype} and this optimizer keeps it in "
                        f"{tensor.dtype}; was optim.moments changed?"
                    )
        for name, slot in slots.items():
            kept = self._kept(slot)
            for kind, tensor in kept.items():
                copy_into(tensor, saved[name][kind])
            if "trained" in saved[name] and "trained" not in kept:
                split.write(slot, local_part(saved[name]["trained"], slot.parameter))
        self.schedule_step = int(state_dict["schedule_step"])

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Within it the model holds the weights to evaluate and to export: averages, where the optimizer has them.

        They are swapped in place, as are the halves of split weights, so that `full_weight` gives averages too. On
        leaving, also by an exception, the trained weights are back bit for bit; meanwhile they take the room of a
        second copy of the weights. May be entered again while entered. AdamW and Muon keep no averages: a no-op.
        """
        with self._averages_shown(True):
            yield

    @contextmanager
    def checkpoint_form(self) -> Iterator[bool]:
        """Within it model and optimizer hold what a checkpoint of both is made of: kforge-ckpt's Checkpointer enters it
        to save and to restore. Where an algorithm averages, the model's part are the weights of `evaluation_weights`,
        so that whoever reads it gets those, and the optimizer's has the trained ones. An `ema` is a part of its own,
        beside the trained weights in the model's. Yields whether the model holds averages."""
        with self._averages_shown(self.ema is None):
            yield bool(self._held)

    @contextmanager
    def _averages_shown(self, shown: bool) -> Iterator[None]:
        before = self._held is not None
        self._show(shown)
        try:
            yield
        finally:
            self._show(before)

    @torch.no_grad()
    def _show(self, averages: bool) -> None:
        """Swap the averages in, or the trained weights back in; nothing where they are in already."""
        if averages and self._held is None:
            self._held = {}
            try:
                for slot, average in self._averages():
                    split_ = slot.remainder is not None
                    self._held[slot.name] = split.full_weight(slot) if split_ else slot.parameter.detach().clone()
                    split.write(slot, average)
            except BaseException:
                self._show(False)
                raise
        elif not averages and self._held is not None:
            for slot in self._all_slots():
                if slot.name in self._held:
                    split.write(slot, local(self._held[slot.name]))
            self._held = None
        else:
            return
        if self._model is not None:
            drop_gathered(self._model)

    def _averages(self) -> Iterator[tuple[Slot, Tensor]]:
        """Slots with an average, in any storage, and that: this rank's part of it. It is the moving one, once it has
        begun, or the ``evaluation_weight`` of an algorithm."""
        if self.ema is not None and self.ema.started:
            averages = self.ema.weights()
            for slot in self._all_slots():
                yield slot, local(averages[slot.name])
        for group in self.groups:
            average = getattr(self._algorithms[group.algorithm], "evaluation_weight", None)
            if average is not None:
                self.init_state()
                for slot in self._slots[group.name]:
                    yield slot, average(split.whole(self._stepped(slot)))

    def full_weight(self, name: str) -> Tensor:
        """The weight called ``name`` at full precision, detached, with the placement of the parameter.

        Under split storage it is a new float32 tensor, joined from the bfloat16 parameter and its remainder; else it
        is the parameter itself. Raises KeyError when no trainable parameter has this name.
        """
        slot = self._slot(name)
        self._allocate_remainder(slot)
        return slot.parameter.detach() if slot.remainder is None else split.full_weight(slot)

    @torch.no_grad()
    def set_full_weight(self, name: str, value: Tensor) -> None:
        """Give the weight called ``name`` its ``value``, in place: `full_weight` returns it bit for bit.

        value: the whole tensor, alike on all ranks, or a DTensor of any layout; float32 under split storage, where the
            parameter gets the upper half and the remainder the lower. Moments stay as they are.

        Under split storage this is how a model gets initial values at full precision, parameter by parameter: the
        bfloat16 parameters alone have lost what lies below. Raises KeyError for an unknown name and ValueError for
        another shape, and under split storage for a value that is not float32; RuntimeError within
        `evaluation_weights` that holds averages.
        """
        if self._held:
            raise RuntimeError(f"{name!r} is an average now, and lost on leaving evaluation_weights(); leave it first")
        slot = self._slot(name)
        self._allocate_remainder(slot)
        if slot.remainder is None:
            copy_into(slot.parameter, value)
            return
        if value.dtype != torch.float32:
            raise ValueError(f"the full weight {name!r} must be float32, not {value.dtype}; a cast would round it")
        split.store(slot, local_part(value, slot.parameter))

    @torch.no_grad()
    def multiply(self, factors: Iterable[tuple[str, Tensor]]) -> None:
        """Multiply weights, by name, at full precision and in place. Moments stay as they are.

        factors: plain tensors that are alike on all ranks, of as many dimensions as the weight, each as long as its or
            1. Where they are 1, every bit of a weight in float32 or split storage stays.

        On the device, without a collective. Raises KeyError for an unknown name, ValueError for a shape that does not
        fit, and RuntimeError within `evaluation_weights` that holds averages.
        """
        for name, by in factors:
            shape = self._slot(name).parameter.shape
            if by.ndim != len(shape) or any(n not in (1, m) for n, m in zip(by.shape, shape, strict=True)):
                raise ValueError(f"{name!r} has shape {tuple(shape)} and cannot be multiplied by {tuple(by.shape)}")
            value = self.full_weight(name)
            here = local(value)
            here.mul_(part_of(by, value).to(device=here.device, dtype=here.dtype))
            self.set_full_weight(name, value)
        if self._model is not None:
            drop_gathered(self._model)

    def load_full_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """`set_full_weight` for each name and value, one at a time: an iterator never needs to hold two of them.

        Raises ValueError when a trainable parameter was not among them, after the rest has been set.
        """
        missing = {slot.name for slot in self._all_slots()}
        for name, value in weights.items() if isinstance(weights, Mapping) else weights:
            self.set_full_weight(name, value)
            missing.discard(name)
        if missing:
            raise ValueError(f"no value was given for the weights {sorted(missing)}")


def _scalar(what: str, value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"{what} must be a tensor of one element on the device, not {value!r}")
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    total_steps: int,
    *,
    storage: Storage = "fp32",
    seed: int = 0,
    rules: Rules = (),
    lr_scales: Mapping[str, float] | None = None,
    whole: nn.Module | None = None,
) -> Optimizer:
    """The optimizer that ``config`` names, over the trainable parameters of ``model``.

    The model must be sharded and materialised already, since both put new parameters in place of the old ones.
    ``total_steps`` is the horizon of the schedule, in optimizer steps.

    storage: ``fp32`` keeps weights in float32 parameters (float64 is fine too). ``split`` takes bfloat16 parameters
        and keeps the 16 bits that they lack as ``remainder`` in the state; together they are bit-equal to ``fp32``
        with the same gradients. ``stochastic`` takes bfloat16 parameters and rounds them stochastically after each
        step: no more memory, and a weight that moves right on average only. Parameters that are float32 all the same
        are updated as under ``fp32``.
    seed: of the random bits that bfloat16 weights, and moments in less than float32, are rounded by; see `rounding`.
    rules: predicates with what holds for the parameters that they choose; they go before ``config.groups``.
    lr_scales: parameter name -> factor on its rate, as μP wants of Adam and its like; names that are missing have 1.
        An optimizer that takes matrices only, Muon, is left alone: its updates have another size to begin with.
    whole: where ``model`` is a stage of a pipeline, the model that it is a part of, under the same names; it may be on
        the meta device. Groups are those of the whole on every stage, and may be empty on some; ``lr_scales`` may name
        any parameter of it.

    Raises ValueError for an unknown optimizer or schedule (listing the known ones), lengths that do not fit, weights
    in less than float32 under ``fp32``, another storage where nothing is bfloat16, a model without trainable
    parameters, rules and ``fused_weights`` that do not fit the model, an ``adamw_lr`` or ``moments`` where AdamW has
    nothing, and ``offload`` of an optimizer that takes matrices only.
    """
    named = [(config.name, config.options), ("adamw", {}), *_optimizers_of((*config.groups, *(r for _, r in rules)))]
    known = {algorithm_name(*one): one for one in named}
    own_name = algorithm_name(config.name, config.options)
    own = build_algorithm(config.name, config.options, config)
    every = model if whole is None else whole
    groups = build_groups(every, config, matrices_only=own.matrices_only, rules=rules, total_steps=total_steps)
    algorithms = {own_name: own}
    momentum = build_momentum_schedule(config, total_steps)
    momenta = {} if momentum is None else {own_name: momentum}
    for group in groups:
        if group.algorithm not in algorithms:
            algorithms[group.algorithm] = build_algorithm(*known[group.algorithm], config)
        algorithm = algorithms[group.algorithm]
        if isinstance(algorithm, TorchOptimizer):
            algorithm.check_rates(Rates(group.lr, group.weight_decay, 0.0 if group.algorithm in momenta else None))
        if config.offload and algorithm.matrices_only:
            raise ValueError(
                f"optim.offload: {group.algorithm} multiplies whole matrices, which takes a CPU far longer than a "
                f"step may; give {group.name!r} to an optimizer that goes by element, as adamw or lion, or leave "
                "optim.offload out"
            )
        flat = [name for name, parameter in group.parameters.items() if parameter.ndim < 2]
        if algorithm.matrices_only and flat:
            raise ValueError(
                f"group {group.name!r} gives {flat[0]!r} to {group.algorithm}, which takes matrices only; add "
                "role = 'matrices' to the rule, or name another optimizer"
            )
    if config.adamw_lr is not None and not any(group.algorithm == "adamw" for group in groups):
        raise ValueError(
            f"optim.adamw_lr = {config.adamw_lr} is the rate of what AdamW owns beside {config.name}, and it owns "
            "nothing; leave it out"
        )
    if config.moments != "fp32" and not any(_may_read_moments(one) for one in algorithms.values()):
        raise ValueError(
            f"optim.moments = {config.moments} is how AdamW keeps its moments, and it owns nothing beside "
            f"{config.name}; leave it out"
        )
    if lr_scales is not None:
        factors = {clean_name(name): factor for name, factor in lr_scales.items()}
        unknown = sorted(factors.keys() - {clean_name(name) for name, _ in unwrapped(every).named_parameters()})
        if unknown:
            raise ValueError(f"lr_scales names {unknown}, which are no parameters of the model")
        apart = [{} if algorithms[group.algorithm].matrices_only else factors for group in groups]
        groups = [part for group, of in zip(groups, apart, strict=True) for part in scaled_rates(group, of)]
    if whole is not None:
        groups = groups_of_stage(groups, model)
    return Optimizer(
        groups,
        algorithms,
        build_schedule(config, total_steps),
        storage=storage,
        seed=seed,
        momentum_schedules=momenta,
        weight_decay_schedule=build_weight_decay_schedule(config, total_steps),
        model=model,
        ema=_ema_of(config),
        offload=config.offload,
    )


def _may_read_moments(algorithm: Algorithm) -> bool:
    """Whether ``optim.moments`` may be meant for an algorithm: AdamW, or one of a user."""
    return not isinstance(algorithm, (_lion.Lion, _schedule_free.ScheduleFreeAdamW, _muon.Muon, TorchOptimizer))


def _ema_of(config: OptimConfig) -> Callable[[Sequence[Slot]], Ema] | None:
    if not config.ema_decay:
        return None
    return partial(Ema, decay=config.ema_decay, every_steps=config.ema_every_steps, device=config.ema_device)


def _optimizers_of(rules: Iterable[GroupRule]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and options of the optimizers that rules bring along."""
    for rule in rules:
        if rule.optimizer is not None:
            yield rule.optimizer, rule.options
