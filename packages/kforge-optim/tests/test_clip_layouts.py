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
from torch.distributed.tensor.debug import CommDebugMode

from kforge_optim import Group, clip
from kforge_optim.sharding import local
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


# Norms of groups, and clipping by value


def grouped(name: str, *parameters: nn.Parameter) -> Group:
    return Group(name, "adamw", 1.0, 0.0, {str(i): parameter for i, parameter in enumerate(parameters)})


def laid_out(layout: str, world: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Parameters of uneven shapes in a layout, and their whole gradients."""
    grads = [random(sizes, seed) for seed, sizes in enumerate([(8, 12), (5, 7), (1, 2), (7,), (6, 4)])]
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        return [place(grad, mesh, [Shard(0)]) for grad in grads], grads
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world,))
        cuts = [Shard(1), Shard(0), Shard(1), Replicate(), Shard(0)]
        return [place(grad, mesh, [cut]) for grad, cut in zip(grads, cuts, strict=True)], grads
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        return [place(grad, mesh, [Replicate(), Shard(0)]) for grad in grads], grads
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_shard", "tp"))
    cuts = [Shard(1), Shard(0), Replicate(), Replicate(), Shard(0)]
    return [by_fsdp(g, mesh["dp_shard"], mesh["tp"], cut) for g, cut in zip(grads, cuts, strict=True)], grads


def _norms_of_groups(rank: int, world: int, layout: str) -> dict[str, Any]:
    parameters, grads = laid_out(layout, world)
    plain = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain.grad = random((3,), seed=9)
    everything, all_grads = [*parameters, plain], [*grads, plain.grad.clone()]
    # Not in the model's order; the bias of no group; one group without a gradient.
    frozen = nn.Parameter(torch.zeros(2))
    members = {"even": [0, 4, 2], "odd": [3, 1], "none": []}
    groups = [grouped(name, *(parameters[i] for i in of)) for name, of in members.items()]
    groups[-1] = grouped("none", frozen)
    passes = 0
    foreach_norm = clip.foreach_norm

    def counted(*arguments: Any) -> list[Tensor]:
        nonlocal passes
        passes += 1
        return foreach_norm(*arguments)

    clip.foreach_norm = counted
    found: dict[str, Any] = {}
    for p in NORMS:
        with CommDebugMode() as alone:
            norm = clip.total_norm([*everything, frozen], norm_type=p)
        before = passes
        with CommDebugMode() as seen:
            total, norms = clip.total_norm([*everything, frozen], norm_type=p, also=groups)
        assert passes - before == before  # no second pass over the gradients
        passes = 0
        assert seen.get_total_counts() == alone.get_total_counts() == 1
        assert float(total) == pytest.approx(float(norm), rel=1e-14)
        found[str(p)] = {"total": float(total), **{name: float(value) for name, value in norms.items()}}
        expected = {"total": reference(all_grads, p), "none": 0.0}
        expected |= {name: reference([grads[i] for i in of], p) for name, of in members.items() if of}
        assert found[str(p)] == pytest.approx(expected, rel=1e-12)

    # What is not a number shows where it is, and in the whole.
    if rank == world - 1:
        local(parameters[0].grad)[-1, -1] = math.nan
    for p in NORMS:
        total, norms = clip.total_norm(everything, norm_type=p, also=groups)
        found[f"nan {p}"] = [bool(value.isnan()) for value in (total, *norms.values())]
    return found


@pytest.mark.parametrize(
    ("layout", "world"), [("fsdp", 2), ("fsdp", 4), ("tp", 2), ("hsdp", 4), ("fsdp over tp", 4)], ids=str
)
def test_norms_of_groups_come_with_the_whole(layout: str, world: int) -> None:
    results = run_ranks(_norms_of_groups, world, layout)
    assert all(result == results[0] for result in results)  # the same bits
    for p in NORMS:
        assert results[0][f"nan {p}"] == [True, True, False, False]


def _groups_on_stages(rank: int, world: int) -> dict[str, float]:
    """Two pipeline stages; the embedding is on the first, the head on the last, a tied weight on both."""
    first = rank < world // 2
    embed, head, tied = with_gradient(3.0), with_gradient(4.0), with_gradient(12.0)
    named = [("embed", embed) if first else ("head", head), ("tied", tied)]
    groups = [grouped("embeddings", *([embed] if first else [])), grouped("head", *([] if first else [head]))]
    groups.append(grouped("tied", tied))
    total, norms = clip.total_norm(named, stages=2, stages_holding={"tied": 2}, also=groups)
    return {"total": float(total), **{name: float(norm) for name, norm in norms.items()}}


def test_norms_of_groups_that_other_stages_hold() -> None:
    expected = {"total": 13.0, "embeddings": 3.0, "head": 4.0, "tied": 12.0}
    assert run_ranks(_groups_on_stages, 4) == [pytest.approx(expected)] * 4


def _clipped_by_value(rank: int, world: int, layout: str) -> None:
    for scale in (None, torch.tensor(4.0)):
        parameters, grads = laid_out(layout, world)
        with CommDebugMode() as seen:
            clip.clip_values_(parameters, 0.5, scale=scale)
        assert seen.get_total_counts() == 0
        bound = 0.5 if scale is None else 2.0
        for parameter, grad in zip(parameters, grads, strict=True):
            assert isinstance(parameter.grad, DTensor)
            assert torch.equal(parameter.grad.full_tensor(), grad.clamp(-bound, bound))


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("tp", 2), ("hsdp", 4), ("fsdp over tp", 4)], ids=str)
def test_clip_by_value_is_that_of_the_whole(layout: str, world: int) -> None:
    run_ranks(_clipped_by_value, world, layout)
