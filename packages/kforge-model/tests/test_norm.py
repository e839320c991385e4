"""RMSNorm against three lines of float64."""

from __future__ import annotations

import pytest
import torch

from kforge_model import RMSNorm


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
