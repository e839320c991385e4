"""Schedule-Free AdamW against a few lines of float64, and what those get who look at its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_models import TinyModel, batches, summed_loss, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kforge_optim import GroupRule, OptimConfig, Optimizer, Rates, ScheduleFreeAdamW, Slot, build_optimizer
from kforge_optim.sharding import copy_into
from kforge_testing import run_ranks

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 0.02
TARGET = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)


def config(**values: Any) -> OptimConfig:
    base = {"name": "schedule_free", "lr": LR, "betas": BETAS, "weight_decay": DECAY, "schedule": "none"}
    return OptimConfig(**{**base, **values})


def reference(weight: Tensor, rates: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """y and x after each step down the bowl Σ(i+1)(w-target)²/2, in the words of the paper: x is kept, y made of it."""
    z, x, v, total, highest = weight.clone(), weight.clone(), torch.zeros_like(weight), 0.0, 0.0
    for t, rate in enumerate(rates, start=1):
        y = (1 - BETAS[0]) * z + BETAS[0] * x
        grad = gradient(y)
        v = BETAS[1] * v + (1 - BETAS[1]) * grad**2
        z = z - rate * (grad / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + DECAY * y)
        highest = max(highest, rate)
        total += highest**2
        c = highest**2 / total if total else 0.0
        x = (1 - c) * x + c * z
        yield (1 - BETAS[0]) * z + BETAS[0] * x, x


def gradient(weight: Tensor) -> Tensor:
    return (torch.arange(1, 13, dtype=weight.dtype).view(4, 3)) * (weight - TARGET.to(weight.dtype))


class Bowl(nn.Module):
    """One matrix [4,3], which decays."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=dtype))


def down(model: Bowl, optimizer: Optimizer, steps: int, gate: Tensor | None = None) -> None:
    for _ in range(steps):
        model.weight.grad = gradient(model.weight.detach().to(torch.float64)).to(model.weight.dtype)
        optimizer.step(gate=gate)


def rates_of(optimizer: Optimizer, steps: int) -> list[float]:
    seen = []
    for optimizer.schedule_step in range(steps):
        seen.append(optimizer.lrs()["matrices"])
    optimizer.schedule_step = 0
    return seen


@pytest.mark.parametrize(
    "schedule",
    [{}, {"schedule": "constant", "warmup_steps": 7}, {"schedule": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.0}],
    ids=["none", "warmup", "cosine"],
)
def test_50_steps_equal_the_paper_in_float64(schedule: dict[str, Any]) -> None:
    model = Bowl()
    optimizer = build_optimizer(model, config(**schedule), 50)
    expected = reference(model.weight.detach().clone(), rates_of(optimizer, 50))
    for y, x in expected:
        down(model, optimizer, 1)
        torch.testing.assert_close(model.weight.detach(), y, rtol=1e-12, atol=1e-12)
        with optimizer.evaluation_weights():
            torch.testing.assert_close(model.weight.detach(), x, rtol=1e-12, atol=1e-12)
    assert (y - x).abs().max() > 1e-4


