"""Tokens to their experts and back, against a sum over all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kforge_model import Experts, LocalExchange

T, D, E = 13, 8, 5


def parts(top_k: int) -> tuple[Tensor, Tensor, Tensor, Experts]:
    generator = torch.Generator().manual_seed(top_k)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:top_k] for _ in range(T)])  # the last has none
    weights = torch.rand(T, top_k, generator=generator, dtype=torch.float64, requires_grad=True)
    experts = Experts(E, D, 6).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return x, ids, weights, experts


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_values_and_gradients(top_k: int) -> None:
    x, ids, weights, experts = parts(top_k)
    y = LocalExchange()(x, ids, weights, experts)
    right = torch.zeros_like(x)
    for e in range(E):
        weight = (weights * (ids == e)).sum(1, keepdim=True)
        alone = torch.zeros(E, dtype=torch.int64)
        alone[e] = T
        right = right + weight * experts(x, alone)
    assert (y - right).abs().max() < 1e-13
    wanted = [x, weights, *experts.parameters()]
    out = torch.randn(T, D, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(y, wanted, out), torch.autograd.grad(right, wanted, out), strict=True):
        assert (a - b).abs().max() < 1e-12 * max(b.abs().max().item(), 1.0)


def test_experts_get_their_tokens_in_order() -> None:
    x, ids, weights, _ = parts(2)
    seen = []

    class Watched(nn.Module):
        n_experts = E

        def forward(self, sent: Tensor, counts: Tensor) -> Tensor:
            seen.append((sent, counts))
            return sent

    y = LocalExchange()(x, ids, weights, Watched())  # type: ignore[arg-type]
    assert torch.allclose(y, x * weights.sum(1, keepdim=True))
    ((sent, counts),) = seen
    assert counts.tolist() == [(ids == e).sum().item() for e in range(E)] and counts.dtype == torch.int64
    assert torch.equal(sent, torch.cat([x[(ids == e).any(1)] for e in range(E)]))


def test_the_sum_is_made_in_the_dtype_of_the_weights() -> None:
    x = torch.randn(T, D).bfloat16()
    ids = torch.tensor([[0, 1, 2]]).expand(T, 3)
    weights = torch.rand(T, 3)

    class Same(nn.Module):
        n_experts = E

        def forward(self, sent: Tensor, counts: Tensor) -> Tensor:
            return sent

    y = LocalExchange()(x, ids, weights, Same())  # type: ignore[arg-type]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x[:, None].float() * weights[..., None]).sum(1).bfloat16())


def test_counts_are_those_of_this_process() -> None:
    counts = torch.arange(10).view(2, 5)
    assert torch.equal(LocalExchange().sum_counts(counts), counts)
