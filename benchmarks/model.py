"""kforge-model's parts on one device, each beside what it is to be compared with, in turns in one process.

    python benchmarks/model.py                   every row, sizes of Llama-3 8B where there is a GPU, small ones without
    python benchmarks/model.py --rows loss       one kind of row: block, loss, packed, cores, experts

block    forward and backward of a compiled block, beside its matrix products and its attention measured alone, and
         beside the same block in eager torch with SDPA
loss     time and peak memory of the head and the loss in chunks, beside all logits and torch's cross-entropy
packed   a compiled block on rows of documents (mean 600 tokens), beside rows of one document
cores    attention with what only some kernels can (windows, soft-cap, sinks), on rows of documents, beside a mask
experts  a compiled layer of 8 experts, 2 a token, beside dense products of as many FLOPs
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _results
import torch
from _floor import attention, block_products, expert_products, median_seconds, products
from _rows import ROWS, document_lengths
from torch import Tensor
from torch.nn import functional as F

from kforge_model import (
    AttentionCore,
    Block,
    ModelConfig,
    MoE,
    Rotary,
    Rows,
    linear_cross_entropy,
    preset,
    rope_frequencies,
)

ROUNDS = 7
Work = Callable[[], Any]


class Sizes:
    """A shape and a microbatch: Llama-3 8B's on a GPU, a small one elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        small = ModelConfig(vocab_size=8192, dim=256, n_heads=4, n_kv_heads=1, ffn_dim=1024)
        self.config = preset("llama3-8b") if self.cuda else small
        self.batch, self.seq = (2, 4096) if self.cuda else (2, 1024)
        self.loss_tokens = 8192 if self.cuda else 2048

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def documents(self) -> Rows:
        lengths = [document_lengths(self.seq, seed).tolist() for seed in range(self.batch)]
        return Rows.packed(lengths, self.device)

    def plain(self) -> Rows:
        return Rows.plain(self.batch, self.seq, self.device)


def rounds(sizes: Sizes, works: list[Work], of: Callable[[list[float]], float]) -> tuple[float, float, list[float]]:
    """Median and spread over the rounds of a number made from each round's times, and the median times in ms."""
    found = [median_seconds(works, sizes.device, at_least_s=0.4, calls=5) for _ in range(ROUNDS)]
    value, spread = _results.median_and_spread([of(times) for times in found])
    return value, spread, [1e3 * statistics.median(times) for times in zip(*found, strict=True)]


