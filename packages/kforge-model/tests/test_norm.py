"""Norms against three lines of float64, whole and cut over ranks."""

from __future__ import annotations

import pytest
import torch

from kforge_model import LayerNorm, RMSNorm
from kforge_testing import run_ranks


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    norm = RMSNorm(48, 1e-5)
    norm.weight.data = (1 + torch.randn(48) / 4).to(weight_dtype)
    x = (torch.randn(3, 7, 48) * 5).to(dtype)
    got, right = norm(x), reference(x, norm.weight, 1e-5)
    assert got.dtype == dtype
    # Computed wide, rounded once: half a unit in the last place, and a little for float32's own arithmetic.
    assert (
        (got.double() - right).abs() <= right.abs() * torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 0.51)
    ).all()


def test_float64_goes_through_and_gradients_are_right() -> None:
    norm = RMSNorm(6, 1e-3).double()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert (norm(x) - reference(x, norm.weight, 1e-3)).abs().max() < 1e-14
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, norm.weight)
    )


def test_large_bf16_input_does_not_overflow_its_square() -> None:
    x = torch.full((1, 8), 60_000.0, dtype=torch.float16)
    assert torch.equal(RMSNorm(8)(x), torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_layer_norm(dtype: torch.dtype) -> None:
    norm = LayerNorm(48, 1e-3)
    norm.weight.data, norm.bias.data = 1 + torch.randn(48) / 4, torch.randn(48)
    norm = norm.double() if dtype == torch.float64 else norm
    x = (torch.randn(3, 7, 48, dtype=torch.float64) * 5 + 2).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    right = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    right = right * norm.weight.double() + norm.bias.double()
    got = norm(x)
    assert got.dtype == dtype
    bound = {torch.bfloat16: 2**-8, torch.float32: 2e-6, torch.float64: 1e-14}[dtype]
    assert (got.double() - right).abs().max() <= bound * right.abs().max()


def _cut(rank: int, world: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    x, weight = inputs()
    mine = slice(rank * 4, rank * 4 + 4)
    norm = make(kind, weight[mine])
    norm.group = dist.group.WORLD  # type: ignore[assignment]
    x = x[:, mine].clone().requires_grad_()
    y = norm(x)
    (y * torch.arange(8.0).double()[mine]).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 8, generator=generator).double(), 1 + torch.randn(8, generator=generator).double() / 4


def make(kind: str, weight: torch.Tensor) -> RMSNorm | LayerNorm:
    norm = (RMSNorm if kind == "rms" else LayerNorm)(len(weight), 0.1).double()
    norm.weight.data = weight.clone()
    return norm


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_over_the_features_of_several_ranks(kind: str) -> None:
    x, weight = inputs()
    norm = make(kind, weight)
    x.requires_grad_()
    y = norm(x)
    (y * torch.arange(8.0).double()).sum().backward()
    parts = run_ranks(_cut, 2, kind)
    for i, right in enumerate((y.detach(), x.grad, norm.weight.grad)):
        assert right is not None
        assert (torch.cat([part[i] for part in parts], -1) - right).abs().max() < 1e-14
