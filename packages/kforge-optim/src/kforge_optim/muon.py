"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), for matrices.

The update is that of the whole matrix under any sharding, and each matrix is orthogonalised once in the group of ranks
that shard it (see `dealing`). Momentum is elementwise and stays sharded; what travels is the update on the way to the
owner of its matrix, and the orthogonalised one on the way back, both in the dtype of the orthogonalisation.

A weight holds one matrix, or several: parts of a fused weight (`Slot.fused`), or a batch over its leading dimensions,
as experts are. Shards of a batch that cut no matrix do not travel: each rank has its own matrices.

Names of shapes: N matrices [N,R,C]; a suffix of small letters is what lies on this rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from kforge_optim import split
from kforge_optim._torch import foreach_copy_, laid_out, sharded_dim
from kforge_optim.algorithm import Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.dealing import Bucket, Layout, Place, back, deal, in_flight, moved, there
from kforge_optim.orthogonal import METHODS
from kforge_optim.rounding import noise_key
from kforge_optim.sharding import local, local_gradient

_BATCH_ELEMENTS = 2**25
"""Elements of whole matrices that one rank works on at a time: 128 MiB in float32, large enough to fill a GPU, small
beside a model. Three such buckets, or five where two mesh dimensions cut matrices, are under way at once."""


@dataclass
class _Weight:
    """A weight in the middle of a step."""

    slot: Slot
    update_rc: Tensor
    """This rank's part of what is orthogonalised, then of the result, in Newton-Schulz's dtype."""
    rows_r: Tensor | None
    """This rank's part of the second moments of rows, as bits in that dtype [..., row elements]."""
    to_come: int
    """Parts whose result has not come yet."""

    def buffer(self, kind: int) -> Tensor:
        """What a `Part` of this kind indexes."""
        found = self.rows_r if kind else self.update_rc
        assert found is not None
        return found


