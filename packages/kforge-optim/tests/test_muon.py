from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from kforge_optim import Muon, OptimConfig, Optimizer, Rates, Slot, build_optimizer, newton_schulz
from kforge_testing import run_ranks

SHAPES = [(10, 6), (6, 10), (7, 7), (10, 6), (1, 5), (5, 1), (6, 10)]


def reference_newton_schulz(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Jordan's polynomial on the singular values, through an SVD instead of products of matrices."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / max(np.sqrt((s**2).sum()), 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def slots(of: list[nn.Parameter], muon: Muon) -> list[Slot]:
    return [Slot(f"p{i}", weight, muon.init_state(weight)) for i, weight in enumerate(of)]


@torch.no_grad()
def update(muon: Muon, of: list[Slot], scale: Tensor | None = None, gate: Tensor | None = None) -> None:
    muon.update(of, rates=Rates(lr=0.02, weight_decay=0.1), scale=scale, gate=gate)


def reference_weights(steps: int) -> list[np.ndarray]:
    result = [weight.detach().numpy().copy() for weight in weights()]
    buffers = [np.zeros_like(weight) for weight in result]
    for step in range(steps):
        for i, grad in enumerate(gradients(step)):
            g = grad.numpy()
            buffers[i] = 0.95 * buffers[i] + 0.05 * g
            update = reference_newton_schulz(0.05 * g + 0.95 * buffers[i], 5)
            result[i] = result[i] * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(max(g.shape)) * update
    return result


@pytest.mark.parametrize("shape", [(2, 9, 4), (2, 4, 9), (3, 6, 6), (1, 1, 5), (2, 5, 1)])
def test_newton_schulz(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = newton_schulz(matrices, steps=5)
    for matrix, one in zip(matrices, result, strict=True):
        np.testing.assert_allclose(one.numpy(), reference_newton_schulz(matrix.numpy(), 5), atol=1e-12)
    scaled = newton_schulz(matrices, steps=5, scale=0.3)
    torch.testing.assert_close(scaled, 0.3 * newton_schulz(matrices, steps=5), rtol=1e-13, atol=1e-13)
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))


def test_equals_the_reference() -> None:
    muon, ours = Muon(), weights()
    of = slots(ours, muon)
    for step in range(50):
        for weight, grad in zip(ours, gradients(step), strict=True):
            weight.grad = grad
        update(muon, of)
    for weight, expected in zip(ours, reference_weights(50), strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), expected, atol=1e-11)


def test_momentum_of_the_rates_takes_the_place_of_its_own() -> None:
    (usual, other), (ours, theirs) = (Muon(), Muon(momentum=0.8)), (weights(), weights())
    of, reference = slots(ours, usual), slots(theirs, other)
    for step in range(3):
        for mine, its, grad in zip(ours, theirs, gradients(step), strict=True):
            mine.grad, its.grad = grad, grad.clone()
        with torch.no_grad():
            usual.update(of, rates=Rates(0.02, 0.1, momentum=0.8), scale=None, gate=None)
        update(other, reference)
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


def test_agrees_with_torch() -> None:
    muon, ours, theirs = Muon(ns_dtype=torch.bfloat16), weights(torch.float32), weights(torch.float32)
    of = slots(ours, muon)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(10):
        for mine, other, grad in zip(ours, theirs, gradients(step, torch.float32), strict=True):
            mine.grad, other.grad = grad, grad.clone()
        update(muon, of)
        reference.step()
    for mine, other, start in zip(ours, theirs, weights(torch.float32), strict=True):
        moved = (other - start).abs().max()
        assert (mine - other).abs().max() < 0.02 * moved  # bfloat16 keeps 8 bits


def test_update_has_the_root_mean_square_of_adamw() -> None:
    for shape in ((48, 96), (96, 48), (64, 64)):
        weight = nn.Parameter(torch.zeros(shape))
        muon = Muon()
        of = slots([weight], muon)
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        update(muon, of)
        assert 0.14 < weight.detach().square().mean().sqrt() / 0.02 < 0.24


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_gate_0_changes_no_bit(poison: float) -> None:
    muon, ours = Muon(), weights(torch.float32)
    ours[0].data[0, 0] = -0.0
    of = slots(ours, muon)
    for weight, grad in zip(ours, gradients(0, torch.float32), strict=True):
        weight.grad = grad
    update(muon, of)
    ours[0].data[0, 0] = -0.0
    before = [(slot.parameter.detach().clone(), slot.state["momentum_buffer"].clone()) for slot in of]
    for weight, grad in zip(ours, gradients(1, torch.float32), strict=True):
        grad[0, 0] = poison
        weight.grad = grad
    update(muon, of, scale=torch.tensor(0.5), gate=torch.tensor(0.0))
    for slot, (weight, buffer) in zip(of, before, strict=True):
        assert slot.parameter.detach().view(torch.int32).equal(weight.view(torch.int32))
        assert slot.state["momentum_buffer"].view(torch.int32).equal(buffer.view(torch.int32))


