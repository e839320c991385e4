"""The loss on held-out text: during training, and of a run that is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from kforge_data import TokenStream, evaluation_batches, row_transforms
from kforge_parallel import Mesh, find_world, launch, shard_rows, shutdown
from kforge_train.build import open_heldout
from kforge_train.config import JobConfig
from kforge_train.engine import build_engine
from kforge_train.errors import ConfigError, config_errors
from kforge_train.saved import fit_layout, load_run, restore_weights


@torch.no_grad()
def evaluate(
    model: nn.Module,
    source: TokenStream,
    config: JobConfig,
    mesh: Mesh,
    max_rows: int = 0,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Mean loss over the scored tokens of ``max_rows`` rows spread over the text (0: all), over all ranks.

    Returns loss (nats a token), perplexity, bits_per_byte (the text's own ratio of tokens to bytes applied to the
    loss; left out where the bytes were not counted), and tokens (how many were scored). Returns None as soon as
    ``stop`` is true on any rank.
    """
    data = config.data
    training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    engine = build_engine(model, mesh)
    batches = iter(
        evaluation_batches(
            source,
            row_tokens=data.row_tokens,
            microbatch_rows=data.microbatch_rows or max(1, data.global_rows // mesh.data_size),
            rank=mesh.data_rank,
            world=mesh.data_size,
            max_rows=max_rows,
            isolate_documents=data.isolate_documents,
            transforms=row_transforms(data, training=False),
            device=mesh.device,
        )
    )
    try:
        while some := list(islice(batches, mesh.pp_size)):  # as many as a pipeline has at work at a time
            if stop is not None and anywhere(stop(), mesh):
                return None
            some = [shard_rows(batch, mesh) for batch in some]
            scored = torch.stack([(batch["labels"] != -100).sum() for batch in some]).sum()
            total += torch.stack([engine.nll_sums(some).sum(), scored.to(torch.float64) / mesh.copies])
    finally:
        model.train(training)
    if mesh.size > 1:
        dist.all_reduce(total)
    nats, tokens = total.tolist()
    if not tokens:
        raise ValueError(
            "the held-out text has no token to score: every document is shorter than two tokens, "
            "or has none of the answers that data.answer_start asks for"
        )
    loss = nats / tokens
    values = {"loss": loss, "perplexity": math.exp(min(loss, 80.0)), "tokens": tokens}
    if source.text_bytes:
        values["bits_per_byte"] = source.bits_per_byte(loss)
    return values


def anywhere(here: bool, mesh: Mesh) -> bool:
    """Whether something is true on any rank. Collective; waits."""
    flag = torch.tensor(float(here), device=mesh.device)
    if mesh.size > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def evaluate_run(run_dir: Path, step: int | None = None, data: Path | None = None) -> dict[str, float]:
    """Score the whole held-out text of a run, or the token shards in ``data``, with the weights of ``step`` (None:
    the newest). Every process of a job calls it. Returns what `evaluate` does, and the ``step``."""
    config = load_run(run_dir)
    folder = data or config.data.heldout
    if not folder:
        raise ConfigError(f"the run {run_dir} has no held-out text; name token shards with --data")
    with config_errors():
        source = open_heldout(config.data, folder)
        config = replace(config, parallel=fit_layout(config.parallel, find_world().size))
        mesh = launch(config.parallel)
    try:
        model, at = restore_weights(config, mesh, step)
        values = evaluate(model, source, config, mesh)
        assert values is not None  # nothing was there to stop it
        return {**values, "step": at, "rank": mesh.rank}
    finally:
        shutdown()


def main(run_dir: Path, step: int | None = None, data: Path | None = None) -> int:
    """`kforge eval`: print the held-out loss of a run. Returns the exit code."""
    values = evaluate_run(run_dir, step, data)
    if values["rank"] == 0:
        bits = f"{values['bits_per_byte']:.4f} bits/byte, " if "bits_per_byte" in values else ""
        print(
            f"step {values['step']:.0f}: {values['loss']:.4f} nats/token, {bits}"
            f"perplexity {values['perplexity']:.2f} over {values['tokens']:,.0f} tokens"
        )
    return 0
