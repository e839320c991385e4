from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_models import TinyModel, batches, summed_loss, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kforge_optim import GroupRule, OptimConfig, Optimizer, Rates, Slot, build_optimizer, clip, register_optimizer
from kforge_testing import run_ranks

NAMES = ["adamw", "muon"]
TOKENS = 12 * 4


def config(name: str, **values: Any) -> OptimConfig:
    defaults = {"name": name, "lr": 0.01, "warmup_steps": 3, "schedule": "cosine", "clip_norm": 0.5}
    return OptimConfig(**{**defaults, **values})


def train(model: nn.Module, optimizer: Optimizer, of: OptimConfig, steps: range, rank: int = 0, world: int = 1) -> None:
    """Gradients are sums over ranks of the loss over all tokens; each rank has its part of the rows."""
    for step, ids in enumerate(batches(steps.stop)):
        if step in steps:
            summed_loss(model, ids.tensor_split(world)[rank], TOKENS).backward()
            norm = clip.total_norm(model.named_parameters())
            optimizer.step(scale=clip.clip_factor(norm, of.clip_norm), gate=torch.isfinite(norm).to(torch.float32))
            optimizer.zero_grad()


def sharded(model: TinyModel, **options: Any) -> TinyModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, **options)
    for module in (*model.layers.values(), model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Whole weights and whole state, by name, copied."""
    flat = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, state in optimizer.state_dict()["state"].items():
        flat.update({f"{name}:{kind}": tensor for kind, tensor in state.items()})
    return {name: tensor.clone() for name, tensor in whole(flat).items()}


def one_process(name: str, steps: int, tied: bool = False) -> dict[str, Tensor]:
    model, of = tiny(tied=tied), config(name)
    optimizer = build_optimizer(model, of, 10)
    train(model, optimizer, of, range(steps))
    return snapshot(model, optimizer)


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (result[name] - tensor).abs().max()
        assert difference <= bound * max(float(tensor.abs().max()), 1e-30), (name, difference)


def assert_same_bits(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        same = result[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        assert same, name


def _fsdp(rank: int, world: int, cases: list[tuple[str, bool]]) -> list[dict[str, Tensor]]:
    results = []
    for name, tied in cases:
        model, of = sharded(tiny(tied=tied)), config(name)
        optimizer = build_optimizer(model, of, 10)
        train(model, optimizer, of, range(6), rank, world)
        results.append(snapshot(model, optimizer))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_law_1_fsdp_equals_one_process(world: int) -> None:
    cases = list(itertools.product(NAMES, [False, True]))
    expected = [one_process(name, 6, tied) for name, tied in cases]
    for results in run_ranks(_fsdp, world, cases):
        for result, of_one in zip(results, expected, strict=True):
            assert_close(result, of_one, 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_equals_torch_optimizers_in_a_loop(name: str) -> None:
    model, of = tiny(), config(name)
    optimizer = build_optimizer(model, of, 10)
    twin = tiny()
    decay, no_decay = [], []
    for parameter_name, parameter in twin.named_parameters():
        (decay if parameter.ndim > 1 and "embed" not in parameter_name else no_decay).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step, ids in enumerate(batches(6)):
        for which in (model, twin):
            summed_loss(which, ids, TOKENS).backward()
        optimizer.step(scale=clip.clip_factor(clip.total_norm(model), of.clip_norm))
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), of.clip_norm)
        for group in reference.param_groups:
            group["lr"] = 0.01 * ((step + 1) / 3 if step < 3 else 0.55 + 0.45 * math.cos(math.pi * (step - 3) / 7))
        reference.step()
        reference.zero_grad()
        if name == "muon":
            break  # the groups that Muon leaves to AdamW agree as long as the matrices do
    for (parameter_name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        by_muon = name == "muon" and parameter_name in optimizer.groups[0].parameters
        close = torch.allclose(mine, other, rtol=1e-12, atol=1e-12)
        assert close != by_muon, parameter_name


def _save_and_load(rank: int, world: int) -> None:
    for name, dtype in itertools.product(NAMES, [torch.float32, torch.float64]):
        _resume(rank, world, name, dtype)


def _resume(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    of = config(name)
    straight = sharded(tiny(dtype))
    optimizer = build_optimizer(straight, of, 10)
    train(straight, optimizer, of, range(3), rank, world)
    saved = {"model": straight.state_dict(), "optimizer": optimizer.state_dict()}
    copied = _copy(saved)
    train(straight, optimizer, of, range(3, 6), rank, world)
    expected = snapshot(straight, optimizer)

    resumed = sharded(tiny(dtype))
    fresh = build_optimizer(resumed, of, 10)
    resumed.load_state_dict(copied["model"])
    fresh.init_state()
    tensors = [t for state in fresh.state_dict()["state"].values() for t in state.values()]
    fresh.load_state_dict(copied["optimizer"])
    assert all(a is b for a, b in zip(tensors, _tensors(fresh), strict=True))  # in place
    train(resumed, fresh, of, range(3, 6), rank, world)
    assert_same_bits(snapshot(resumed, fresh), expected)


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [t for state in optimizer.state_dict()["state"].values() for t in state.values()]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else value


def test_law_3_save_and_load_midway_is_bit_exact() -> None:
    run_ranks(_save_and_load, 2)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_in_one_process(name: str) -> None:
    of, model = config(name), tiny(torch.float32)
    optimizer = build_optimizer(model, of, 10)
    train(model, optimizer, of, range(3))
    saved = _copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, of, range(3, 6))
    resumed = tiny(torch.float32)
    fresh = build_optimizer(resumed, of, 10)
    resumed.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    train(resumed, fresh, of, range(3, 6))
    assert_same_bits(snapshot(resumed, fresh), snapshot(model, optimizer))


def _load_elsewhere(rank: int, world: int, name: str, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors into shards; then into another layout of the same ranks; and back to whole ones."""
    of, model = config(name), sharded(tiny())
    optimizer = build_optimizer(model, of, 10)
    optimizer.load_state_dict(saved)
    assert optimizer.schedule_step == 6
    mesh = init_device_mesh("cpu", (world,))
    other = _copy(optimizer.state_dict())
    for state in other["state"].values():
        for kind, tensor in state.items():
            if isinstance(tensor, DTensor):
                state[kind] = distribute_tensor(tensor.full_tensor(), mesh, [Replicate()])
    again = build_optimizer(sharded(tiny()), of, 10)
    again.load_state_dict(other)
    plain = tiny()
    last = build_optimizer(plain, of, 10)
    last.load_state_dict(again.state_dict())
    return snapshot(plain, last)


@pytest.mark.parametrize("name", NAMES)
def test_state_loads_into_any_layout(name: str) -> None:
    of, model = config(name), tiny()
    optimizer = build_optimizer(model, of, 10)
    train(model, optimizer, of, range(6))
    expected = {k: v for k, v in snapshot(model, optimizer).items() if ":" in k}
    for result in run_ranks(_load_elsewhere, 3, name, _copy(optimizer.state_dict())):
        assert_same_bits({k: v for k, v in result.items() if ":" in k}, expected)


def test_state_that_does_not_fit_is_refused_whole() -> None:
    optimizer = build_optimizer(tiny(), config("adamw"), 10)
    before = _copy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"lacks parameters \['embed.weight'\] and has unknown ones \['x'\]"):
        bad = _copy(before)
        bad["state"]["x"] = bad["state"].pop("embed.weight")
        optimizer.load_state_dict(bad)
    with pytest.raises(ValueError, match=r"this optimizer keeps \['exp_avg', 'exp_avg_sq', 'step'\]; was optim.name"):
        optimizer.load_state_dict(build_optimizer(tiny(), config("muon"), 10).state_dict())
    with pytest.raises(ValueError, match=r"has shape \(14, 8\), here it is \(14, 10\)"):
        optimizer.load_state_dict(build_optimizer(tiny(dim=8), config("adamw"), 10).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(_tensors(optimizer), _values(before), strict=True))


