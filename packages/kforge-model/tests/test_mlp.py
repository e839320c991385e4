"""SwiGLU against its formula."""

from __future__ import annotations

import torch

from kforge_model import SwiGLU


def test_formula() -> None:
    mlp = SwiGLU(8, 24).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    gate, up, down = (w.weight for w in (mlp.w_gate, mlp.w_up, mlp.w_down))
    g = x @ gate.T
    assert (mlp(x) - (g / (1 + (-g).exp()) * (x @ up.T)) @ down.T).abs().max() < 1e-14
    assert [name for name, _ in mlp.named_parameters()] == ["w_gate.weight", "w_up.weight", "w_down.weight"]