def test_scale_and_gate_1() -> None:
    muon, scaled, plain = Muon(), weights(), weights()
    of, reference = slots(scaled, muon), slots(plain, muon)
    for step in range(3):
        factor = torch.tensor(0.37 / (step + 1), dtype=torch.float64)
        for mine, other, grad in zip(scaled, plain, gradients(step), strict=True):
            mine.grad, other.grad = grad.clone(), grad * factor
        update(muon, of, scale=factor, gate=torch.tensor(1.0))
        update(muon, reference)
    assert all(torch.equal(mine, other) for mine, other in zip(scaled, plain, strict=True))


def test_batches_do_not_depend_on_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import kforge_optim.muon as module

    results = []
    for elements in (1, 130, 2**25):
        monkeypatch.setattr(module, "_BATCH_ELEMENTS", elements)
        muon, ours = Muon(), weights()
        of = slots(ours, muon)
        for weight, grad in zip(ours, gradients(0), strict=True):
            weight.grad = grad
        update(muon, of)
        results.append([weight.detach() for weight in ours])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13)


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match=r"not a parameter of shape \(4,\)"):
        Muon().init_state(nn.Parameter(torch.zeros(4)))
    with pytest.raises(ValueError, match="steps = 0 must be at least 1"):
        newton_schulz(torch.eye(2)[None], steps=0)
    with pytest.raises(ValueError, match="muon_ns_dtype = 'float8'"):
        OptimConfig(muon_ns_dtype="float8")


def test_ns_dtype_is_heeded() -> None:
    moved = []
    for dtype in ("float32", "bfloat16"):
        model = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(model.weight)
        model.weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
        build_optimizer(model, OptimConfig(name="muon", muon_ns_dtype=dtype), 10).step()
        moved.append(model.weight.detach())
    difference = (moved[0] - moved[1]).abs().max() / moved[0].abs().max()
    assert 1e-4 < difference < 5e-2


PLACEMENTS: dict[str, Any] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
    "rows, columns": [Shard(0), Shard(1)],
    "rows, rows": [Shard(0), Shard(0)],
    "replicated, rows": [Replicate(), Shard(0)],
}


