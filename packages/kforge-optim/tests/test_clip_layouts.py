"""`clip.total_norm` over every mix of placements: each against one process in float64, the same bits on all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from kforge_optim import clip
from kforge_testing import run_ranks

NORMS = (1.0, 2.0, math.inf)
SHAPES = [(8, 12), (5, 7), (1, 2), (7,), (4, 6, 3), ()]  # even; uneven; less than one element a rank; vector; 3-D; 0-D
ROOTS: dict[int, list[tuple[int, ...]]] = {  # ranks -> mesh shapes; three dimensions: dp_replicate, dp_shard, tp
    2: [(2,)],
    4: [(4,), (2, 2), (1, 4)],
    8: [(4, 2), (2, 4), (2, 2, 2)],
}


def random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(grads: list[Tensor], p: float) -> float:
    """Of whole gradients, in one process."""
    flat = torch.cat([grad.flatten() for grad in grads])
    return float(flat.abs().max() if math.isinf(p) else (flat.abs() ** p).sum() ** (1 / p))


def place(grad: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter laid out so, with its part of ``grad``."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(grad), mesh, placements, src_data_rank=None))
    parameter.grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    return parameter


def mixes(mesh: DeviceMesh, dims: int) -> Iterator[tuple[Placement, ...]]:
    """Every way to lay a tensor of so many dimensions on the mesh by Replicate and Shard."""
    yield from itertools.product([Replicate(), *(Shard(dim) for dim in range(min(dims, 2)))], repeat=mesh.ndim)


def by_fsdp(grad: Tensor, fsdp: DeviceMesh, tp: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter that tensor parallelism placed on ``tp`` and fully_shard cut again, with its part of ``grad``."""
    holder = nn.Module()
    zeros = torch.zeros_like(grad)
    holder.weight = nn.Parameter(distribute_tensor(zeros, tp, [placement], src_data_rank=None))
    fully_shard(holder, mesh=fsdp)
    weight = holder.weight
    assert isinstance(weight, DTensor)
    weight.grad = distribute_tensor(grad, weight.device_mesh, weight.placements, src_data_rank=None)
    return weight


