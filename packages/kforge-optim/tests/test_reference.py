"""Fifty steps of each optimizer in float64 against a reference of a few lines, with decay, schedule, scale and gate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from algorithms import ALGORITHMS, NAMES, config
from torch import nn

from kforge_optim import build_optimizer

STEPS = 50
SHAPES = {"tall": (9, 4), "wide": (4, 7), "square": (5, 5), "vector": (6,)}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(weight))


def gradient(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    # Now large, now small: what adapts to the size of gradients has something to do.
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64) * 10 ** (2 * math.sin(step))


@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps_in_float64(name: str) -> None:
    row, model = ALGORITHMS[name], Weights()
    optimizer = build_optimizer(model, config(name, warmup_steps=5, weight_decay=0.1), STEPS)
    decays = {key: group.weight_decay for group in optimizer.groups for key in group.parameters}
    assert decays == {"tall": 0.1, "wide": 0.1, "square": 0.1, "vector": 0.0}
    expected = {key: parameter.detach().numpy().copy() for key, parameter in model.named_parameters()}
    states: dict[str, dict[str, Any]] = {key: {} for key in SHAPES}
    for step in range(STEPS):
        refused, scale = step % 7 == 3, 0.5 + 0.25 * math.cos(step)
        rates = {key: optimizer.lrs()[group.name] for group in optimizer.groups for key in group.parameters}
        for key, parameter in model.named_parameters():
            parameter.grad = gradient(key, step)
            if refused:
                parameter.grad.view(-1)[step % 4] = math.nan
            else:
                rule = row.reference if parameter.ndim == 2 or row.beside is None else row.beside
                scaled = scale * parameter.grad.numpy()
                expected[key] = rule(expected[key], scaled, states[key], rates[key], decays[key])
        optimizer.step(torch.tensor(scale, dtype=torch.float64), torch.tensor(0.0 if refused else 1.0))
    for key, parameter in model.named_parameters():
        assert np.abs(parameter.detach().numpy() - expected[key]).max() < 1e-11, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [0, 2])
def test_gate_0_changes_no_bit(name: str, dtype: torch.dtype, step: int) -> None:
    """Neither in the first step, where all state is fresh, nor later; -0.0 keeps its sign."""
    model = Weights().to(dtype)
    optimizer = build_optimizer(model, config(name, schedule="none"), STEPS)
    with torch.no_grad():
        model.tall[0, 0] = -0.0
    for now in range(step + 1):
        for key, parameter in model.named_parameters():
            parameter.grad = gradient(key, now).to(dtype)
            parameter.grad.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf] if now == step else 0.0)
        before = bits(model, optimizer)
        optimizer.step(torch.tensor(0.5), torch.tensor(float(now != step)))
    after = bits(model, optimizer)
    assert after.keys() == before.keys()
    for key, old in before.items():
        assert after[key].equal(old), key


def bits(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = {f"{key}:{kind}": tensor for key, kinds in state.items() for kind, tensor in kinds.items()}
    tensors |= dict(model.named_parameters())
    return {key: tensor.detach().clone().reshape(-1).view(torch.uint8) for key, tensor in tensors.items()}
