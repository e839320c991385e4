"""The optimizer object: several algorithms over named parameters, one schedule, one state keyed by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kforge_optim import adamw as _adamw  # noqa: F401  (registers itself)
from kforge_optim import muon as _muon  # noqa: F401  (registers itself)
from kforge_optim.algorithm import OPTIMIZERS, Algorithm, Slot
from kforge_optim.config import OptimConfig
from kforge_optim.groups import Group, build_groups, check_owned_once, groups_table
from kforge_optim.schedules import Schedule, build_schedule
from kforge_optim.sharding import copy_into


class Optimizer:
    """Updates parameters in place from their ``.grad``; build it with `build_optimizer`, after sharding.

    ``schedule_step`` (int, on the host) counts the calls of `step`, accepted or not; it alone drives the rate, so
    after a resume the rate is that of the next step.
    """

    def __init__(self, groups: Sequence[Group], algorithms: Mapping[str, Algorithm], schedule: Schedule) -> None:
        check_owned_once(groups)
        self.groups = list(groups)
        self.schedule_step = 0
        self._algorithms = dict(algorithms)
        self._schedule = schedule
        self._slots = {group.name: [Slot(*item) for item in group.parameters.items()] for group in self.groups}
        for slot in self._all_slots():
            if slot.parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"parameter {slot.name!r} is {slot.parameter.dtype}, in which a step of 3e-4 does not move a "
                    "weight of 1.0; keep weights in float32 and compute in bfloat16 (FSDP's MixedPrecisionPolicy "
                    "with param_dtype, or autocast)"
                )

    def _all_slots(self) -> Iterator[Slot]:
        for slots in self._slots.values():
            yield from slots

    def _slot(self, name: str) -> Slot:
        for slot in self._all_slots():
            if slot.name == name:
                return slot
        raise KeyError(f"no trainable parameter is called {name!r}")

    @torch.no_grad()
    def step(self, scale: Tensor | None = None, gate: Tensor | None = None) -> None:
        """One update of every parameter that has a gradient.

        scale: 0-dim tensor that multiplies the gradients (the clip factor). None: 1.
        gate: 0-dim tensor, 1 to accept the step, 0 to leave weights, moments and counters as they are, bit for bit,
            even if gradients are inf or NaN. None: 1.

        Both are read on the device; the host does not wait. The schedule advances either way. ``.grad`` is used up:
        it may hold scaled values afterwards. Every rank must call it.
        """
        self.init_state()
        rates = self.lrs()
        self.schedule_step += 1
        scale, gate = _scalar("scale", scale), _scalar("gate", gate)
        for group in self.groups:
            by_device: dict[torch.device, list[Slot]] = {}
            for slot in self._slots[group.name]:
                if slot.parameter.grad is not None:
                    by_device.setdefault(slot.parameter.device, []).append(slot)
            for device, slots in by_device.items():
                self._algorithms[group.algorithm].update(
                    slots,
                    lr=rates[group.name],
                    weight_decay=group.weight_decay,
                    scale=None if scale is None else scale.to(device, non_blocking=True),
                    gate=None if gate is None else gate.to(device, non_blocking=True),
                )

    def zero_grad(self) -> None:
        """Drop all gradients (``.grad = None``)."""
        for slot in self._all_slots():
            slot.parameter.grad = None

    def lrs(self) -> dict[str, float]:
        """Group name -> learning rate that the next step will use."""
        factor = self._schedule(self.schedule_step)
        return {group.name: group.lr * factor for group in self.groups}

    def groups_table(self) -> str:
        """The groups as a table for people."""
        return groups_table(self.groups)

    def init_state(self) -> None:
        """Allocate the state that is not there yet, without a step. Raises ValueError on the meta device."""
        for group in self.groups:
            for slot in self._slots[group.name]:
                if slot.state:
                    continue
                if slot.parameter.is_meta:
                    raise ValueError(f"parameter {slot.name!r} is on the meta device; materialise the model first")
                slot.state = self._algorithms[group.algorithm].init_state(slot.parameter)

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {parameter name: {"exp_avg": tensor, …}}, "schedule_step": int}``.

        The tensors are the live ones (DTensors keep their placement), allocated first if need be.
        """
        self.init_state()
        return {
            "state": {slot.name: dict(slot.state) for slot in self._all_slots()},
            "schedule_step": self.schedule_step,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a saved state into this one's tensors, in place, whatever the layout it was saved from.

        Tensors are whole ones or DTensors on any mesh. Raises ValueError, before anything is changed, when parameter
        names, kinds of state or shapes differ.
        """
        self.init_state()
        saved: Mapping[str, Mapping[str, Tensor]] = state_dict["state"]
        slots = {slot.name: slot for slot in self._all_slots()}
        missing, unknown = sorted(slots.keys() - saved.keys()), sorted(saved.keys() - slots.keys())
        if missing or unknown:
            raise ValueError(f"the saved optimizer state lacks parameters {missing} and has unknown ones {unknown}")
        for name, slot in slots.items():
            if slot.state.keys() != saved[name].keys():
                raise ValueError(
                    f"the saved state of {name!r} has {sorted(saved[name])}, this optimizer keeps "
                    f"{sorted(slot.state)}; was optim.name changed?"
                )
            for kind, tensor in slot.state.items():
                if tensor.shape != saved[name][kind].shape:
                    shapes = f"{tuple(saved[name][kind].shape)}, here it is {tuple(tensor.shape)}"
                    raise ValueError(f"the saved {kind} of {name!r} has shape {shapes}; was the model changed?")
        for name, slot in slots.items():
            for kind, tensor in slot.state.items():
                copy_into(tensor, saved[name][kind])
        self.schedule_step = int(state_dict["schedule_step"])

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Within it the model holds the weights to evaluate and to save. AdamW and Muon keep no others: a no-op.

        May be entered again while entered.
        """
        yield

    def full_weight(self, name: str) -> Tensor:
        """The weight called ``name`` at full precision, detached, with the placement of the parameter.

        Raises KeyError when no trainable parameter has this name.
        """
        return self._slot(name).parameter.detach()


def _scalar(what: str, value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(f"{what} must be a tensor of one element on the device, not {value!r}")
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).reshape(())


def build_optimizer(model: nn.Module, config: OptimConfig, total_steps: int) -> Optimizer:
    """The optimizer that ``config`` names, over the trainable parameters of ``model``.

    The model must be sharded and materialised already, since both put new parameters in place of the old ones.
    ``total_steps`` is the horizon of the
    schedule, in optimizer steps.

    Raises ValueError for an unknown optimizer or schedule (listing the known ones), lengths that do not fit, weights
    in less than float32, and a model without trainable parameters.
    """
    algorithm = OPTIMIZERS.get(config.name)(config)
    algorithms = {config.name: algorithm}
    if algorithm.matrices_only:
        algorithms["adamw"] = OPTIMIZERS.get("adamw")(config)
    groups = build_groups(model, config, matrices_only=algorithm.matrices_only)
    return Optimizer(groups, algorithms, build_schedule(config, total_steps))
