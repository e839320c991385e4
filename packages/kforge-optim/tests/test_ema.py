"""The moving average against a few lines of float64; in any storage and layout; swapped in and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kforge_optim import Ema, OptimConfig, Optimizer, build_optimizer
from kforge_testing import run_ranks


def build(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)
    storage = {torch.bfloat16: "split"}.get(dtype, "fp32")
    config = OptimConfig(lr=0.05, schedule="constant", **{"ema_decay": 0.9, **options})
    return model, build_optimizer(model, config, 100, storage=storage)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: Optimizer, number: int, gate: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        grad = grad if gate else grad * torch.nan
        whole = grad.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
    optimizer.step(gate=torch.tensor(gate))


def weights(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.full_weight(name).clone() for group in optimizer.groups for name in group.parameters}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("device", ["same", "cpu"])
def test_it_follows_the_formula_after_accepted_steps(every: int, dtype: torch.dtype, bound: float, device: str) -> None:
    model, optimizer = build(dtype, ema_every_steps=every, ema_device=device)
    assert optimizer.ema is not None
    expected = {name: weight.double() for name, weight in weights(optimizer).items()}
    moves = 0
    for number in range(1, 41):
        accepted = number % 4 != 0
        before = {name: average.clone() for name, average in optimizer.ema.weights().items()}
        step(model, optimizer, number, float(accepted))
        if accepted and number % every == 0:
            decay = min(0.9, (1 + moves) / (10 + moves))
            for name, weight in weights(optimizer).items():
                expected[name] += (1 - decay) * (weight.double() - expected[name])
            moves += 1
        else:
            assert all(torch.equal(average, before[name]) for name, average in optimizer.ema.weights().items())
    for name, average in optimizer.ema.weights().items():
        assert average.dtype == torch.promote_types(dtype, torch.float32)
        assert (average.double() - expected[name]).abs().max() < bound * expected[name].abs().max()
    assert optimizer.ema.state_dict()["moves"].item() == moves


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evaluation_sees_the_average_and_training_gets_its_bits_back(dtype: torch.dtype) -> None:
    model, optimizer = build(dtype)
    assert optimizer.ema is not None
    with optimizer.evaluation_weights():  # there is none before the first step
        pass
    for number in range(5):
        step(model, optimizer, number)
    trained = weights(optimizer)
    averages = {name: average.clone() for name, average in optimizer.ema.weights().items()}
    with pytest.raises(KeyError), optimizer.evaluation_weights():
        with optimizer.evaluation_weights():
            assert all(torch.equal(weight, averages[name]) for name, weight in weights(optimizer).items())
        assert all(torch.equal(weight, averages[name]) for name, weight in weights(optimizer).items())
        with pytest.raises(RuntimeError, match="leave it first"):
            step(model, optimizer, 9)
        raise KeyError
    assert all(torch.equal(weight, trained[name]) for name, weight in weights(optimizer).items())
    assert all(torch.equal(average, averages[name]) for name, average in optimizer.ema.weights().items())
    with optimizer.checkpoint_form() as averaged:
        assert averaged is False
        assert all(torch.equal(weight, trained[name]) for name, weight in weights(optimizer).items())


def test_saved_and_loaded_it_goes_on_bit_for_bit() -> None:
    model, optimizer = build()
    for number in range(4):
        step(model, optimizer, number)
    assert optimizer.ema is not None
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.ema.state_dict()))
    again, other = build()
    assert other.ema is not None
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    other.ema.load_state_dict(saved[2])
    for number in range(4, 8):
        step(model, optimizer, number)
        step(again, other, number)
    for name, average in optimizer.ema.weights().items():
        assert torch.equal(average, other.ema.weights()[name])
    wrong = {"weights": {**saved[2]["weights"], "0.bias": torch.zeros(3)}, "moves": saved[2]["moves"]}
    with pytest.raises(ValueError, match=r"others of them: \['0\.bias'\]"):
        other.ema.load_state_dict(wrong)


def sharded(rank: int, world: int, state: Any) -> dict[str, Tensor]:
    """Shards of odd lengths take up a state of one process and go on."""
    model, _ = build()
    mesh = init_device_mesh("cpu", (world,))
    for module in model:  # type: ignore[attr-defined]
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    optimizer = build_optimizer(model, OptimConfig(lr=0.05, schedule="constant", ema_decay=0.9, ema_device="cpu"), 100)
    assert isinstance(optimizer.ema, Ema)
    with torch.no_grad():
        for name, value in state[0].items():
            optimizer.set_full_weight(name, value)
    optimizer.load_state_dict(state[1])
    optimizer.ema.load_state_dict(state[2])
    for number in range(4, 8):
        step(model, optimizer, number)
    averages = optimizer.ema.weights()
    assert all(isinstance(average, DTensor) for average in averages.values())
    with optimizer.evaluation_weights():
        seen = {name: weight.full_tensor() for name, weight in model.named_parameters()}  # type: ignore[operator]
    for name, average in averages.items():
        assert torch.equal(seen[name], average.full_tensor())  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_shards_are_parts_of_the_whole(world: int) -> None:
    model, optimizer = build()
    for number in range(4):
        step(model, optimizer, number)
    assert optimizer.ema is not None
    saved = copy.deepcopy((weights(optimizer), optimizer.state_dict(), optimizer.ema.state_dict()))
    for number in range(4, 8):
        step(model, optimizer, number)
    for averages in run_ranks(sharded, world, saved):
        for name, average in optimizer.ema.weights().items():
            assert (averages[name] - average).abs().max() < 1e-14


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="schedule_free evaluates an average already"):
        build(name="schedule_free")
    for options, words in (
        ({"ema_decay": 1.0}, r"optim\.ema_decay = 1\.0 must lie in \[0, 1\)"),
        ({"ema_every_steps": 0}, r"optim\.ema_every_steps = 0 must be at least 1"),
        ({"ema_device": "disk"}, r"optim\.ema_device = 'disk' must be same or cpu"),
        (
            {"ema_decay": 0.0, "ema_device": "cpu"},
            r"optim\.ema_device = cpu is of the average, and optim\.ema_decay = 0",
        ),
        ({"ema_decay": 0.0, "ema_every_steps": 2}, r"optim\.ema_every_steps = 2 is of the average"),
    ):
        with pytest.raises(ValueError, match=words):
            OptimConfig(**options)  # type: ignore[arg-type]
