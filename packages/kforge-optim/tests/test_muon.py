from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from kforge_optim import Muon, OptimConfig, Slot, build_optimizer, newton_schulz
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
    muon.update(of, lr=0.02, weight_decay=0.1, scale=scale, gate=gate)


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
