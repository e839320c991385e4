from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kforge_optim import OptimConfig, Optimizer, build_optimizer
from kforge_optim.moments import SMALLEST, codes, new_moments, storage_dtype
from kforge_optim.rounding import noise
from kforge_optim.sharding import copy_into
from kforge_testing import run_ranks

KINDS = ["bf16", "int8"]


def one(shape: tuple[int, ...], moments: str, **values: Any) -> tuple[nn.ParameterDict, Optimizer]:
    """A model of one matrix and its optimizer."""
    model = nn.ParameterDict({"w": torch.randn(shape, generator=torch.Generator().manual_seed(0))})
    defaults: dict[str, Any] = {"lr": 1e-3, "schedule": "none", "weight_decay": 0.0, "moments": moments}
    return model, build_optimizer(model, OptimConfig(**{**defaults, **values}), 10)


def value(state: dict[str, Tensor], kind: str) -> Tensor:
    """A moment as numbers, by the format as it is described: codes times the scale of their block of 256."""
    stored = state[kind]
    if stored.dtype != torch.uint8:
        return stored.to(torch.float32)
    each = state[f"{kind}_scale"].repeat_interleave(256, dim=-1)[..., : stored.shape[-1]]
    return codes(kind == "exp_avg")[stored.int()] * each


