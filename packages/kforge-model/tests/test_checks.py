"""Sizes and choices that do not go together are told with their values and what to change."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kforge_model import ModelConfig, Transformer, build_model
from kforge_model.checks import OF_EXPERTS

SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "n_experts": 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_experts": -1}, "n_experts = -1 must not be negative"),
        ({"n_experts": 1}, "moe_top_k = 2 must be at least 1 and at most n_experts = 1"),
        ({"moe_top_k": 0}, "moe_top_k = 0 must be at least 1"),
        ({"moe_top_k": 9}, "moe_top_k = 9 must be at least 1 and at most n_experts = 8"),
        ({"moe_pattern": ""}, "moe_pattern = '' must be of the letters M"),
        ({"moe_pattern": "MX"}, "moe_pattern = 'MX' must be of the letters M"),
        ({"moe_pattern": "DDM"}, "moe_pattern = 'DDM' gives experts to none of the 2 layers; put an M"),
        ({"expert_dim": 0}, "expert_dim = 0 must be at least 1"),
        ({"shared_experts": -1}, "shared_experts = -1 must not be negative"),
        ({"mlp_bias": True}, "mlp_bias = True, and experts have no biases; set it to False"),
        ({"router_scale": 0.0}, "router_scale = 0.0 must be above 0"),
        ({"router_groups": 3}, "router_groups = 3 does not divide n_experts = 8"),
        ({"router_groups": 0}, "router_groups = 0 does not divide n_experts = 8"),
        ({"router_top_groups": 2}, "router_top_groups = 2 must be at least 1 and at most router_groups = 1"),
        ({"router_groups": 4, "router_top_groups": 0}, "router_top_groups = 0 must be at least 1"),
        ({"router_groups": 8}, "router_top_groups = 1 groups of 1 experts have fewer than moe_top_k = 2"),
        (
            {"router_groups": 8, "router_top_groups": 4, "router": "sigmoid"},
            "router_groups = 8 leaves one expert a group",
        ),
        ({"router_bias_rate": 0.1}, "router_bias_rate = 0.1 is read with model.router_bias = True only"),
        ({"router_bias": True, "router_bias_rate": 0.0}, "router_bias_rate = 0.0 must be above 0"),
        (
            {"router_bias": True, "router_bias_schedule": "warmup"},
            "router_bias_schedule = 'warmup' wants model.router_bias_warmup_steps above 0; it is 0",
        ),
        ({"router_bias": True, "router_bias_warmup_steps": 5}, "router_bias_warmup_steps = 5 is read by"),
        ({"balance_loss": -0.1}, "balance_loss = -0.1 must not be negative"),
        ({"router_z_loss": float("nan")}, "router_z_loss = nan must not be negative"),
        ({"balance_over": "batch"}, "balance_over = 'batch' is of the balance loss, and model.balance_loss = 0"),
        ({"expert_capacity": 0.0}, "expert_capacity = 0.0 must be above 0"),
        ({"expert_capacity": -1.0}, "expert_capacity = -1.0 must be above 0"),
    ],
)
def test_experts_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"model.{words}")):
        ModelConfig(**{**SIZES, **changes})


OTHER: dict[str, Any] = {
    "moe_pattern": "DM",
    "moe_top_k": 1,
    "expert_dim": 8,
    "shared_experts": 1,
    "router": "sigmoid",
    "router_norm": False,
    "router_scale": 2.0,
    "router_groups": 2,
    "router_top_groups": 2,
    "router_bias": True,
    "router_bias_rate": 0.1,
    "router_bias_schedule": "cosine",
    "router_bias_warmup_steps": 3,
    "balance_loss": 0.1,
    "balance_over": "batch",
    "router_z_loss": 0.1,
    "expert_capacity": 1.0,
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_what_means_nothing_without_experts_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{name} = .* is for experts, and model\.n_experts = 0"):
        ModelConfig(**{**SIZES, "n_experts": 0, name: OTHER[name]})


def test_parts_that_cannot_be_experts() -> None:
    with pytest.raises(ValueError, match="mlp = 'bilinear' cannot be an expert"):
        Transformer(ModelConfig(**SIZES, mlp="bilinear"))
    with pytest.raises(ValueError, match=r"unknown router 'nonsense'; known are .*sigmoid, softmax"):
        build_model(ModelConfig(**SIZES, router="nonsense"))


def test_defaults_are_resolved() -> None:
    config = ModelConfig(**SIZES, ffn_dim=48, shared_experts=2)
    assert (config.expert_size, config.shared_size) == (48, 96)
    config = ModelConfig(**SIZES, expert_dim=20, shared_experts=2, moe_pattern="DMM", mtp_depth=2)
    assert (config.expert_size, config.shared_size) == (20, 40)
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, True, False]
    assert not ModelConfig(dim=16, n_heads=2).has_experts(0)
    assert config.layout_exact
    assert not ModelConfig(**SIZES, expert_capacity=1.0).layout_exact
    assert not ModelConfig(**SIZES, balance_loss=0.1, balance_over="batch").layout_exact
