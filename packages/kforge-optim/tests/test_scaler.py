from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_models import batches, summed_loss, tiny

from kforge_optim import LossScaler, OptimConfig, build_optimizer, clip
from kforge_testing import run_ranks

GOOD, BAD = torch.tensor(1.0), torch.tensor(0.0)


def scales(scaler: LossScaler, gates: str) -> list[float]:
    """The scale after each gate of a text like ``++-``."""
    seen = []
    for gate in gates:
        scaler.update(GOOD if gate == "+" else BAD)
        seen.append(float(scaler.scale))
    return seen


def test_doubles_after_good_steps_in_a_row_and_halves_after_a_bad_one() -> None:
    scaler = LossScaler(init_scale=8.0, growth_interval=3)
    assert scaler.scale.dtype == torch.float32 and scaler.scale.shape == () and scaler.scale == 8
    assert scales(scaler, "+++") == [8, 8, 16]
    assert scales(scaler, "++-++-") == [16, 16, 8, 8, 8, 4]  # a bad step starts the count anew
    assert scales(scaler, "++++++") == [4, 4, 8, 8, 8, 16]  # so does growth
    assert scales(LossScaler(init_scale=2.0, growth_interval=1), "+-++") == [4, 2, 4, 8]


def test_bounds() -> None:
    assert scales(LossScaler(init_scale=2.0, growth_interval=2), "---++") == [1, 1, 1, 1, 2]
    top = LossScaler(init_scale=2.0**23, growth_interval=1)
    assert scales(top, "+++-") == [2**24, 2**24, 2**24, 2**23]


def test_the_scale_is_one_tensor_and_gates_come_in_any_kind() -> None:
    scaler = LossScaler(init_scale=8.0, growth_interval=1)
    scale = scaler.scale
    for gate in (torch.tensor(True), torch.ones(1), torch.ones((), dtype=torch.float64)):
        scaler.update(gate)
    assert scale == 64 and scaler.scale is scale
    for gate in (torch.tensor(False), torch.tensor(math.nan)):
        scaler.update(gate)
    assert scale == 16


def test_disabled_is_exactly_1() -> None:
    scaler = LossScaler(enabled=False, init_scale=8.0, growth_interval=1)
    assert scales(scaler, "++--") == [1, 1, 1, 1]
    again = LossScaler(enabled=False)
    again.load_state_dict(scaler.state_dict())
    assert again.scale == 1


@settings(deadline=None)  # a busy machine is no fault
@given(
    gates=st.text("+-", max_size=60),
    exponent=st.integers(0, 24),
    interval=st.integers(1, 5),
    stop=st.integers(0, 60),
)
def test_any_run_of_gates_against_plain_python(gates: str, exponent: int, interval: int, stop: int) -> None:
    """Also stopped and resumed anywhere; the scale is a power of two in [1, 2**24] all the while."""
    expected, scale, good = [], 2.0**exponent, 0
    for gate in gates:
        good = good + 1 if gate == "+" else 0
        if gate == "-":
            scale = max(scale / 2, 1.0)
        elif good == interval:
            scale, good = min(scale * 2, 2.0**24), 0
        expected.append(scale)
    first = LossScaler(init_scale=2.0**exponent, growth_interval=interval)
    found = scales(first, gates[:stop])
    second = LossScaler(growth_interval=interval)
    second.load_state_dict(first.state_dict())
    found += scales(second, gates[stop:])
    assert found == expected
    assert all(math.frexp(scale)[0] == 0.5 and 1 <= scale <= 2**24 for scale in found)


def _scales_of_a_rank(rank: int, world: int) -> list[float]:
    """Gates are agreed on first, as `Guard.vote` does: one rank's inf is everybody's 0."""
    scaler = LossScaler(init_scale=16.0, growth_interval=2)
    seen = []
    for step in range(8):
        finite = torch.tensor(float(step % 3 != rank))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        scaler.update(finite)
        seen.append(float(scaler.scale))
    return seen


