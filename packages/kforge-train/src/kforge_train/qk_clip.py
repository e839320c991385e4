"""QK-clip between two steps: attention scores that have grown too great are scaled down at their weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from kforge_model import max_logits, qk_factors
from kforge_optim import OptimConfig, Optimizer
from kforge_parallel import Mesh
from kforge_train.engine import Batch, rows_of


@torch.no_grad()
def clip_scores(
    model: torch.nn.Module,
    optimizer: Optimizer,
    config: OptimConfig,
    mesh: Mesh,
    window: list[Batch],
    gate: Tensor,
    step: int,
) -> None:
    """After optimizer step ``step``, from 1, when it is due: look at the scores of the step's rows under the new
    weights, and scale down the heads that exceed ``optim.qk_clip`` on any rank, unless ``gate`` is 0.

    Every rank calls it. The rows are those of the whole global batch, so the layout changes nothing. Costs a forward
    pass without gradients, which context ranks make of whole rows each; factors stay on the device.
    """
    if not config.qk_clip or step % config.qk_clip_every_steps:
        return
    seen = [max_logits(model, batch["input_ids"], rows_of(batch)) for batch in window]  # type: ignore[arg-type]
    here = torch.stack(seen).amax(0)  # [layers, heads of this rank]
    heads = here.shape[1]
    greatest = here.new_full((here.shape[0], heads * mesh.tp_size), -torch.inf)
    greatest[:, heads * mesh.tp_rank :][:, :heads] = here
    if mesh.size > 1:
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    over = (greatest > config.qk_clip) & greatest.isfinite() & (gate > 0)
    factors = torch.where(over, config.qk_clip / greatest, 1.0)
    optimizer.multiply(qk_factors(model, factors))  # type: ignore[arg-type]
