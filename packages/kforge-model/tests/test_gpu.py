"""What only a CUDA device can show: the kernels taken, their values, no waiting, the same initial bits as on CPU."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kforge_model import (
    AttentionCore,
    Block,
    ModelConfig,
    Rotary,
    Rows,
    Transformer,
    generate,
    init_normal_,
    rope_frequencies,
)
from kforge_model.core import attend_masked, attention_mask
from kforge_model.losses import cross_entropy, linear_cross_entropy

pytestmark = pytest.mark.gpu

LENGTHS = [[100, 1, 411], [512], [7, 505]]
CONFIG = ModelConfig(
    vocab_size=1000, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=512, max_seq_len=512, init_std=0.05
)


class Ops(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def ran(self, part: str) -> bool:
        return any(part in name for name in self.names)


def qkv(dtype: torch.dtype, kv: int, dim: int = 64) -> list[Tensor]:
    """Seen as the model makes them: [B,H,S,Dh] views of [B,S,H,Dh]."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(3, 512, heads, dim, generator=generator, device="cuda").to(dtype).transpose(1, 2).requires_grad_()
        for heads in (8, kv, kv)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Float64, an explicit mask, repeated heads."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.ones(512, 512, device="cuda", dtype=torch.bool).tril().expand(3, 1, 512, 512)
    if rows.doc_ids is not None:
        seen = seen & (rows.doc_ids[:, None, :, None] == rows.doc_ids[:, None, None, :])
    scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def core_of(dim: int = 64, window: int | None = None, **options: Any) -> AttentionCore:
    return AttentionCore(ModelConfig(dim=8 * dim, n_heads=8, head_dim=dim, **options), window)


def padded(rows: Rows) -> Rows:
    """cu_seqlens of a fixed length, the last value repeated, as loaders make them."""
    assert rows.cu_seqlens is not None
    more = torch.cat([rows.cu_seqlens, rows.cu_seqlens[-1:].expand(40)])
    return Rows(rows.position_ids, more, 512, rows.doc_ids)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kv", [1, 2, 8])
