from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import kforge_optim.muon as module
from kforge_optim import Muon, OptimConfig, Optimizer, Rates, Slot, build_optimizer
from kforge_optim._torch import laid_out as on_mesh
from kforge_optim.orthogonal import METHODS, NEWTON_SCHULZ, POLAR_EXPRESS
from kforge_optim.sharding import local
from kforge_testing import run_ranks

SHAPES = [(10, 6), (6, 10), (7, 7), (10, 6), (1, 5), (5, 1), (6, 10)]


def reference_newton_schulz(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Jordan's polynomial on the singular values, through an SVD instead of products of matrices."""
    return through_polynomials(matrix, [NEWTON_SCHULZ] * steps, 1.0)


def through_polynomials(matrix: np.ndarray, polynomials: list[tuple[float, float, float]], margin: float) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / max(margin * np.sqrt((s**2).sum()), 1e-7)
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
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


def reference_weights(
    steps: int, method: str = "newton_schulz", scale: str = "rms", variance_beta: float | None = None
) -> list[np.ndarray]:
    result = [weight.detach().numpy().copy() for weight in weights()]
    buffers = [np.zeros_like(weight) for weight in result]
    variances = [np.zeros((len(weight), 1)) for weight in result]
    for step in range(steps):
        for i, grad in enumerate(gradients(step)):
            g, (rows, columns) = grad.numpy(), grad.shape
            buffers[i] = 0.95 * buffers[i] + 0.05 * g
            nesterov = 0.05 * g + 0.95 * buffers[i]
            if method == "polar_express":
                update = through_polynomials(nesterov, list(POLAR_EXPRESS[:5]), 1.01)
            else:
                update = reference_newton_schulz(nesterov, 5)
            if variance_beta is not None:
                square = (update**2).mean(axis=1, keepdims=True)
                variances[i] = variance_beta * variances[i] + (1 - variance_beta) * square
                update = update / (np.sqrt(variances[i]) + 1e-8)
                update = update * math.sqrt(min(rows, columns)) / np.linalg.norm(update)
            factor = 0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else math.sqrt(max(1, rows / columns))
            result[i] = result[i] * (1 - 0.02 * 0.1) - 0.02 * factor * update
    return result


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": "original"},
    {"method": "polar_express"},
    {"variance_beta": 0.9},
    {"variance_beta": 0.9, "scale": "original", "method": "polar_express"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_reference(options: dict[str, Any]) -> None:
    muon, ours = Muon(**options), weights()
    of = slots(ours, muon)
    for step in range(50):
        for weight, grad in zip(ours, gradients(step), strict=True):
            weight.grad = grad
        update(muon, of)
    for weight, expected in zip(ours, reference_weights(50, **options), strict=True):
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


@pytest.mark.parametrize(("scale", "theirs_called"), [("rms", "match_rms_adamw"), ("original", "original")])
def test_agrees_with_torch(scale: str, theirs_called: str) -> None:
    muon, ours, theirs = Muon(ns_dtype=torch.bfloat16, scale=scale), weights(torch.float32), weights(torch.float32)
    of = slots(ours, muon)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=theirs_called)
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


@pytest.mark.parametrize("variance_beta", [None, 0.9])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_gate_0_changes_no_bit(poison: float, variance_beta: float | None) -> None:
    muon, ours = Muon(variance_beta=variance_beta), weights(torch.float32)
    ours[0].data[0, 0] = -0.0
    of = slots(ours, muon)
    for weight, grad in zip(ours, gradients(0, torch.float32), strict=True):
        weight.grad = grad
    update(muon, of)
    ours[0].data[0, 0] = -0.0
    before = [[slot.parameter.detach().clone(), *(kept.clone() for kept in slot.state.values())] for slot in of]
    for weight, grad in zip(ours, gradients(1, torch.float32), strict=True):
        grad[0, 0] = poison
        weight.grad = grad
    update(muon, of, scale=torch.tensor(0.5), gate=torch.tensor(0.0))
    for slot, kept in zip(of, before, strict=True):
        for tensor, old in zip([slot.parameter.detach(), *slot.state.values()], kept, strict=True):
            assert tensor.view(torch.int32).equal(old.view(torch.int32))


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
    for field, value in {
        "muon_ns_dtype": "float8",
        "muon_method": "svd",
        "muon_scale": "none",
        "muon_variance_beta": 1.0,
    }.items():
        with pytest.raises(ValueError, match=f"{field} = {value!r}"):
            OptimConfig(**{field: value})


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


LAID_OUT: list[dict[str, Any]] = [{}, {"variance_beta": 0.9}]


def _laid_out(rank: int, world: int, layouts: list[str], dtype: torch.dtype) -> dict[tuple[str, str], list[Tensor]]:
    """Three steps of Muon on DTensors, in buckets of two or three matrices; returns the whole weights."""
    module._BATCH_ELEMENTS = 130
    return {
        (layout, str(options)): _three_steps(world, PLACEMENTS[layout], dtype, options)
        for layout in layouts
        for options in LAID_OUT
    }


def _three_steps(world: int, placements: list[Any], dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (world,) if len(placements) == 1 else (2, world // 2))
    muon = Muon(**options)
    ours = [nn.Parameter(distribute_tensor(weight.detach(), mesh, placements)) for weight in weights(dtype)]
    of = slots(ours, muon)
    for step in range(3):
        for weight, grad in zip(ours, gradients(step, dtype), strict=True):
            weight.grad = distribute_tensor(grad, mesh, placements)
        update(muon, of, gate=torch.tensor(1.0))
    for slot in of:
        assert slot.state["momentum_buffer"].placements == tuple(placements)
        if muon.variance_beta is not None:
            rows = [Replicate() if placement == Shard(1) else placement for placement in placements]
            assert slot.state["row_variance"].placements == tuple(rows)
            assert slot.state["row_variance"].shape == (slot.parameter.shape[0], 1)
            assert (slot.state["row_variance"].full_tensor() > 0).all()
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
    expected = {str(options): reference_weights(3, **options) for options in LAID_OUT}
    for result in run_ranks(_laid_out, world, layouts, torch.float64):
        assert len(result) == len(layouts) * len(expected)
        for (layout, options), found in result.items():
            for weight, whole in zip(found, expected[options], strict=True):
                np.testing.assert_allclose(weight.numpy(), whole, atol=1e-12, err_msg=f"{layout} {options}")


def test_c23_float32() -> None:
    expected = {str(options): reference_weights(3, **options) for options in LAID_OUT}
    for result in run_ranks(_laid_out, 3, ["rows"], torch.float32):
        for (_, options), found in result.items():
            for weight, whole in zip(found, expected[options], strict=True):
                np.testing.assert_allclose(weight.numpy(), whole, atol=2e-5)


def _in_bfloat16(rank: int, world: int) -> list[list[Tensor]]:
    """Weights and variances of rows after three steps on shards whose updates travel in bfloat16; the same unsharded.
    Columns of 5 over 3 ranks: pieces of odd lengths lie between the halves of float32 numbers."""
    mesh, results = init_device_mesh("cpu", (world,)), []
    for placements in ([Shard(0)], [Shard(1)], None):
        muon = Muon(ns_dtype=torch.bfloat16, variance_beta=0.9)

        def cut(value: Tensor, placements: Any = placements) -> Tensor:
            return value if placements is None else distribute_tensor(value, mesh, placements)

        of = slots([nn.Parameter(cut(weight.detach())) for weight in weights(torch.float32)], muon)
        for step in range(3):
            for slot, grad in zip(of, gradients(step, torch.float32), strict=True):
                slot.parameter.grad = cut(grad)
            update(muon, of, gate=torch.tensor(1.0))
        tensors = [t for slot in of for t in (slot.parameter.detach(), slot.state["row_variance"])]
        results.append([t if placements is None else t.full_tensor() for t in tensors])
    return results


def test_variances_travel_in_full_beside_bfloat16_updates() -> None:
    for rows, columns, whole in run_ranks(_in_bfloat16, 3):
        for by_row, by_column, right in zip(rows, columns, whole, strict=True):
            torch.testing.assert_close(by_row, right, rtol=0.03, atol=1e-4)
            torch.testing.assert_close(by_column, right, rtol=0.03, atol=1e-4)


def _collectives(rank: int, world: int) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world,))
    muon = Muon(variance_beta=0.9)
    square = [nn.Parameter(distribute_tensor(torch.eye(6), mesh, [Shard(0)])) for _ in range(5)]
    of = slots(square, muon)
    for weight in square:
        weight.grad = distribute_tensor(torch.eye(6), mesh, [Shard(0)])
    with CommDebugMode() as seen:
        update(muon, of, gate=torch.tensor(1.0))
    return {str(collective): count for collective, count in seen.get_comm_counts().items()}


def test_matrices_go_to_their_owners_and_back_in_one_exchange_each_way() -> None:
    assert run_ranks(_collectives, 3) == [{"c10d.alltoall_base_": 2}] * 3


def _order(rank: int, world: int) -> str:
    """Exchanges that begin (x) and batches that are orthogonalised (o), in their order; a matrix a bucket and rank."""
    seen: list[str] = []
    begin, newton_schulz = dist.all_to_all_single, METHODS["newton_schulz"]

    def exchange(*args: Any, **options: Any) -> Any:
        seen.append("x")
        assert options["async_op"]
        return begin(*args, **options)

    def orthogonalise(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
        seen.append("o")
        return newton_schulz(matrices, steps=steps, scale=scale)

    dist.all_to_all_single, METHODS["newton_schulz"] = exchange, orthogonalise
    module._BATCH_ELEMENTS = 1
    mesh, muon = init_device_mesh("cpu", (world,)), Muon()
    of = slots([nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Shard(0)])) for _ in range(2 * 3)], muon)
    for slot in of:
        slot.parameter.grad = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    update(muon, of)
    return "".join(seen)


