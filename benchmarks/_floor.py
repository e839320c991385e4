"""The least time that a step of a row can take on this device, summed from parts that are timed here.

Symbols: T tokens a microbatch, M microbatches a step, L layers, D model, F ffn, Q = heads x head size, KV likewise, V
vocabulary, P parameters.

    products       of a block and of the head: forward, dgrad and wgrad, in turns with the attention and the copy
    attention      forward and backward, with the model's own core
    elementwise    bytes that must pass through memory between products, over the measured rate of a copy as large as
                   those of one block
    accumulation   bytes of adding a microbatch's bf16 gradients to fp32 sums, over the same rate
    optimizer      fused AdamW on fp32 weights and moments, and the norm of all gradients; where weights and moments
                   are of fewer bytes, as much less as there are fewer to read and write
    casts          FP8 alone: bytes of reading each operand in bf16 and writing it in 8 bits in the two layouts that its
                   products want, activations and gradients in each microbatch and weights once a step

Bytes of elementwise work, if all that stands between two products were one kernel, which reads each of its inputs and
writes each of its results once. In elements of 2 bytes, a token and a layer:

    forward     residual and norm 4D, twice; rotation of q and k 2(Q + KV); SwiGLU 3F
    backward    the same norms 4D, twice; rotation 2(Q + KV); SwiGLU 5F (reads dh, gate, up; writes dgate, dup)
    together    16D + 4(Q + KV) + 8F

With experts a token goes through k of them: products are those of kT dense rows, F is kF, and rows are copied to their
experts and added up again, in both directions: 4(k + 1)D more.

Beside the layers: softmax and its gradient 3V a token in bf16, the embedding and the last norm 12D. Once a step bf16
weights are made from fp32 ones: 6P bytes. Recomputation is not in the floor: a step that needs it pays for it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _rows import Row, document_lengths
from torch import Tensor

from kforge_model import AttentionCore, ModelConfig, Rows, model_shape


def median_seconds(
    works: list[Callable[[], Any]], device: torch.device, at_least_s: float = 1.0, calls: int = 10
) -> list[float]:
    """Median time on the device of each work, done in turns, over at least so many turns and so much time.

    In turns and for long, as the clock follows the power that is drawn: products alone draw more than a step does,
    and run up to 10 % slower than in one.
    """
    cuda = device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    def turns(count: int) -> None:
        mark()
        for _ in range(count):
            for work in works:
                work()
                mark()
        if cuda:
            torch.cuda.synchronize(device)

    turns(2)
    start = time.perf_counter()
    turns(2)
    once = (time.perf_counter() - start) / 2
    marks.clear()
    turns(max(calls, min(300, int(at_least_s / once))))
    times = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in itertools.pairwise(marks)]
    return [statistics.median(times[i :: len(works)]) for i in range(len(works))]


def products(
    tokens: int, sizes: list[tuple[int, int]], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], None]:
    """Forward, dgrad and wgrad of linears [N,K] on ``tokens`` rows, one after the other."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    inputs = {k: normal(tokens, k) for _, k in sizes}
    outputs = {n: normal(tokens, n) for n, _ in sizes}
    weights = [normal(n, k) for n, k in sizes]

    def work() -> None:
        for (_, k), w in zip(sizes, weights, strict=True):
            inputs[k] @ w.t()
        for (n, k), w in zip(sizes, weights, strict=True):
            outputs[n] @ w
            outputs[n].t() @ inputs[k]

    return work