@pytest.mark.parametrize("packed", [False, True])
def test_core_forward_and_backward(dtype: torch.dtype, tolerance: float, kv: int, packed: bool) -> None:
    rows = padded(Rows.packed(LENGTHS, "cuda")) if packed else Rows.plain(3, 512, "cuda")
    inputs = qkv(dtype, kv)
    core = core_of()
    prepared = core.prepare(rows, dtype)
    ops = Ops()
    with nullcontext() if dtype == torch.float32 else ops:  # flex does not compile inside a dispatch mode
        got = core(*inputs, prepared)
    right = reference(*inputs, rows)
    upstream = torch.randn_like(got)
    for one, two in zip(
        (got, *torch.autograd.grad(got, inputs, upstream)),
        (right, *torch.autograd.grad(right, inputs, upstream.double())),
        strict=True,
    ):
        assert (one.double() - two.double()).abs().max() <= tolerance * two.double().abs().max()
    if dtype == torch.float32:
        assert core.kernel(rows, rows.position_ids.device, dtype) == ("flex" if packed else "sdpa")
        return
    if packed:
        assert ops.ran("varlen_attn")
    elif torch.cuda.get_device_capability() >= (9, 0):
        assert ops.ran("scaled_dot_product_cudnn_attention")
    else:
        assert ops.ran("scaled_dot_product_flash_attention")


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 100},
    "soft-cap": {"attn_softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 33, "attn_softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize(
    ("name", "dtype", "packed", "compiled"),
    [
        *((name, torch.bfloat16, True, False) for name in OPTIONS),
        ("window", torch.bfloat16, False, True),
        ("all", torch.bfloat16, False, False),
        ("all", torch.float32, True, False),
        ("all", torch.bfloat16, True, True),
    ],
)
def test_windows_soft_caps_and_sinks(name: str, dtype: torch.dtype, packed: bool, compiled: bool) -> None:
    torch.compiler.reset()
    options = OPTIONS[name]
    core = core_of(**options)
    rows = padded(Rows.packed(LENGTHS, "cuda")) if packed else Rows.plain(3, 512, "cuda")
    kernel = core.kernel(rows, rows.position_ids.device, dtype)
    assert kernel == ("varlen" if name == "window" and dtype == torch.bfloat16 else "flex")
    inputs = qkv(dtype, 2)
    given = {"sinks": torch.randn(8, device="cuda").to(dtype).requires_grad_()} if core.has_sinks else {}
    prepared = core.prepare(rows, dtype)
    if compiled:
        core.compile(fullgraph=True)
    got = core(*inputs, prepared, **given)
    wide = [x.detach().double().requires_grad_() for x in (*inputs, *given.values())]
    mask = attention_mask(rows, torch.float64, core.window)
    right = attend_masked(*wide[:3], mask, scale=core.scale, softcap=core.softcap, sinks=wide[3] if given else None)
    upstream = torch.randn_like(got)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for one, two in zip(
        (got, *torch.autograd.grad(got, (*inputs, *given.values()), upstream)),
        (right, *torch.autograd.grad(right, wide, upstream.double())),
        strict=True,
    ):
        assert one.dtype == dtype
        assert (one.double() - two).abs().max() <= tolerance * two.abs().max()


def test_latent_heads_of_two_widths() -> None:
    config = ModelConfig(dim=256, n_heads=8, attention="mla", head_dim=96, rope_dim=32, v_head_dim=64, kv_lora_rank=64)
    core = AttentionCore(config)
    for rows in (padded(Rows.packed(LENGTHS, "cuda")), Rows.plain(3, 512, "cuda")):
        for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
            q, k, _ = qkv(dtype, 8, 96)
            v = qkv(dtype, 8, 64)[2]
            got = core(q, k, v, core.prepare(rows, dtype))
            right = reference(q, k, v, rows)
            upstream = torch.randn_like(got)
            for one, two in zip(
                (got, *torch.autograd.grad(got, (q, k, v), upstream)),
                (right, *torch.autograd.grad(right, (q, k, v), upstream.double())),
                strict=True,
            ):
                assert (one.double() - two.double()).abs().max() <= tolerance * two.double().abs().max()


def test_heads_too_odd_for_the_flash_kernel_have_another() -> None:
    rows = Rows.packed(LENGTHS, "cuda")
    inputs = qkv(torch.bfloat16, 2, dim=20)
    got = core_of(20)(*inputs, rows)
    right = reference(*inputs, rows)
    assert (got.double() - right).abs().max() <= 2e-2 * right.abs().max()


def test_packed_rows_make_no_square_mask() -> None:
    seq = 32_768
    rows = Rows.packed([[600] * 54 + [seq - 54 * 600]], "cuda")
    q = torch.randn(1, seq, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    for core in (core_of(), core_of(window=500), core_of(attn_softcap=5.0)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        core(q, q, q, core.prepare(rows, q.dtype)).sum().backward()
        assert torch.cuda.max_memory_allocated() - before < seq * seq // 2  # a mask has one byte an element


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_never_waits_for_the_device(packed: bool) -> None:
    model = Transformer(CONFIG).to("cuda", torch.bfloat16)
    ids, labels = torch.randint(1000, (2, 9, 512), device="cuda")  # enough tokens for the embedding's sorting backward
    rows = padded(Rows.packed(LENGTHS * 3, "cuda")) if packed else Rows.plain(9, 512, "cuda")
    scale = torch.tensor(1 / labels.numel(), device="cuda")
    model(ids, rows, labels, scale)[0].backward()  # first calls set up libraries
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(ids, rows, labels, scale)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_model_equals_the_float64_model_on_cpu(dtype: torch.dtype, tolerance: float, packed: bool) -> None:
    on_cpu = Transformer(CONFIG).double()
    model = Transformer(CONFIG).to("cuda", dtype)
    ids, labels = torch.randint(1000, (2, 3, 512))
    rows = Rows.packed(LENGTHS) if packed else Rows.plain(3, 512)
    there = padded(Rows.packed(LENGTHS, "cuda")) if packed else Rows.plain(3, 512, "cuda")
    right, _ = on_cpu(ids, rows, labels, 1 / labels.numel())
    right.backward()
    loss, _ = model(ids.cuda(), there, labels.cuda(), 1 / labels.numel())
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), rel=min(tolerance, 1e-3))
    for (name, one), two in zip(model.named_parameters(), on_cpu.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        difference = (one.grad.cpu().double() - two.grad).norm() / two.grad.norm()
        assert difference <= 4 * tolerance, name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 100, "sinks": True, "attn_softcap": 5.0, "attn_gate": True}])
