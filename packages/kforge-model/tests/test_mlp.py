"""The feed-forward halves against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from kforge_model import MLPS, GatedMLP, ModelConfig, PlainMLP
from kforge_model.config import GATED_MLPS
from kforge_model.mlp import GATED

FORMULAS = {
    "swiglu": lambda g: g / (1 + (-g).exp()),
    "geglu": lambda g: g * torch.special.ndtr(g),
    "geglu_tanh": lambda g: g / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "gelu": lambda g: g * torch.special.ndtr(g),
    "gelu_tanh": lambda g: g / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "relu": lambda g: torch.maximum(g, torch.zeros(())),
    "relu2": lambda g: torch.maximum(g, torch.zeros(())) ** 2,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, bias: bool) -> None:
    mlp = MLPS.get(name)(ModelConfig(dim=8, n_heads=2, ffn_dim=24, mlp=name, mlp_bias=bias)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)

    def product(y: torch.Tensor, weight: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return y @ weight.T + (0 if b is None else b)

    act = FORMULAS[name]
    if name.endswith("glu") or name == "geglu_tanh":
        stacked = mlp.w_gate_up
        assert stacked.weight.shape == (2, 24, 8)
        biases = (None, None) if stacked.bias is None else stacked.bias.unbind()
        gate, up = (product(x, w, b) for w, b in zip(stacked.weight.unbind(), biases, strict=True))
        hidden = act(gate) * up
        names = ["w_gate_up.weight", "w_gate_up.bias", "w_down.weight", "w_down.bias"]
    else:
        hidden = act(product(x, mlp.w_up.weight, mlp.w_up.bias))
        names = ["w_up.weight", "w_up.bias", "w_down.weight", "w_down.bias"]
    assert (mlp(x) - product(hidden, mlp.w_down.weight, mlp.w_down.bias)).abs().max() < 1e-13
    assert [n for n, _ in mlp.named_parameters()] == [n for n in names if bias or n.endswith("weight")]


def test_used_alone() -> None:
    x = torch.randn(2, 5, 8)
    assert GatedMLP(8, 24)(x).shape == PlainMLP(8, 24, torch.relu)(x).shape == x.shape


def test_the_config_knows_which_are_gated() -> None:
    assert set(GATED_MLPS) == set(GATED)
