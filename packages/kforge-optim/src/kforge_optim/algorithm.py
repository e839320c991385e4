"""What an optimizer must be to work under `Optimizer`, and the register of those known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from kforge_optim.config import OptimConfig
from kforge_optim.registry import Registry

Fused = tuple[int, tuple[int, ...]]
"""How a weight that holds several matrices is cut into them: (dimension, sizes of the parts along it)."""


@dataclass
class Slot:
    """One parameter and what its optimizer remembers of it."""

    name: str
    parameter: nn.Parameter
    state: dict[str, Tensor] = field(default_factory=dict)
    remainder: Tensor | None = None
    """The lower half of a bfloat16 weight in split storage, int16; only ``update_split`` sees it."""
    fused: Fused | None = None
    """How the weight is cut into matrices [rows, in]: each part with all dimensions but the last flattened. None: the
    weight is a matrix, or a batch of them over all dimensions but the last two."""


@dataclass(frozen=True)
class Rates:
    """What the schedules say of one group in one step, as numbers on the host."""

    lr: float
    """Learning rate."""
    weight_decay: float
    """Decoupled weight decay: the step takes lr · weight_decay of the weight."""
    momentum: float | None = None
    """Decay rate of the first moment (AdamW's first beta, Muon's momentum). None: the algorithm's own."""
    step: int = 0
    """The number of the step, accepted or not, from 0, and"""
    seed: int = 0
    """the seed of the run: what random rounding is a function of, beside name and index; see `rounding`."""


class Algorithm(Protocol):
    """An update rule. It holds hyperparameters only; what it remembers lies in the slots.

    One that trains other weights than those to evaluate has ``evaluation_weight(slot) -> Tensor`` too: this rank's part
    of the latter, at full precision, a new tensor; nothing in the slot is changed.
    """

    @property
    def matrices_only(self) -> bool:
        """True: it takes the hidden matrices, and AdamW takes the rest."""
        ...

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Fresh state of one parameter. Tensors of the parameter's shape are made with ``zeros_like``, so that they
        keep its placement; others are DTensors on its mesh, or alike on all ranks. For a bfloat16 weight the parameter
        given here and to ``update`` is a float32 stand-in, which does not outlive the call: keep no reference to it.
        With ``update_split`` there is no stand-in, and the state is made for the bfloat16 parameter."""
        ...

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """Update parameters and state in place; each slot has a gradient. Called without autograd.

        scale: 0-dim, multiplies the gradients. gate: 0-dim, 1 or 0; with 0 no bit of parameters and state changes,
        whatever is in the gradients. Neither may be read on the host. ``.grad`` may be changed. Tensors of the state
        are changed in place, not replaced.
        """
        ...


@runtime_checkable
class SplitAlgorithm(Algorithm, Protocol):
    """An algorithm that updates bfloat16 weights itself, without a float32 copy of them."""

    def update_split(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """As ``update``, of bfloat16 parameters: with ``remainder`` the two halves of a float32 weight (`split`),
        without it rounded stochastically (`rounding`)."""
        ...


AlgorithmBuilder = Callable[[OptimConfig], Algorithm]

OPTIMIZERS: Registry[AlgorithmBuilder] = Registry("optimizer", "kforge.optimizers")
register_optimizer = OPTIMIZERS.register
"""Decorator: ``@register_optimizer("mine")`` over a function ``OptimConfig -> Algorithm``."""


def build_algorithm(name: str, options: Mapping[str, Any], config: OptimConfig) -> Algorithm:
    """The update rule called ``name``: a registered one, or a class of `torch.optim` or of anybody by module and class.

    options: keyword arguments of a class; a plug-in finds them in ``config.options``.

    Raises ValueError for an unknown name (listing the known ones) and for options of a rule that has none.
    """
    if "." in name and name not in OPTIMIZERS.names():
        from kforge_optim.torch_optim import build_torch_optimizer  # which is an algorithm, and needs this module

        return build_torch_optimizer(name, options, config)
    builder = OPTIMIZERS.get(name)
    if options and builder.__module__.partition(".")[0] == "kforge_optim":
        raise ValueError(
            f"options = {dict(options)} mean nothing to {name!r}, which has fields of its own in [optim]; they are for "
            f"a class named as torch.optim.{name.capitalize()}"
        )
    return builder(replace(config, options=options))
