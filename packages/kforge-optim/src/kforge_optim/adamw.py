"""AdamW on local shards, through torch's fused kernel (Loshchilov and Hutter 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from kforge_optim._torch import foreach_mul_
from kforge_optim.algorithm import Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.sharding import local, local_gradient, same_strides


class AdamW:
    """m = β₁m + (1-β₁)g;  v = β₂v + (1-β₂)g²;  w = w - lr·wd·w - lr · (m / (1-β₁ᵗ)) / (√(v / (1-β₂ᵗ)) + eps).

    It is elementwise, so each rank updates its own shard and nothing is sent. State of a parameter: ``exp_avg`` and
    ``exp_avg_sq`` in its dtype and placement, and ``step``, a 0-dim float32 tensor on its device that counts the
    accepted steps. Bit-equal to ``torch.optim.AdamW(fused=True)``.
    """

    matrices_only = False

    def __init__(self, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> None:
        self.betas = betas
        self.eps = eps

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero moments and counter."""
        weight = parameter.detach()
        return {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. With ``scale`` the kernel leaves the scaled gradient in ``.grad``."""
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.parameter.dtype, []).append(slot)
        # The kernel skips everything when found_inf is 1, and divides by grad_scale; it reads both, as float32, on
        # the device, so the host never waits.
        found_inf = None if gate is None else 1 - gate.to(torch.float32)
        for dtype, batch in by_dtype.items():
            weights = [local(slot.parameter) for slot in batch]
            grads = [local_gradient(slot.parameter).to(dtype) for slot in batch]
            grads = [_laid_out_as(weight, grad) for weight, grad in zip(weights, grads, strict=True)]
            exp_avgs = [local(slot.state["exp_avg"]) for slot in batch]
            for weight, moment, slot in zip(weights, exp_avgs, batch, strict=True):
                if not same_strides(weight, moment):
                    raise ValueError(
                        f"parameter {slot.name!r} has strides {weight.stride()}, which leave gaps; make it contiguous"
                    )
            grad_scale = None
            if scale is not None and dtype == torch.float64:
                foreach_mul_(grads, scale.to(dtype))  # a float32 divisor would round the gradients to 1e-7
            elif scale is not None:
                grad_scale = scale.to(torch.float32).reciprocal()
            adamw(
                weights,
                grads,
                exp_avgs,
                [local(slot.state["exp_avg_sq"]) for slot in batch],
                [],
                [slot.state["step"] for slot in batch],
                fused=True,
                grad_scale=grad_scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=self.betas[0] if rates.momentum is None else rates.momentum,
                beta2=self.betas[1],
                lr=rates.lr,
                weight_decay=rates.weight_decay,
                eps=self.eps,
                maximize=False,
            )


def _laid_out_as(weight: Tensor, grad: Tensor) -> Tensor:
    """``grad`` with the strides of ``weight``: the kernel walks through memory and looks at no strides.

    Autograd sees to it for plain tensors; for the shards of a DTensor (a transposed product under tensor parallelism)
    nobody does.
    """
    return grad if same_strides(weight, grad) else torch.empty_like(weight).copy_(grad)


@register_optimizer("adamw")
def build_adamw(config: OptimConfig) -> AdamW:
    """AdamW with the betas and eps of ``config``."""
    return AdamW(betas=config.betas, eps=config.eps)
