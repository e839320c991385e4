"""Sizes and choices that do not go together are told with their values and what to change."""

from __future__ import annotations

import dataclasses
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
        ({"router_z_loss": float("nan")}, "router_z_loss = nan must be finite"),
        ({"balance_over": "batch"}, "balance_over = 'batch' is of the balance loss, and model.balance_loss = 0"),
        ({"expert_capacity": 0.0}, "expert_capacity = 0.0 must be above 0"),
        ({"expert_capacity": -1.0}, "expert_capacity = -1.0 must be above 0"),
    ],
)
def test_experts_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"model.{words}")):
        ModelConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("pattern", ["F", "FFW"])
def test_a_window_of_no_layer_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"window_pattern = '{pattern}' gives the window of 4 tokens to none of the 2"):
        ModelConfig(n_layers=2, window=4, window_pattern=pattern)
    assert ModelConfig(n_layers=2, mtp_depth=1, window=4, window_pattern="FFW").window_of(2) == 4


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


DENSE: dict[str, Any] = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": "per-head"}, "qk_norm = 'per-head' is not known; did you mean 'per_head'? Known are 'none', '"),
        ({"norm_placement": "Pre"}, "norm_placement = 'Pre' is not known; did you mean 'pre'?"),
        ({"init": "foo"}, "init = 'foo' is not known; known are 'normal', 'truncated_normal'"),
        ({"attention": "GQA"}, "attention = 'GQA' is not known; did you mean 'gqa'?"),
        ({"rope_scaling": "foo"}, "rope_scaling = 'foo' is not known; known are 'none', 'linear'"),
        ({"rope_scaling": None}, "rope_scaling = None is not known; known are 'none', 'linear'"),
        ({"balance_over": "rows"}, "balance_over = 'rows' is not known"),
        ({"router_bias_schedule": ["cosine"]}, "router_bias_schedule = ['cosine'] is not known"),
        ({"n_layers": None}, "n_layers = None must be a whole number"),
        ({"vocab_size": None}, "vocab_size = None must be a whole number"),
        ({"dim": 256.0}, "dim = 256.0 must be a whole number"),
        ({"mtp_depth": 1.5}, "mtp_depth = 1.5 must be a whole number"),
        ({"ffn_dim": 7.5}, "ffn_dim = 7.5 must be a whole number, or None"),
        ({"n_heads": "4"}, "n_heads = '4' must be a whole number"),
        ({"n_heads": True}, "n_heads = True must be a whole number"),
        ({"window": 2.5}, "window = 2.5 must be a whole number, or None"),
        ({"window": True}, "window = True must be a whole number, or None"),
        ({"tie_embeddings": "no"}, "tie_embeddings = 'no' must be True or False"),
        ({"tie_embeddings": 1}, "tie_embeddings = 1 must be True or False"),
        ({"norm_eps": None}, "norm_eps = None must be a number"),
        ({"norm_eps": True}, "norm_eps = True must be a number"),
        ({"attn_scale": "1"}, "attn_scale = '1' must be a number, or None"),
        ({"norm": None}, "norm = None must be a text"),
        ({"options": 3}, "options = 3 must be a mapping"),
        ({"options": {3: 4}}, "options has the key 3, and keys are names"),
        *(
            ({name: value}, f"{name} = {value} must be finite")
            for name in ("attn_softcap", "logit_softcap", "embed_scale", "init_std", "rope_factor", "mtp_weight")
            for value in (float("inf"), float("nan"))
        ),
        (
            {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_len": 32, "rope_high": 32.0, "rope_theta": 1.0},
            "rope_theta = 1.0 must be above 1 under rope_scaling = 'yarn'",
        ),
        ({"head_dim": 5}, "head_dim = 5 must be even and positive: RoPE rotates pairs. Or say by rope_dim how many"),
        ({"dim": 10}, "head_dim = 5 must be even and positive: RoPE rotates pairs. Or say by rope_dim how many"),
        ({"head_dim": 5, "rope_dim": 3}, "rope_dim = 3 must be even and positive: RoPE rotates pairs"),
        ({"rope_low": 8.0}, "rope_low = 8.0 is read by rope_scaling = 'yarn' and 'llama3' only"),
        (
            {"rope_scaling": "linear", "rope_factor": 2.0, "rope_high": 8.0},
            "rope_high = 8.0 is read by rope_scaling = 'yarn' and 'llama3' only",
        ),
        ({"mtp_weight": 0.5}, "mtp_weight = 0.5 is of the further tokens, and model.mtp_depth = 0"),
    ],
)
def test_values_of_another_kind_and_choices_that_are_none(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"model.{words}")):
        ModelConfig(**{**DENSE, **changes})


def test_every_field_refuses_a_value_of_another_kind() -> None:
    for field in dataclasses.fields(ModelConfig):
        with pytest.raises(ValueError, match=rf"model\.{field.name} = "):
            ModelConfig(**{**DENSE, field.name: object()})


def test_whole_numbers_are_numbers_and_a_rotated_part_may_be_even_in_an_odd_head() -> None:
    config = ModelConfig(**DENSE, embed_scale=2, attn_scale=1, head_dim=7, rope_dim=4)
    assert (config.embed_scale, config.attn_scale, config.head_size, config.rope_size) == (2, 1, 7, 4)
