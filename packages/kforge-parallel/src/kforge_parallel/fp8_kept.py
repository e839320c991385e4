"""Weights in 8 bits beside their own, of a model that FSDP2 does not wrap: made once a step, not in each microbatch.

They cost a byte a weight tensorwise, where a weight has the same bits in all of its products, and two rowwise: one with
a scale a row, for the output, and one with a scale a column, for the gradient of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kforge_parallel.fp8 import E4M3, KEPT, cast, largest, scale_for


def keep_in_fp8(model: nn.Module) -> None:
    """Let the modules of ``model``, which has values, that multiply in FP8 find their weights in 8 bits."""
    modules = [module for module in model.modules() if vars(module).get("fp8") in KEPT]
    if modules:
        kept = KeptWeights(modules)
        vars(model)["fp8_weights"] = kept
        model.register_forward_pre_hook(kept.before_forward, prepend=True)


class KeptWeights:
    """Attributes of each module, as `KEPT` names them: no buffers, so that checkpoints do not have them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.last = True
        """Whether weights may change after the backward of the next forward: it is of a step's last microbatch."""
        self._changed = True
        for module in modules:
            for dim, (bits, unit) in _kept(module).items():
                weight = _seen(module, dim)
                shape = () if dim is None else largest(weight, dim).shape
                vars(module)[bits] = torch.empty_like(weight, dtype=E4M3, requires_grad=False)
                vars(module)[unit] = torch.ones(shape, dtype=torch.float32, device=weight.device)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Cast weights where they may be others than those of the last forward."""
        if self._changed:
            self.cast()
        self._changed = self.last

    @torch.no_grad()
    def cast(self) -> None:
        """Fill the bits anew, where they are: whoever compiled a block knows their place. No host sync."""
        for module in self.modules:
            for dim, (bits, unit) in _kept(module).items():
                weight = _seen(module, dim)
                scale = scale_for(largest(weight, dim), E4M3)
                # A power of two: the product is exact in bf16, too, which has the exponents of float32.
                exact = weight * scale.to(weight.dtype) if weight.dtype == torch.bfloat16 else None
                vars(module)[bits].copy_(cast(weight, scale, E4M3) if exact is None else exact)
                vars(module)[unit].copy_(1 / scale)


def _kept(module: nn.Module) -> dict[int | None, tuple[str, str]]:
    """Along which dimension values share a scale (None: all do) -> names of bits and unit."""
    names = KEPT[vars(module)["fp8"]]
    return {None: (names[0], names[1])} if len(names) == 2 else {1: (names[0], names[1]), 0: (names[2], names[3])}


def _seen(module: nn.Module, dim: int | None) -> Tensor:
    """The weight as its product takes it: as it is tensorwise, else as the matrix [N,K]."""
    weight: Tensor = module.get_parameter("weight").detach()
    return weight if dim is None else weight.flatten(0, -2)
