"""The experts' products, both ways of making them, against one feed-forward half for each expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kforge_model import MLPS, Experts, ModelConfig
from kforge_model.moe import experts as module
from kforge_model.moe.experts import groups_can

COUNTS = [3, 0, 6, 1, 0]
ACTIVATIONS = ["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "relu2"]


def experts_of(mlp: str, dtype: torch.dtype) -> Experts:
    experts = Experts(5, 16, 24, mlp)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return experts.to(dtype)


def results(experts: Experts, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = experts(x, torch.tensor(COUNTS))
    y.sum().backward()  # an expanded gradient
    found = [y.detach(), x.grad, *(p.grad for p in experts.parameters())]
    experts.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("mlp", ACTIVATIONS)
def test_each_expert_is_a_feed_forward_half(mlp: str) -> None:
    experts = experts_of(mlp, torch.float64)
    x = torch.randn(10, 16, dtype=torch.float64)
    parts = []
    for e, part in enumerate(x.split(COUNTS)):
        one = MLPS.get(mlp)(ModelConfig(dim=16, n_heads=2, ffn_dim=24, mlp=mlp)).double()
        one.load_state_dict({f"{name}.weight": weight[e] for name, weight in experts.state_dict().items()})
        parts.append(one(part))
    assert (experts(x, torch.tensor(COUNTS)) - torch.cat(parts)).abs().max() < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_grouped_products_are_those_of_the_experts_one_by_one(
    mlp: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, x = experts_of(mlp, dtype), torch.randn(10, 16).to(dtype)
    one_by_one = results(experts, x)
    monkeypatch.setattr(module, "groups_can", lambda *tensors: True)
    grouped = results(experts, x)
    for a, b in zip(grouped, one_by_one, strict=True):
        assert a.dtype == dtype and (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("grouped", [False, True])
def test_an_expert_without_tokens_gets_no_gradient(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "groups_can", lambda *tensors: grouped)
    _, _, *gradients = results(experts_of("swiglu", torch.float32), torch.randn(10, 16))
    for gradient in gradients:
        assert [bool(part.any()) for part in gradient] == [count > 0 for count in COUNTS]


def test_no_tokens_at_all() -> None:
    experts = experts_of("swiglu", torch.float64)
    y = experts(torch.zeros(0, 16, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 16) and all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_grouped_products_are_for_cuda() -> None:
    x = torch.randn(10, 16, dtype=torch.bfloat16)
    assert not groups_can(x, torch.zeros(5, 24, 16, dtype=torch.bfloat16))


def test_names_and_shapes() -> None:
    assert {n: tuple(p.shape) for n, p in Experts(5, 16, 24).named_parameters()} == {
        "w_gate_up": (5, 2, 24, 16),
        "w_down": (5, 16, 24),
    }
    assert {n: tuple(p.shape) for n, p in Experts(5, 16, 24, "relu").named_parameters()} == {
        "w_up": (5, 24, 16),
        "w_down": (5, 16, 24),
    }
    with pytest.raises(ValueError, match="mlp = 'mine' cannot be an expert"):
        Experts(5, 16, 24, "mine")
