"""A torch optimizer has no state before its first step; to restore into one, the state must be there to be filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kforge_ckpt.errors import StateMismatchError


@contextmanager
def state_like_saved(optimizer: torch.optim.Optimizer, saved: set[int], name: str) -> Iterator[None]:
    """Give exactly the parameters numbered ``saved`` an optimizer state, for the time of a restore.

    Those that lack one get it from a step of their own with zero gradients and learning rate 0, which leaves the
    weights as they are; the states of others are dropped. If the block raises, the optimizer is as it was before.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = dict(optimizer.state)
    try:
        for index, param in enumerate(params):
            if index not in saved:
                optimizer.state.pop(param, None)
        lacking = [p for index, p in enumerate(params) if index in saved and not optimizer.state.get(p)]
        if lacking:
            _step_of_zero(optimizer, params, lacking, name)
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise


def _step_of_zero(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], lacking: list[torch.Tensor], name: str
) -> None:
    grads = [param.grad for param in params]
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = None
        for param in lacking:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    except Exception as error:
        raise StateMismatchError(
            f"{name} is a {type(optimizer).__name__} without state, and it could not be given one ({error}); "
            "let it take a step before restoring"
        ) from error
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