def _values(state: dict[str, Any]) -> list[Tensor]:
    return [tensor for kinds in state["state"].values() for tensor in kinds.values()]


@pytest.mark.parametrize("stop", [1, 5, 6, 19])
def test_c25_rates_after_resume(stop: int) -> None:
    of = config("adamw", warmup_steps=5)

    def run(optimizer: Optimizer, steps: int) -> list[dict[str, float]]:
        used = []
        for _ in range(steps):
            used.append(optimizer.lrs())
            optimizer.step()
        return used

    straight = run(build_optimizer(tiny(), of, 20), 20)
    first = build_optimizer(tiny(), of, 20)
    before = run(first, stop)
    second = build_optimizer(tiny(), of, 20)
    second.load_state_dict(first.state_dict())
    assert second.schedule_step == stop
    assert before + run(second, 20 - stop) == straight
    assert straight[0]["matrices"] == pytest.approx(0.01 / 5)
    assert set(straight[0]) == {"matrices", "embeddings", "head", "norms_and_biases"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_c42_a_refused_step_leaves_no_trace(name: str, poison: float, clip_norm: float) -> None:
    of, model = config(name, clip_norm=clip_norm), tiny(torch.float32)
    optimizer = build_optimizer(model, of, 10)
    for step, ids in enumerate(batches(5)):
        summed_loss(model, ids, TOKENS).backward()
        if step == 3:
            model.layers["0"].up.weight.grad[1, 1] = poison
        before = snapshot(model, optimizer)
        norm = clip.total_norm(model)
        gate = torch.isfinite(norm).to(torch.float32)
        optimizer.step(scale=clip.clip_factor(norm, of.clip_norm), gate=gate)
        optimizer.zero_grad()
        after = snapshot(model, optimizer)
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
        if step == 3:
            assert gate == 0 and not math.isfinite(norm)
            assert_same_bits(after, before)
        else:
            assert not torch.equal(after["norm.weight"], before["norm.weight"])
    assert optimizer.schedule_step == 5  # the schedule counts steps of the run
    assert after["norm.weight:step"] == 4  # AdamW counts accepted ones


def _norms_move(rank: int, world: int) -> list[float]:
    """bf16 compute, fp32 shards: one step at 3e-4 moves norm weights of 1.0, where bf16 weights would stay."""
    return [_moved(rank, world, name) for name in NAMES]


def _moved(rank: int, world: int, name: str) -> float:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(tiny(torch.float32), mp_policy=policy)
    of = config(name, lr=3e-4, schedule="none", warmup_steps=0)
    optimizer = build_optimizer(model, of, 10)
    train(model, optimizer, of, range(1), rank, world)
    assert model.norm.weight.dtype == torch.float32
    return float((model.norm.weight.full_tensor() - 1).abs().min())


def test_law_6_norm_weights_move_under_bf16_compute() -> None:
    for moved in itertools.chain(*run_ranks(_norms_move, 2)):
        assert 2.9e-4 < moved < 3.1e-4


@pytest.mark.parametrize("name", NAMES)
def test_s9_zero_grad_covers_everything_and_unused_parameters_are_left_alone(name: str) -> None:
    model, of = tiny(), config(name)
    model.spare = nn.Linear(3, 3)
    optimizer = build_optimizer(model, of, 10)
    before = model.spare.weight.detach().clone()
    summed_loss(model, next(batches(1)), TOKENS).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model.spare.weight, before)
    assert optimizer.state_dict()["state"].keys() == dict(model.named_parameters()).keys()


