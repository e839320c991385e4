"""The nearest orthogonal matrix, by products of matrices alone: what Muon makes of its momentum.

Both methods put an odd polynomial, x -> ax + bx³ + cx⁵, on the singular values, some times over, and leave the singular
vectors as they are.

Names of shapes: N matrices [R,C].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic (2024, https://kellerjordan.github.io/posts/muon/): steepest at 0, so five iterations bring singular
values of 0.01 and more near 1."""

_MARGIN = 1.01
POLAR_EXPRESS = (
    *(
        (a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
)
"""Polynomials of Polar Express (Amsel et al. 2025, https://arxiv.org/abs/2505.16932, algorithm 1), the last one for all
further iterations: each is the best of its degree for singular values from where those before it have left them, at
first from 0.001 to 1. All but the last take singular values up to 1.01, against rounding."""


def newton_schulz(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
    """Push the singular values of each matrix [N,R,C] to near 1: X ← aX + (bA + cA²)X with A = XXᵀ, ``steps`` times.

    Works in the dtype of ``matrices`` (the norm it starts with in at least float32); a tall matrix is transposed, so
    that A is the smaller square. A zero matrix stays zero. The quintic does not converge: singular values end between
    about 0.7 and 1.2, which trains as well as exactly 1 (see `NEWTON_SCHULZ`). ``scale`` multiplies the result, as part
    of the last product. Raises ValueError for fewer steps than one.
    """
    return _iterate(matrices, [NEWTON_SCHULZ] * steps, steps, 1.0, scale)


def polar_express(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
    """As `newton_schulz`, with the polynomials of `POLAR_EXPRESS`, which converge.

    Of a matrix whose norm is 1, singular values from 0.001 to 1 end in [0.84, 1.13] after 5 steps, in [0.993, 1.002]
    after 6, within 2e-5 of 1 after 7 and within rounding after 8.
    """
    further = max(0, steps - len(POLAR_EXPRESS))
    return _iterate(matrices, [*POLAR_EXPRESS, *POLAR_EXPRESS[-1:] * further], steps, _MARGIN, scale)


METHODS = {"newton_schulz": newton_schulz, "polar_express": polar_express}
"""Methods by their name in ``OptimConfig.muon_method``."""


def _iterate(
    matrices: Tensor, polynomials: Sequence[tuple[float, float, float]], steps: int, margin: float, scale: float
) -> Tensor:
    """Matrices [N,R,C], each over ``margin`` times its norm, through the first ``steps`` polynomials in turn."""
    if steps < 1:
        raise ValueError(f"steps = {steps} must be at least 1")
    norm_dtype = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=norm_dtype)
    x = torch.div(matrices, (norm * margin).clamp(min=1e-7), out=torch.empty_like(matrices))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    for step, (a, b, c) in enumerate(polynomials[:steps]):
        last = scale if step == steps - 1 else 1.0
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a * last, alpha=last)
    return x.mT if tall else x