def test_c6_a_rate_of_0_divides_nothing_by_0() -> None:
    model = Bowl()
    optimizer = build_optimizer(model, config(), 50)
    rates = [0.0, 0.0, 0.5, 0.0, 1.0]
    optimizer._schedule = lambda step: rates[step]  # type: ignore[assignment]
    for y, x in reference(model.weight.detach().clone(), [rate * LR for rate in rates]):
        down(model, optimizer, 1)
        torch.testing.assert_close(model.weight.detach(), y, rtol=1e-12, atol=1e-12)
        with optimizer.evaluation_weights():
            torch.testing.assert_close(model.weight.detach(), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gate_0_changes_no_bit(poison: float) -> None:
    model = Bowl(torch.float32)
    optimizer = build_optimizer(model, config(), 50)
    for accepted in range(3):
        kept = {"weight": model.weight.detach(), **optimizer.state_dict()["state"]["weight"]}
        with torch.no_grad():
            model.weight[0, 0] = kept["z"][0, 0] = -0.0
        before = {name: tensor.clone() for name, tensor in kept.items()}
        model.weight.grad = torch.full_like(model.weight, poison)
        optimizer.step(gate=torch.tensor(0.0), scale=torch.tensor(0.5))
        for name, tensor in kept.items():
            assert tensor.reshape(-1).view(torch.uint8).equal(before[name].reshape(-1).view(torch.uint8)), name
        assert before["step"] == accepted
        down(model, optimizer, 1, gate=torch.tensor(1.0))
        assert not torch.equal(kept["weight"], before["weight"])


def test_weights_given_after_the_state_are_where_it_starts() -> None:
    """A pretrained model loaded between `init_state` and the first step: z and x begin there."""
    late, early = Bowl(), Bowl()
    optimizer = build_optimizer(late, config(), 50)
    optimizer.init_state()
    for model in (late, early):
        model.load_state_dict({"weight": TARGET + 1})
    with optimizer.evaluation_weights():
        assert torch.equal(late.weight, TARGET + 1)
    other = build_optimizer(early, config(), 50)
    down(late, optimizer, 3)
    down(early, other, 3)
    assert torch.equal(late.weight, early.weight)
    with optimizer.evaluation_weights(), other.evaluation_weights():
        assert torch.equal(late.weight, early.weight)


# What evaluation, exports and checkpoints get


def made(storage: str) -> tuple[TinyModel, Optimizer]:
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "split": torch.bfloat16}[storage]
    model = tiny(dtype)
    optimizer = build_optimizer(model, config(), 60, storage="split" if storage == "split" else "fp32")
    if storage == "split":
        optimizer.load_full_weights(tiny(torch.float32).named_parameters())
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int = 0, world: int = 1) -> None:
    for step, ids in enumerate(batches(steps.stop)):
        if step in steps:
            summed_loss(model, ids.tensor_split(world)[rank], 48).backward()
            optimizer.step()
            optimizer.zero_grad()


