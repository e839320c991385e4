"""Generation and looking inside, on a CUDA device: equal to the CPU, without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kforge_model import ModelConfig, Transformer
from kforge_model.cache import KVCache
from kforge_model.generation import generate, score, stream
from kforge_model.points import attention_weights, capture
from kforge_model.qk_clip import max_logits

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"n_kv_heads": 2},
    "window": {"n_kv_heads": 1, "window": 8, "window_pattern": "WF", "sinks": True, "attn_softcap": 5.0},
    "mla": {"attention": "mla", "kv_lora_rank": 64, "head_dim": 48, "rope_dim": 16, "q_lora_rank": 32},
}


def build(kind: str, **options: Any) -> Transformer:
    return Transformer(
        ModelConfig(
            vocab_size=1000, dim=128, n_layers=4, n_heads=4, max_seq_len=128, init_std=0.1, **KINDS[kind], **options
        )
    ).double()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_cpu_in_float64(kind: str) -> None:
    model = build(kind)
    prompts = [torch.randint(1000, (n,)) for n in (9, 4, 17)]
    ids = torch.randint(1000, (2, 40))
    right = generate(model, prompts, 20, temperature=0), score(model, ids), max_logits(model, ids)
    weights = attention_weights(model, ids)
    model.cuda()
    for one, two in zip(generate(model, prompts, 20, temperature=0, prefill_chunk=5), right[0], strict=True):
        assert torch.equal(one.cpu(), two)
    assert (score(model, ids.cuda()).cpu() - right[1]).abs().max() < 1e-10
    assert (max_logits(model, ids.cuda()).cpu() - right[2]).abs().max() < 1e-10
    for layer, found in attention_weights(model, ids.cuda()).items():
        assert (found.cpu() - weights[layer]).abs().max() < 1e-10


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "min_p": 0.01, "top_k": 50, "repetition_penalty": 1.1}])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits(kind: str, options: dict[str, Any]) -> None:
    model = build(kind).cuda().bfloat16()
    tokens = stream(model, torch.randint(1000, (3, 9), device="cuda"), 20, seed=1, **options)
    next(tokens), next(tokens)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(tokens)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert len(rest) == 18


def test_offload_does_not_wait_and_is_whole_at_the_end() -> None:
    model = build("gqa").cuda()
    ids = torch.randint(1000, (4, 100), device="cuda")
    points = ["layers.*.mlp", "norm"]
    with capture(model, points) as right:
        model(ids)
    with capture(model, points, offload=True) as seen:
        model(ids)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for name, calls in seen.items():
        assert len(calls) == 2
        for found in calls:
            assert found.is_pinned() and torch.equal(found, right[name][0].cpu())


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decoding(kind: str) -> None:
    """Inductor, blocks compiled one by one; the buffers stay where they were allocated."""
    model = build(kind).cuda().float()
    prompts = [torch.randint(1000, (n,)) for n in (9, 4, 17)]
    ids = torch.randint(1000, (2, 30), device="cuda")
    with torch.no_grad():
        whole = model(ids)
        torch._dynamo.reset()
        for block in model.layers.values():
            block.compile(fullgraph=True)
        cache = KVCache(model.config, 30, chunk=20)
        parts = [model(ids[:, :20], cache=cache)]
        held = cache.layer("1")._keys
        parts += [model(ids[:, at : at + 1], cache=cache) for at in range(20, 30)]
    assert (torch.cat(parts, 1) - whole[:, 19:]).abs().max() < 1e-3 * whole.abs().max()
    assert held is cache.layer("1")._keys
    assert [len(row) for row in generate(model, prompts, 8, temperature=0)] == [17, 12, 25]
    torch._dynamo.reset()
