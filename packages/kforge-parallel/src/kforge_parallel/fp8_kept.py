"""Weights in 8 bits beside their own, of a model that FSDP2 does not wrap: made once a step, not in each microbatch.

They cost a byte a weight. Of `Tensorwise` alone, as a weight has the same bits in all of its products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kforge_parallel.fp8 import E4M3, cast, largest, scale_for


def keep_in_fp8(model: nn.Module) -> None:
    """Let the modules of ``model``, which has values, that multiply tensorwise find their weights in 8 bits."""
    modules = [module for module in model.modules() if vars(module).get("fp8") == "tensorwise"]
    if modules:
        kept = KeptWeights(modules)
        vars(model)["fp8_weights"] = kept
        model.register_forward_pre_hook(kept.before_forward, prepend=True)


class KeptWeights:
    """``fp8_bits`` and ``fp8_unit`` of each module: no buffers, so that checkpoints do not have them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.last = True
        """Whether weights may change after the backward of the next forward: it is of a step's last microbatch."""
        self._changed = True
        for module in modules:
            weight = module.get_parameter("weight")
            vars(module)["fp8_bits"] = torch.empty_like(weight, dtype=E4M3, requires_grad=False)
            vars(module)["fp8_unit"] = torch.ones((), dtype=torch.float32, device=weight.device)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Cast weights where they may be others than those of the last forward."""
        if self._changed:
            self.cast()
        self._changed = self.last

    @torch.no_grad()
    def cast(self) -> None:
        """Fill the bits anew, where they are: whoever compiled a block knows their place. No host sync."""
        for module in self.modules:
            weight: Tensor = module.get_parameter("weight")
            scale = scale_for(largest(weight), E4M3)
            # A power of two: the product is exact in bf16, too, which has the exponents of float32.
            exact = weight * scale.to(weight.dtype) if weight.dtype == torch.bfloat16 else None
            vars(module)["fp8_bits"].copy_(cast(weight, scale, E4M3) if exact is None else exact)
            vars(module)["fp8_unit"].copy_(1 / scale)
