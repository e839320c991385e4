"""A torch optimizer has no state before its first step; to restore into one, the state must be there to be filled."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kforge_ckpt.errors import StateMismatchError
from kforge_ckpt.modules import plain_name


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


def check_groups(optimizer: torch.optim.Optimizer, given: dict[str, Any], name: str) -> None:
    """Raise StateMismatchError unless the optimizer would take what ``load_state_dict`` will be ``given``: as many
    groups, of as many parameters, in the same order where both have the same names, and with its options. A double of
    it is asked, so that nothing of it is changed."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    double = object.__new__(type(optimizer))
    double.__dict__.update(vars(optimizer))
    double.param_groups = [dict(group) for group in optimizer.param_groups]
    double.defaults = dict(optimizer.defaults)
    double.state = defaultdict(dict)
    double._optimizer_load_state_dict_post_hooks = OrderedDict()
    if not optimizer._optimizer_load_state_dict_pre_hooks:  # which may make others of them
        _compare_groups(optimizer.param_groups, given.get("param_groups"), name)
    try:
        double.load_state_dict(given)
    except Exception as error:
        raise StateMismatchError(f"{name} does not take the saved state: {type(error).__name__}: {error}") from error
    for number, group in enumerate(double.param_groups):
        if lacking := sorted(optimizer.defaults.keys() - group.keys()):
            raise StateMismatchError(
                f"{name}: group {number} was saved without {', '.join(lacking)}, which {type(optimizer).__name__} "
                "needs; was it another algorithm? Make the optimizer as it was, or leave its state out"
            )


def _compare_groups(here: list[dict[str, Any]], saved: Any, name: str) -> None:
    if not isinstance(saved, list) or not all(isinstance(one, dict) and "params" in one for one in saved):
        raise StateMismatchError(f"{name} was saved without parameter groups; was it an optimizer?")
    if len(here) != len(saved):
        raise StateMismatchError(
            f"{name} has {len(here)} parameter group{'' if len(here) == 1 else 's'}, and {len(saved)} "
            f"{'was' if len(saved) == 1 else 'were'} saved; make the same groups"
        )
    for number, (ours, theirs) in enumerate(zip(here, saved, strict=True)):
        if len(ours["params"]) != len(theirs["params"]):
            raise StateMismatchError(
                f"{name}: group {number} has {len(ours['params'])} parameters, and {len(theirs['params'])} were saved; "
                "make the same groups"
            )
    order, order_then = ([name for group in groups for name in _names(group)] for groups in (here, saved))
    # Other names may be those of a model that was renamed: torch goes by the order alone.
    if sorted(order) == sorted(order_then):
        for our, their in zip(order, order_then, strict=True):
            if our != their:
                raise StateMismatchError(
                    f"{name} has {our!r} where {their!r} was saved; give the parameters in the same order and groups"
                )


def _names(group: dict[str, Any]) -> list[str]:
    """The names of a group's parameters, if it has any, without what wrappers put in, DDP's among them."""
    names = (plain_name(name) for name in group.get("param_names", []))
    return [".".join(part for part in name.split(".") if part != "module") for name in names]
