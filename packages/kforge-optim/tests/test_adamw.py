from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kforge_optim import AdamW, OptimConfig, Rates, Slot, build_optimizer

SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = [(7, 5), (64, 33), (3,), (1,), (2, 3, 4)]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)


def slots(weights: list[nn.Parameter], algorithm: AdamW) -> list[Slot]:
    return [Slot(f"p{i}", weight, algorithm.init_state(weight)) for i, weight in enumerate(weights)]


@torch.no_grad()
def update(algorithm: AdamW, of: list[Slot], lr: float, scale: Tensor | None = None, gate: Tensor | None = None):  # type: ignore[no-untyped-def]
    algorithm.update(of, rates=Rates(lr=lr, weight_decay=0.1), scale=scale, gate=gate)


def test_equals_torch_in_float64() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    algorithm = AdamW(**SETTINGS)
    of = slots(ours, algorithm)
    reference = torch.optim.AdamW(theirs, lr=1.0, weight_decay=0.1, foreach=False, **SETTINGS)
    for step in range(50):
        lr = 1e-2 * (1 + math.sin(step))
        set_gradients(ours, step)
        set_gradients(theirs, step)
        update(algorithm, of, lr)
        reference.param_groups[0]["lr"] = lr
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_equals_the_formula() -> None:
    (weight,) = (nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64)),)
    algorithm = AdamW(**SETTINGS)
    of = slots([weight], algorithm)
    w, m, v = weight.detach().clone(), torch.zeros(1, 2).double(), torch.zeros(1, 2).double()
    for step in range(1, 51):
        set_gradients([weight], step)
        assert weight.grad is not None
        g = weight.grad.clone()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w - 1e-2 * 0.1 * w - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        update(algorithm, of, 1e-2)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-12, atol=1e-12)
    assert of[0].state["step"] == 50


def test_momentum_of_the_rates_takes_the_place_of_the_first_beta() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    usual, other = AdamW(**SETTINGS), AdamW(betas=(0.8, 0.95), eps=1e-8)
    of, reference = slots(ours, usual), slots(theirs, other)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        with torch.no_grad():
            usual.update(of, rates=Rates(1e-2, 0.1, momentum=0.8), scale=None, gate=None)
        update(other, reference, 1e-2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, theirs, strict=True))


def test_bit_equal_to_torch_fused_in_float32() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    algorithm = AdamW(**SETTINGS)
    of = slots(ours, algorithm)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True, **SETTINGS)
    for step in range(20):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        update(algorithm, of, 1e-2, gate=torch.tensor(1.0))
        reference.step()
    for slot, other in zip(of, theirs, strict=True):
        assert torch.equal(slot.parameter, other)
        assert all(torch.equal(slot.state[kind], reference.state[other][kind]) for kind in slot.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1.0])
def test_gate_0_changes_no_bit(dtype: torch.dtype, poison: float) -> None:
    weights = parameters(dtype)
    weights[0].data[0, 0] = -0.0
    algorithm = AdamW(**SETTINGS)
    of = slots(weights, algorithm)
    set_gradients(weights, 0)
    update(algorithm, of, 1e-2)
    before = [{"w": slot.parameter.detach().clone(), **{k: t.clone() for k, t in slot.state.items()}} for slot in of]
    set_gradients(weights, 1)
    for weight in weights:
        assert weight.grad is not None
        weight.grad.view(-1)[0] = poison
    update(algorithm, of, 1e-2, scale=torch.tensor(0.5), gate=torch.tensor(0.0))
    for slot, old in zip(of, before, strict=True):
        for kind, tensor in {"w": slot.parameter.detach(), **slot.state}.items():
            assert tensor.reshape(-1).view(torch.uint8).equal(old[kind].reshape(-1).view(torch.uint8)), kind


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_scale_multiplies_the_gradients(dtype: torch.dtype, bound: float) -> None:
    scaled, plain = parameters(dtype), parameters(dtype)
    algorithm = AdamW(**SETTINGS)
    of, reference = slots(scaled, algorithm), slots(plain, algorithm)
    for step in range(5):
        factor = torch.tensor(0.37 / (step + 1), dtype=dtype)
        set_gradients(scaled, step)
        set_gradients(plain, step)
        for weight in plain:
            assert weight.grad is not None
            weight.grad.mul_(factor)
        update(algorithm, of, 1e-2, scale=factor, gate=torch.tensor(1.0))
        update(algorithm, reference, 1e-2)
    for mine, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