def test_small_parts_of_the_surface() -> None:
    model = tiny()
    optimizer = build_optimizer(model, config("adamw"), 10)
    with optimizer.evaluation_weights(), optimizer.evaluation_weights():
        assert torch.equal(optimizer.full_weight("norm.weight"), model.norm.weight)
    assert not optimizer.full_weight("norm.weight").requires_grad
    with pytest.raises(KeyError, match="nowhere"):
        optimizer.full_weight("nowhere")
    with pytest.raises(ValueError, match="scale must be a tensor of one element"):
        optimizer.step(scale=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on the meta device"), torch.device("meta"):
        build_optimizer(TinyModel(), config("adamw"), 10).init_state()


def test_unknown_optimizer_lists_the_known_ones_and_a_decorator_adds_one() -> None:
    with pytest.raises(ValueError, match=r"unknown optimizer 'adam'; known are .*adamw, .*lion, .*muon"):
        build_optimizer(tiny(), config("adam"), 10)

    class Sign:
        matrices_only = True

        def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
            return {}

        def update(self, slots: list[Slot], *, rates: Rates, scale: Any, gate: Any) -> None:
            for slot in slots:
                slot.parameter.sub_(slot.parameter.grad.sign(), alpha=rates.lr)

    @register_optimizer("test-sign")
    def sign(config: OptimConfig) -> Sign:
        return Sign()

    model = tiny()
    optimizer = build_optimizer(model, config("test-sign", lr=0.5, adamw_lr=0.1, schedule="none", warmup_steps=0), 10)
    before = model.layers["0"].down.weight.detach().clone()
    summed_loss(model, next(batches(1)), TOKENS).backward()
    optimizer.step()
    torch.testing.assert_close((model.layers["0"].down.weight - before).abs(), torch.full_like(before, 0.5))
    assert optimizer.lrs()["embeddings"] == 0.1


@pytest.mark.parametrize("name", ["lion", "cautious_lion", "schedule_free", "torch.optim.NAdam"])
def test_moments_of_adamw_are_refused_where_it_owns_nothing(name: str) -> None:
    rest = {"schedule": "constant"} if name == "schedule_free" else {}
    with pytest.raises(ValueError, match=rf"optim.moments = bf16 is how AdamW .* owns nothing beside {name}; leave it"):
        build_optimizer(tiny(), config(name, moments="bf16", **rest), 10)
    shared = (GroupRule(name="ends", role="embeddings", optimizer="adamw"),)
    assert build_optimizer(tiny(), config(name, moments="bf16", groups=shared, **rest), 10)


def _multiplied(rank: int, world: int) -> None:
    factors = torch.arange(1, 8.0)[None], torch.linspace(0.5, 1, 6)[:, None], torch.full((1, 1), 3.0)
    mesh = init_device_mesh("cpu", (2, world // 2))
    for cut in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        for dtype, storage in ((torch.float32, "fp32"), (torch.bfloat16, "split")):
            whole = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))
            model = nn.Module()
            model.weight = nn.Parameter(distribute_tensor(whole.to(dtype), mesh, cut))
            optimizer = build_optimizer(model, OptimConfig(), 10, storage=storage)
            optimizer.set_full_weight("weight", whole)
            optimizer.multiply(("weight", factor) for factor in factors)
            for factor in factors:
                whole = whole * factor
            assert torch.equal(optimizer.full_weight("weight").full_tensor(), whole), (cut, storage)
            assert torch.equal(model.weight.full_tensor(), whole.to(dtype))


def test_multiply_at_full_precision_on_shards() -> None:
    run_ranks(_multiplied, 4)


def test_multiply_refuses_other_shapes() -> None:
    optimizer = build_optimizer(nn.Linear(4, 3, bias=False), OptimConfig(), 10)
    for shape in ((3,), (4, 1), (3, 4, 1)):
        with pytest.raises(ValueError, match=r"'weight' has shape \(3, 4\) and cannot be multiplied by"):
            optimizer.multiply([("weight", torch.ones(shape))])
    with pytest.raises(KeyError, match="nowhere"):
        optimizer.multiply([("nowhere", torch.ones(1, 1))])
