"""The rows of the speed benchmark: model shapes, how each is run on one device, and the tokens they read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MEAN_DOCUMENT = 600
"""Tokens of a document on average. Lengths are log-normal with sigma 1, as those of web text roughly are."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model, run in one way."""

    name: str
    preset: str | None = None
    """Where the shape comes from; None: all of it is in `model`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model section over the preset's."""
    row_tokens: int = 4096
    global_rows: int = 8
    microbatch_rows: int = 8
    recompute: str = "none"
    recompute_keep: tuple[str, ...] = ()
    """Of a selective recomputation; (): the default."""
    recompute_blocks: int = 0
    """How many blocks are run again; 0: all."""
    reshard_after_forward: bool = False
    isolate_documents: bool = False
    storage: str = "fp32"
    fp8: str = "none"
    moments: str = "fp32"
    compile: bool = True
    device: str = "cuda"
    warmup_steps: int = 5
    timed_steps: int = 20
    target: float | None = None
    """Tokens/s per GPU that the row is to reach."""
    job: dict[str, Any] = field(default_factory=dict)
    """Further keys of the job, with their section before a dot; they go before all above."""

    @property
    def tokens_per_step(self) -> int:
        return self.row_tokens * self.global_rows

    @property
    def microbatches(self) -> int:
        return self.global_rows // self.microbatch_rows

    def overrides(self, tokens: str, run_dir: str, extra_steps: int = 0) -> dict[str, Any]:
        """The job of this row: what differs from the preset, or from the defaults."""
        steps = self.warmup_steps + self.timed_steps + extra_steps
        return {
            **{f"model.{key}": value for key, value in self.model.items()},
            "data.train": tokens,
            "data.row_tokens": self.row_tokens,
            "data.global_rows": self.global_rows,
            "data.microbatch_rows": self.microbatch_rows,
            "data.isolate_documents": self.isolate_documents,
            "parallel.precision": "bf16",
            "parallel.storage": self.storage,
            "parallel.fp8": self.fp8,
            "parallel.recompute": self.recompute,
            "parallel.reshard_after_forward": self.reshard_after_forward,
            **({"parallel.recompute_keep": self.recompute_keep} if self.recompute_keep else {}),
            "parallel.recompute_blocks": self.recompute_blocks,
            "parallel.compile": self.compile,
            "parallel.device": self.device,
            "optim.lr": 3e-4,
            "optim.moments": self.moments,
            "optim.warmup_steps": 2,
            "metrics.every_steps": 4,
            "metrics.console": False,
            "train.eval_every_steps": 0,
            "ckpt.mode": "sync",  # nothing is saved; in the background, host memory would be pinned for it meanwhile
            "train.run_dir": run_dir,
            "train.steps": steps,
            **self.job,
        }


LLAMA_350M = {
    "vocab_size": 50304,
    "dim": 1024,
    "n_layers": 24,
    "n_heads": 16,
    "ffn_dim": 2816,
    "tie_embeddings": True,
    "max_seq_len": 4096,
}

LEAN: dict[str, Any] = {"storage": "split", "moments": "bf16", "warmup_steps": 2, "timed_steps": 10}