def test_law_6_weights_of_1_move_at_3e_4() -> None:
    model = nn.LayerNorm(16)
    optimizer = build_optimizer(model, OptimConfig(lr=3e-4, schedule="none"), 10)
    model.weight.grad = torch.ones(16)
    optimizer.step()
    assert bool((model.weight < 1 - 2.9e-4).all())
    with pytest.raises(ValueError, match="keep weights in float32"):
        build_optimizer(nn.LayerNorm(16, dtype=torch.bfloat16), OptimConfig(), 10)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = build_optimizer(model, OptimConfig(), 10)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_gradients_with_other_strides_and_weights_with_gaps() -> None:
    weights = [nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]
    grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).t()
    weights[0].grad, weights[1].grad = grad, grad.contiguous()
    algorithm = AdamW(betas=(0.9, 0.95), eps=1.0)
    update(algorithm, slots(weights, algorithm), 1e-2)
    assert torch.equal(weights[0], weights[1])

    gaps = nn.Parameter(torch.zeros(3, 8)[:, ::2])
    gaps.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match="make it contiguous"):
        update(algorithm, slots([gaps], algorithm), 1e-2)

    transposed = nn.Parameter(torch.zeros(4, 3).t())
    transposed.grad = grad.contiguous()
    update(algorithm, slots([transposed], algorithm), 1e-2)
    assert torch.equal(transposed, weights[0])


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_1000_steps_of_split_weights_are_bit_equal_to_torch(moments: str) -> None:
    """A plain loop over torch's own AdamW in float32; with bf16 moments the weights stay close, at 8 bytes each."""
    ours = [nn.Parameter(weight.detach().to(torch.bfloat16)) for weight in parameters(torch.float32)]
    theirs = [nn.Parameter(weight.detach().to(torch.float32)) for weight in ours]
    model = nn.ParameterList(ours)
    config = OptimConfig(lr=1e-2, weight_decay=0.1, schedule="none", moments=moments)
    optimizer = build_optimizer(model, config, 10, storage="split")
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": config.eps, "fused": True}
    decayed = [weight for weight in theirs if weight.ndim > 1]
    rest = [weight for weight in theirs if weight.ndim <= 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], **settings
    )
    start = [weight.detach().clone() for weight in theirs]
    for step in range(1000):
        set_gradients(ours, step)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is not None
            other.grad = mine.grad.to(torch.float32)
        optimizer.step()
        reference.step()
    for i, (other, before) in enumerate(zip(theirs, start, strict=True)):
        full = optimizer.full_weight(str(i))
        if moments == "fp32":
            assert torch.equal(full, other)
        else:
            moved = (other - before).square().mean().sqrt()
            assert (full - other).square().mean().sqrt() < 0.05 * moved
    state = optimizer.state_dict()["state"]["1"]
    size = sum(tensor.numel() * tensor.itemsize for tensor in [ours[1], *state.values()]) / ours[1].numel()
    assert size == pytest.approx(12 if moments == "fp32" else 8, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cautious_decay_equals_the_formula(dtype: torch.dtype) -> None:
    weights = parameters(dtype)
    algorithm = AdamW(**SETTINGS, cautious_decay=True)
    of = slots(weights, algorithm)
    expected = [weight.detach().double() for weight in weights]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in expected]
    spared = 0
    for step in range(1, 51):
        set_gradients(weights, step)
        for i, (w, (m, v), weight) in enumerate(zip(expected, moments, weights, strict=True)):
            assert weight.grad is not None
            g = weight.grad.double()
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            u = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
            spared += int((u * w < 0).sum())
            expected[i], moments[i] = w - 1e-2 * (u + torch.where(u * w >= 0, 0.1 * w, 0.0)), (m, v)
        update(algorithm, of, 1e-2, gate=torch.tensor(1.0))
    assert spared > 1000
    bound = 2e-5 if dtype == torch.float32 else 1e-12
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), other, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_law_6_stochastic_weights_move_in_the_mean_at_3e_4(name: str) -> None:
    """Weights of 1 in bfloat16, whose neighbour below is 1 - 2**-8: one in thirteen goes there a step."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(2**15, dtype=torch.bfloat16), "up": nn.Linear(4, 4).bfloat16()})
    optimizer = build_optimizer(model, OptimConfig(name=name, lr=3e-4, schedule="none"), 10, storage="stochastic")
    for step in range(1, 6):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(scale=torch.tensor(1.0), gate=torch.tensor(1.0))
        mean, error = 1 - 3e-4 * step, 2**-8 * (0.25 * step / 2**15) ** 0.5
        assert abs(float(model["norm"].weight.detach().double().mean()) - mean) < 4 * error
    assert set(model["norm"].weight.unique().tolist()) <= {1 - i * 2**-8 for i in range(6)}
    assert "remainder" not in optimizer.state_dict()["state"]["up.weight"]


def test_stochastic_weights_depend_on_seed_step_and_name_alone() -> None:
    def trained(seed: int, steps: int, name: str = "a", resume: bool = False) -> Tensor:
        model = nn.ParameterDict({name: torch.ones(64, 64, dtype=torch.bfloat16)})
        config = OptimConfig(lr=3e-4, schedule="none")
        optimizer = build_optimizer(model, config, 10, storage="stochastic", seed=seed)
        for step in range(steps):
            if resume and step == 2:
                state = optimizer.state_dict()
                optimizer = build_optimizer(model, config, 10, storage="stochastic", seed=seed)
                optimizer.load_state_dict(state)
            model[name].grad = torch.ones(64, 64, dtype=torch.bfloat16)
            optimizer.step()
        return model[name].detach().float()

    assert torch.equal(trained(1, 4), trained(1, 4)) and torch.equal(trained(1, 4), trained(1, 4, resume=True))
    others = [trained(2, 4), trained(1, 4, "b"), trained(1, 5), torch.ones(64, 64)]
    assert all(not torch.equal(trained(1, 4), other) for other in others)


def test_no_slots_are_no_step() -> None:
    gate = torch.ones(())
    AdamW().update([], rates=Rates(1e-2, 0.1), scale=None, gate=gate)
    assert gate == 1
