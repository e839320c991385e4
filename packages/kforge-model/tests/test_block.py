"""A block traces into one graph, and gives the same when recomputed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kforge_model.core as core_module
from kforge_model import Block, ModelConfig, Rotary, Rows, rope_frequencies

SIZES = {"vocab_size": 8, "dim": 32, "n_layers": 1, "n_heads": 4}
CONFIG = ModelConfig(**SIZES, n_kv_heads=2)
OPTIONS = {
    "llama": CONFIG,
    "norms": ModelConfig(**SIZES, norm="layernorm", norm_placement="sandwich", qk_norm="across_heads", mlp="relu2"),
    "windows": ModelConfig(**SIZES, n_kv_heads=1, window=5, sinks=True, qkv_bias=True, mlp_bias=True, mlp="geglu"),
    "soft-cap": ModelConfig(**SIZES, attn_softcap=1.0, attn_gate=True, qk_norm="per_head", norm_placement="post"),
    "latent": ModelConfig(
        **SIZES, attention="mla", head_dim=12, rope_dim=8, kv_lora_rank=16, q_lora_rank=16, mlp="gelu_tanh"
    ),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def inputs(rows: Rows, block: Block) -> tuple[torch.Tensor, Rotary, Rows]:
    x = torch.randn(*rows.position_ids.shape, 32, requires_grad=True)
    config = ModelConfig(dim=32, head_dim=8)
    rotary = Rotary.at(rows.position_ids, rope_frequencies(config)[0], x.dtype)
    return x, rotary, block.attn.core.prepare(rows, x.dtype)


@pytest.mark.parametrize(("name", "hopper"), [*((name, False) for name in OPTIONS), ("llama", True)])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(name: str, packed: bool, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The choice of kernels that a Hopper card gets must trace as well; on CPU it changes nothing.
    if hopper:
        monkeypatch.setattr(core_module, "_prefers_cudnn", lambda *_: True)
    block = Block(OPTIONS[name])
    compiled = copy.deepcopy(block)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in block.named_parameters()]
    for lengths in ([[5, 11], [16]], [[8, 8], [1, 15]]):
        rows = Rows.packed(lengths) if packed else Rows.plain(2, 16)
        x, rotary, rows = inputs(rows, block)
        right, got = block(x, rotary, rows), compiled(x, rotary, rows)
        assert torch.allclose(got, right, atol=1e-6)
        one, two = (torch.autograd.grad(out.square().sum(), x)[0] for out in (right, got))
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_recomputation_gives_the_same_bits(packed: bool) -> None:
    block = Block(CONFIG)
    args = inputs(Rows.packed([[5, 11], [16]]) if packed else Rows.plain(2, 16), block)
    plain, again = block(*args), checkpoint(block, *args, use_reentrant=False)
    parameters = [args[0], *block.parameters()]
    assert torch.equal(plain, again)
    for one, two in zip(*(torch.autograd.grad(out.sum(), parameters) for out in (plain, again)), strict=True):
        assert torch.equal(one, two)