def gradient(step: int, shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    """Of sizes that differ from row to row, by a factor of 100."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.linspace(-1, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return size * 10**rows * torch.randn(shape, generator=generator)


def test_which_tensors_keep_what() -> None:
    sizes = {"norm": (8192,), "small": (63, 65), "matrix": (64, 64), "experts": (4, 32, 40), "none": ()}
    for moments, expected in {
        "fp32": [torch.float32] * 5,
        "bf16": [torch.bfloat16] * 5,
        "int8": [torch.float32, torch.float32, torch.uint8, torch.uint8, torch.float32],
    }.items():
        for dtype in (torch.float32, torch.bfloat16):
            found = [storage_dtype(torch.empty(size, dtype=dtype), moments) for size in sizes.values()]
            assert found == expected, moments
    assert storage_dtype(torch.empty(3, dtype=torch.float64), "fp32") == torch.float64
    assert SMALLEST == 64 * 64


def test_bytes_a_parameter() -> None:
    matrix = torch.empty(512, 1024, dtype=torch.bfloat16)
    for moments, expected in {"fp32": 8, "bf16": 4, "int8": 2 + 2 * 4 / 256}.items():
        state = new_moments(matrix, moments).values()
        assert sum(tensor.numel() * tensor.itemsize for tensor in state) / matrix.numel() == expected


def test_the_codes_are_the_dynamic_map() -> None:
    for signed in (True, False):
        table = codes(signed)
        assert table.shape == (256,) and bool((table.diff() > 0).all())
        assert table[-1] == 1 and table[0] == (-1 if signed else 0) and 0 in table
        counts = [64 >> i if signed else 128 >> i for i in range(7)]
        for i, count in enumerate(counts):
            decade = table[(table > 10.0 ** -(i + 1)) & (table < 0.9999 * 10.0**-i)]
            assert decade.numel() == count
            step = 0.9 * 10.0**-i / count
            assert float(decade[0]) == pytest.approx(10.0 ** -(i + 1) + step / 2, rel=1e-5)
            assert torch.allclose(decade.diff(), torch.tensor(step, dtype=torch.float32), rtol=1e-3)
    assert sorted(set((-codes(True)).tolist()) ^ set(codes(True).tolist())) == pytest.approx([-5.5e-7, 5.5e-7])


@pytest.mark.parametrize("moments", KINDS)
def test_a_second_moment_decays_at_0_999(moments: str) -> None:
    """Gradients of 1, then of 0: rounded to the nearest, bfloat16 would stay where it is for ever, since a step takes
    0.1 % and half a step of the format is at least 0.2 %."""
    model, optimizer = one((16, 512), moments, betas=(0.9, 0.999), eps=1e-3)
    reference = torch.zeros(16, 512)
    state = optimizer.state_dict()["state"]["w"]
    for step in range(600):
        model["w"].grad = torch.full((16, 512), float(step < 300))
        # One element a block that goes on, so that the scale stays what it is.
        model["w"].grad[:, ::256] = 1.0
        reference = 0.999 * reference + 0.001 * model["w"].grad.square()
        optimizer.step()
        if step == 299:
            before = value(state, "exp_avg_sq")
            assert float(before.mean()) == pytest.approx(1 - 0.999**300, rel=5e-3)
    after = value(state, "exp_avg_sq")
    assert not torch.equal(before, after)
    resting = torch.ones(512, dtype=torch.bool)
    resting[::256] = False
    mean, expected = float(after[:, resting].mean()), float(reference[:, resting].mean())
    assert mean == pytest.approx(expected, rel=0.01)
    assert float((after - reference)[:, resting].std()) / expected < (0.09 if moments == "bf16" else 0.3)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_bf16_moments_follow_fp32_within_the_stated_bound(beta2: float) -> None:
    """The mean of the error is 0 and its standard deviation below 2**-7 / (2 sqrt(1 - b**2)) of the value."""
    shape = (64, 128)
    model, optimizer = one(shape, "bf16", betas=(0.9, beta2))
    first, second = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(400):
        model["w"].grad = gradient(step, shape)
        first = 0.9 * first + 0.1 * model["w"].grad.double()
        second = beta2 * second + (1 - beta2) * model["w"].grad.double().square()
        optimizer.step()
    state = optimizer.state_dict()["state"]["w"]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    for kind, beta, exact in (("exp_avg", 0.9, first), ("exp_avg_sq", beta2, second)):
        error = state[kind].double() - exact
        # What a first moment was rounded by is relative to what it was then: at most its largest so far.
        size = exact if kind == "exp_avg_sq" else exact.abs().amax(1, keepdim=True)
        bound = 2**-7 / (2 * math.sqrt(1 - beta**2))
        relative = error / size
        assert 0.05 * bound < float(relative.std()) < bound
        assert abs(float(relative.mean())) < 4 * bound / math.sqrt(relative.numel())


def test_int8_moments_follow_fp32_on_average() -> None:
    shape = (64, 512)
    model, optimizer = one(shape, "int8")
    first, second = torch.zeros(shape), torch.zeros(shape)
    errors, scores = [], []
    for step in range(200):
        model["w"].grad = gradient(step, shape)
        first = 0.9 * first + 0.1 * model["w"].grad
        second = 0.95 * second + 0.05 * model["w"].grad.square()
        optimizer.step()
        if step >= 100:
            state = optimizer.state_dict()["state"]["w"]
            rows = first.std(1, keepdim=True)
            errors.append((value(state, "exp_avg") - first) / rows)
            scores.append(value(state, "exp_avg_sq") / second)
    error, ratio = torch.stack(errors), torch.stack(scores)
    assert float(error.std()) < 0.2 and abs(float(error.mean())) < 5e-3
    assert float(ratio.mean()) == pytest.approx(1, abs=0.01) and float(ratio.std()) < 0.2
    assert float(ratio.min()) > 0.2


@pytest.mark.parametrize("moments", KINDS)
def test_the_loss_comes_down_as_with_fp32(moments: str) -> None:
    torch.manual_seed(0)
    target, inputs = torch.randn(64, 96), torch.randn(256, 96)
    losses = {}
    for kind in ("fp32", moments):
        model, optimizer = one((64, 96), kind, lr=0.02)
        for _ in range(150):
            loss = ((inputs @ (model["w"] - target).t()) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[kind] = float(loss.detach())
    assert losses["fp32"] < 0.05 * 192
    assert losses[moments] < 1.1 * losses["fp32"] + 0.02


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gate_0_changes_no_bit(moments: str, dtype: torch.dtype, poison: float) -> None:
    model = nn.ParameterDict({"w": torch.randn(64, 70).to(dtype)})
    config = OptimConfig(moments=moments, cautious_decay=True)
    optimizer = build_optimizer(model, config, 10, storage="fp32" if dtype == torch.float32 else "stochastic")
    for step in range(3):
        model["w"].grad = gradient(step, (64, 70)).to(dtype)
        optimizer.step()
    with torch.no_grad():
        model["w"][0, 0] = -0.0
    state = optimizer.state_dict()["state"]["w"]
    before = {"w": model["w"].detach().clone(), **{kind: tensor.clone() for kind, tensor in state.items()}}
    model["w"].grad = torch.full((64, 70), poison, dtype=dtype)
    optimizer.step(scale=torch.tensor(0.5), gate=torch.tensor(0.0))
    for kind, old in before.items():
        new = model["w"].detach() if kind == "w" else state[kind]
        assert torch.equal(new.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)), kind
    model["w"].grad = gradient(9, (64, 70)).to(dtype)
    optimizer.step(gate=torch.tensor(1.0))
    assert not torch.equal(state["exp_avg"], before["exp_avg"]) and state["step"] == 4


def test_blocks_lie_in_rows_and_an_empty_one_is_zero() -> None:
    model, optimizer = one((3, 2000), "int8")
    grad = torch.zeros(3, 2000)
    grad[0, 255], grad[0, 256], grad[2, 1999] = -4.0, 1.0, 0.5
    model["w"].grad = grad
    optimizer.step()
    state = optimizer.state_dict()["state"]["w"]
    assert state["exp_avg_scale"].shape == (3, 8)
    expected = torch.zeros(3, 8)
    expected[0, 0], expected[0, 1], expected[2, 7] = 0.4, 0.1, 0.05
    torch.testing.assert_close(state["exp_avg_scale"], expected)
    torch.testing.assert_close(value(state, "exp_avg"), 0.1 * grad)  # -1, 0 and 1 of a scale are exact
    second = value(state, "exp_avg_sq")
    assert bool((second[0, :512] > 0).all())  # never 0 beside a larger one
    assert not second[1].any() and not second[2, :1792].any()


def test_no_moments_of_another_kind_are_loaded() -> None:
    _, fp32 = one((64, 64), "fp32")
    for moments, said in (("bf16", "torch.float32 and this optimizer keeps it in torch.bfloat16"), ("int8", "_scale")):
        _, other = one((64, 64), moments)
        with pytest.raises(ValueError, match=rf"{said}.*optim\.moments.* changed"):
            other.load_state_dict(fp32.state_dict())


# Sharded

SHAPES = [(16, 700), (5, 4, 300)]
PLACEMENTS: dict[int, list[tuple[Any, ...]]] = {
    2: [(Shard(0),), (Shard(1),), (Replicate(),)],
    4: [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1))],
}


def trained(moments: str, storage: str, mesh: Any, placements: tuple[Any, ...], steps: range, load: Any = None) -> Any:
    """Weights and state, whole, after the steps; gradients are whole ones, cut as the weights are."""
    weights = {}
    for i, shape in enumerate(SHAPES):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        whole = whole.to(torch.float32 if storage == "fp32" else torch.bfloat16)
        if mesh is not None:
            last = [Shard(len(shape) - 1) if p == Shard(1) else p for p in placements]
            whole = distribute_tensor(whole, mesh, last, src_data_rank=None)
        weights[f"w{i}"] = whole
    model = nn.ParameterDict(weights)
    config = OptimConfig(moments=moments, lr=0.01, schedule="none", cautious_decay=moments == "int8")
    optimizer = build_optimizer(model, config, 10, storage=storage, seed=3)  # type: ignore[arg-type]
    if load is not None:
        weights, state = load
        optimizer.load_state_dict(state)
        for name, parameter in model.items():
            copy_into(parameter, weights[name])
    for step in steps:
        for i, (shape, parameter) in enumerate(zip(SHAPES, model.values(), strict=True)):
            grad = gradient(10 * step + i, shape).to(parameter.dtype)
            if mesh is not None:
                grad = distribute_tensor(grad, mesh, parameter.placements, src_data_rank=None)
            parameter.grad = grad
        optimizer.step(gate=torch.tensor(1.0))
    state = optimizer.state_dict()
    return dict(model.items()), state


def whole(of: tuple[dict[str, Tensor], dict[str, Any]]) -> dict[str, Tensor]:
    weights, state = of
    tensors = {**weights, **{f"{n}:{k}": t for n, kinds in state["state"].items() for k, t in kinds.items()}}
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):  # neither gloo nor NCCL sends int16
            like = torch.zeros(tensor.shape, dtype=tensor.dtype)
            copy_into(like, tensor)
            tensor = like
        result[name] = tensor.clone()
    return result


def _layouts(rank: int, world: int) -> list[tuple[Any, dict[str, Tensor]]]:
    mesh = init_device_mesh("cpu", (world,) if world == 2 else (2, 2))
    other = init_device_mesh("cpu", (world,))
    results = []
    for moments, storage in (("bf16", "fp32"), ("bf16", "split"), ("int8", "stochastic"), ("int8", "split")):
        for placements in PLACEMENTS[world]:
            half = trained(moments, storage, mesh, placements, range(2))
            for name, parameter in half[0].items():
                for kind, tensor in half[1]["state"][name].items():
                    if kind.endswith("_scale"):
                        cut = [p == Shard(parameter.ndim - 1) for p in parameter.placements]
                        expected = [Replicate() if c else p for c, p in zip(cut, parameter.placements, strict=True)]
                        assert list(tensor.placements) == expected
                    else:
                        assert kind == "step" or tensor.placements == parameter.placements
            # Saved here, gone on elsewhere: on a line of ranks that cut rows.
            rest = trained(moments, storage, other, (Shard(0),), range(2, 4), load=half)
            results.append(((moments, storage), whole(rest)))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_has_the_bits_of_one_process(world: int) -> None:
    """Elementwise steps with random bits by place, and blocks that no layout cuts apart: nothing differs at all."""
    expected: dict[tuple[str, str], dict[str, Tensor]] = {}
    for ranks in zip(*run_ranks(_layouts, world, timeout_s=120), strict=True):
        for of, tensors in ranks:
            if of not in expected:
                expected[of] = whole(trained(*of, None, (), range(4)))
            assert tensors.keys() == expected[of].keys()
            for name, tensor in expected[of].items():
                assert torch.equal(tensors[name], tensor), (of, name)
    assert len(expected) == 4


def test_the_noise_is_the_elements_own() -> None:
    """Two steps of one value: the elements of a constant tensor are not all rounded alike, nor alike in both steps."""
    model, optimizer = one((64, 64), "bf16")
    seen = []
    for _ in range(2):
        model["w"].grad = torch.full((64, 64), 0.3)
        optimizer.step()
        seen.append(optimizer.state_dict()["state"]["w"]["exp_avg"].float().clone())
    ups = [(step > step.mean()).double() for step in seen]
    assert all(0.02 < float(up.mean()) < 0.98 for up in ups)
    assert noise(torch.tensor([0]), 1).item() != noise(torch.tensor([0]), 2).item()