def _every_mix(rank: int, world: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Norms found and norms expected, by case; each case for every p."""
    found: dict[str, list[float]] = {}
    expected: dict[str, list[float]] = {}

    def check(case: str, parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
        found[case] = [float(clip.total_norm(parameters, norm_type=p)) for p in NORMS]
        expected[case] = [reference(grads, p) for p in NORMS]

    everything: list[nn.Parameter] = []
    grads: list[Tensor] = []
    for shape in ROOTS[world]:
        mesh = init_device_mesh("cpu", shape)
        mixed: list[nn.Parameter] = []
        mixed_grads: list[Tensor] = []
        for sizes in SHAPES:
            for placements in mixes(mesh, len(sizes)):
                grad = random(sizes, seed=len(grads) + len(mixed))
                parameter = place(grad, mesh, placements)
                if world < 8 or sizes == (5, 7):
                    check(f"{shape} {sizes} {placements}", [parameter], [grad])
                mixed.append(parameter)
                mixed_grads.append(grad)
        check(f"{shape} together", mixed, mixed_grads)
        everything += mixed
        grads += mixed_grads

    # What fully_shard makes of parameters that tensor parallelism placed, _StridedShard among it, and HSDP.
    if world > 2:
        names = ("dp_replicate", "dp_shard", "tp")
        dense = init_device_mesh("cpu", (1, 2, 2) if world == 4 else (2, 2, 2), mesh_dim_names=names)
        for hsdp in (False, True):
            fsdp = dense["dp_replicate", "dp_shard"] if hsdp else dense["dp_shard"]
            # Without dp_replicate in its mesh a parameter lies whole on each of the copies, unsaid.
            for sizes, placement in itertools.product(
                [(8, 6), (5, 3), (2, 2), (7,)], [Replicate(), Shard(0), Shard(1)]
            ):
                if placement == Shard(len(sizes)):
                    continue
                grad = random(sizes, seed=len(grads))
                parameter = by_fsdp(grad, fsdp, dense["tp"], placement)
                kinds = {type(p).__name__ for p in parameter.placements}
                assert ("_StridedShard" in kinds) == (placement == Shard(0))
                check(f"fully_shard {sizes} over {placement}, hsdp {hsdp}", [parameter], [grad])
                everything.append(parameter)
                grads.append(grad)

    # A second root with other cuts (experts), plain tensors, one tied, one whose gradient is Partial still.
    if world > 2:
        experts = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("expert_shard", "ep"))
        for sizes, placements in (((4, 5, 3), (Shard(1), Shard(0))), ((2, 3, 3), (Shard(0), Shard(0)))):
            grads.append(random(sizes, seed=len(grads)))
            everything.append(place(grads[-1], experts, placements))
    grads.append(random((3, 2), seed=len(grads)))
    plain = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    plain.grad = grads[-1]
    everything += [plain, everything[0], plain]  # tied ones come again
    mesh = init_device_mesh("cpu", ROOTS[world][-1])
    norm_weight = nn.Parameter(distribute_tensor(torch.zeros(6).double(), mesh, [Replicate()] * mesh.ndim))
    parts = random((mesh.size(-1), 6), seed=len(grads))
    unreduced = [*[Replicate()] * (mesh.ndim - 1), Partial()]
    norm_weight.grad = DTensor.from_local(parts[mesh.get_local_rank(mesh.ndim - 1)], mesh, unreduced)
    everything.append(norm_weight)
    grads.append(parts.sum(0))
    check("everything together", everything, grads)
    return found, expected


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_mix_equals_one_process(world: int) -> None:
    results = run_ranks(_every_mix, world, timeout_s=120)
    found, expected = results[0]
    assert len(found) > {2: 10, 4: 60, 8: 40}[world]
    for case, norms in expected.items():
        assert found[case] == pytest.approx(norms, rel=1e-12), case
    assert all(result[0] == found for result in results)  # the same bits


# C16: stages own other parameters


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def _stages(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Two pipeline stages whose gradients have norms 3 and 4, spread over what ranks each stage has."""
    stage = rank // (world // 2)
    shape = {2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[world]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_shard", "tp"))["dp_shard", "tp"]

    def sharded(*values: float) -> nn.Parameter:
        return place(torch.tensor(values), mesh, [Shard(0), Shard(0)])

    def case(named: list[tuple[str, nn.Parameter]], p: float = 2.0, **options: Any) -> tuple[float, float]:
        norm = clip.total_norm(named, norm_type=p, stages=2, **options)
        return float(norm), float(clip.clip_factor(norm, 1.0))

    planted = [("w", sharded(3.0, 0.0, 0.0) if stage == 0 else sharded(0.0, 2 * math.sqrt(3), 2.0))]
    tied = [("embed", sharded(2.0)), ("w", sharded(3.0 + stage))]
    idle = [("w", nn.Parameter(torch.zeros(1))) if stage == 0 else ("w", sharded(3.0, 4.0))]
    poisoned = [("w", sharded(*[1.0] * 4)), ("v", with_gradient(math.nan if stage else 1.0))]
    return {
        "planted": case(planted),
        "planted, p 1": case(planted, 1.0),
        "planted, p inf": case(planted, math.inf),
        "plain": case([("w", with_gradient(3.0 + stage))]),
        "plain, p 1": case([("w", with_gradient(3.0 + stage))], 1.0),
        "plain, p inf": case([("w", with_gradient(3.0 + stage))], math.inf),
        "no gradients on a stage": case(idle),
        "no gradients on a stage, p inf": case(idle, math.inf),
        "nothing on a stage": case([] if stage == 0 else [("w", sharded(3.0, 4.0))]),
        "tied over stages": case(tied, stages_holding={"embed": 2}),
        "tied over stages, p 1": case(tied, 1.0, stages_holding={"embed": 2}),
        "nan on a stage": case(poisoned),
        "nan on a stage, p inf": case(poisoned, math.inf),
    }


@pytest.mark.parametrize("world", [2, 4, 8])
def test_c16_stages_of_norms_3_and_4_make_5_on_all_ranks(world: int) -> None:
    results = run_ranks(_stages, world)
    for result in results:
        for case, expected in {
            "planted": 5.0,
            "planted, p 1": 3.0 + 2 * math.sqrt(3) + 2,
            "planted, p inf": 2 * math.sqrt(3),
            "plain": 5.0,
            "plain, p 1": 7.0,
            "plain, p inf": 4.0,
            "no gradients on a stage": 5.0,
            "no gradients on a stage, p inf": 4.0,
            "nothing on a stage": 5.0,
            "tied over stages": math.sqrt(29),
            "tied over stages, p 1": 9.0,
        }.items():
            norm, factor = result[case]
            assert norm == pytest.approx(expected, rel=1e-6), case
            assert factor == pytest.approx(1 / expected, rel=1e-5), case
            assert result[case] == results[0][case], case
        for case in ("nan on a stage", "nan on a stage, p inf"):
            assert math.isnan(result[case][0]) and result[case][1] == 1.0, case


def _group(rank: int, world: int) -> float:
    """Two jobs of two ranks side by side, each with a norm of its own."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "dp_shard"))
    grad = torch.tensor([3.0, 4.0]) * (1 + pairs.get_local_rank("job"))
    weight = place(grad, pairs["dp_shard"], [Shard(0)])
    return float(clip.total_norm([weight], group=pairs.get_group("dp_shard")))


def test_a_group_has_its_own_norm() -> None:
    assert run_ranks(_group, 4) == [5.0, 5.0, 10.0, 10.0]


def _low_precision(rank: int, world: int) -> list[tuple[float, str]]:
    mesh = init_device_mesh("cpu", (world,))
    weights = [place(random((257,), seed=1).to(dtype), mesh, [Shard(0)]) for dtype in (torch.bfloat16, torch.float16)]
    norms = [clip.total_norm([weight]) for weight in weights]
    return [(float(norm), str(norm.dtype)) for norm in norms]


def test_16_bit_gradients_are_summed_in_float32() -> None:
    results = run_ranks(_low_precision, 2)
    for i, dtype in enumerate((torch.bfloat16, torch.float16)):
        grad = random((257,), seed=1).to(dtype)
        expected = float(grad.double().square().sum().sqrt())
        assert float(torch.linalg.vector_norm(grad)) != pytest.approx(expected, rel=1e-5)  # what 16 bits would say
        for result in results:
            assert result[i] == (pytest.approx(expected, rel=1e-6), "torch.float32")
