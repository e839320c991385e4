from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from kforge_optim import Group, clip
from kforge_testing import run_ranks

NORMS = (1.0, 2.0, 3.0, math.inf)


def with_gradient(grad: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad) if grad is not None else torch.zeros(2))
    parameter.grad = grad
    return parameter


def reference(grads: list[Tensor], p: float) -> float:
    flat = torch.cat([grad.flatten().double() for grad in grads])
    return float(flat.abs().max() if math.isinf(p) else (flat.abs() ** p).sum() ** (1 / p))


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=5))
def test_one_process(values: list[list[float]]) -> None:
    grads = [torch.tensor(value, dtype=torch.float64) for value in values]
    for p in NORMS:
        norm = clip.total_norm([with_gradient(grad) for grad in grads], norm_type=p)
        assert norm.dtype == torch.float64 and norm.shape == ()
        assert float(norm) == pytest.approx(reference(grads, p), rel=1e-12)


def test_tied_once_without_gradient_skipped_and_nothing_at_all() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"].weight.grad = torch.full((2, 2), 2.0)
    weight = model["a"].weight
    for given_as in (model, model.named_parameters(remove_duplicate=False), [weight, weight, with_gradient(None)]):
        norm = clip.total_norm(given_as)
        assert norm == 4.0 and norm.dtype == torch.float32
    for p in NORMS:
        assert clip.total_norm([], norm_type=p) == 0
        assert clip.total_norm([with_gradient(None)], norm_type=p) == 0


def test_bad_arguments() -> None:
    for p in (0, -1, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            clip.total_norm([], norm_type=p)
    with pytest.raises(ValueError, match="stages = 2 does not divide"):
        clip.total_norm([], stages=2)
    with pytest.raises(ValueError, match="clip_norm = -1"):
        clip.clip_factor(torch.tensor(1.0), -1)


def test_factor_equals_torch() -> None:
    for norm in (0.0, 0.3, 1.0, 1.0 + 1e-6, 5.0, 1e30):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.tensor([norm], dtype=torch.float64)
        factor = clip.clip_factor(clip.total_norm([parameter]), 1.0)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        assert factor * norm == pytest.approx(float(parameter.grad), rel=1e-12)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_c42_norm_is_seen_and_factor_is_1(poison: float) -> None:
    norm = clip.total_norm([with_gradient(torch.tensor([1.0, poison])), with_gradient(torch.ones(3))])
    assert math.isnan(norm) if math.isnan(poison) else norm == math.inf
    for max_norm in (0.0, 1.0):
        assert clip.clip_factor(norm, max_norm) == 1.0


def test_values_are_clipped_in_place() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    grad = model["a"].weight.grad = torch.tensor([[-3.0, 0.5], [math.inf, math.nan]])
    clip.clip_values_(model, 0.0)
    assert grad[0, 0] == -3 and grad[1, 0] == math.inf
    for given_as in (model, model.named_parameters(remove_duplicate=False), [model["a"].weight, with_gradient(None)]):
        clip.clip_values_(given_as, 2.0)
        assert grad.nan_to_num(nan=9.0).tolist() == [[-2.0, 0.5], [2.0, 9.0]]
    clip.clip_values_(model, 0.5, scale=torch.tensor(2.0))
    assert grad.nan_to_num(nan=9.0).tolist() == [[-1.0, 0.5], [1.0, 9.0]]
    for value in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"clip_value = .* must not be negative"):
            clip.clip_values_(model, value)


def test_value_clipping_that_is_off_does_not_look_at_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("gradients were read")

    monkeypatch.setattr(clip, "local_gradient", never)
    clip.clip_values_([with_gradient(torch.ones(2))], 0.0)
    with pytest.raises(AssertionError, match="were read"):
        clip.clip_values_([with_gradient(torch.ones(2))], 1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4)), max_size=6))
def test_norms_of_groups_in_one_process(values: list[tuple[int, list[float]]]) -> None:
    parameters = [(row, with_gradient(torch.tensor(value, dtype=torch.float64))) for row, value in values]
    groups = [
        Group(name, "adamw", 1.0, 0.0, {str(i): p for i, (of, p) in enumerate(parameters) if of == row})
        for row, name in enumerate(["first", "second"])
    ]  # those of row 2 are in no group
    for p in NORMS:
        total, norms = clip.total_norm([p for _, p in parameters], norm_type=p, also=groups, device="cpu")
        grads = [(row, parameter.grad) for row, parameter in parameters if parameter.grad is not None]
        for row, norm in ((None, total), (0, norms["first"]), (1, norms["second"])):
            mine = [grad for of, grad in grads if row in (None, of)]
            assert float(norm) == pytest.approx(reference(mine, p) if mine else 0.0, rel=1e-12)


def _gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"dense": (6, 10), "uneven": (3, 5), "experts": (4, 5, 3), "norm": (7,), "plain": (4,), "tiny": (1, 2)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _mixed_meshes(rank: int, world: int) -> dict[str, Any]:
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", (1, 4), mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (4,))
    layouts: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "dense": (two, [Shard(0), Shard(1)]),
        "uneven": (flat, [Shard(0)]),
        "experts": (experts, [Shard(1), Shard(0)]),
        "norm": (two, [Shard(0), Replicate()]),
        "tiny": (two["fsdp"], [Shard(0)]),
    }
    parameters = []
    for name, grad in _gradients().items():
        if name in layouts:
            parameters.append(with_gradient(distribute_tensor(grad, *layouts[name])))
        else:
            parameters.append(with_gradient(grad))
    # Only a Partial gradient, as tensor parallelism leaves it on a replicated norm: each rank has a quarter.
    partial = nn.Parameter(distribute_tensor(torch.zeros(3, dtype=torch.float64), flat, [Replicate()]))
    partial.grad = DTensor.from_local(torch.full((3,), 0.25, dtype=torch.float64), flat, [Partial()])
    parameters.append(partial)
    clip.total_norm(parameters)
    assert partial.grad.placements == (Replicate(),)
    with CommDebugMode() as seen:
        norms = {p: float(clip.total_norm(parameters, norm_type=p)) for p in NORMS}
    return {"norms": norms, "collectives": seen.get_total_counts()}


def test_mixed_meshes_equal_one_process() -> None:
    grads = [*_gradients().values(), torch.ones(3)]
    results = run_ranks(_mixed_meshes, 4)
    for result in results:
        for p in NORMS:
            assert result["norms"][p] == pytest.approx(reference(grads, p), rel=1e-13)
        assert result == results[0]  # the same bits
        assert result["collectives"] == len(NORMS)  # one all-reduce a norm


def _plain(rank: int, world: int) -> float:
    return float(clip.total_norm([with_gradient(torch.tensor([3.0, 4.0]))]))


def test_plain_tensors_are_alike_on_all_ranks() -> None:
    assert run_ranks(_plain, 3) == [5.0] * 3
