from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_models import TinyModel, batches, summed_loss, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kforge_optim import OptimConfig, Optimizer, build_optimizer, clip, join_float32, register_optimizer, split_float32
from kforge_testing import run_ranks

NAMES = ["adamw", "muon"]
LOWS = torch.tensor([0, 1, -1, 2, 0x00FF, 0x0100, -0x0100, 0x5A5A, 0x7FFE, 0x7FFF, -0x7FFF, -0x8000], dtype=torch.int16)
EVERY_HALF = torch.arange(-(2**15), 2**15).to(torch.int16)


def floats(*bits: int) -> Tensor:
    """float32 numbers with these bits."""
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bits, so that NaNs and the sign of zero count."""
    return one.dtype == other.dtype and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


# The format


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_every_bit_pattern_comes_back(bits: list[int]) -> None:
    assert same_bits(join_float32(*split_float32(floats(*bits))), floats(*bits))


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_the_half_is_the_nearest_bfloat16(values: list[float]) -> None:
    full = torch.tensor(values, dtype=torch.float32)
    high, low = split_float32(full)
    cast = full.to(torch.bfloat16)
    tie = low == -0x8000
    assert same_bits(high[~tie], cast[~tie])
    finite = full.abs() < 3.3961776e38
    error = (high.double() - full.double()).abs()
    assert bool((error <= (cast.double() - full.double()).abs())[finite].all())
    assert bool((high.double().abs() > full.double().abs())[tie].all())  # away from zero


def test_every_half_with_tricky_remainders_and_the_reverse() -> None:
    """All 65,536 bfloat16 numbers (both zeros, denormals, the largest, infinities, NaNs) with the edges of int16, and
    all 65,536 remainders with such numbers: a pair is one weight, and a weight is one pair."""
    tricky = floats(*(h << 16 for h in (0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80)))
    for highs, lows in ((EVERY_HALF.view(torch.bfloat16), LOWS), (tricky.to(torch.bfloat16), EVERY_HALF)):
        high, low = (part.reshape(-1).contiguous() for part in torch.broadcast_tensors(highs[:, None], lows[None, :]))
        full = join_float32(high, low)
        again = split_float32(full)
        assert same_bits(again[0], high) and same_bits(again[1], low)
        # The remainder is added to the bits: it moves a positive number up and a negative one away from zero.
        assert torch.equal(full.view(torch.int32) - low, high.view(torch.int16).to(torch.int32) << 16)


def test_numbers_by_hand() -> None:
    cases = [  # bits of the weight, of its half, remainder
        (0x00000000, 0x0000, 0),
        (0x80000000, 0x8000, 0),  # -0.0 keeps its sign
        (0x00000001, 0x0000, 1),  # the smallest denormal
        (0x80000001, 0x8000, 1),
        (0x3F800000, 0x3F80, 0),  # 1.0
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F808000, 0x3F81, -0x8000),  # a tie, away from zero; a cast goes to the even 0x3f80
        (0xBF808000, 0xBF81, -0x8000),
        (0x3F818000, 0x3F82, -0x8000),  # a tie where a cast goes the same way
        (0x3FFFFFFF, 0x4000, -1),  # into the next power of two
        (0x007FFFFF, 0x0080, -1),  # the largest denormal
        (0x7F7F7FFF, 0x7F7F, 0x7FFF),  # the largest with a finite half
        (0x7F7FFFFF, 0x7F80, -1),  # the largest float32: its half is infinity, as in a cast
        (0xFF7FFFFF, 0xFF80, -1),
        (0x7F800000, 0x7F80, 0),  # infinity
        (0x7FC00000, 0x7FC0, 0),  # the canonical NaN, and that of x86
        (0xFFC00000, 0xFFC0, 0),
        (0x7F800001, 0x7F80, 1),  # a NaN whose half is infinity
        (0x7FFFFFFF, 0x8000, -1),  # and one whose half is -0.0
    ]
    for bits, half, remainder in cases:
        high, low = split_float32(floats(bits))
        assert high.view(torch.int16).item() & 0xFFFF == half, hex(bits)
        assert low.item() == remainder, hex(bits)
        assert same_bits(join_float32(high, low), floats(bits))


def test_other_dtypes_are_refused_and_strides_are_kept() -> None:
    with pytest.raises(ValueError, match="only float32 splits"):
        split_float32(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"not from torch.float32 and torch.int16"):
        join_float32(torch.zeros(2), torch.zeros(2, dtype=torch.int16))
    full = torch.randn(5, 3).t()
    high, low = split_float32(full)
    assert high.stride() == low.stride() == full.stride() == join_float32(high, low).stride()


# Training


def config(name: str, **values: Any) -> OptimConfig:
    return OptimConfig(**{"name": name, "lr": 0.01, "schedule": "none", **values})


def pair(name: str) -> tuple[TinyModel, Optimizer, TinyModel, Optimizer]:
    """The same float32 weights under fp32 and under split storage."""
    whole, halves = tiny(torch.float32), tiny(torch.float32).to(torch.bfloat16)
    fp32 = build_optimizer(whole, config(name), 10)
    split = build_optimizer(halves, config(name), 10, storage="split")
    split.load_full_weights(whole.named_parameters())
    return whole, fp32, halves, split


def same_gradients(step: int, whole: nn.Module, halves: nn.Module) -> None:
    """bfloat16 gradients, of sizes from tiny to large, exact in both."""
    generator = torch.Generator().manual_seed(step)
    for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
        grad = torch.randn(one.shape, generator=generator) * 10.0 ** torch.randint(
            -6, 3, one.shape, generator=generator
        )
        one.grad = grad.to(torch.bfloat16).to(torch.float32)
        other.grad = one.grad.to(other.dtype, copy=True)


def assert_equal(whole: nn.Module, fp32: Optimizer, halves: nn.Module, split: Optimizer) -> None:
    parameters = dict(halves.named_parameters())
    states = fp32.state_dict()["state"], split.state_dict()["state"]
    for name, weight in whole.named_parameters():
        full = split.full_weight(name)
        assert same_bits(full, weight.detach()), name
        assert parameters[name].dtype == torch.bfloat16
        assert states[1][name].keys() == {*states[0][name], "remainder"}
        tie = states[1][name]["remainder"] == -0x8000
        assert same_bits(parameters[name].detach()[~tie], weight.detach().to(torch.bfloat16)[~tie]), name
        for kind, tensor in states[0][name].items():
            assert same_bits(states[1][name][kind], tensor), (name, kind)


@pytest.mark.parametrize(("name", "steps"), [("adamw", 1000), ("muon", 60)])
def test_law_6_split_is_bit_equal_to_fp32(name: str, steps: int) -> None:
    whole, fp32, halves, split = pair(name)
    assert_equal(whole, fp32, halves, split)
    for step in range(steps):
        same_gradients(step, whole, halves)
        scale = torch.tensor(1.0 / (1 + step % 7)) if step % 3 else None
        gate = torch.tensor(0.0 if step % 11 == 5 else 1.0) if step % 2 else None
        fp32.step(scale=scale, gate=gate)
        split.step(scale=scale, gate=gate)
        if step % 100 == 0 or step == steps - 1:
            assert_equal(whole, fp32, halves, split)
    moved = torch.cat(
        [(p - q).abs().flatten() for p, q in zip(whole.parameters(), tiny(torch.float32).parameters(), strict=True)]
    )
    assert moved.min() > 0


def test_law_6_a_weight_of_1_moves_at_3e_4() -> None:
    model = nn.LayerNorm(16, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, OptimConfig(lr=3e-4, schedule="none"), 10, storage="split")
    weights = []
    for step in range(8):
        model.weight.grad = torch.ones(16, dtype=torch.bfloat16)
        optimizer.step()
        assert optimizer.full_weight("weight")[0] == pytest.approx(1 - 3e-4 * (step + 1), abs=1e-6)
        weights.append(model.weight[0].item())
    assert weights[0] == 1.0  # below 1 the bfloat16 numbers lie 2**-8 apart; the seventh step passes the middle
    assert weights[6:] == [1 - 2**-8] * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_gate_0_changes_no_bit(name: str, poison: float) -> None:
    whole, _, halves, split = pair(name)
    same_gradients(0, whole, halves)
    split.step()
    with torch.no_grad():
        halves.norm.weight[0] = -0.0
        split.state_dict()["state"]["norm.weight"]["remainder"][0] = -0x8000
    before = snapshot(halves, split)
    for weight in halves.parameters():
        weight.grad = torch.full_like(weight, poison)
    split.step(scale=torch.tensor(0.5), gate=torch.tensor(0.0))
    after = snapshot(halves, split)
    assert all(same_bits(after[key], before[key]) for key in before)
    assert split.schedule_step == 2


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    flat = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, state in optimizer.state_dict()["state"].items():
        flat.update({f"{name}:{kind}": tensor.clone() for kind, tensor in state.items()})
    return flat


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_in_float32_is_not_rounded(name: str) -> None:
    whole, fp32, halves, split = pair(name)
    generator = torch.Generator().manual_seed(1)
    for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad_dtype = torch.float32  # what lets microbatches accumulate in float32
        other.grad = one.grad.clone()
    assert torch.equal(clip.total_norm(halves), clip.total_norm(whole))
    fp32.step()
    split.step()
    assert_equal(whole, fp32, halves, split)


def test_only_a_few_weights_are_whole_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import kforge_optim.split as module

    seen: list[list[int]] = []

    class Spy:
        matrices_only = False

        def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
            return {"sum": torch.zeros_like(parameter.detach())}

        def update(self, slots: Any, **_: Any) -> None:
            seen.append([slot.parameter.numel() for slot in slots])
            for slot in slots:
                assert slot.parameter.dtype == slot.parameter.grad.dtype == slot.state["sum"].dtype == torch.float32
                slot.parameter.add_(slot.parameter.grad)
                slot.state["sum"].add_(slot.parameter.grad)

    register_optimizer("test-spy")(lambda config: Spy())
    results = []
    for elements in (2**24, 300, 1):
        monkeypatch.setattr(module, "_BATCH_ELEMENTS", elements)
        whole, _, halves, _ = pair("adamw")
        optimizer = build_optimizer(halves, config("test-spy"), 10, storage="split")
        same_gradients(0, whole, halves)
        seen.clear()
        optimizer.step()
        assert sum(map(sum, seen)) == sum(parameter.numel() for parameter in halves.parameters())
        assert all(len(sizes) == 1 or sum(sizes) <= elements for sizes in seen)
        assert max(map(len, seen)) > 1 or elements == 1
        results.append(snapshot(halves, optimizer))
    assert all(same_bits(other[key], results[0][key]) for other in results[1:] for key in other)


def test_it_trains_as_fp32_does() -> None:
    """A real backward in bfloat16: the loss of split storage stays beside that of fp32 storage under autocast-like
    rounding, where bfloat16 weights alone would stand still."""
    model = tiny(torch.bfloat16)
    optimizer = build_optimizer(model, config("adamw", lr=3e-3), 10, storage="split")
    losses = []
    ids = next(batches(1))
    for _ in range(80):
        loss = summed_loss(model, ids, 48)
        loss.backward()
        optimizer.step(scale=clip.clip_factor(clip.total_norm(model), 1.0))
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


# The surface


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="keep weights in float32"):
        build_optimizer(tiny(torch.bfloat16), config("adamw"), 10)
    with pytest.raises(ValueError, match="keep weights in float32"):
        build_optimizer(tiny(torch.float16), config("adamw"), 10, storage="split")
    with pytest.raises(ValueError, match="no trainable parameter is bfloat16"):
        build_optimizer(tiny(torch.float32), config("adamw"), 10, storage="split")
    with pytest.raises(ValueError, match="storage = 'fp16' must be fp32, split or stochastic"):
        build_optimizer(tiny(torch.float32), config("adamw"), 10, storage="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on the meta device"), torch.device("meta"):
        build_optimizer(TinyModel().to(torch.bfloat16), config("adamw"), 10, storage="split").init_state()


def test_full_weights() -> None:
    whole, _, halves, split = pair("adamw")
    split = build_optimizer(halves, config("adamw"), 10, storage="split")
    assert same_bits(split.full_weight("norm.weight"), halves.norm.weight.detach().to(torch.float32))
    value = torch.linspace(-1, 1, 10)
    split.set_full_weight("norm.weight", value)
    assert same_bits(split.full_weight("norm.weight"), value)
    assert same_bits(halves.norm.weight.detach(), value.to(torch.bfloat16))
    split.load_full_weights(dict(whole.named_parameters()))
    assert same_bits(split.full_weight("layers.0.up.weight"), whole.layers["0"].up.weight.detach())
    with pytest.raises(ValueError, match=r"must be float32, not torch\.float64"):
        split.set_full_weight("norm.weight", value.double())
    with pytest.raises(ValueError, match=r"shape \(3,\) does not fit into \(10,\)"):
        split.set_full_weight("norm.weight", torch.zeros(3))
    with pytest.raises(ValueError, match=r"no value was given for the weights \['embed.weight', 'head.weight'"):
        split.load_full_weights([("norm.weight", value)])
    with pytest.raises(KeyError, match="nowhere"):
        split.load_full_weights({"nowhere": value})
    fp32 = build_optimizer(whole, config("adamw"), 10)
    fp32.set_full_weight("norm.weight", value)
    assert torch.equal(whole.norm.weight, value) and whole.norm.weight.requires_grad


def test_float32_parameters_beside_bfloat16_ones() -> None:
    whole, fp32, halves, _ = pair("adamw")
    halves.norm.to(torch.float32)
    split = build_optimizer(halves, config("adamw"), 10, storage="split")
    split.load_full_weights(whole.named_parameters())
    for step in range(3):
        same_gradients(step, whole, halves)
        fp32.step()
        split.step()
    assert "remainder" not in split.state_dict()["state"]["norm.weight"]
    for name, weight in whole.named_parameters():
        assert same_bits(split.full_weight(name), weight.detach()), name


@pytest.mark.parametrize("name", NAMES)
def test_law_3_save_and_load_midway_is_bit_exact(name: str) -> None:
    whole, _, halves, split = pair(name)
    for step in range(3):
        same_gradients(step, whole, halves)
        split.step()
    saved = {key: tensor.clone() for key, tensor in halves.state_dict().items()}
    state = split.state_dict()
    state = {**state, "state": {n: {k: t.clone() for k, t in kinds.items()} for n, kinds in state["state"].items()}}

    resumed = tiny(torch.bfloat16)
    fresh = build_optimizer(resumed, config(name), 10, storage="split")
    remainder = fresh.state_dict()["state"]["norm.weight"]["remainder"]
    resumed.load_state_dict(saved)
    fresh.load_state_dict(state)
    assert fresh.state_dict()["state"]["norm.weight"]["remainder"] is remainder  # in place
    for step in range(3, 6):
        same_gradients(step, whole, halves)
        same_gradients(step, whole, resumed)
        split.step()
        fresh.step()
    expected, result = snapshot(halves, split), snapshot(resumed, fresh)
    assert all(same_bits(result[key], expected[key]) for key in expected)


def test_states_of_the_other_storage_are_refused() -> None:
    _, fp32, _, split = pair("adamw")
    with pytest.raises(ValueError, match="saved under fp32 storage and this run keeps it under split storage"):
        split.load_state_dict(fp32.state_dict())
    with pytest.raises(ValueError, match="resume with storage = 'split'"):
        fp32.load_state_dict(split.state_dict())


# Sharded


class Wide(nn.Module):
    """Two matrices, a norm and an embedding; sizes that two ranks, and four, cut evenly or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 16, bias=False)
        self.down = nn.Linear(16, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.down(self.up(self.embed(ids)).relu()))


