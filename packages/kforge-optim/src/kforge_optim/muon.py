"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), for matrices.

The update is that of the whole matrix under any sharding. Momentum is elementwise and stays sharded; each rank gathers
the whole matrix, orthogonalises it, and keeps the part of the result that it owns. All ranks that share a matrix do
the same work on the same bits. Weights of one shape are gathered as one batch, and matrices of one shape in it are
orthogonalised as one: few launches, one collective.

A weight holds one matrix, or several: parts of a fused weight (`Slot.fused`), or a batch over its leading dimensions,
as experts are. Shards of a batch that cut no matrix are not gathered: each rank has its own matrices.

Names of shapes: N weights [R,C] or [...,R,C]; a suffix of small letters is what lies on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from kforge_optim._torch import sharded_dim, stacked
from kforge_optim.algorithm import Fused, Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.sharding import distinct_shards, gathered, local, local_gradient

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: steepest at 0, so five iterations bring singular values of 0.01 and more near 1."""

_BATCH_ELEMENTS = 2**25
"""Elements of whole matrices in one batch: 128 MiB in float32, large enough to fill a GPU, small beside a model."""


def newton_schulz(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
    """Push the singular values of each matrix [N,R,C] to near 1: X ← aX + (bA + cA²)X with A = XXᵀ, ``steps`` times.

    Works in the dtype of ``matrices`` (the norm it starts with in at least float32); a tall matrix is transposed, so
    that A is the smaller square. A zero matrix stays zero. The quintic does not converge: singular values end between
    about 0.7 and 1.2, which trains as well as exactly 1 (see the module's reference). ``scale`` multiplies the result,
    as part of the last product. Raises ValueError for fewer steps than one.
    """
    if steps < 1:
        raise ValueError(f"steps = {steps} must be at least 1")
    a, b, c = COEFFICIENTS
    norm_dtype = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=norm_dtype)
    x = (matrices / norm.clamp(min=1e-7)).to(matrices.dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for step in range(steps):
        last = scale if step == steps - 1 else 1.0
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a * last, alpha=last)
    return x.mT if tall else x


class Muon:
    """B = μB + (1-μ)g;  O = NS(g + μ(B - g));  W = W - lr·wd·W - lr · 0.2·√max(R, C) · O, for each matrix of a weight.

    Nesterov momentum. The factor 0.2·√max(R, C) gives the update the root mean square of AdamW's (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, equation 4), so AdamW's rate and decay carry over. State of a parameter:
    ``momentum_buffer`` in its dtype and placement.

    ns_dtype: dtype of Newton-Schulz. None: bfloat16 on a GPU; elsewhere the parameter's. float64 stays float64.
    """

    matrices_only = True

    def __init__(self, *, momentum: float = 0.95, ns_steps: int = 5, ns_dtype: torch.dtype | None = None) -> None:
        self.momentum = momentum
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero momentum. Raises ValueError for fewer than two dimensions."""
        if parameter.ndim < 2:
            raise ValueError(f"muon takes matrices, not a parameter of shape {tuple(parameter.shape)}")
        return {"momentum_buffer": torch.zeros_like(parameter.detach())}

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. Every rank that shares a matrix must call it with the same slots."""
        accept = None if gate is None else gate > 0
        momentum = self.momentum if rates.momentum is None else rates.momentum
        for batch in _batches(slots):
            updates = [self._momentum(slot, momentum, scale, accept) for slot in batch]
            ortho_Nrc = self._orthogonalise(torch.stack(updates), batch[0])
            for slot, ortho_rc in zip(batch, ortho_Nrc.unbind(), strict=True):
                weight_rc = local(slot.parameter)
                decayed_rc = weight_rc * (1 - rates.lr * rates.weight_decay)
                _put(weight_rc, decayed_rc.sub_(ortho_rc, alpha=rates.lr), accept)

    def _momentum(self, slot: Slot, momentum: float, scale: Tensor | None, accept: Tensor | None) -> Tensor:
        """Move the momentum of one weight; return the local part of what is orthogonalised, in Newton-Schulz's dtype.

        What is gathered travels in that dtype: bfloat16 halves it.
        """
        grad_rc = local_gradient(slot.parameter).to(slot.parameter.dtype)
        if scale is not None:
            grad_rc = grad_rc * scale.to(grad_rc.dtype)
        old_rc = local(slot.state["momentum_buffer"])
        buffer_rc = old_rc.lerp(grad_rc, 1 - momentum)
        update_rc = grad_rc.lerp(buffer_rc, momentum)
        _put(old_rc, buffer_rc, accept)
        if update_rc.dtype == torch.float64:
            return update_rc
        return update_rc.to(self.ns_dtype or (torch.bfloat16 if update_rc.is_cuda else update_rc.dtype))

    def _orthogonalise(self, update_Nrc: Tensor, like: Slot) -> Tensor:
        """Shards [N,...] laid out as ``like`` -> the same shards of the orthogonalised, scaled whole matrices.

        May write into ``update_Nrc``.
        """
        parameter = like.parameter
        if not isinstance(parameter, DTensor):
            return self._each_matrix(update_Nrc, like.fused)
        mesh, over = parameter.device_mesh, _gathered_over(like)
        placements = [stacked(placement) for placement in parameter.placements]
        between = [Replicate() if dim in over else placement for dim, placement in enumerate(placements)]
        shape = torch.Size((update_Nrc.size(0), *parameter.shape))
        stride = torch.empty(shape, device="meta").stride()
        shards = DTensor.from_local(update_Nrc, mesh, placements, run_check=False, shape=shape, stride=stride)
        whole_NRC = self._each_matrix(gathered(shards, over), like.fused)
        everywhere = DTensor.from_local(whole_NRC, mesh, between, run_check=False, shape=shape, stride=stride)
        # From Replicate to Shard each rank cuts out its own part; nothing is sent. Offloaded shards were gathered, and
        # orthogonalised, on the mesh's device, and their part goes back.
        return local(everywhere.redistribute(placements=placements)).to(update_Nrc.device)

    def _each_matrix(self, whole_NRC: Tensor, fused: Fused | None) -> Tensor:
        """Weights [N,...] -> the same with each of their matrices orthogonalised and scaled; may write into them."""
        if fused is None:
            return self._scaled(whole_NRC.flatten(0, -3)).reshape(whole_NRC.shape)
        dim, sizes = fused
        alike: dict[torch.Size, list[Tensor]] = {}
        for part in whole_NRC.split(sizes, dim + 1):
            alike.setdefault(part.shape, []).append(part)
        for shape, parts in alike.items():
            ortho = self._scaled(torch.cat(parts).flatten(1, -2))
            for part, new in zip(parts, ortho.split(shape[0]), strict=True):
                part.copy_(new.reshape(shape))
        return whole_NRC

    def _scaled(self, matrices: Tensor) -> Tensor:
        """Orthogonalise matrices [M,R,C] and give them the root mean square of AdamW's update."""
        return newton_schulz(matrices, steps=self.ns_steps, scale=0.2 * math.sqrt(max(matrices.shape[-2:])))


def _gathered_over(slot: Slot) -> list[int]:
    """The mesh dimensions over which a weight is gathered: those that cut its matrices.

    Of a fused weight all that shard it: parts interleave along several dimensions.
    """
    parameter = slot.parameter
    assert isinstance(parameter, DTensor)
    first = parameter.ndim - 2 if slot.fused is None else 0
    dims = [sharded_dim(placement) for placement in parameter.placements]
    return [mesh_dim for mesh_dim, dim in enumerate(dims) if dim is not None and dim >= first]


def _put(old: Tensor, new: Tensor, accept: Tensor | None) -> None:
    """``old`` becomes ``new`` where the device scalar ``accept`` is true, and keeps every bit where it is not."""
    if accept is None:
        old.copy_(new)
    else:
        torch.where(accept, new, old, out=old)


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots of like weights (shape, cut, dtype, device, layout), at most `_BATCH_ELEMENTS` gathered ones a batch."""
    alike: dict[object, list[Slot]] = {}
    for slot in slots:
        parameter = slot.parameter
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike.setdefault((parameter.shape, slot.fused, parameter.dtype, parameter.device, layout), []).append(slot)
    for batch in alike.values():
        parameter = batch[0].parameter
        kept = distinct_shards(parameter, besides=_gathered_over(batch[0])) if isinstance(parameter, DTensor) else 1
        count = max(1, _BATCH_ELEMENTS * kept // max(1, parameter.numel()))
        for first in range(0, len(batch), count):
            yield batch[first : first + count]


@register_optimizer("muon")
def build_muon(config: OptimConfig) -> Muon:
    """Muon with the momentum, the iterations and their dtype of ``config``."""
    dtype = None if config.muon_ns_dtype == "auto" else getattr(torch, config.muon_ns_dtype)
    return Muon(momentum=config.muon_momentum, ns_steps=config.muon_ns_steps, ns_dtype=dtype)