def test_all_ranks_hold_the_same_scale() -> None:
    assert run_ranks(_scales_of_a_rank, 2) == [[8.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("stop", range(8))
def test_law_3_resume_is_exact(stop: int, numbers: bool) -> None:
    gates = "++-++++-+"
    straight = scales(LossScaler(init_scale=8.0, growth_interval=3), gates)
    first = LossScaler(init_scale=8.0, growth_interval=3)
    before = scales(first, gates[:stop])
    state = first.state_dict()
    if numbers:
        state = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    second = LossScaler(init_scale=2.0, growth_interval=3)
    scale = second.scale
    second.load_state_dict(state)
    assert second.scale is scale  # in place
    assert before + scales(second, gates[stop:]) == straight


@pytest.mark.parametrize("in_place", [False, True])
def test_a_run_may_change_its_precision_at_a_restart(in_place: bool) -> None:
    on, off = LossScaler(init_scale=8.0, growth_interval=3), LossScaler(enabled=False)

    def restore(scaler: LossScaler, saved: dict[str, Any]) -> None:
        live = scaler.state_dict()
        if in_place:  # as a checkpointer does before it hands the state over
            saved = {name: live[name].copy_(v) if isinstance(v, torch.Tensor) else v for name, v in saved.items()}
        scaler.load_state_dict(saved)

    scales(on, "-++")
    restore(off, on.state_dict())
    assert off.scale == 1 and scales(off, "+++-") == [1, 1, 1, 1]
    restore(on, off.state_dict())
    assert on.scale == 8 and scales(on, "++++") == [8, 8, 16, 16]  # anew: neither the old scale nor the old count


def test_what_cannot_be_is_refused() -> None:
    for scale in (0.0, 0.5, 3.0, 2.0**25, -2.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"init_scale = .* must be a power of two from 1 to 2\*\*24"):
            LossScaler(init_scale=scale)
        with pytest.raises(ValueError, match=r"optim\.loss_scale_init = .* must be a power of two"):
            OptimConfig(loss_scale_init=scale)
    with pytest.raises(ValueError, match="growth_interval = 0 must be at least 1"):
        LossScaler(growth_interval=0)
    with pytest.raises(ValueError, match="the saved scale = 3"):
        LossScaler().load_state_dict({"enabled": True, "scale": 3.0, "good_steps": 0})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_power_of_two_rounds_nothing(name: str) -> None:
    """Scaled loss, unscaled norm and factor: the same bits as without scaling, wherever the scale stands."""
    plain, scaled = tiny(torch.float32), tiny(torch.float32)
    config = OptimConfig(name=name, lr=0.01, schedule="none")
    one, other = build_optimizer(plain, config, 10), build_optimizer(scaled, config, 10)
    scaler = LossScaler(init_scale=2.0**10, growth_interval=2)
    for step, ids in enumerate(batches(7)):
        summed_loss(plain, ids, 48).backward()
        (summed_loss(scaled, ids, 48) * scaler.scale).backward()
        norm, scaled_norm = clip.total_norm(plain), clip.total_norm(scaled) / scaler.scale
        assert torch.equal(norm, scaled_norm)
        gate = torch.tensor(float(step != 4))
        one.step(scale=clip.clip_factor(norm, 0.5), gate=gate)
        other.step(scale=clip.clip_factor(scaled_norm, 0.5) / scaler.scale, gate=gate)
        scaler.update(gate)
        one.zero_grad()
        other.zero_grad()
    assert scaler.scale == 2.0**12
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_float16_gradients_that_vanish_without_it() -> None:
    weight = torch.full((4,), 1e-4, dtype=torch.float16, requires_grad=True)
    scaler = LossScaler()

    def loss() -> torch.Tensor:
        return (weight.float() * 1e-9).sum()

    loss().backward()
    assert weight.grad is not None and not weight.grad.any()
    weight.grad = None
    (loss() * scaler.scale).backward()
    torch.testing.assert_close(weight.grad.float() / scaler.scale, torch.full((4,), 1e-9), rtol=1e-3, atol=0)