def test_block_compiles_into_one_graph(packed: bool, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    block = Block(ModelConfig(**{**CONFIG.__dict__, **options})).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            init_normal_(parameter, 0, name, 0.05)
    core = block.attn.core
    rows = padded(Rows.packed(LENGTHS, "cuda")) if packed else Rows.plain(3, 512, "cuda")
    rotary = Rotary.at(rows.position_ids, rope_frequencies(CONFIG)[0], torch.bfloat16)
    x = torch.randn(3, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = core.prepare(rows, torch.bfloat16)  # type: ignore[operator]
    right = block(x, rotary, rows)
    (right_grad,) = torch.autograd.grad(right.square().sum(), x)
    block.compile(fullgraph=True)
    got = block(x, rotary, rows)
    (grad,) = torch.autograd.grad(got.square().sum(), x)
    for one, two in ((got, right), (grad, right_grad)):
        assert (one - two).norm() <= 2e-2 * two.norm()


HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"vocab_size": 4999},
    "softcap": {"softcap": 5.0},
    "label_smoothing": {"label_smoothing": 0.1, "vocab_size": 4999},
    "z_loss": {"z_loss": 0.05},
    "all": {"vocab_size": 4999, "softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", HEAD_OPTIONS.values(), ids=HEAD_OPTIONS)
@pytest.mark.parametrize("loss_of", [partial(linear_cross_entropy, chunk_tokens=128), cross_entropy])
def test_losses_equal_those_in_float64_on_cpu(dtype: torch.dtype, options: dict[str, Any], loss_of: Any) -> None:
    hidden = torch.randn(2, 300, 64, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(5000, 64, device="cuda") / 8).to(dtype).requires_grad_()
    labels = torch.randint(4999, (2, 300), device="cuda").masked_fill(torch.rand(2, 300, device="cuda") < 0.2, -100)
    scale = torch.rand(2, 300, device="cuda") / 600
    loss, nll = loss_of(hidden, weight, labels, scale, **options)
    h, w = (x.detach().cpu().double().requires_grad_() for x in (hidden, weight))
    right, right_nll = cross_entropy(h, w, labels.cpu(), scale.cpu(), **options)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    assert loss.item() == pytest.approx(right.item(), rel=tolerance)
    assert (nll.cpu().double() - right_nll).norm() <= tolerance * right_nll.norm()
    for one, two in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(right, (h, w)), strict=True):
        assert one.dtype == dtype
        assert (one.cpu().double() - two).norm() <= tolerance * two.norm()


@pytest.mark.parametrize("options", HEAD_OPTIONS.values(), ids=HEAD_OPTIONS)
def test_chunked_loss_never_waits_and_holds_one_chunk(options: dict[str, Any]) -> None:
    tokens, rows, dim, chunk = 4096, 5000, 64, 256
    hidden = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(4999, (tokens,), device="cuda")
    scale = torch.full((tokens,), 1 / tokens, device="cuda")
    for _ in range(2):  # the first calls set up libraries
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(hidden, weight, labels, scale, chunk_tokens=chunk, **options)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    logits = chunk * rows * 2
    weights = rows * dim * 4  # the gradient, rounded in place
    others = tokens * dim * (2 + 2) + tokens * 8 * 4
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * (logits + weights + others)


def test_initial_values_equal_those_on_cpu() -> None:
    shape = (1500, 1000)
    one = init_normal_(torch.empty(shape), 3, "w", 0.02)
    two = init_normal_(torch.empty(shape, device="cuda"), 3, "w", 0.02).cpu()
    step = torch.nextafter(one.abs(), torch.full_like(one, torch.inf)) - one.abs()
    assert ((one - two).abs() <= step).all()
    assert (one == two).float().mean() > 0.999
    fine = init_normal_(torch.empty(1000, dtype=torch.float64), 3, "w", 1.0)
    there = init_normal_(torch.empty(1000, dtype=torch.float64, device="cuda"), 3, "w", 1.0)
    assert (fine - there.cpu()).abs().max() < 1e-13


def test_generation_equals_cpu_in_float64_and_runs_in_bf16() -> None:
    model = Transformer(CONFIG).double()
    prompt = torch.randint(1000, (2, 9))
    right = generate(model, prompt, 20, temperature=0)
    model.cuda()
    assert torch.equal(generate(model, prompt.cuda(), 20, temperature=0).cpu(), right)
    model.bfloat16()
    drawn = []
    for _ in range(2):
        drawn.append(generate(model, prompt.cuda(), 20, temperature=0.8, top_k=50, top_p=0.9, seed=1))
    assert torch.equal(drawn[0], drawn[1]) and drawn[0].shape == (2, 29)
