"""Experts dealt out over ranks, against one process that has them all, in float64."""

from functools import partial

import mixture
import pytest
import torch
from torch import nn

from kforge_parallel import ParallelConfig, check_model
from kforge_parallel.testing import compare
from kforge_testing import RankFailure, run_ranks

# ------------------------------------------------------------------------------------------ the exchange alone


def stacked(x, counts, up, down):
    parts = zip(x.split(counts.tolist()), up, down, strict=True)
    return torch.cat([torch.tanh(part @ a.T) @ b.T for part, a, b in parts])


def tokens_of(rank, experts, dtype):
    """3 · rank tokens with 3 choices each, of which some are equal; experts 0 and 1 (all of rank 0) get none."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(3 * rank, 4, generator=random, dtype=torch.float64)
    ids = torch.randint(2, experts, (3 * rank, 3), generator=random)
    weights = torch.rand(3 * rank, 3, generator=random, dtype=torch.float64)
    grad = torch.randn(3 * rank, 4, generator=random, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), ids, weights.requires_grad_(), grad.to(dtype)


def weights_of(experts):
    random = torch.Generator().manual_seed(99)
    return [torch.randn(experts, *shape, generator=random, dtype=torch.float64) for shape in ((5, 4), (4, 5))]


def exchanged(rank, world, dtype):
    """y and the gradients of x, weights, and this rank's two experts."""
    import torch.distributed as dist

    from kforge_parallel.expert import AllToAllExchange

    up, down = (w.chunk(world)[rank].to(dtype).requires_grad_() for w in weights_of(2 * world))
    x, ids, weights, grad = tokens_of(rank, 2 * world, dtype)
    exchange = AllToAllExchange(dist.group.WORLD, 2 * world)
    y = exchange(x, ids, weights.to(torch.promote_types(dtype, torch.float32)), partial(stacked, up=up, down=down))
    y.backward(grad)
    return [t.detach() for t in (y, x.grad, weights.grad, up.grad, down.grad)]


@pytest.mark.parametrize(
    ("world", "dtype", "limit"),
    [(2, torch.float64, 1e-13), (3, torch.float64, 1e-13), (2, torch.bfloat16, 0.02)],
    ids=["2", "3", "bf16"],
)
def test_what_experts_elsewhere_give_and_all_gradients(world, dtype, limit):
    up, down = (w.to(dtype).to(torch.float64).requires_grad_() for w in weights_of(2 * world))
    found = run_ranks(exchanged, world, dtype)
    for rank, (y, *gradients) in enumerate(found):
        x, ids, weights, grad = tokens_of(rank, 2 * world, dtype)
        assert y.shape == x.shape and y.dtype == dtype
        every = [torch.tanh(x.to(torch.float64) @ a.T) @ b.T for a, b in zip(up, down, strict=True)]
        wanted = sum(weights[:, j, None] * torch.stack(every)[ids[:, j], torch.arange(len(x))] for j in range(3))
        wanted.backward(grad.to(torch.float64))
        if len(x):
            for mine, right in zip((y, *gradients), (wanted, x.grad, weights.grad), strict=False):
                assert (mine - right).abs().max() <= limit * right.abs().max()
    for mine, right in ((3, up.grad), (4, down.grad)):
        whole = torch.cat([tensors[mine] for tensors in found])
        assert (whole - right).abs().max() <= limit * right.abs().max()
        assert not whole[:2].any() and whole[2:].any()


