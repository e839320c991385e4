"""What a restore refuses, it refuses before anything is changed: weights, moments, options, places and streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stateful import Box
from torch import nn

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, RngState, StateMismatchError
from kforge_testing import run_ranks


class Place:
    """A loader's: a number and, by rank, a list. Some numbers and lists it does not take."""

    def __init__(self, position: int, lanes: list[int], refused: int | None = None) -> None:
        self.position, self.lanes, self.refused = position, lanes, refused

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "lanes": PerRank(self.lanes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]  # the worst kind: changes first, refuses then
        self.lanes = state["lanes"][dist.get_rank() if dist.is_initialized() else 0]
        if self.position == self.refused:
            raise ValueError(f"position {self.position} is of another sequence of rows")


class Counted(nn.Module):
    """A module with a state that is no tensor, or one of another name than before."""

    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.counts = WithExtra() if extra else nn.Identity()


class WithExtra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Careful(Box):
    """Tensors of its own, and says beforehand what it does not take."""

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if state["scale"] > 100:
            raise ValueError(f"scale {state['scale']} is above 100")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))


def adamw(model: nn.Module, *sizes: int, **options: Any) -> torch.optim.AdamW:
    params = iter(model.parameters())
    groups = [{"params": [next(params) for _ in range(size)]} for size in sizes]
    return torch.optim.AdamW(groups or model.parameters(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()


def values(thing: Any) -> Any:
    """All that a state holds, so that == compares it to the bit."""
    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), tuple(thing.shape), thing.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(thing, PerRank):
        return values(thing.value)
    if isinstance(thing, dict):
        return {key: values(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [values(value) for value in thing]
    return thing


def snapshot(states: dict[str, Any]) -> Any:
    return {name: values(obj.state_dict()) for name, obj in states.items()}


def streams(**other: Any) -> Box:
    return Box(streams=PerRank(RngState().state_dict()["streams"].value | other))


def numbered(model: nn.Module, names: Callable[[str], str] = str) -> torch.optim.AdamW:
    return torch.optim.AdamW([(names(name), param) for name, param in model.named_parameters()])


def one_that_cannot_be_written(tensor: torch.Tensor) -> Box:
    return Box(t=tensor)


def inference(shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


Make = Callable[[nn.Module], dict[str, Any]]
CASES: dict[str, tuple[Make, Make, str]] = {
    "fewer groups": (
        lambda m: {"optim": adamw(m, 4, 2)},
        lambda m: {"optim": adamw(m)},
        r"optim has 1 parameter group, and 2 were saved",
    ),
    "more groups": (
        lambda m: {"optim": adamw(m)},
        lambda m: {"optim": adamw(m, 2, 2, 2)},
        r"optim has 3 parameter groups, and 1 was saved",
    ),
    "other members": (
        lambda m: {"optim": adamw(m, 4, 2)},
        lambda m: {"optim": adamw(m, 2, 4)},
        r"optim: group 0 has 2 parameters, and 4 were saved",
    ),
    "members of other names": (
        lambda m: {"optim": numbered(m)},
        lambda m: {"optim": numbered(m, lambda name: {"0.bias": "1.bias", "1.bias": "0.bias"}.get(name, name))},
        r"optim has '1.bias' where '0.bias' was saved",
    ),
    "options of another algorithm": (
        lambda m: {"optim": torch.optim.SGD(m.parameters(), 0.1)},
        lambda m: {"optim": torch.optim.Adagrad(m.parameters(), 0.1)},
        r"optim: group 0 was saved without .*eps",
    ),
    "a loader of other rows": (
        lambda m: {"first": Place(5, [1, 2]), "loader": Place(7, [3])},
        lambda m: {"first": Place(0, [0]), "loader": Place(1, [9], refused=7)},
        "position 7 is of another sequence of rows",
    ),
    "a module without its count": (
        lambda m: {"counted": Counted(True)},
        lambda m: {"counted": Counted(False)},
        r"1 only in the checkpoint: counted\.counts\._extra_state",
    ),
    "a module with a count": (
        lambda m: {"counted": Counted(False)},
        lambda m: {"counted": Counted(True)},
        r"1 not in the checkpoint: counted\.counts\._extra_state",
    ),
    "streams of another size": (
        lambda m: {"rng": streams(torch=torch.zeros(7, dtype=torch.uint8))},
        lambda m: {"rng": RngState()},
        r"torch stream of rank 0",
    ),
    "streams of another python": (
        lambda m: {"rng": streams(python=(4, (1, 2), None))},
        lambda m: {"rng": RngState()},
        r"python stream of rank 0",
    ),
    "streams of another numpy": (
        lambda m: {"rng": streams(numpy={"bit_generator": "PCG64"})},
        lambda m: {"rng": RngState()},
        r"numpy stream of rank 0",
    ),
    "no streams": (
        lambda m: {"rng": Box(streams=None)},
        lambda m: {"rng": RngState()},
        r"holds no streams of ranks",
    ),
    "no stream of this rank": (
        lambda m: {"rng": Box(streams=PerRank(None))},
        lambda m: {"rng": RngState()},
        r"holds no streams of rank 0",
    ),
    "an object that says so": (
        lambda m: {"own": Careful(t=torch.ones(2), scale=101)},
        lambda m: {"own": Careful(t=torch.zeros(2), scale=1)},
        r"scale 101 is above 100",
    ),
    "a tensor whose elements share memory": (
        lambda m: {"own": Box(t=torch.ones(2, 3))},
        lambda m: {"own": one_that_cannot_be_written(torch.zeros(2, 1).expand(2, 3))},
        r"own\.t .*cannot be filled.*\.contiguous\(\)",
    ),
    "an inference tensor": (
        lambda m: {"own": Box(t=torch.ones(2))},
        lambda m: {"own": one_that_cannot_be_written(inference((2,)))},
        r"own\.t .*cannot be filled.*\.clone\(\)",
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refusal_changes_nothing(tmp_path: Path, case: str) -> None:
    saved, present, words = CASES[case]
    model, again = net(0), net(1)
    given = saved(model)
    if "optim" in given and "another algorithm" not in case:
        train(model, given["optim"])
    given = {"model": model, "mate": Place(3, [4]), **given}
    Checkpointer(tmp_path).save(1, given)
    states = {"model": again, "mate": Place(0, [0]), **present(again)}
    if "optim" in states:
        train(again, states["optim"])
    before = snapshot(states), random.getstate(), values(torch.get_rng_state())
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpointer(tmp_path).restore(states)
    assert "was not restored" in str(caught.value)
    assert (snapshot(states), random.getstate(), values(torch.get_rng_state())) == before
    if "optim" in states:
        assert {group["lr"] for group in states["optim"].param_groups} == {states["optim"].defaults["lr"]}
    # The rest of the checkpoint is as good as ever.
    rest = {"model": again, "mate": states["mate"]}
    assert Checkpointer(tmp_path).restore(rest) == 1
    assert snapshot(rest) == snapshot({"model": model, "mate": given["mate"]})


def test_an_optimizer_without_state_has_none_after_a_refusal(tmp_path: Path) -> None:
    model = net(0)
    optimizer = adamw(model, 4, 2)
    train(model, optimizer)
    Checkpointer(tmp_path).save(1, {"optim": optimizer})
    fresh = adamw(net(1))
    with pytest.raises(StateMismatchError, match="parameter group"):
        Checkpointer(tmp_path).restore({"optim": fresh})
    assert not fresh.state


def test_options_that_a_version_of_torch_added_are_not_missed(tmp_path: Path) -> None:
    """torch gives what an older one did not save its default; so an optimizer of that time is taken."""
    model = net(0)
    optimizer = adamw(model)
    train(model, optimizer)
    old = optimizer.state_dict()
    old["param_groups"] = [{k: v for k, v in old["param_groups"][0].items() if k not in ("fused", "foreach")}]
    Checkpointer(tmp_path).save(1, {"optim": Box(**old)})
    fresh = adamw(net(1), lr=7.0)
    assert Checkpointer(tmp_path).restore({"optim": fresh}) == 1
    assert values(fresh.state_dict()["state"]) == values(optimizer.state_dict()["state"])
    assert fresh.param_groups[0]["fused"] is None and fresh.param_groups[0]["lr"] == 1e-3


def test_hooks_of_an_optimizer_are_asked_before_and_told_once(tmp_path: Path) -> None:
    model, told = net(0), []
    optimizer = adamw(model, 4, 2)
    train(model, optimizer)
    Checkpointer(tmp_path).save(1, {"optim": optimizer})
    fresh = adamw(net(1))

    def one_group(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        first, second = state["param_groups"]
        return {**state, "param_groups": [{**first, "params": first["params"] + second["params"]}]}

    fresh.register_load_state_dict_pre_hook(one_group)
    fresh.register_load_state_dict_post_hook(told.append)
    assert Checkpointer(tmp_path).restore({"optim": fresh}) == 1
    assert values(fresh.state_dict()["state"]) == values(optimizer.state_dict()["state"])
    assert told == [fresh]


def refuse_on_one(rank: int, world: int, folder: Path) -> tuple[Any, Any, str]:
    model = net(rank)
    Checkpointer(folder).save(1, {"model": net(7), "loader": Place(7, [10 + rank]), "mate": Place(2, [20 + rank])})
    states = {"model": model, "mate": Place(0, [30 + rank]), "loader": Place(1, [40 + rank], refused=7 * rank)}
    before = snapshot(states)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(folder).restore(states)
    return before, snapshot(states), str(caught.value)


def test_the_refusal_of_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    texts = set()
    for before, after, text in run_ranks(refuse_on_one, 2, tmp_path):
        assert before == after
        texts.add(text)
    assert len(texts) == 1 and "rank 1: ValueError: position 7" in texts.pop()