def bits(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all weights and of all state, whole."""
    kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, state in optimizer.state_dict()["state"].items():
        kept.update({f"{name}:{kind}": tensor for kind, tensor in state.items()})
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in kept.items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.reshape(-1).view(torch.uint8).equal(other[name].reshape(-1).view(torch.uint8)), name


def average(optimizer: Optimizer, name: str) -> Tensor:
    """x from y and z, by hand."""
    y, z = optimizer.full_weight(name), optimizer.state_dict()["state"][name]["z"]
    return (y.double() - (1 - BETAS[0]) * z.double()) / BETAS[0]


@pytest.mark.parametrize("storage", ["fp64", "fp32", "split"])
def test_c21_evaluation_and_export_get_the_average_and_training_goes_on_from_the_same_bits(storage: str) -> None:
    model, optimizer = made(storage)
    train(model, optimizer, range(20))
    before = bits(model, optimizer)
    expected = {name: average(optimizer, name) for name, _ in model.named_parameters()}
    close = {"rtol": 1e-5, "atol": 1e-6} if storage != "fp64" else {"rtol": 1e-12, "atol": 1e-12}
    moved = 0.0
    with optimizer.evaluation_weights():
        exported = model.state_dict()
        for name, weight in expected.items():
            full = optimizer.full_weight(name)
            torch.testing.assert_close(full.double(), weight, **close)
            torch.testing.assert_close(exported[name], full.to(exported[name].dtype), rtol=0.004, atol=0)
            moved = max(moved, float((full.double() - before[name].double()).abs().max()))
        within = bits(model, optimizer)
        with optimizer.evaluation_weights(), optimizer.checkpoint_form():
            assert_same_bits(bits(model, optimizer), within)
        assert_same_bits(bits(model, optimizer), within)
        with pytest.raises(RuntimeError, match="leave it first"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"'norm\.weight' is an average now"):
            optimizer.set_full_weight("norm.weight", torch.ones(10))
    assert moved > 1e-3
    assert_same_bits(bits(model, optimizer), before)
    with pytest.raises(ZeroDivisionError), optimizer.evaluation_weights():
        raise ZeroDivisionError
    assert_same_bits(bits(model, optimizer), before)


def test_averages_that_do_not_fit_into_memory_leave_the_trained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made("fp32")
    train(model, optimizer, range(3))
    before, calls = bits(model, optimizer), []

    def third_fails(self: ScheduleFreeAdamW, slot: Any) -> Tensor:
        calls.append(slot.name)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros_like(slot.parameter)

    monkeypatch.setattr(ScheduleFreeAdamW, "evaluation_weight", third_fails)
    with pytest.raises(torch.OutOfMemoryError), optimizer.evaluation_weights():
        raise AssertionError("entered")
    assert len(calls) == 3
    assert_same_bits(bits(model, optimizer), before)
    train(model, optimizer, range(3, 4))


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("storage", ["fp32", "split"])
@pytest.mark.parametrize("saved_within", [False, True])
@pytest.mark.parametrize("loaded_within", [False, True])
def test_c21_a_resumed_run_has_the_bits_of_one_never_stopped(
    storage: str, saved_within: bool, loaded_within: bool
) -> None:
    model, optimizer = made(storage)
    train(model, optimizer, range(6))
    with optimizer._averages_shown(saved_within):
        saved = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(torch.equal(saved["model"][name], again["model"][name]) for name in saved["model"])
    train(model, optimizer, range(6, 9))

    resumed, fresh = made(storage)
    if loaded_within and not saved_within:
        with fresh.evaluation_weights(), pytest.raises(RuntimeError, match="lacks the trained"):
            fresh.load_state_dict(saved["optimizer"])
        return
    with fresh._averages_shown(loaded_within):
        resumed.load_state_dict(saved["model"])
        fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, range(6, 9))
    assert_same_bits(bits(resumed, fresh), bits(model, optimizer))


def sharded(model: TinyModel) -> TinyModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return model


def _on_ranks(rank: int, world: int, saved: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint of one process goes on on several; the averages there, and everything after two more steps."""
    model = sharded(tiny())
    optimizer = build_optimizer(model, config(), 60)
    for name, weight in model.state_dict().items():
        copy_into(weight, saved["model"][name])
    optimizer.load_state_dict(saved["optimizer"])
    before = bits(model, optimizer)
    ids = next(batches(1))
    with torch.no_grad():
        losses = [summed_loss(model, ids, 48)]
        with optimizer.evaluation_weights():
            losses.append(summed_loss(model, ids, 48))  # FSDP keeps what it gathers for a forward without a backward
            shown = {name: weight.full_tensor().clone() for name, weight in model.state_dict().items()}
            for name in shown:
                trained = optimizer.state_dict()["state"][name]["trained"]
                assert trained.placements == model.state_dict()[name].placements
            losses.append(summed_loss(model, ids, 48))
        losses.append(summed_loss(model, ids, 48))
    assert losses[0] == losses[3] != losses[1] == losses[2]
    assert_same_bits(bits(model, optimizer), before)
    train(model, optimizer, range(6, 8), rank, world)
    return shown, bits(model, optimizer)


@pytest.mark.parametrize("world", [2, 3])
def test_law_1_shards_show_the_same_average(world: int) -> None:
    model, optimizer = made("fp64")
    train(model, optimizer, range(6))
    with optimizer.checkpoint_form():
        saved = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(6, 8))
    expected = bits(model, optimizer)
    for shown, after in run_ranks(_on_ranks, world, saved):
        assert_same_bits(shown, saved["model"])
        for name, tensor in expected.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-10, atol=1e-12)


def test_tied_weights_are_swapped_once() -> None:
    model = tiny(tied=True)
    optimizer = build_optimizer(model, config(), 60)
    train(model, optimizer, range(4))
    expected = average(optimizer, "embed.weight")
    with optimizer.evaluation_weights():
        assert model.head.weight is model.embed.weight
        torch.testing.assert_close(model.head.weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.betas = \(0\.0, 0\.9\): schedule_free averages with the first"):
        build_optimizer(tiny(), config(betas=(0.0, 0.9)), 10)
    with pytest.raises(ValueError, match=r"optim\.momentum_phases: schedule_free keeps its first beta"):
        build_optimizer(tiny(), config(momentum_phases=({"schedule": "linear", "from": 0.5, "to": 0.9},)), 10)
    moving = OptimConfig(
        momentum_phases=({"from": 0.5},),
        schedule="constant",
        groups=(GroupRule(name="averaged", role="matrices", optimizer="schedule_free"),),
    )  # the momentum that moves is AdamW's
    momenta = {name: rates.momentum for name, rates in build_optimizer(tiny(), moving, 10).rates().items()}
    assert momenta.pop("averaged") is None and set(momenta.values()) == {0.5}
    with pytest.raises(ValueError, match=r"momentum = 0\.8: schedule_free keeps its first beta"):
        rule = ScheduleFreeAdamW()
        rule.update([Slot("w", Bowl().weight)], rates=Rates(0.1, 0.0, momentum=0.8), scale=None, gate=None)