def operations(rank, world):
    """What runs in a forward and a backward, and how often the host asks for numbers of the device."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from kforge_parallel import expert

    class Seen(TorchDispatchMode):
        names = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    asked, to_host = [], expert.to_host
    expert.to_host = lambda numbers: asked.append(numbers.shape) or to_host(numbers)
    x, ids, weights, _ = tokens_of(rank + 1, 4, torch.float64)
    with Seen() as seen:
        exchange = expert.AllToAllExchange(dist.group.WORLD, 4)
        exchange(x, ids, weights, lambda rows, counts: rows * 2).sum().backward()
    return seen.names, asked


def test_the_host_waits_for_nothing_but_sizes_once():
    for names, asked in run_ranks(operations, 2):
        assert asked == [(2, 2)]
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "bincount")
        assert not [name for name in names if any(word in name for word in waits)]
        assert sum("alltoall_base" in name for name in names) == 1 + 2 + 2  # sizes; there and back, and their gradients


# ------------------------------------------------------------------------------------------ whole models

trained = partial(compare, model=mixture.Model, batch=mixture.BATCH, loss=mixture.loss, run=run_ranks)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dp_shard": 2, "ep": 2}, {}),
        ({"dp_shard": 4, "ep": 4}, {"init": mixture.fill, "clip_norm": 0.01}),
        ({"dp_shard": 4, "ep": 2, "recompute": "full"}, {"microbatches": 2}),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"microbatches": 2}),
        ({"dp_replicate": 2, "tp": 2, "ep": 2}, {}),
        ({"tp": 2, "ep": 2, "recompute": "full"}, {"init": mixture.fill}),
        ({"tp": 2, "dp_shard": 2, "ep": 4}, {}),
        ({"tp": 2, "dp_shard": 2, "ep": 2, "prefetch": 1}, {}),
        ({"tp": 4, "ep": 2}, {}),
        ({"tp": 2, "dp_shard": 2}, {}),
        ({"dp_shard": 2}, {}),
        # Two experts a rank, which four ranks share.
        ({"tp": 2, "dp_shard": 4, "ep": 2}, {"model": mixture.four, "init": mixture.fill, "steps": 1}),
    ],
    ids=lambda value: "-".join(f"{name}{size}" for name, size in value.items() if isinstance(size, int)),
)
def test_a_layout_changes_nothing(axes, options):
    trained(ParallelConfig(**{"dp_shard": 1, **axes}), **options).check()


@pytest.mark.parametrize(
    ("axes", "model", "what"),
    [
        ({"tp": 2, "ep": 2}, mixture.counted_apart, "router.weight"),
        ({"tp": 2}, mixture.counted_apart, "router.weight"),
        ({"dp_shard": 4, "ep": 2}, mixture.averaged, "experts.w_up"),
        ({"dp_shard": 2, "ep": 2}, mixture.unsorted, "experts.w_up"),
    ],
    ids=["counts-ep", "counts-tp", "mean", "order"],
)
def test_faults_are_found_out(axes, model, what):
    result = trained(ParallelConfig(**{"dp_shard": 1, **axes}), model=model, steps=1)
    assert any(what in place for place in result.differing["gradients"])


def averages(rank, world, axes):
    from kforge_parallel import launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64", **axes))
    model = parallelize(mixture.Model, mesh, init=mixture.fill)
    mine = {name: rows.chunk(mesh.data_size)[mesh.data_rank] for name, rows in mixture.BATCH.items()}
    mixture.loss(model, mine, torch.tensor(0.1, dtype=torch.float64)).backward()
    return mesh.data_size, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "tp": 2, "ep": 2},
    ],
    ids=str,
)
def test_means_are_over_the_ranks_that_read_other_rows(axes):
    model = mixture.Model().double()
    mixture.fill(model)
    mixture.loss(model, mixture.BATCH, torch.tensor(0.1, dtype=torch.float64)).backward()
    world = axes.get("dp_replicate", 1) * axes["dp_shard"] * axes.get("tp", 1)
    data, gradients = run_ranks(averages, world, axes)[0]
    for name, parameter in model.named_parameters():
        difference = (gradients[name] * data - parameter.grad).abs().max()
        assert difference <= 1e-12 * max(parameter.grad.abs().max(), 1e-3), name


def built(rank, world):
    """How experts lie on 4 ranks, ep 2, in bf16; two shards of each."""
    from torch.distributed.fsdp import FSDPModule

    from kforge_parallel import full_parameters, launch, parallelize

    mesh = launch(ParallelConfig(ep=2))
    model = parallelize(mixture.Model, mesh, init=mixture.fill, gradients="sum")
    mixture.loss(model, mixture.BATCH, torch.tensor(0.1)).backward()
    experts = model.layers[0].moe.experts
    whole = full_parameters(model)
    expected = mixture.Model()
    mixture.fill(expected)
    assert all(torch.equal(whole[name], parameter) for name, parameter in expected.named_parameters())
    weight, state = experts.w_up, model.layers[0]._get_fsdp_state()
    return {
        "mesh": weight.device_mesh.mesh_dim_names,
        "cut along": [placement.dim for placement in weight.placements],
        "here": tuple(weight.to_local().shape),
        "dtypes": (weight.dtype, weight.grad.dtype),
        "finite": bool(weight.grad.to_local().isfinite().all()),
        "unit": isinstance(experts, FSDPModule),
        "gathered with the block": [s is experts._get_fsdp_state() for s in state._states_to_forward_prefetch],
        "names": [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()],
        "exchange": str(model.layers[0].moe.exchange),
    }


def test_experts_are_a_unit_of_their_own_on_the_expert_root():
    for found in run_ranks(built, 4, init=False):
        assert found == {
            "mesh": ("expert_shard", "ep"),
            "cut along": [0, 0],
            "here": (2, 2, mixture.WIDE, mixture.DIM),
            "dtypes": (torch.float32, torch.float32),
            "finite": True,
            "unit": True,
            "gathered with the block": [True],
            "names": True,
            "exchange": "AllToAllExchange(8 experts over 2 ranks)",
        }


def replicas(rank, world):
    from kforge_parallel import check_replicas, launch, parallelize

    mesh = launch(ParallelConfig(dp_replicate=2, dp_shard=2, ep=2))
    model = parallelize(mixture.Model, mesh, init=mixture.fill)
    if rank == 3:
        with torch.no_grad():
            model.layers[1].moe.experts.w_down.to_local().view(-1)[0] += 1e-3
    with pytest.raises(RuntimeError) as error:
        check_replicas(model)
    return str(error.value)


def test_copies_of_an_expert_are_compared():
    for message in run_ranks(replicas, 4, init=False):
        assert message.startswith("ranks [3] hold other values than rank 1") and "(ep 1)" in message


def compiled(rank, world):
    """Gradients, exchanges and graphs of two microbatches: not compiled, compiled, and run again in backward."""
    import torch._dynamo

    from kforge_parallel import build, expert, launch, parallelize

    build.compile_blocks = partial(build.compile_blocks, backend="aot_eager")
    routes = []
    expert.Route.wait = lambda route, wait=expert.Route.wait: routes.append(route) or wait(route)
    mesh = launch(ParallelConfig(precision="fp64", ep=2))
    found = []
    for options in ({}, {"compile": True}, {"compile": True, "recompute": "full"}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        routes.clear()
        model = parallelize(mixture.Model, mesh, init=mixture.fill, gradients="sum", **options)
        for part in (slice(0, 4), slice(4, 8)):  # rows go to other experts: other sizes
            batch = {name: rows[part] for name, rows in mixture.BATCH.items()}
            mixture.loss(model, batch, torch.tensor(0.1, dtype=torch.float64)).backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found.append((gradients, len(routes), torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return found


def test_compiled_blocks_compute_the_same_and_can_run_again_in_backward():
    (plain, exchanges, _), once, twice = run_ranks(compiled, 2, init=False, timeout_s=120)[0]
    assert exchanges == once[1] == 4 and twice[1] == 8
    assert once[2] == twice[2] > 0  # what runs again is compiled, too
    for gradients, _, _ in (once, twice):
        for name in plain:
            torch.testing.assert_close(gradients[name], plain[name], rtol=1e-12, atol=1e-13, msg=name)


# ------------------------------------------------------------------------------------------ what cannot be


def selective_and_compiled(rank, world):
    from kforge_parallel import launch, parallelize

    options = {"precision": "fp64", "recompute": "selective", "compile": True}
    parallelize(mixture.Model, launch(), init=mixture.fill, **options)


def test_a_selective_recomputation_of_several_graphs_is_refused():
    with pytest.raises(RankFailure, match="sees no operation inside of a compiled graph, and with"):
        run_ranks(selective_and_compiled, 1, init=False)
    axes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    config = ParallelConfig(recompute="selective", compile=True)
    with torch.device("meta"), pytest.raises(ValueError, match="sees no operation"):
        check_model(mixture.Model(), config, axes)  # before there is a process group


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = nn.Module()
        self.moe.exchange, self.moe.experts = nn.Identity(), nn.Linear(4, 6)
        self.moe.experts.scale = nn.Parameter(torch.ones(4))


def refusals(rank, world):
    from kforge_parallel import launch, parallelize

    said = []

    def refused(build, config, **options):
        with pytest.raises(ValueError) as error:
            parallelize(build, launch(config), **options)
        said.append(str(error.value))

    plan = mixture.Model.plan
    refused(lambda: nn.Linear(4, 4), ParallelConfig(ep=2))
    refused(partial(mixture.Model, 3), ParallelConfig(ep=2))
    refused(Ragged, ParallelConfig(ep=2))
    refused(mixture.Model, ParallelConfig(tp=2, ep=2), plan={**plan, "layers.*.moe.experts": "sequence"})
    refused(mixture.Model, ParallelConfig(tp=2, ep=2), plan={**plan, "layers.*.moe": "gather"})
    refused(mixture.Model, ParallelConfig(tp=2), plan={**plan, "layers.*.moe": "gather"})
    refused(mixture.Model, ParallelConfig(tp=2, ep=2, sequence_parallel=False))
    return said


def test_what_cannot_be_dealt_out_is_refused():
    none, three, ragged, word, around, alone, whole = run_ranks(refusals, 2)[0]
    assert "parallel.ep = 2, but Linear has no experts" in none and "set parallel.ep to 1" in none
    assert "layers.0.moe.experts holds 3 experts" in three and "ep to a divisor of 3" in three
    assert (
        "moe.experts must hold the experts as the first dimension" in ragged and "weight 6, bias 6, scale 4" in ragged
    )
    assert "cuts layers.0.moe.experts.w_up as 'sequence' over tp, but parallel.ep = 2" in word
    for said in (around, alone):
        assert "layers.0.moe.experts.w_up is of experts" in said and "Take 'gather' off" in said
    assert "Set parallel.sequence_parallel to true" in whole
