"""act(gate) * up, and its gradient, against the formulas in float64.

On a machine without a GPU, TRITON_INTERPRET=1 runs the kernel where Triton is installed, with `-m gpu`.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from kforge_model.gated import SwiGLU, gated

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"


def test_halves() -> None:
    pair = torch.randn(3, 2, 5, dtype=torch.float64)
    for activation in (F.silu, F.gelu, torch.relu):
        assert torch.equal(gated(pair, activation), activation(pair[:, 0]) * pair[:, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 2, 1024), (5, 2, 1500), (1, 2, 7), (0, 2, 8)], ids=str)
def test_the_gradient_is_rounded_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from kforge_model.swiglu_kernel import swiglu_backward

    random = torch.Generator().manual_seed(2)
    pair = (4 * torch.randn(shape, generator=random)).to(dtype)
    grad = torch.randn(*shape[:-2], shape[-1], generator=random).to(dtype)
    exact = pair.double().requires_grad_()
    (F.silu(exact.select(-2, 0)) * exact.select(-2, 1)).backward(grad.double())
    assert exact.grad is not None
    found = swiglu_backward(grad.to(DEVICE), pair.to(DEVICE)).cpu().double()
    step = torch.finfo(dtype).eps / 2
    # Float32's errors beside it: of products, the sigmoid, and a sum near zero (1 + g (1 - s) at g of about -1.3).
    assert ((found - exact.grad).abs() <= exact.grad.abs() * step * 1.01 + 2e-6 + 2.0**-25).all()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_taken_on_cuda_and_is_one_graph(compiled: bool) -> None:
    pair = torch.randn(40, 2, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(40, 96, device="cuda", dtype=torch.bfloat16)
    function = torch.compile(gated, fullgraph=True) if compiled else gated
    out = function(pair, F.silu)
    out.backward(grad)
    if not compiled:
        assert type(out.grad_fn).__name__ == f"{SwiGLU.__name__}Backward"
    exact = pair.detach().double().requires_grad_()
    right = F.silu(exact[:, 0]) * exact[:, 1]
    right.backward(grad.double())
    torch.testing.assert_close(out.double(), right, rtol=2.0**-7, atol=1e-5)
    assert pair.grad is not None and exact.grad is not None
    torch.testing.assert_close(pair.grad.double(), exact.grad, rtol=2.0**-8, atol=1e-5)