def test_a_bucket_travels_while_the_one_before_is_orthogonalised() -> None:
    """The first two go out before the first is worked on; a result's way back begins after the next way out."""
    assert run_ranks(_order, 2) == ["xxoxxoxox"] * 2


COUNTED = [(8, 8)] * 5 + [(24, 8), (8, 24), (40, 16), (3, 4, 6), (2, 2), (1, 30)]
"""Shapes of weights; the one of three dimensions is three matrices."""


def _counted(rank: int, world: int, shape: tuple[int, ...], placements: list[Any]) -> list[tuple[int, int]]:
    """The matrices [R,C] that this rank orthogonalises in a step."""
    seen: list[tuple[int, int]] = []

    def spy(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
        seen.extend([(matrices.shape[-2], matrices.shape[-1])] * len(matrices))
        return scale * matrices

    METHODS["newton_schulz"] = spy
    module._BATCH_ELEMENTS = 300
    mesh, muon = init_device_mesh("cpu", shape), Muon()
    of = []
    for i, size in enumerate(COUNTED):
        value = torch.ones(size)
        cut = [Shard(placement.dim + value.ndim - 2) if placement.is_shard() else placement for placement in placements]
        weight = nn.Parameter(distribute_tensor(value, mesh, cut))
        weight.grad = distribute_tensor(value, mesh, cut)
        of.append(Slot(f"p{i}", weight, muon.init_state(weight)))
    update(muon, of)
    for slot, size in zip(of, COUNTED, strict=True):
        whole, factor = slot.parameter.detach().full_tensor(), 0.2 * math.sqrt(max(size[-2:]))
        torch.testing.assert_close(whole, torch.full(size, 1 - 0.02 * 0.1 - 0.02 * factor * (0.05 + 0.95 * 0.05)))
    return seen


@pytest.mark.parametrize(
    ("shape", "placements", "groups"),
    [
        ((4,), [Shard(0)], [[0, 1, 2, 3]]),
        ((2, 2), [Shard(0), Shard(1)], [[0, 1, 2, 3]]),
        ((2, 2), [Replicate(), Shard(0)], [[0, 1], [2, 3]]),
    ],
    ids=["rows", "rows, columns", "replicas"],
)
def test_each_matrix_is_orthogonalised_once_in_its_group(
    shape: tuple[int, ...], placements: list[Any], groups: list[list[int]]
) -> None:
    ranks = run_ranks(_counted, 4, shape, placements)
    expected = sorted(size for each in COUNTED for size in [each[-2:]] * (each[0] if len(each) == 3 else 1))
    costs = [rows * columns * min(rows, columns) for rows, columns in expected]
    for group in groups:
        assert sorted(matrix for rank in group for matrix in ranks[rank]) == expected
        loads = [sum(rows * columns * min(rows, columns) for rows, columns in ranks[rank]) for rank in group]
        assert max(loads) <= sum(costs) / len(group) + max(costs)
        assert max(loads) < 0.75 * sum(costs)  # the largest matrix alone has 0.6 of the work


# Weights that hold several matrices


class Several(nn.Module):
    """Query, key and value of 4 groups of 2 query heads; gate and up; 3 experts; query and key one under the other; two
    matrices side by side, if asked for; one matrix by heads; a plain one."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, beside: bool = True) -> None:
        super().__init__()
        self.fused_weights = {
            "wqkv": (1, (2, 1, 1)),
            "w_gate_up": (0, (1, 1)),
            "wqk": (0, (12, 4)),
            "by_head": (0, (4,)),
        }
        if beside:
            self.fused_weights["beside"] = (1, (5, 3))
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
        if not beside:
            del shapes["beside"]
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
    beside = tensors.get("beside")
    return {
        "q": qkv[:, :2].reshape(32, 8),
        "k": qkv[:, 2].reshape(16, 8),
        "v": qkv[:, 3].reshape(16, 8),
        "gate": gate_up[0],
        "up": gate_up[1],
        **{f"expert {i}": experts[i] for i in range(3)},
        "upper": tensors["wqk"][:12],
        "lower": tensors["wqk"][12:],
        **({"left": beside[:, :5], "right": beside[:, 5:]} if beside is not None else {}),
        "heads": tensors["by_head"].reshape(16, 8),
        "plain": tensors["plain"],
    }


SEVERAL = OptimConfig(name="muon", lr=0.02, schedule="none")
VARIANCE = OptimConfig(name="muon", lr=0.02, schedule="none", muon_variance_beta=0.9)


def several(config: OptimConfig, dtype: torch.dtype = torch.float64) -> Several:
    """Rows of matrices side by side have no variance each."""
    return Several(dtype, beside=config.muon_variance_beta is None)


def train_several(model: nn.Module, optimizer: Optimizer, steps: range, share: float = 1.0) -> None:
    for step in steps:
        model(share, step).backward()
        optimizer.step(scale=torch.tensor(0.7, dtype=torch.float64), gate=torch.tensor(1.0))
        optimizer.zero_grad()


def flat_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Whole weights, momenta and variances of rows by name, copied."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, kinds in optimizer.state_dict()["state"].items():
        assert list(kinds) in (["momentum_buffer"], ["momentum_buffer", "row_variance"])
        tensors |= {f"{name}:{kind}": tensor for kind, tensor in kinds.items()}
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()}


def several_in_one_process(steps: int, config: OptimConfig) -> dict[str, Tensor]:
    model = several(config)
    optimizer = build_optimizer(model, config, 10)
    train_several(model, optimizer, range(steps))
    return flat_state(model, optimizer)


@pytest.mark.parametrize("config", [SEVERAL, VARIANCE], ids=["plain", "variance"])
def test_each_matrix_of_a_weight_is_updated_as_if_alone(config: OptimConfig) -> None:
    model = several(config)
    optimizer = build_optimizer(model, config, 10)
    apart = nn.ParameterDict({n: m.detach().clone() for n, m in matrices_of(dict(model.named_parameters())).items()})
    reference = build_optimizer(apart, config, 10)
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
    if config is VARIANCE:
        variances = {name: kinds["row_variance"] for name, kinds in optimizer.state_dict()["state"].items()}
        upper, lower = variances["wqk"].split([12, 4])
        for name, part in {"upper": upper, "lower": lower, "q": variances["wqkv"][:, :2].reshape(32, 1)}.items():
            expected = reference.state_dict()["state"][name]["row_variance"]
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-12, msg=name)


def test_rows_of_matrices_side_by_side_have_no_variance() -> None:
    model = Several()
    with pytest.raises(ValueError, match=r"'beside' holds matrices side by side, .* leave muon_variance_beta out"):
        train_several(model, build_optimizer(model, VARIANCE, 10), range(1))


def test_parts_of_one_shape_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    newton_schulz = METHODS["newton_schulz"]

    def spy(matrices: Tensor, *, steps: int = 5, scale: float = 1.0) -> Tensor:
        seen.append(tuple(matrices.shape))
        return newton_schulz(matrices, steps=steps, scale=scale)

    monkeypatch.setitem(METHODS, "newton_schulz", spy)
    muon = Muon()
    of = [Slot(f"p{i}", nn.Parameter(torch.ones(2, 4, 3, 5)), fused=(1, (2, 1, 1))) for i in range(3)]
    of += [Slot(f"experts {i}", nn.Parameter(torch.ones(2, 4, 3, 5))) for i in range(2)]
    for slot in of:
        slot.state = muon.init_state(slot.parameter)
        slot.parameter.grad = torch.ones(2, 4, 3, 5)
    update(muon, of)
    assert sorted(seen) == [(3, 12, 5), (6, 6, 5), (16, 3, 5)]


@pytest.mark.parametrize("config", [SEVERAL, VARIANCE], ids=["plain", "variance"])
def test_fused_gate_0_and_split_storage(config: OptimConfig) -> None:
    model, halves = several(config, torch.float32), several(config, torch.bfloat16)
    fp32, split = build_optimizer(model, config, 10), build_optimizer(halves, config, 10, storage="split")
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


def laid_out(layout: Layout, config: OptimConfig) -> tuple[nn.Module, Optimizer, float]:
    replicate, shard, tp, shard_dim, tp_dim = layout
    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = several(config)
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
    return model, build_optimizer(model, config, 10), 1 / (replicate * shard)


def _several_laid_out(rank: int, world: int, layouts: list[Layout], config: OptimConfig) -> list[dict[str, Tensor]]:
    """Two steps in each layout, a third in the next one, from the first one's weights and state; small buckets."""
    module._BATCH_ELEMENTS = 200
    results = []
    for layout, following in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        model, optimizer, share = laid_out(layout, config)
        train_several(model, optimizer, range(2), share)
        for name, parameter in model.named_parameters():
            assert optimizer.state_dict()["state"][name]["momentum_buffer"].placements == parameter.placements
        resumed, other, share = laid_out(following, config)
        other.load_full_weights({name: parameter.detach() for name, parameter in model.named_parameters()})
        other.load_state_dict(optimizer.state_dict())
        train_several(resumed, other, range(2, 3), share)
        results.append(flat_state(resumed, other))
    return results


LAYOUTS: list[list[Layout]] = [
    [(1, 4, 1, dim, 0) for dim in range(4)] + [(2, 2, 1, dim, 0) for dim in range(4)] + [(1, 1, 4, 0, 2)],
    [(1, 2, 2, dim, tp_dim) for dim in range(4) for tp_dim in (dim, (dim + 1) % 4)],
]


@pytest.mark.parametrize("config", [SEVERAL, VARIANCE], ids=["plain", "variance"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=["one dimension", "two dimensions"])
def test_law_1_several_matrices_under_any_sharding(layouts: list[Layout], config: OptimConfig) -> None:
    expected = several_in_one_process(3, config)
    for results in run_ranks(_several_laid_out, 4, layouts, config):
        for layout, result in zip(layouts, results, strict=True):
            assert result.keys() == expected.keys()
            for name, tensor in expected.items():
                difference = float((result[name] - tensor).abs().max())
                assert difference <= 1e-10 * float(tensor.abs().max()), (layout, name, difference)


def _several_exchanges(rank: int, world: int) -> list[int]:
    """Exchanges of a step for three weights each of: fused; experts cut by expert, by row; by both, on two dimensions;
    by row and column."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    counts = []
    for mesh, placements, fused in (
        (flat, [Shard(0)], (1, (2, 1, 1))),
        (flat, [Shard(0)], None),
        (flat, [Shard(2)], None),
        (square, [Shard(0), Shard(2)], None),
        (square, [Shard(0), Shard(1)], None),
        (square, [Shard(2), Shard(3)], None),
    ):
        muon, of = Muon(), []
        for i in range(3):
            value = torch.randn(4, 4, 4, 6, generator=torch.Generator().manual_seed(i))
            weight = nn.Parameter(distribute_tensor(value, mesh, placements))
            weight.grad = distribute_tensor(value, mesh, placements)
            of.append(Slot(f"p{i}", weight, muon.init_state(weight), fused=fused))
        with CommDebugMode() as seen:
            update(muon, of)
        assert all("alltoall" in str(collective) for collective in seen.get_comm_counts())
        counts.append(seen.get_total_counts())
    return counts


def test_one_exchange_a_mesh_dimension_each_way_and_none_for_whole_experts() -> None:
    assert run_ranks(_several_exchanges, 4) == [[2, 0, 2, 2, 0, 4]] * 4


def _devices_of_states(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    shard = torch.empty(4, 6, device="meta")  # not where the mesh is, as shards that are kept off it
    weight = nn.Parameter(on_mesh(shard, mesh, [Shard(0)], torch.Size((8, 6)), (6, 1)), requires_grad=False)
    state = Muon(variance_beta=0.9).init_state(weight)
    assert state["row_variance"].placements == (Shard(0),) and state["row_variance"].shape == (8, 1)
    return [local(tensor).device.type for tensor in state.values()]


def test_state_lies_where_the_weights_do() -> None:
    assert run_ranks(_devices_of_states, 2) == [["meta", "meta"]] * 2
