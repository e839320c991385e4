"""Counted FLOPs against torch's counter, hand formulas, and the real number of parameters."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kforge_model import PRESETS, ModelConfig, Transformer, flops_per_token, model_shape, num_parameters

CONFIGS = [
    ModelConfig(vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40),
    ModelConfig(vocab_size=96, dim=32, n_layers=3, n_heads=4, head_dim=16, tie_embeddings=True),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_against_torchs_counter(config: ModelConfig) -> None:
    model = Transformer(config)
    ids = torch.zeros(2, 48, dtype=torch.int64)
    # The math kernel is plain products, so its backward is counted without flash attention's recomputation.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _ = model(ids, labels=ids, scale=1.0)
        loss.backward()
    assert counter.get_total_flops() == 2 * 48 * flops_per_token(config, 48, causal=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(ids)
    assert 3 * counter.get_total_flops() == 2 * 48 * flops_per_token(config, 48, causal=False)


def test_by_hand() -> None:
    config = ModelConfig(**PRESETS["llama3-8b"])
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    for seq in (1024, 8192):
        assert flops_per_token(config, seq, causal=False) == 6 * matrices + 12 * 32 * 4096 * seq
        assert flops_per_token(config, seq) == 6 * matrices + 6 * 32 * 4096 * seq
    tied = ModelConfig(**{**PRESETS["llama3-8b"], "tie_embeddings": True})
    assert flops_per_token(tied, 1024) == flops_per_token(config, 1024)  # the head's product is there either way
    packed = [300, 700, 24]
    mean = sum(n * n for n in packed) / sum(packed)
    whole = sum(n * flops_per_token(config, n) for n in packed)
    assert flops_per_token(config, mean) * sum(packed) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_number_of_parameters(config: ModelConfig) -> None:
    model = Transformer(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    shape = model_shape(config)
    assert shape["parameters"] == num_parameters(config)
    assert shape["block_parameters"] == sum(p.numel() for p in model.layers["0"].parameters())
    assert shape["n_kv_heads"] == config.kv_heads and shape["head_dim"] == config.head_size
    assert all(type(value) in (int, bool) for value in shape.values())
