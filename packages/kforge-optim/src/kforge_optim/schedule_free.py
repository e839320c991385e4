"""Schedule-Free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682): an average in the place of a descent.

Three weights belong together: gradients are taken at y, which is the parameter while training; z moves as under AdamW
without momentum; x is the average of all z, and what is evaluated, saved and exported::

    y = (1-β₁)z + β₁x
    z = z - lr (g / (√(v / (1-β₂ᵗ)) + eps) + wd·y)        v = β₂v + (1-β₂)g²
    x = (1-c)x + c·z                                      c = γ² / Σγ², γ the highest rate so far

x is not stored: y and z give it, so that a weight takes as many bytes as under AdamW. Rates of a warm-up count with
their squares; a rate of 0 counts nothing, and where all were 0, c is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kforge_optim._torch import foreach_copy_
from kforge_optim.algorithm import Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.sharding import local, local_gradient

_SCALARS = ("step", "lr_max", "weight_sum")


class ScheduleFreeAdamW:
    """AdamW whose parameters are y and whose evaluation weights are the average x; see the module for the formulas.

    It is elementwise, so each rank updates its own shard and nothing is sent. State of a parameter: ``z`` and
    ``exp_avg_sq`` in its dtype and placement, and as 0-dim float64 tensors ``step``, which counts the accepted steps,
    ``lr_max`` and ``weight_sum``, the highest rate and the sum of the γ². Decay is that of the official library: at y.

    Raises ValueError for a first beta of 0, under which y is z and tells nothing of x.
    """

    matrices_only = False

    def __init__(self, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> None:
        if not betas[0] > 0:
            raise ValueError(f"optim.betas = {betas}: schedule_free averages with the first, which must be above 0")
        self.betas = betas
        self.eps = eps

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero second moment and sums. The first accepted step takes the weight as it is then for ``z``."""
        weight = parameter.detach()
        scalars = {name: torch.zeros((), dtype=torch.float64, device=weight.device) for name in _SCALARS}
        return {**scalars, "z": weight.clone(), "exp_avg_sq": torch.zeros_like(weight)}

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. Raises ValueError for a scheduled momentum: x = (y - (1-β₁)z) / β₁ holds
        for one β₁ only."""
        if rates.momentum is not None:
            raise ValueError(f"momentum = {rates.momentum}: schedule_free keeps its first beta, it cannot be scheduled")
        beta1, beta2 = self.betas
        device = slots[0].parameter.device
        accept = torch.ones((), dtype=torch.bool, device=device) if gate is None else gate > 0

        # The scalars of all N slots at once.
        scalars = [[slot.state[name] for slot in slots] for name in _SCALARS]
        old_3N = torch.stack([torch.stack(tensors) for tensors in scalars])
        step_N, highest_N = old_3N[0] + 1, old_3N[1].clamp(min=rates.lr)
        weight_N = highest_N.square()
        sum_N = old_3N[2] + weight_N
        for tensors, new_N in zip(
            scalars, torch.where(accept, torch.stack([step_N, highest_N, sum_N]), old_3N), strict=True
        ):
            foreach_copy_(tensors, new_N.unbind())
        average_N = torch.where(sum_N > 0, weight_N / sum_N, 0.0)
        move_N = rates.lr * (1 - beta1 * (1 - average_N))
        correction_N = 1 - beta2**step_N
        first_N = step_N == 1
        lr_N, decay_N = torch.full_like(step_N, rates.lr), torch.full_like(step_N, rates.weight_decay)
        numbers_5N = torch.stack([lr_N, decay_N, average_N, move_N, correction_N])
        numbers = {dtype: numbers_5N.to(dtype) for dtype in {slot.parameter.dtype for slot in slots}}
        for i, slot in enumerate(slots):
            y = local(slot.parameter)
            grad = local_gradient(slot.parameter).to(y.dtype)
            if scale is not None:
                grad = grad * scale.to(y.dtype)
            kept = y, local(slot.state["z"]), local(slot.state["exp_avg_sq"])
            _move(*kept, grad, numbers[y.dtype][:, i], first_N[i], accept, beta2=beta2, eps=self.eps)

    def evaluation_weight(self, slot: Slot) -> Tensor:
        """This rank's part of x, a new tensor; y itself before the first step."""
        y, z = local(slot.parameter), local(slot.state["z"])
        return torch.where(slot.state["step"] > 0, y.lerp(z, 1 - 1 / self.betas[0]), y)


def _move(
    y: Tensor,
    z: Tensor,
    v: Tensor,
    grad: Tensor,
    numbers_5: Tensor,
    first: Tensor,
    accept: Tensor,
    *,
    beta2: float,
    eps: float,
) -> None:
    """Move y, z and v of one weight, each in place, where the device scalar ``accept`` is true.

    numbers_5: lr, wd, c, lr (1-β₁(1-c)), 1-β₂ᵗ, on the device. The fourth is the step of y along z's direction: z takes
    lr of it, x takes c of what z takes. first: 0-dim, whether z is still to begin where y is.
    """
    lr, decay, average, move, correction = numbers_5.unbind()
    z_old = torch.where(first, y, z)
    v_new = v.lerp(grad.square(), 1 - beta2)
    direction = grad / ((v_new / correction).sqrt() + eps) + y * decay
    y_new = y.lerp(z_old, average) - direction * move
    z_new = z_old - direction * lr
    for old, new in ((y, y_new), (z, z_new), (v, v_new)):
        torch.where(accept, new, old, out=old)


@register_optimizer("schedule_free")
def build_schedule_free(config: OptimConfig) -> ScheduleFreeAdamW:
    """Schedule-Free AdamW with the betas and eps of ``config``. Raises ValueError for a momentum that moves."""
    if config.momentum_phases and config.name == "schedule_free":
        raise ValueError("optim.momentum_phases: schedule_free keeps its first beta, it cannot be scheduled; drop them")
    return ScheduleFreeAdamW(betas=config.betas or (0.9, 0.95), eps=config.eps)