class Muon:
    """B = μB + (1-μ)g;  O = orthogonal(g + μ(B - g));  W = W - lr·wd·W - lr · s · O, for each matrix of a weight.

    Nesterov momentum. State of a parameter: ``momentum_buffer`` in its placement, in float32 or wider.

    method: ``newton_schulz`` or ``polar_express``, see `orthogonal`. ns_steps: its iterations. ns_dtype: their dtype.
    None: bfloat16 on a GPU; elsewhere the parameter's. float64 stays float64.

    scale: ``rms``, s = 0.2·√max(R, C), gives the update the root mean square of AdamW's (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, equation 4), so AdamW's rate and decay carry over. ``original``, s = √max(1, R/C),
    is Jordan's, for rates of its own, near 0.02.

    variance_beta: NorMuon's β₂ (Li et al. 2025, https://arxiv.org/abs/2510.05491, algorithm 1). None: off. Else
    v = β₂v + (1-β₂)·mean over columns of O², a number a row, and O / (√v + 1e-8) takes the place of O, scaled to norm
    √min(R, C), that of an orthogonal matrix; with ``rms`` this is the paper's 0.2·√(RC) / norm. Further state:
    ``row_variance`` of the parameter's shape but for the last dimension, which is 1, in float32 or wider, cut as the
    parameter's rows are.
    """

    matrices_only = True

    def __init__(
        self,
        *,
        momentum: float = 0.95,
        method: str = "newton_schulz",
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        scale: str = "rms",
        variance_beta: float | None = None,
    ) -> None:
        self.momentum = momentum
        self.method = method
        self.ns_steps = ns_steps
        self.ns_dtype = ns_dtype
        self.scale = scale
        self.variance_beta = variance_beta

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero momentum, and zero row variances. Raises ValueError for fewer than two dimensions."""
        if parameter.ndim < 2:
            raise ValueError(f"muon takes matrices, not a parameter of shape {tuple(parameter.shape)}")
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state = {"momentum_buffer": torch.zeros_like(parameter.detach(), dtype=wide)}
        if self.variance_beta is not None:
            state["row_variance"] = _row_zeros(parameter.detach())
        return state

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. Every rank that shares a matrix must call it with the same slots."""
        in_flight(self._jobs(slots, rates, scale, None if gate is None else gate > 0))

    def update_split(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """As `update`, of bfloat16 weights, dealt all together; each is widened as it takes its step."""
        self.update(slots, rates=rates, scale=scale, gate=gate)

    def _jobs(
        self, slots: Sequence[Slot], rates: Rates, scale: Tensor | None, accept: Tensor | None
    ) -> Iterator[Generator[None]]:
        """The buckets of a step, as jobs for `in_flight`."""
        groups: dict[tuple[DeviceMesh | None, tuple[int, ...], torch.dtype, torch.device], list[Slot]] = {}
        for slot in slots:
            mesh, over = _shared(slot)
            groups.setdefault((mesh, over, self._dtype(slot), slot.parameter.device), []).append(slot)
        for (mesh, over, dtype, device), members in groups.items():
            like = torch.empty(0, dtype=dtype, device=_work_device(mesh, device))
            row_elements = 0
            if self.variance_beta is not None:
                row_elements = local(members[0].state["row_variance"]).element_size() // dtype.itemsize
            where = ((), ()) if mesh is None else (tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
            buckets = deal(tuple(map(_layout, members)), over, *where, row_elements, _BATCH_ELEMENTS)
            to_come = Counter(part.weight for bucket in buckets for part in bucket.parts)
            weights: dict[int, _Weight] = {}
            for bucket in buckets:
                for at in {part.weight: None for part in bucket.parts}:
                    if at not in weights:
                        slot = members[at]
                        update = self._momentum(slot, rates, scale, accept).to(dtype)
                        rows = local(slot.state["row_variance"]).clone().view(dtype) if row_elements else None
                        weights[at] = _Weight(slot, update, rows, to_come[at])
                yield self._job(bucket, mesh, weights, like, rates, accept)

    def _job(
        self,
        bucket: Bucket,
        mesh: DeviceMesh | None,
        weights: dict[int, _Weight],
        like: Tensor,
        rates: Rates,
        accept: Tensor | None,
    ) -> Generator[None]:
        """A bucket to its owners and back; weights that are complete then take their step."""
        mine = [weights[part.weight].buffer(part.kind)[part.index] for part in bucket.parts]
        pieces: Sequence[Tensor] = mine if bucket.exchanges else moved(mine, like.device)
        for exchange in bucket.exchanges:
            assert mesh is not None
            pieces = yield from there(exchange, mesh, pieces, like)
        pieces = self._results(bucket, pieces, like)
        for exchange in reversed(bucket.exchanges):
            assert mesh is not None
            pieces = yield from back(exchange, mesh, pieces, like)
        pieces = moved(pieces, mine[0].device)
        foreach_copy_(mine, [piece.view(to.shape) for piece, to in zip(pieces, mine, strict=True)])
        for part in bucket.parts:
            weight = weights[part.weight]
            weight.to_come -= 1
            if weight.to_come == 0:
                self._step(weights.pop(part.weight), rates, accept)

    def _momentum(self, slot: Slot, rates: Rates, scale: Tensor | None, accept: Tensor | None) -> Tensor:
        """Move the momentum of one weight; return this rank's part of what is orthogonalised."""
        old_rc = local(slot.state["momentum_buffer"])
        grad_rc = local_gradient(slot.parameter).to(old_rc.dtype)
        if scale is not None:
            grad_rc = grad_rc * scale.to(grad_rc.dtype)
        momentum = self.momentum if rates.momentum is None else rates.momentum
        buffer_rc = old_rc.lerp(grad_rc, 1 - momentum)
        update_rc = grad_rc.lerp(buffer_rc, momentum)
        _put(old_rc, buffer_rc, accept)
        return update_rc

    def _results(self, bucket: Bucket, pieces: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Pieces of matrices that this rank owns -> the same pieces of the results, in their order."""
        results = list(pieces)
        for batch in bucket.batches:
            stacks = [like.new_empty(batch.count, batch.rows, batch.columns)]
            if self.variance_beta is not None:
                width = next(place.shape[-1] for place in batch.places if place.kind == 1)
                stacks.append(like.new_empty(batch.count, batch.rows, width))
            targets = [_spot(stacks[place.kind], place) for place in batch.places]
            sources = [pieces[place.piece].view(to.shape) for place, to in zip(batch.places, targets, strict=True)]
            foreach_copy_(targets, sources)
            stacks = self._orthogonalised(*stacks)
            for place in batch.places:
                results[place.piece] = _spot(stacks[place.kind], place)
        return results

    def _orthogonalised(self, update_NRC: Tensor, rows_NR: Tensor | None = None) -> list[Tensor]:
        """Matrices, and second moments of their rows as bits, -> scaled orthogonal matrices, and the new moments."""
        rows, columns = update_NRC.shape[-2:]
        scale = 0.2 * math.sqrt(max(rows, columns)) if self.scale == "rms" else math.sqrt(max(1, rows / columns))
        orthogonal = METHODS[self.method]
        if rows_NR is None:
            return [orthogonal(update_NRC, steps=self.ns_steps, scale=scale)]
        assert self.variance_beta is not None
        wide = torch.promote_types(update_NRC.dtype, torch.float32)
        ortho_NRC = orthogonal(update_NRC, steps=self.ns_steps).to(wide)
        squares_NR = ortho_NRC.square().mean(-1, keepdim=True)
        moments_NR = rows_NR.view(wide).lerp(squares_NR, 1 - self.variance_beta)
        even_NRC = ortho_NRC / (moments_NR.sqrt() + 1e-8)
        norm = torch.linalg.vector_norm(even_NRC, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        even_NRC *= scale * math.sqrt(min(rows, columns)) / norm
        return [even_NRC.to(update_NRC.dtype), moments_NR.view(update_NRC.dtype)]

    def _step(self, weight: _Weight, rates: Rates, accept: Tensor | None) -> None:
        slot = weight.slot
        weight_rc = local(split.whole(slot).parameter)
        new_rc = (weight_rc * (1 - rates.lr * rates.weight_decay)).sub_(weight.update_rc, alpha=rates.lr)
        _put(weight_rc, new_rc, accept)
        if slot.remainder is not None:
            split.store(slot, weight_rc)
        elif slot.parameter.dtype == torch.bfloat16:
            split.store_rounded(slot, weight_rc, noise_key(rates.seed, rates.step, slot.name))
        if weight.rows_r is not None:
            rows_r = local(slot.state["row_variance"])
            _put(rows_r, weight.rows_r.view(rows_r.dtype), accept)

    def _dtype(self, slot: Slot) -> torch.dtype:
        """In which the update of a weight travels, and is orthogonalised."""
        dtype = slot.state["momentum_buffer"].dtype
        if dtype == torch.float64:
            return dtype
        mesh, _ = _shared(slot)
        on_gpu = _work_device(mesh, slot.parameter.device).type == "cuda"
        return self.ns_dtype or (torch.bfloat16 if on_gpu else dtype)


def _shared(slot: Slot) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a weight, and those of its dimensions over which matrices are shared. None for a plain tensor."""
    parameter = slot.parameter
    if "row_variance" in slot.state and slot.fused is not None and slot.fused[0] == parameter.ndim - 1:
        raise ValueError(
            f"the weight {slot.name!r} holds matrices side by side, {slot.fused}, whose rows have one variance in "
            "common; put them one under the other, or leave muon_variance_beta out"
        )
    if not isinstance(parameter, DTensor):
        return None, ()
    mesh = parameter.device_mesh
    return mesh, tuple(dim for dim in _layout(slot).over if mesh.size(dim) > 1)


def _layout(slot: Slot) -> Layout:
    parameter = slot.parameter
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return Layout(tuple(parameter.shape), slot.fused, tuple(placements))


def _work_device(mesh: DeviceMesh | None, device: torch.device) -> torch.device:
    """Where matrices are orthogonalised: on the mesh's device, also those of shards that are offloaded from it."""
    return device if mesh is None or mesh.device_type == device.type else torch.device(mesh.device_type)


def _spot(stack: Tensor, place: Place) -> Tensor:
    """Where in a stack of matrices [N,R,C] a piece belongs."""
    return stack[place.member].unflatten(0, place.shape[:-1])[place.index]


def _row_zeros(weight: Tensor) -> Tensor:
    """Zeros [..., R, 1] for a weight [..., R, C], laid out as its rows are; ranks that share a row all have it."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    shard = local(weight)
    zeros = torch.zeros(*shard.shape[:-1], 1, dtype=dtype, device=shard.device)
    if not isinstance(weight, DTensor):
        return zeros
    last = weight.ndim - 1
    placements = [Replicate() if sharded_dim(one) == last else one for one in weight.placements]
    shape = torch.Size((*weight.shape[:-1], 1))
    stride = torch.empty(shape, device="meta").stride()
    return laid_out(zeros, weight.device_mesh, placements, shape, stride)


def _put(old: Tensor, new: Tensor, accept: Tensor | None) -> None:
    """``old`` becomes ``new`` where the device scalar ``accept`` is true, and keeps every bit where it is not."""
    if accept is None:
        old.copy_(new)
    else:
        torch.where(accept, new, old, out=old)


@register_optimizer("muon")
def build_muon(config: OptimConfig) -> Muon:
    """Muon as the fields ``muon_*`` of ``config`` say."""
    return Muon(
        momentum=config.muon_momentum,
        method=config.muon_method,
        ns_steps=config.muon_ns_steps,
        ns_dtype=None if config.muon_ns_dtype == "auto" else getattr(torch, config.muon_ns_dtype),
        scale=config.muon_scale,
        variance_beta=config.muon_variance_beta,
    )
