"""Scales and gates of a CUDA device beside weights on the host, in fake tensors: no device is needed to see a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kforge_optim import LossScaler, OptimConfig, build_optimizer, clip
from kforge_optim.scalars import on_device


class Copies(TorchDispatchMode):
    """Notes for each copy from a CUDA device to the host whether it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = torch.device(kwargs.get("device") or "meta")
        copies = func is torch.ops.aten._to_copy.default and args[0].device.type == "cuda"
        if copies and target.type == "cpu":
            self.waited.append(not kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


def scalars() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones((), device="cuda"), torch.ones((), device="cuda")


def step() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1), 10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scale, gate = scalars()
    optimizer.step(scale=scale, gate=gate)


def clip_values() -> None:
    model = torch.nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip.clip_values_(model, 0.5, scale=scalars()[0])


def scaler() -> None:
    LossScaler(enabled=True).update(scalars()[1])


@pytest.mark.parametrize("action", [step, clip_values, scaler])
def test_what_is_needed_on_the_host_is_waited_for(action: Any) -> None:
    with FakeTensorMode(), Copies() as copies:
        action()
    assert copies.waited and all(copies.waited)


def test_to_a_device_nothing_waits_and_where_it_is_nothing_is_copied() -> None:
    with FakeTensorMode(), Copies() as copies:
        there = on_device(torch.ones(()), torch.device("cuda", 0))
        assert there.device.type == "cuda"
        assert on_device(there, there.device) is there
    assert copies.waited == []