def wide(dtype: torch.dtype) -> Wide:
    torch.manual_seed(3)
    return Wide().to(dtype)


def _sharded(rank: int, world: int, tp: int) -> None:
    """Real bfloat16 backward passes under fully_shard (over tensor-parallel matrices, with ``tp``); their gradients go
    to a float32 twin of the same layout, whose weights must keep the same bits; then a state goes elsewhere."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    for name in NAMES:
        models = {dtype: wide(dtype) for dtype in (torch.float32, torch.bfloat16)}
        for model in models.values():
            if tp > 1:
                parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp_shard"])
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)
        whole, halves = models.values()
        fp32 = build_optimizer(whole, config(name), 10)
        split = build_optimizer(halves, config(name), 10, storage="split")
        # Initial values: whole tensors on every rank, or shards.
        original = dict(wide(torch.float32).named_parameters())
        split.load_full_weights(original if name == "adamw" else whole.named_parameters())
        kept = split.state_dict()["state"]
        for step in range(4):
            ids = torch.randint(13, (4,), generator=torch.Generator().manual_seed(10 * step + rank // tp))
            halves(ids).square().sum().backward()
            for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
                assert isinstance(other.grad, DTensor) and other.grad.dtype == torch.bfloat16
                one.grad = other.grad.to(torch.float32)
            factor = clip.clip_factor(clip.total_norm(halves), 0.5)
            assert torch.equal(factor, clip.clip_factor(clip.total_norm(whole), 0.5))
            gate = torch.tensor(0.0 if step == 2 else 1.0)
            fp32.step(scale=factor, gate=gate)
            split.step(scale=factor, gate=gate)
            split.zero_grad()
        for (key, weight), parameter in zip(whole.named_parameters(), halves.parameters(), strict=True):
            remainder, full = kept[key]["remainder"], split.full_weight(key)
            assert remainder.dtype == torch.int16 and kept[key].keys() > {"remainder"}
            for tensor in (remainder, full):
                assert isinstance(tensor, DTensor) and tensor.placements == parameter.placements
                assert tensor.shape == parameter.shape and tensor.device_mesh == parameter.device_mesh
            assert same_bits(full.to_local(), weight.to_local()), key
            assert same_bits(full.full_tensor(), weight.detach().full_tensor()), key

        # Onto one process, from whole tensors and from DTensors.
        single = wide(torch.bfloat16)
        elsewhere = build_optimizer(single, config(name), 10, storage="split")
        elsewhere.load_state_dict(split.state_dict())
        single.load_state_dict({key: tensor.full_tensor() for key, tensor in halves.state_dict().items()})
        for key, weight in whole.named_parameters():
            assert same_bits(elsewhere.full_weight(key), weight.detach().full_tensor()), key
        other = distribute_tensor(elsewhere.full_weight("up.weight"), mesh, [Replicate(), Shard(1)])
        split.set_full_weight("up.weight", other + 1)
        assert same_bits(split.full_weight("up.weight").full_tensor(), other.full_tensor() + 1)


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (4, 2)])
def test_law_6_sharded(world: int, tp: int) -> None:
    run_ranks(_sharded, world, tp)