def _laid_out(rank: int, world: int, layouts: list[str], dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Three steps of Muon on DTensors; returns the whole weights by layout."""
    return {layout: _three_steps(world, PLACEMENTS[layout], dtype) for layout in layouts}


def _three_steps(world: int, placements: list[Any], dtype: torch.dtype) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world,) if len(placements) == 1 else (2, world // 2))
    muon = Muon()
    ours = [nn.Parameter(distribute_tensor(weight.detach(), mesh, placements)) for weight in weights(dtype)]
    of = slots(ours, muon)
    for step in range(3):
        for weight, grad in zip(ours, gradients(step, dtype), strict=True):
            weight.grad = distribute_tensor(grad, mesh, placements)
        update(muon, of, gate=torch.tensor(1.0))
    assert all(slot.state["momentum_buffer"].placements == tuple(placements) for slot in of)
    return [weight.detach().full_tensor() for weight in ours]


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, ["rows", "replicated"]),
        (3, ["rows", "columns"]),
        (4, ["rows, columns", "rows, rows", "replicated, rows"]),
    ],
)
def test_c23_whole_matrix_under_any_sharding(world: int, layouts: list[str]) -> None:
    expected = reference_weights(3)
    for result in run_ranks(_laid_out, world, layouts, torch.float64):
        for layout in layouts:
            for weight, whole in zip(result[layout], expected, strict=True):
                np.testing.assert_allclose(weight.numpy(), whole, atol=1e-12, err_msg=layout)


def test_c23_float32() -> None:
    for result in run_ranks(_laid_out, 3, ["rows"], torch.float32):
        for weight, whole in zip(result["rows"], reference_weights(3), strict=True):
            np.testing.assert_allclose(weight.numpy(), whole, atol=1e-5)


def _collectives(rank: int, world: int) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world,))
    muon = Muon()
    square = [nn.Parameter(distribute_tensor(torch.eye(6), mesh, [Shard(0)])) for _ in range(5)]
    of = slots(square, muon)
    for weight in square:
        weight.grad = distribute_tensor(torch.eye(6), mesh, [Shard(0)])
    with CommDebugMode() as seen:
        update(muon, of, gate=torch.tensor(1.0))
    return {str(collective): count for collective, count in seen.get_comm_counts().items()}


def test_five_matrices_of_one_shape_take_one_gather_and_nothing_else() -> None:
    for counts in run_ranks(_collectives, 2):
        assert list(counts.values()) == [1]
        assert "all_gather" in next(iter(counts))


# Weights that hold several matrices


class Several(nn.Module):
    """Query, key and value of 4 groups of 2 query heads; gate and up; 3 experts; query and key one under the other; two
    matrices side by side; one matrix by heads; a plain one."""

    fused_weights: ClassVar = {
        "wqkv": (1, (2, 1, 1)),
        "w_gate_up": (0, (1, 1)),
        "wqk": (0, (12, 4)),
        "beside": (1, (5, 3)),
        "by_head": (0, (4,)),
    }

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {
            "wqkv": (4, 4, 4, 8),
            "w_gate_up": (2, 12, 8),
            "experts": (3, 8, 4),
            "wqk": (16, 8),
            "beside": (4, 8),
            "by_head": (4, 4, 8),
            "plain": (12, 8),
        }
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, share: float, step: int) -> Tensor:
        """Half the squared distance to a target of the step, times ``share``; over all ranks shares add up to 1."""
        total = torch.zeros((), dtype=torch.float64)
        for i, weight in enumerate(self.parameters()):
            loss = ((weight - math.cos(i + step)) ** 2 * (i + 1)).sum() * (share / 2)
            total = total + (loss.full_tensor() if isinstance(loss, DTensor) else loss)
        return total


def matrices_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices in the weights of `Several`, written out one by one."""
    qkv, gate_up, experts = tensors["wqkv"], tensors["w_gate_up"], tensors["experts"]
    return {
        "q": qkv[:, :2].reshape(32, 8),
        "k": qkv[:, 2].reshape(16, 8),
        "v": qkv[:, 3].reshape(16, 8),
        "gate": gate_up[0],
        "up": gate_up[1],
        **{f"expert {i}": experts[i] for i in range(3)},
        "upper": tensors["wqk"][:12],
        "lower": tensors["wqk"][12:],
        "left": tensors["beside"][:, :5],
        "right": tensors["beside"][:, 5:],
        "heads": tensors["by_head"].reshape(16, 8),
        "plain": tensors["plain"],
    }


SEVERAL = OptimConfig(name="muon", lr=0.02, schedule="none")


def train_several(model: nn.Module, optimizer: Optimizer, steps: range, share: float = 1.0) -> None:
    for step in steps:
        model(share, step).backward()
        optimizer.step(scale=torch.tensor(0.7, dtype=torch.float64), gate=torch.tensor(1.0))
        optimizer.zero_grad()


def flat_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Whole weights and momenta by name, copied."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, kinds in optimizer.state_dict()["state"].items():
        assert list(kinds) == ["momentum_buffer"]
        tensors[f"{name}:momentum"] = kinds["momentum_buffer"]
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()}


def several_in_one_process(steps: int) -> dict[str, Tensor]:
    model = Several()
    optimizer = build_optimizer(model, SEVERAL, 10)
    train_several(model, optimizer, range(steps))
    return flat_state(model, optimizer)


def test_each_matrix_of_a_weight_is_updated_as_if_alone() -> None:
    model = Several()
    optimizer = build_optimizer(model, SEVERAL, 10)
    apart = nn.ParameterDict({n: m.detach().clone() for n, m in matrices_of(dict(model.named_parameters())).items()})
    reference = build_optimizer(apart, SEVERAL, 10)
    assert [(group.name, group.algorithm) for group in optimizer.groups] == [("matrices", "muon")]
    for step in range(4):
        model(1.0, step).backward()
        for name, grad in matrices_of({n: p.grad for n, p in model.named_parameters()}).items():
            apart[name].grad = grad.clone()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    moved = matrices_of({name: parameter.detach() for name, parameter in model.named_parameters()})
    momenta = matrices_of({name: kinds["momentum_buffer"] for name, kinds in optimizer.state_dict()["state"].items()})
    for name, matrix in apart.items():
        torch.testing.assert_close(moved[name], matrix.detach(), rtol=0, atol=1e-12, msg=name)
        expected = reference.state_dict()["state"][name]["momentum_buffer"]
        torch.testing.assert_close(momenta[name], expected, rtol=0, atol=1e-12, msg=name)


def test_parts_of_one_shape_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import kforge_optim.muon as module

    seen: list[tuple[int, ...]] = []

    def spy(matrices: Tensor, **options: Any) -> Tensor:
        seen.append(tuple(matrices.shape))
        return newton_schulz(matrices, **options)

    monkeypatch.setattr(module, "newton_schulz", spy)
    muon = Muon()
    of = [Slot(f"p{i}", nn.Parameter(torch.ones(2, 4, 3, 5)), fused=(1, (2, 1, 1))) for i in range(3)]
    of += [Slot(f"experts {i}", nn.Parameter(torch.ones(2, 4, 3, 5))) for i in range(2)]
    for slot in of:
        slot.state = muon.init_state(slot.parameter)
        slot.parameter.grad = torch.ones(2, 4, 3, 5)
    update(muon, of)
    assert seen == [(3, 12, 5), (6, 6, 5), (16, 3, 5)]