def block_work(sizes: Sizes, config: ModelConfig, rows: Rows, compiled: bool) -> Work:
    """Forward and backward of one block; gradients of its input and its weights."""
    block = Block(config).to(sizes.device, sizes.dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if compiled:
        block.compile()
    x = sizes.normal(sizes.batch, sizes.seq, config.dim).requires_grad_()
    upstream = sizes.normal(sizes.batch, sizes.seq, config.dim)
    rotary = Rotary.at(rows.position_ids, rope_frequencies(config)[0], sizes.dtype)
    rows = block.attn.core.prepare(rows, sizes.dtype)  # type: ignore[operator]
    wanted = (x, *block.parameters())
    return lambda: torch.autograd.grad(block(x, rotary, rows), wanted, upstream) and None


def block_rows(sizes: Sizes) -> list[dict[str, Any]]:
    row = replace(ROWS["8b"], microbatch_rows=sizes.batch, row_tokens=sizes.seq, isolate_documents=False)
    works = [
        block_work(sizes, sizes.config, sizes.plain(), compiled=True),
        products(sizes.batch * sizes.seq, block_products(sizes.config), sizes.device, sizes.dtype),
        attention(row, sizes.config, sizes.device),
        block_work(sizes, sizes.config, sizes.plain(), compiled=False),
    ]
    names = ["block", "products", "attention", "eager block"]
    value, spread, times = rounds(sizes, works, lambda t: (t[1] + t[2]) / t[0])
    parts = dict(zip(names, times, strict=True))
    target = 0.85 if sizes.cuda else None
    alone = "block / products + attention alone"
    return [
        _results.row(alone, value, "ratio", target=target, spread=spread, parts_ms=parts),
        _results.row("block against eager", times[3] / times[0], "ratio", parts_ms=parts),
    ]


def loss_rows(sizes: Sizes) -> list[dict[str, Any]]:
    config, n = sizes.config, sizes.loss_tokens
    hidden = sizes.normal(n, config.dim).requires_grad_()
    weight = (sizes.normal(config.vocab_size, config.dim) * 0.02).requires_grad_()
    labels = torch.randint(config.vocab_size, (n,), device=sizes.device)
    scale = torch.ones((), device=sizes.device) / n

    def chunked() -> None:
        loss, _ = linear_cross_entropy(hidden, weight, labels, scale, chunk_tokens=config.loss_chunk_tokens)
        torch.autograd.grad(loss, (hidden, weight))

    def plain() -> None:
        wide = torch.promote_types(sizes.dtype, torch.float32)
        loss = F.cross_entropy((hidden @ weight.t()).to(wide), labels)
        torch.autograd.grad(loss, (hidden, weight))

    value, spread, times = rounds(sizes, [chunked, plain], lambda t: t[1] / t[0])
    parts = {"chunked ms": times[0], "plain ms": times[1]}
    lines = [
        _results.row("loss in chunks against all logits, speed", value, "ratio", target=1.0, spread=spread, parts=parts)
    ]
    if sizes.cuda:
        peaks = [peak_bytes(sizes, work) for work in (chunked, plain)]
        said = {"chunked GB": peaks[0] / 1e9, "plain GB": peaks[1] / 1e9}
        share = peaks[0] / peaks[1]
        name = "loss in chunks against all logits, peak memory"
        lines.append(_results.row(name, share, "ratio", better="lower", target=0.25, parts=said))
    return lines


def peak_bytes(sizes: Sizes, work: Work) -> int:
    """Most memory that a work holds beside what it is given."""
    gc.collect()
    torch.cuda.synchronize(sizes.device)
    before = torch.cuda.memory_allocated(sizes.device)
    torch.cuda.reset_peak_memory_stats(sizes.device)
    work()
    torch.cuda.synchronize(sizes.device)
    return torch.cuda.max_memory_allocated(sizes.device) - before


def packed_rows(sizes: Sizes) -> list[dict[str, Any]]:
    works = [block_work(sizes, sizes.config, rows, compiled=True) for rows in (sizes.documents(), sizes.plain())]
    value, spread, times = rounds(sizes, works, lambda t: t[1] / t[0])
    parts = {"packed ms": times[0], "plain ms": times[1]}
    target = 1.0 if sizes.cuda else None
    return [
        _results.row("block on packed rows against plain", value, "ratio", target=target, spread=spread, parts=parts)
    ]


def core_rows(sizes: Sizes) -> list[dict[str, Any]]:
    config, lines = sizes.config, []
    size = config.head_size
    heads = (config.n_heads, config.kv_heads, config.kv_heads)
    q, k, v = (sizes.normal(sizes.batch, sizes.seq, h, size).transpose(1, 2).requires_grad_() for h in heads)
    upstream = torch.randn_like(q)
    sinks = sizes.normal(config.n_heads).requires_grad_()
    choices = {"window": {"window": 512}, "soft-cap": {"attn_softcap": 30.0}, "sinks": {"sinks": True}}
    for name, choice in choices.items():
        works = []
        for core_name in ("auto", "masked"):
            core = AttentionCore(replace(config, attention_core=core_name, **choice), choice.get("window"))
            rows = core.prepare(sizes.documents(), sizes.dtype)
            given = {"sinks": sinks} if choice.get("sinks") else {}

            def work(core: AttentionCore = core, rows: Rows = rows, given: dict[str, Any] = given) -> None:
                torch.autograd.grad(core(q, k, v, rows, **given), (q, k, v), upstream)

            works.append(work)
        kernel = AttentionCore(replace(config, **choice), choice.get("window")).kernel(rows, sizes.device, sizes.dtype)
        value, spread, times = rounds(sizes, works, lambda t: t[1] / t[0])
        parts = {f"{kernel} ms": times[0], "masked ms": times[1]}
        lines.append(_results.row(f"{name}: {kernel} against a mask", value, "ratio", spread=spread, parts=parts))
    return lines


def expert_rows(sizes: Sizes) -> list[dict[str, Any]]:
    """A compiled layer of 8 experts, 2 a token, beside dense products of as many FLOPs, and the same in eager torch."""
    width = {"dim": 2048, "n_heads": 16, "ffn_dim": 7168} if sizes.cuda else {"dim": 128, "n_heads": 4, "ffn_dim": 256}
    config = ModelConfig(n_experts=8, moe_top_k=2, balance_loss=0.01, **width)
    tokens = 16_384 if sizes.cuda else 1024
    moe = MoE(config).to(sizes.device, sizes.dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = sizes.normal(4, tokens // 4, config.dim).requires_grad_()
    upstream = torch.randn_like(x)
    rows = replace(Rows.plain(4, tokens // 4, sizes.device), scale=torch.ones((), device=sizes.device) / tokens)
    wanted = (x, *moe.parameters())
    compiled = torch.compile(moe.forward, dynamic=False)
    works = [
        lambda: torch.autograd.grad(compiled(x, rows), wanted, upstream) and None,
        products(config.moe_top_k * tokens, expert_products(config), sizes.device, sizes.dtype),
        lambda: torch.autograd.grad(moe(x, rows), wanted, upstream) and None,
    ]
    value, spread, times = rounds(sizes, works, lambda t: t[1] / t[0])
    parts = {"layer ms": times[0], "products ms": times[1], "eager layer ms": times[2]}
    target = 0.75 if sizes.cuda else None
    name = "dense products / layer of experts"
    return [_results.row(name, value, "ratio", target=target, spread=spread, parts=parts)]


KINDS = {"block": block_rows, "loss": loss_rows, "packed": packed_rows, "cores": core_rows, "experts": expert_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(KINDS), help=f"kinds of rows, of {', '.join(KINDS)} (default all)")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    options = parser.parse_args()
    kinds = options.rows.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no such kind of row: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    cuda = torch.cuda.is_available()
    sizes = Sizes(torch.device("cuda" if cuda else "cpu"))
    torch.manual_seed(0)
    lines: list[dict[str, Any]] = []
    for kind in kinds:
        lines += KINDS[kind](sizes)
        torch.cuda.empty_cache() if cuda else None
    gpu = torch.cuda.get_device_name() if cuda else None
    _results.write(f"model_{sizes.device.type}", lines, _results.environment(gpu), options.out)


if __name__ == "__main__":
    main()
