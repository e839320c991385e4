"""Weights that travel in 8 bits: each rank casts its part, and FSDP2 gathers what `Tensorwise` multiplies.

A rank can only cast its part if it knows the scale of the whole weight. So the largest values of all weights are
brought together in one all-reduce, before the first forward after a step of the optimizer, or before a pipeline runs:

    optimizer step -> max |W| of each part -> all-reduce (max) over the ranks that hold parts -> scales
    every gather:  part -> 8 bits -> all-gather -> `Fp8Weight` of the whole

FSDP2 calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a sharded tensor where it has them. They are set on
the tensors themselves rather than on a subclass: to the optimizer, to checkpoints and to all else these are the plain
tensors that they were. Where parts differ in size FSDP2 pads them, and the weight is cast after the gather instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kforge_parallel._torch import extend_gather, local_tensor
from kforge_parallel.fp8 import E4M3, Fp8Weight, cast, largest, scale_for
from kforge_parallel.mesh import Mesh


def gather_in_fp8(root: nn.Module, mesh: Mesh) -> None:
    """Let the weights of ``root`` (the root of FSDP units, with values) that multiply tensorwise travel in 8 bits."""
    names = [f"{name}.weight".lstrip(".") for name, m in root.named_modules() if vars(m).get("fp8") == "tensorwise"]
    extended = extend_gather(root, {root.get_parameter(name) for name in names})
    if extended:
        groups = [mesh.fsdp.get_group(mesh.fsdp.ndim - 1), *([mesh.tp.get_group()] if mesh.tp_size > 1 else [])]
        weights = Weights([_Part(parameter) for parameter in extended], groups)
        vars(root)["fp8_weights"] = weights
        root.register_forward_pre_hook(weights.before_forward, prepend=True)


class Weights:
    """The parts that a rank holds of all weights that travel in 8 bits, and their scales."""

    def __init__(self, parts: list[_Part], groups: list[dist.ProcessGroup]) -> None:
        self.parts, self.groups = parts, groups
        self.last = True
        """Whether weights may change after the backward of the next forward: it is of a step's last microbatch."""
        self._changed = True

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Take new scales where the weights may be others than those of the last forward."""
        if self._changed:
            self.take_scales()
        self._changed = self.last

    def begin(self) -> None:
        """Take new scales now, and none in the forwards until this is called again: of a pipeline, whose schedule may
        gather before any forward."""
        self.take_scales()
        self._changed = self.last = False

    @torch.no_grad()
    def take_scales(self) -> None:
        """The scale of each weight, from the largest value that any rank holds of it. Collective; no host sync."""
        amax = torch.stack([largest(part.tensor) for part in self.parts])
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may leave NaN out
        for group in self.groups:
            if group.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group)
        for part, scale in zip(self.parts, scale_for(amax, E4M3).unbind(), strict=True):
            part.scale = scale


class _Part:
    """A rank's part of one weight. Its two methods are FSDP2's extension of the all-gather."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.tensor: Tensor = local_tensor(parameter)
        self.scale: Tensor | None = None
        vars(self.tensor).update(fsdp_pre_all_gather=self.before, fsdp_post_all_gather=self.after)

    def before(self, mesh: Any, size: torch.Size, stride: Any, module: nn.Module, policy: Any) -> tuple[Any, Any]:
        if self.scale is None:
            raise RuntimeError("a block ran before its model, which takes the scales of FP8 weights; call the model")
        bits = cast(self.tensor.detach(), self.scale, E4M3).view(torch.uint8)  # no backend reduces or sends e4m3
        return (bits,), (1 / self.scale, size)

    def after(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        (bits,), (unit, size) = gathered, metadata
        if out is None:
            return Fp8Weight(bits.view(-1).view(E4M3).view(size), unit, dtype), ()
        # The bits are where they were, and FSDP2 has filled them anew.
        local_tensor(out).unit = unit
        return None