ROWS = {
    row.name: row
    for row in (
        Row(name="350m", model=LLAMA_350M),
        Row(name="350m-packed", model=LLAMA_350M, isolate_documents=True),
        Row(name="1b", preset="llama3-1b", target=58_000, timed_steps=15),
        Row(name="1b-packed", preset="llama3-1b", isolate_documents=True, timed_steps=15),
        # Split weights and bf16 moments of 8.03 B parameters are 64 GB, their fp32 gradients 32: what is left of the
        # 150 GB of an H200 holds the activations of two rows, and nothing is run again.
        Row(name="8b", preset="llama3-8b", microbatch_rows=2, target=12_600, **LEAN),
        Row(name="8b-packed", preset="llama3-8b", microbatch_rows=2, isolate_documents=True, **LEAN),
        # The target is 1.35 times the row in bf16.
        Row(name="8b-fp8", preset="llama3-8b", microbatch_rows=2, fp8="tensorwise", target=16_400, **LEAN),
        # One text as long as a step. Blocks run again, but not their attention, half of the work at this length.
        Row(
            name="8b-32k",
            preset="llama3-8b",
            model={"max_seq_len": 32_768},
            row_tokens=32_768,
            global_rows=1,
            microbatch_rows=1,
            recompute="selective",
            recompute_keep=("attention",),
            recompute_blocks=20,
            **LEAN,
        ),
        # fp32 weights, gradients and two moments are 128.5 GB. What is left holds the inputs of the blocks, not all
        # activations, and one row a microbatch: NOTES.md counts it up.
        Row(
            name="8b-fp32",
            preset="llama3-8b",
            microbatch_rows=1,
            recompute="full",
            reshard_after_forward=True,
            warmup_steps=2,
            timed_steps=10,
        ),
        Row(name="1b-fp8", preset="llama3-1b", fp8="tensorwise", target=70_000, timed_steps=15),
        # 24 layers of 8 experts, 9.2 B parameters: split storage and bf16 moments, 74 GB, and 37 GB of fp32 gradients
        # leave room for the activations of two rows.
        Row(
            name="moe",
            model={"preset": "moe-9b-a3b"},
            microbatch_rows=2,
            storage="split",
            moments="bf16",
            reshard_after_forward=True,
            warmup_steps=2,
            timed_steps=10,
            target=22_000,
        ),
        # The same in 84 GB: stochastic weights and moments of 8 bits are 37 GB, and four blocks keep their activations.
        Row(
            name="moe-lean",
            model={"preset": "moe-9b-a3b"},
            microbatch_rows=2,
            storage="stochastic",
            moments="int8",
            recompute="full",
            recompute_blocks=20,
            reshard_after_forward=True,
            warmup_steps=2,
            timed_steps=10,
        ),
        # The blocks of 8b without recomputation and with two rows a microbatch: 24 of them fit.
        Row(
            name="8b-shape-24-layers",
            preset="llama3-8b",
            model={"n_layers": 24},
            microbatch_rows=2,
            reshard_after_forward=True,
            warmup_steps=2,
            timed_steps=10,
        ),
        Row(
            name="8b-shape-24-layers-packed",
            preset="llama3-8b",
            model={"n_layers": 24},
            microbatch_rows=2,
            reshard_after_forward=True,
            isolate_documents=True,
            warmup_steps=2,
            timed_steps=10,
        ),
    )
}


def tiny(row: Row) -> Row:
    """The same row at a size that a CPU takes in seconds: it shows that all of it runs, and measures nothing."""
    model = {"vocab_size": 257, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}
    return dataclasses.replace(
        row,
        model={**row.model, **model},
        row_tokens=64,
        global_rows=min(4, row.global_rows),
        microbatch_rows=min(2, row.microbatch_rows),
        compile=False,
        device="cpu",
        warmup_steps=2,
        timed_steps=10,
    )


def document_lengths(tokens: int, seed: int = 1) -> np.ndarray:
    """Lengths [n] of documents that sum to ``tokens``: log-normal, mean `MEAN_DOCUMENT`, the last one cut."""
    sigma = 1.0
    draws = int(tokens / MEAN_DOCUMENT * 2) + 50
    log_mean = np.log(MEAN_DOCUMENT) - sigma**2 / 2
    lengths = np.random.default_rng(seed).lognormal(log_mean, sigma, draws).astype(np.int64).clip(2)
    while lengths.sum() < tokens:
        lengths = np.concatenate([lengths, lengths])
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    lengths = lengths[: last + 1].copy()
    lengths[-1] -= ends[last] - tokens
    return lengths[lengths > 0]


def write_tokens(folder: Path, vocab_size: int, tokens: int, seed: int = 1) -> None:
    """Token shards in which there is something to learn.

    Seven ids of ten follow from the one before by a fixed table, the others are drawn from Zipf's law (exponent 1); the
    table's entries too, so that ids stay as frequent as the law says. A model learns the frequencies first, within a
    few steps, and then the table.
    """
    from kforge_data import ShardWriter

    rng = np.random.default_rng(seed)

    def zipf(*shape: int) -> np.ndarray:
        # Ranks whose logarithm is uniform are distributed as 1 / rank; id 0 is left to end documents.
        return np.exp(rng.random(shape) * np.log(vocab_size - 1)).astype(np.int64).clip(1, vocab_size - 1)

    lanes, length = 256, -(-tokens // 256)
    follows, stream = zipf(vocab_size), np.empty((lanes, length), np.int64)
    stream[:, 0] = zipf(lanes)
    for i in range(1, length):
        stream[:, i] = np.where(rng.random(lanes) < 0.7, follows[stream[:, i - 1]], zipf(lanes))
    ids = stream.reshape(-1)[:tokens]
    sizes = document_lengths(tokens, seed)
    ids[np.cumsum(sizes) - 1] = 0
    with ShardWriter(folder, vocab_size=vocab_size, eos_id=0) as writer:
        writer.add_batch(ids, sizes, 4 * sizes)