def test_fused_gate_0_and_split_storage() -> None:
    model, halves = Several(torch.float32), Several(torch.bfloat16)
    fp32, split = build_optimizer(model, SEVERAL, 10), build_optimizer(halves, SEVERAL, 10, storage="split")
    split.load_full_weights(model.named_parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(model.parameters(), halves.parameters(), strict=True):
            other.grad = torch.randn(one.shape, generator=generator).to(torch.bfloat16)
            if step == 2:
                other.grad.view(-1)[1] = math.nan
            one.grad = other.grad.to(torch.float32)
        before = flat_state(model, fp32)
        gate = torch.tensor(float(step != 2))
        fp32.step(gate=gate)
        split.step(gate=gate)
        after = flat_state(model, fp32)
        assert all(torch.equal(after[name], before[name]) == (step == 2) for name in before)
        for name, weight in model.named_parameters():
            assert torch.equal(split.full_weight(name), weight), name


Layout = tuple[int, int, int, int, int]  # dp_replicate, dp_shard, tp, and the dimensions that dp_shard and tp cut


def laid_out(layout: Layout) -> tuple[nn.Module, Optimizer, float]:
    replicate, shard, tp, shard_dim, tp_dim = layout
    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = Several()
    if tp > 1:
        for name, weight in list(model.named_parameters()):
            placement = Shard(min(tp_dim, weight.ndim - 1))
            setattr(model, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["tp"], [placement])))
    if replicate * shard > 1:
        fully_shard(
            model,
            mesh=mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"],
            shard_placement_fn=lambda parameter: Shard(min(shard_dim, parameter.ndim - 1)),
        )
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model, build_optimizer(model, SEVERAL, 10), 1 / (replicate * shard)


def _several_laid_out(rank: int, world: int, layouts: list[Layout]) -> list[dict[str, Tensor]]:
    """Two steps in each layout, a third in the next one, from the first one's weights and state."""
    results = []
    for layout, following in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        model, optimizer, share = laid_out(layout)
        train_several(model, optimizer, range(2), share)
        for name, parameter in model.named_parameters():
            assert optimizer.state_dict()["state"][name]["momentum_buffer"].placements == parameter.placements
        resumed, other, share = laid_out(following)
        other.load_full_weights({name: parameter.detach() for name, parameter in model.named_parameters()})
        other.load_state_dict(optimizer.state_dict())
        train_several(resumed, other, range(2, 3), share)
        results.append(flat_state(resumed, other))
    return results


LAYOUTS: list[list[Layout]] = [
    [(1, 4, 1, dim, 0) for dim in range(4)] + [(2, 2, 1, dim, 0) for dim in range(4)] + [(1, 1, 4, 0, 2)],
    [(1, 2, 2, dim, tp_dim) for dim in range(4) for tp_dim in (dim, (dim + 1) % 4)],
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["one dimension", "two dimensions"])
def test_law_1_several_matrices_under_any_sharding(layouts: list[Layout]) -> None:
    expected = several_in_one_process(3)
    for results in run_ranks(_several_laid_out, 4, layouts):
        for layout, result in zip(layouts, results, strict=True):
            assert result.keys() == expected.keys()
            for name, tensor in expected.items():
                difference = float((result[name] - tensor).abs().max())
                assert difference <= 1e-10 * float(tensor.abs().max()), (layout, name, difference)


def _several_gathers(rank: int, world: int) -> list[int]:
    """Gathers of a step for three weights each of: fused; experts cut by expert, by row; by both, on two dimensions."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    counts = []
    for mesh, placements, fused in (
        (flat, [Shard(0)], (1, (2, 1, 1))),
        (flat, [Shard(0)], None),
        (flat, [Shard(2)], None),
        (square, [Shard(0), Shard(2)], None),
        (square, [Shard(0), Shard(1)], None),
    ):
        muon, of = Muon(), []
        for i in range(3):
            value = torch.randn(4, 4, 4, 6, generator=torch.Generator().manual_seed(i))
            weight = nn.Parameter(distribute_tensor(value, mesh, placements))
            weight.grad = distribute_tensor(value, mesh, placements)
            of.append(Slot(f"p{i}", weight, muon.init_state(weight), fused=fused))
        with CommDebugMode() as seen:
            update(muon, of)
        assert all("all_gather" in str(collective) for collective in seen.get_comm_counts())
        counts.append(seen.get_total_counts())
    return counts


def test_one_gather_a_batch_and_none_for_whole_experts() -> None:
    assert run_ranks(_several_gathers, 4) == [[1, 0, 1, 1, 0]] * 4