def products_in_fp8(tokens: int, sizes: list[tuple[int, int]], device: torch.device) -> Callable[[], None]:
    """The same with operands that are in 8 bits already, in the layouts that Hopper multiplies; bf16 results."""

    def bits(rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return torch.randn(rows, columns, device=device).to(dtype)

    one = torch.ones((), device=device)
    recipe = torch.nn.functional.ScalingType.TensorWise

    def times(a: Tensor, b: Tensor, fast: bool) -> None:
        """a [M,K] and b [N,K] -> a bᵀ."""
        torch.nn.functional.scaled_mm(
            a, b.t(), one, recipe, one, recipe, output_dtype=torch.bfloat16, use_fast_accum=fast
        )

    e5m2 = torch.float8_e5m2
    work = [
        (
            (bits(tokens, k), bits(n, k)),
            (bits(tokens, n, e5m2), bits(k, n)),
            (bits(n, tokens, e5m2), bits(k, tokens)),
        )
        for n, k in sizes
    ]

    def run() -> None:
        for forward, _, _ in work:
            times(*forward, True)
        for _, dgrad, wgrad in work:
            times(*dgrad, False)
            times(*wgrad, False)

    return run


def block_products(config: ModelConfig) -> list[tuple[int, int]]:
    """The linears [N,K] of a block of Llama's kind: q, k and v in one, output, gate and up in one, down; with experts
    the first two, as the others have more rows (`expert_products`)."""
    q, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    mlp = [] if config.n_experts else expert_products(config)
    return [(q + 2 * kv, config.dim), (config.dim, q), *mlp]


def expert_products(config: ModelConfig) -> list[tuple[int, int]]:
    """The linears [N,K] of one expert, or of a dense feed-forward half: gate and up in one, down."""
    size = config.expert_size
    return [(2 * size, config.dim), (config.dim, size)]


def attention(row: Row, config: ModelConfig, device: torch.device) -> Callable[[], None]:
    """Forward and backward of the model's attention core on one microbatch."""
    batch, seq, size = row.microbatch_rows, row.row_tokens, config.head_size
    if row.isolate_documents:
        lengths = [document_lengths(seq, seed).tolist() for seed in range(batch)]
        rows = Rows.packed(lengths, device)
    else:
        rows = Rows.plain(batch, seq, device)
    q, k, v = (
        torch.randn(batch, seq, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (config.n_heads, config.kv_heads, config.kv_heads)
    )
    upstream = torch.randn(batch, seq, config.n_heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)
    core = AttentionCore(config)
    rows = core.prepare(rows, torch.bfloat16)
    return lambda: torch.autograd.grad(core(q, k, v, rows), (q, k, v), upstream) and None


def copy(size: int, device: torch.device) -> Callable[[], Tensor]:
    """A copy of so many bytes on the device, which reads as many as it writes."""
    source = torch.randint(0, 255, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def optimizer_seconds_per_parameter(device: torch.device, parameters: int) -> float:
    """Norm of all gradients and a step of torch's fused AdamW, weights, gradients and moments in fp32."""
    piece = min(parameters, 1 << 26)
    tensors = [torch.nn.Parameter(torch.randn(piece, device=device)) for _ in range(max(1, parameters // piece))]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=True)

    def work() -> None:
        torch.nn.utils.get_total_norm([tensor.grad for tensor in tensors])
        optimizer.step()

    return median_seconds([work], device, at_least_s=0.3)[0] / (piece * len(tensors))


def state_bytes(row: Row) -> int:
    """Bytes of a parameter that a step of the optimizer reads and writes, those of the gradient's norm among them: 32
    where all is fp32."""
    moments = {"fp32": 16, "bf16": 8, "int8": 4}[row.moments]
    return 8 + 8 + moments  # the gradient twice, the weight (split or not) in and out, the moments in and out


def measure(row: Row, config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """Parts of the floor in seconds a step, their sum, the rates behind them and the bytes that were assumed."""
    small = device.type != "cuda"
    shape = model_shape(config)
    dim, vocab, layers = config.dim, config.vocab_size, config.n_layers
    chosen = config.moe_top_k if config.n_experts else 0  # experts of a token; every layer has them, or none
    ffn = config.expert_size * max(1, chosen)
    q, kv = config.n_heads * config.head_size, config.kv_heads * config.head_size
    tokens, micro = row.microbatch_rows * row.row_tokens, row.microbatches
    chunk = min(tokens, config.loss_chunk_tokens)
    least_s = 0.001 if small else 0.1

    block, expert = block_products(config), expert_products(config) if chosen else []
    layer_bytes = 2 * tokens * (16 * dim + 4 * (q + kv) + 8 * ffn + (4 * (chosen + 1) * dim if chosen else 0))
    in_fp8 = row.fp8 != "none" and not small
    layer = [
        (products_in_fp8 if in_fp8 else products)(tokens, block, device),
        attention(row, config, device),
        copy(layer_bytes // 2, device),
    ]
    layer += [products(chosen * tokens, expert, device)] if chosen else []
    block_s, attention_s, layer_copy_s, *experts_s = median_seconds(layer, device, 15 * least_s)
    block_s += sum(experts_s)
    head = [products(chunk, [(vocab, dim)], device), copy(6 * chunk * vocab // 2, device)]
    head_s = median_seconds(head, device, 5 * least_s)[0] * tokens / chunk
    rate = layer_bytes / layer_copy_s
    optimizer_s = optimizer_seconds_per_parameter(device, 1 << (16 if small else 29))

    parameters = int(shape["parameters"])
    step_tokens = row.tokens_per_step
    elementwise = micro * layers * layer_bytes + step_tokens * 2 * (3 * vocab + 12 * dim)
    if row.storage == "fp32":
        elementwise += 6 * parameters
    accumulation = parameters * (10 * (micro - 1) + 6)  # bf16 in, fp32 sum in and out; the first only out
    parts = {
        "products": micro * (layers * block_s + head_s),
        "attention": micro * layers * attention_s,
        "elementwise": elementwise / rate,
        "accumulation": accumulation / rate,
        "optimizer": optimizer_s * parameters * state_bytes(row) / 32,
    }
    if in_fp8:
        operands = tokens * sum(n + k for n, k in block)
        parts["casts"] = 4 * layers * (micro * operands + sum(n * k for n, k in block)) / rate
    block_flops = 6 * tokens * (sum(n * k for n, k in block) + chosen * sum(n * k for n, k in expert))
    return {
        "seconds": sum(parts.values()),
        "tokens_per_s": step_tokens / sum(parts.values()),
        "parts_s": parts,
        "block_products_tflops": block_flops / block_s / 1e12,
        "head_products_tflops": 6 * tokens * vocab * dim / head_s / 1e12,
        "attention_ms": attention_s * 1e3,
        "copy_tb_per_s": rate / 1e12,
        "elementwise_bytes": elementwise,
        "accumulation_bytes": accumulation,
    }
