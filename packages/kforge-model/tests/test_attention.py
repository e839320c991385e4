"""Attention's projections, norms and RoPE around its core."""

from __future__ import annotations

import torch
from torch import Tensor

from kforge_model import Attention, LatentAttention, ModelConfig, Rotary, Rows, rope_frequencies

ROWS = Rows.packed([[5, 1, 10], [16], [3, 13]])


class Recorder(torch.nn.Module):
    """Gives the queries back, and keeps what it was called with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None) -> Tensor:
        self.seen = (q, k, v, rows, sinks)
        return q[..., : v.shape[-1]]


def rotary_of(config: ModelConfig) -> Rotary:
    return Rotary.at(ROWS.position_ids, rope_frequencies(config)[0], torch.float64)


def test_the_core_gets_each_heads_slice_of_the_fused_weight() -> None:
    config = ModelConfig(dim=24, n_heads=4, n_kv_heads=2, head_dim=8, qkv_bias=True, sinks=True, attn_gate=True)
    layer = Attention(config).double()
    layer.core = core = Recorder()
    torch.nn.init.normal_(layer.sinks)
    x, rotary = torch.randn(3, 16, 24, dtype=torch.float64), rotary_of(config)
    out = layer(x, rotary, ROWS)
    weight, bias = layer.wqkv.weight, layer.wqkv.bias
    assert weight.shape == (2, 4, 8, 24) and bias is not None and bias.shape == (2, 4, 8)
    q, k, v, rows, sinks = core.seen
    assert rows is ROWS and sinks is layer.sinks
    for head in range(4):
        part = (head // 2, head % 2)
        right = rotary.rotate((x @ weight[part].T + bias[part])[:, :, None])[:, :, 0]
        assert (q[:, head] - right).abs().max() < 1e-13
    for group in range(2):
        key, value = (x @ weight[group, i].T + bias[group, i] for i in (2, 3))
        assert (k[:, group] - rotary.rotate(key[:, :, None])[:, :, 0]).abs().max() < 1e-13
        assert (v[:, group] - value).abs().max() < 1e-13
    assert layer.w_gate is not None
    gated = q.transpose(1, 2).flatten(2) * torch.sigmoid(x @ layer.w_gate.weight.T)
    assert (out - gated @ layer.wo.weight.T).abs().max() < 1e-13


def test_latent_keys_of_all_heads_share_the_rotated_part() -> None:
    config = ModelConfig(
        dim=24, n_heads=4, attention="mla", head_dim=10, rope_dim=4, kv_lora_rank=12, q_lora_rank=9, v_head_dim=7
    )
    layer = LatentAttention(config).double()
    layer.core = core = Recorder()
    x, rotary = torch.randn(3, 16, 24, dtype=torch.float64), rotary_of(config)
    layer(x, rotary, ROWS)
    q, k, v, _, _ = core.seen
    assert q.shape == k.shape == (3, 4, 16, 10) and v.shape == (3, 4, 16, 7)
    both = x @ layer.wkv_a.weight.T
    shared = rotary.rotate(both[:, :, None, 12:])[:, :, 0]
    latent = layer.kv_a_norm(both[..., :12])
    for head in range(4):
        rows = layer.wkv_b.weight.view(4, 13, 12)[head]
        assert torch.equal(k[:, head, :, 6:], shared)
        assert (k[:, head, :, :6] - latent @ rows[:6].T).abs().max() < 1e-13
        assert (v[:, head] - latent @ rows[6:].T).abs().max() < 1e-13
