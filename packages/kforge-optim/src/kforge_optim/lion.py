"""Lion: the sign of a mean of gradients (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

Half of AdamW's moments. An update has the same size everywhere, so its rate is three to ten times smaller than AdamW's
and its decay as much larger (section 5 of the paper).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from kforge_optim._torch import foreach_lerp, foreach_mul_, foreach_sign_, sharded_dim
from kforge_optim.algorithm import Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.gate import put
from kforge_optim.sharding import distinct_shards, gathered, local, local_gradient

_BATCH_ELEMENTS = 2**25
"""Elements of this rank that are updated at one time: what a step needs beside weights and moments stays small."""


class Lion:
    """u = sign(β₁m + (1-β₁)g);  w = w - lr·wd·w - lr·u;  m = β₂m + (1-β₂)g.

    It is elementwise, so each rank updates its own shard. State of a parameter: ``exp_avg`` in its dtype and placement.

    cautious: entries of u that disagree in sign with g are 0, and the others are divided by their share of the whole
        parameter, at least 0.001 (Liang et al. 2024, https://arxiv.org/abs/2411.16085, algorithm 1). Shards of one
        parameter count together: one all-reduce of a number a parameter.
    """

    matrices_only = False

    def __init__(self, *, betas: tuple[float, float] = (0.9, 0.99), cautious: bool = False) -> None:
        self.betas = betas
        self.cautious = cautious

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A zero moment."""
        return {"exp_avg": torch.zeros_like(parameter.detach())}

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. It leaves the scaled gradient in ``.grad`` where dtypes agree."""
        beta1, beta2 = self.betas if rates.momentum is None else (rates.momentum, self.betas[1])
        accept = None if gate is None else gate > 0
        for batch in _batches(slots):
            weights = [local(slot.parameter) for slot in batch]
            moments = [local(slot.state["exp_avg"]) for slot in batch]
            grads = [local_gradient(slot.parameter).to(slot.parameter.dtype) for slot in batch]
            if scale is not None:
                foreach_mul_(grads, scale.to(grads[0].dtype))
            updates = foreach_lerp(moments, grads, 1 - beta1)
            foreach_sign_(updates)
            if self.cautious:
                _keep_agreeing(updates, grads, batch)
            new_weights = [
                (weight * (1 - rates.lr * rates.weight_decay)).sub_(update, alpha=rates.lr)
                for weight, update in zip(weights, updates, strict=True)
            ]
            del updates
            put(weights, new_weights, accept)
            del new_weights
            put(moments, foreach_lerp(moments, grads, 1 - beta2), accept)


def _keep_agreeing(updates: Sequence[Tensor], grads: Sequence[Tensor], batch: Sequence[Slot]) -> None:
    """Zero what disagrees in sign with the gradient and scale up the rest, in place."""
    for update, grad in zip(updates, grads, strict=True):
        update.mul_(update * grad > 0)
    counts = _summed_over_shards([update.count_nonzero() for update in updates], batch)
    for update, slot, count in zip(updates, batch, counts, strict=True):
        share = count.to(update.dtype) / max(1, slot.parameter.numel())
        update.div_(share.clamp(min=1e-3))


def _summed_over_shards(counts: Sequence[Tensor], batch: Sequence[Slot]) -> list[Tensor]:
    """Local 0-dim counts of a batch laid out alike -> those of the whole parameters, the same on all ranks."""
    parameter = batch[0].parameter
    stacked = torch.stack(list(counts))
    if isinstance(parameter, DTensor) and distinct_shards(parameter) > 1:
        mesh, sharded = parameter.device_mesh, [sharded_dim(kind) is not None for kind in parameter.placements]
        placements: list[Placement] = [Partial() if cut else Replicate() for cut in sharded]
        # Offloaded shards are counted on the CPU; the sum is made on the mesh's device.
        total = DTensor.from_local(stacked.to(mesh.device_type), mesh, placements, run_check=False)
        stacked = gathered(total).to(stacked.device)
    return list(stacked.unbind())


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots of one dtype and layout, at most `_BATCH_ELEMENTS` elements of a rank each, but one slot at least.

    Only sizes that all ranks agree on count, so that all ranks make the same batches.
    """
    alike: dict[object, list[Slot]] = {}
    for slot in slots:
        parameter = slot.parameter
        sharded: object = None
        if isinstance(parameter, DTensor):
            sharded = (parameter.device_mesh, tuple(sharded_dim(kind) is None for kind in parameter.placements))
        alike.setdefault((parameter.dtype, sharded), []).append(slot)
    for members in alike.values():
        batch: list[Slot] = []
        elements = 0
        for slot in members:
            size = -(-slot.parameter.numel() // distinct_shards(slot.parameter))
            if batch and elements + size > _BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(slot)
            elements += size
        yield batch


@register_optimizer("lion")
def build_lion(config: OptimConfig) -> Lion:
    """Lion with the betas of ``config``, its own where there are none."""
    return Lion(betas=config.betas or (0.9, 0.99))


@register_optimizer("cautious_lion")
def build_cautious_lion(config: OptimConfig) -> Lion:
    """The same, with updates that go against the gradient left out."""
    return Lion(betas=config.betas or (0.9, 0.99), cautious=True)
