"""FSDP2 as torch documents it: what rows of the Trainer are held against.

No part of kforge-parallel, kforge-optim or kforge-train takes part in a step.

The same model and batches; fp32 shards, bf16 products, fp32 sums of gradients, torch's fused AdamW, compiled blocks.
"""

from __future__ import annotations

from typing import Any

from _rows import Row
from _timing import Clock, job


def run(row: Row, tokens: str, started: float, rank: int, world: int) -> dict[str, Any]:
    """Steps of a row over one window that stays."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from kforge_data import Loader, TokenShards
    from kforge_model import Rows, Transformer

    config = job(row, tokens, "run")
    device = torch.device(row.device, rank) if row.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    with torch.device("meta"):
        model = Transformer(config.model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.layers.values():
        if row.compile:
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=row.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=row.reshard_after_forward)
    model.to_empty(device=device)
    model.init_weights(config.train.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), fused=True)
    loader = Loader(
        TokenShards(tokens),
        row_tokens=row.row_tokens,
        global_rows=row.global_rows,
        rank=rank,
        world=world,
        microbatch_rows=row.microbatch_rows,
        isolate_documents=row.isolate_documents,
        device=device,
    )
    window = loader.next()
    loader.close()
    plain = Rows.plain(row.microbatch_rows, row.row_tokens, device)
    # fully_shard divides sums of gradients by the number of ranks: each rank's loss is a mean of its own tokens.
    scale = 1.0 / torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum().to(torch.float64)
    clock = Clock(device, started)
    losses = []
    for _ in range(config.train.steps):
        parts = []
        for i, batch in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            loss, _ = model(batch["input_ids"], plain, labels=batch["labels"], scale=scale)
            loss.backward()
            parts.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).sum())
        clock.mark()
    found: dict[str, Any] = {"step_s": clock.step_seconds(row.warmup_steps, row.timed_steps)}
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    found["losses"] = (mean / world).tolist()
    found["peak_bytes"] = clock.peak_bytes
    found["start_s"] = {"first step": clock.first_step_s}
    dist.destroy_process_group()
    return found
