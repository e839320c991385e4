from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kforge_ckpt import Checkpointer, StateMismatchError
from kforge_ckpt.optimizer import state_like_saved

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adafactor, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_any_torch_optimizer_goes_on_as_if_never_stopped(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    model = net(0)
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, 3)
    Checkpointer(tmp_path).save(3, {"model": model, "optim": optimizer})
    train(model, optimizer, 3)
    again = net(1)
    fresh = kind(again.parameters(), **options)
    Checkpointer(tmp_path).restore({"model": again, "optim": fresh})
    train(again, fresh, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert a.equal(b)


def test_state_is_given_to_the_saved_parameters_only_and_weights_stay() -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    params = list(model.parameters())
    params[1].grad = torch.ones_like(params[1])
    before = [param.detach().clone() for param in params]
    with state_like_saved(optimizer, {0, 3}, "optim"):
        assert set(optimizer.state) == {params[0], params[3]}
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(a.equal(b) for a, b in zip(before, params, strict=True))
    grad = params[1].grad
    assert grad is not None and grad.equal(torch.ones_like(grad)) and params[0].grad is None


def test_a_failed_restore_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    Checkpointer(tmp_path).save(1, {"model": model, "optim": optimizer})
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(StateMismatchError, match=r"optim\.state\.0\.exp_avg "):
        Checkpointer(tmp_path).restore({"optim": fresh})
    assert not fresh.state


def test_an_optimizer_that_cannot_step_by_itself_says_so(tmp_path: Path) -> None:
    model = net(0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    Checkpointer(tmp_path).save(1, {"optim": optimizer})
    with pytest.raises(StateMismatchError, match="optim is a LBFGS without state"):
        Checkpointer(tmp_path).restore({"optim": torch.optim.LBFGS(net(1).parameters())})
