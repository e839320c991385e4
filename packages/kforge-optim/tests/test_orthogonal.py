from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kforge_optim import newton_schulz, polar_express
from kforge_optim.orthogonal import NEWTON_SCHULZ, POLAR_EXPRESS


def through_svd(matrix: np.ndarray, polynomials: list[tuple[float, float, float]], margin: float) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (margin * np.sqrt((s**2).sum()))
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(2, 9, 4), (2, 4, 9), (3, 6, 6), (1, 1, 5), (2, 5, 1)])
@pytest.mark.parametrize("steps", [1, 5, 10])
@pytest.mark.parametrize(
    ("method", "polynomials", "margin"),
    [(newton_schulz, [NEWTON_SCHULZ] * 10, 1.0), (polar_express, [*POLAR_EXPRESS, *POLAR_EXPRESS[-1:] * 2], 1.01)],
    ids=["newton_schulz", "polar_express"],
)
def test_tall_and_wide_against_an_svd(
    method: Callable[..., Tensor],
    polynomials: list[tuple[float, float, float]],
    margin: float,
    steps: int,
    shape: tuple[int, int, int],
) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = method(matrices, steps=steps)
    for matrix, one in zip(matrices, result, strict=True):
        np.testing.assert_allclose(one.numpy(), through_svd(matrix.numpy(), polynomials[:steps], margin), atol=1e-11)
    scaled = method(matrices, steps=steps, scale=0.3)
    torch.testing.assert_close(scaled, 0.3 * result, rtol=1e-13, atol=1e-13)
    assert torch.equal(method(torch.zeros(shape), steps=steps), torch.zeros(shape))
    with pytest.raises(ValueError, match="steps = 0 must be at least 1"):
        method(matrices, steps=0)


def of_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    u = torch.linalg.qr(torch.randn(rows, len(values), generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(columns, len(values), generator=generator, dtype=torch.float64)).Q
    return (u * values) @ v.mT


@pytest.mark.parametrize(("steps", "low", "high"), [(5, 0.84, 1.13), (6, 0.993, 1.002), (7, 1 - 2e-5, 1 + 2e-5)])
@pytest.mark.parametrize(("rows", "columns"), [(80, 50), (50, 80)])
def test_polar_express_ends_where_it_says(steps: int, low: float, high: float, rows: int, columns: int) -> None:
    values = torch.logspace(-3, 0, 50, dtype=torch.float64)
    values /= values.norm()
    values = values[values >= 1e-3]
    matrix = of_singular_values(values, rows, columns)
    found = torch.linalg.svdvals(polar_express(matrix[None], steps=steps)[0])[: len(values)]
    assert low <= found.min()
    assert found.max() <= high


def test_polar_express_is_nearer_to_orthogonal_than_newton_schulz_and_ends_there() -> None:
    matrices = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    identity = torch.eye(32, dtype=torch.float64)
    off = [
        float((result @ result.mT - identity).abs().max())
        for result in (newton_schulz(matrices), polar_express(matrices), polar_express(matrices, steps=9))
    ]
    assert off[0] > off[1] > 1e-3
    assert off[2] < 1e-12


def test_bfloat16_does_not_blow_up() -> None:
    matrices = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(5))
    for method in (newton_schulz, polar_express):
        values = torch.linalg.svdvals(method(matrices.to(torch.bfloat16), steps=8).to(torch.float32))
        assert values.max() < 1.3
