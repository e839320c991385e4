"""Classes of torch and of users by name: what is taken and steps as the class itself, and what is refused, and why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kforge_optim import OptimConfig, build_optimizer
from kforge_testing import run_ranks

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


class Halves(torch.optim.Optimizer):
    """A user's own: each step goes half of the mean of all gradients so far."""

    def __init__(self, params: Any, lr: float = 1e-3, share: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["sum"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                state["sum"] += parameter.grad
                parameter.sub_(state["sum"] / state["count"], alpha=group["lr"] * group["share"])


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)


def config(name: str, **more: Any) -> OptimConfig:
    return OptimConfig(**{"name": name, "lr": 0.01, "weight_decay": 0.0, "schedule": "none", **more})


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_are_those_of_the_class_alone(name: str) -> None:
    ours, theirs = model(), model()
    optimizer = build_optimizer(ours, config(f"torch.optim.{name}"), 30)
    cls = getattr(torch.optim, name)
    reference = cls(theirs.parameters(), lr=0.01, **({"weight_decay": 0.0} if name in ("AdamW",) else {}))
    for step in range(30):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step(gate=torch.ones(()))
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor"])
def test_a_refused_step_leaves_every_bit(name: str) -> None:
    net = model()
    optimizer = build_optimizer(net, config(f"torch.optim.{name}"), 30)
    gradients(net, 0)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    states = [{k: v.clone() for k, v in state.items()} for state in optimizer.state_dict()["state"].values()]
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step(gate=torch.zeros(()))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    for old, state in zip(states, optimizer.state_dict()["state"].values(), strict=True):
        assert old.keys() == state.keys() and all(torch.equal(old[kind], state[kind]) for kind in old)


def test_a_class_of_a_user_with_its_options() -> None:
    name = f"{Halves.__module__}.Halves"
    ours, theirs = model(), model()
    optimizer = build_optimizer(ours, config(name, options={"share": 0.25}), 30)
    reference = Halves(theirs.parameters(), lr=0.01, share=0.25)
    for step in range(5):
        gradients(ours, step)
        gradients(theirs, step)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14)
    assert {kind for state in optimizer.state_dict()["state"].values() for kind in state} == {"count", "sum"}


@pytest.mark.parametrize("name", ["torch.optim.Adam", "torch.optim.Adamax", "lion"])
def test_split_weights_are_those_of_float32(name: str) -> None:
    split, wide = model(torch.bfloat16), model(torch.bfloat16).float()
    optimizer = build_optimizer(split, config(name), 30, storage="split")
    reference = build_optimizer(wide, config(name), 30)
    for step in range(20):
        gradients(split, step)
        for mine, other in zip(split.parameters(), wide.parameters(), strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.float()
        optimizer.step()
        reference.step()
    for parameter, (full, _) in zip(wide.parameters(), split.named_parameters(), strict=True):
        assert torch.equal(optimizer.full_weight(full), parameter)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("torch.optim.LBFGS", {}, "cannot be run here"),
        ("torch.optim.SparseAdam", {}, "cannot be run here"),
        ("torch.optim.SGD", {"momentum": 0.9, "dampening": 0.5}, "does not start from a state that can be made before"),
        ("torch.optim.Adam", {"lr": 0.1}, "options of torch.optim.Adam have 'lr'; set optim.lr"),
        ("torch.optim.Adam", {"beta": 0.1}, "takes no option 'beta'; it takes betas, eps"),
        ("torch.optim.Adams", {}, "is no class that can be imported"),
        ("torch.nn.Linear", {}, "is no torch.optim.Optimizer"),
        ("torch.optim.Optimizer", {}, "is no torch.optim.Optimizer"),
        ("nowhere.Adam", {}, "is no class that can be imported: No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(name: str, options: dict[str, Any], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=words):
            build_optimizer(model(), config(name, options=options), 30)


def test_a_decay_that_the_class_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Halves has no weight decay, but some of its parameters have 0\.1"):
        build_optimizer(model(), config(f"{Halves.__module__}.Halves", weight_decay=0.1), 30)


def sharded(rank: int, world: int, name: str) -> tuple[str, list[Tensor]]:
    """Why not, or the weights after three steps on shards of uneven length."""
    net, mesh = model(), init_device_mesh("cpu", (world,))
    for module in net:  # type: ignore[attr-defined]
        for leaf, parameter in list(module.named_parameters()):
            setattr(module, leaf, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimizer = build_optimizer(net, config(name), 30)
    whole = model()
    try:
        for step in range(3):
            gradients(whole, step)
            for parameter, other in zip(net.parameters(), whole.parameters(), strict=True):
                assert other.grad is not None
                parameter.grad = distribute_tensor(other.grad, mesh, [Shard(0)])
            optimizer.step()
    except ValueError as error:
        return str(error), []
    return "", [parameter.full_tensor() for parameter in net.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["torch.optim.NAdam", "torch.optim.Rprop", "torch.optim.Adafactor"])
def test_shards_are_stepped_as_the_whole_or_refused(name: str) -> None:
    net = model()
    optimizer = build_optimizer(net, config(name), 30)
    for step in range(3):
        gradients(net, step)
        optimizer.step()
    for why, weights in run_ranks(sharded, 2, name):
        if name == "torch.optim.Adafactor":
            assert "is not elementwise: its step of a shard is not that of the whole parameter" in why
            continue
        assert not why
        for mine, other in zip(weights, net.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-12)
