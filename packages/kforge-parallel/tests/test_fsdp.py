import pytest
import torch
from torch import nn

from kforge_parallel.axes import shard_dim
from kforge_testing import run_ranks


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((7,), 4, 0),
        ((6, 9), 4, 0),  # matrices and vectors by rows, evenly or not
        ((2, 8, 5), 2, 0),
        ((2, 8, 5), 4, 1),  # two parts for four ranks: half of them would hold nothing
        ((2, 6, 8), 4, 2),
        ((2, 7, 5), 4, 0),
    ],
)
def test_stacks_of_matrices_are_dealt_out_evenly(shape, shards, dim):
    assert shard_dim(torch.Size(shape), shards) == dim


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def settings(rank, world, options):
    from torch.distributed.fsdp import FSDPModule

    from kforge_parallel import ParallelConfig, launch, parallelize

    config = ParallelConfig(precision="fp32", **options)
    mesh = launch(config)
    model = parallelize(Toy, mesh, config, gradients="sum")
    blocks = list(model.layers)
    number = {id(block._get_fsdp_state()): i for i, block in enumerate(blocks)}
    states = [block._get_fsdp_state() for block in blocks]
    return {
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "forward": [[number[id(s)] for s in state._states_to_forward_prefetch] for state in states],
        "backward": [[number[id(s)] for s in state._states_to_backward_prefetch] for state in states],
        "factors": {
            group.gradient_divide_factor
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for group in [module._get_fsdp_state()._fsdp_param_group]
            if group is not None
        },
    }


def test_prefetching_follows_the_order_of_the_blocks():
    found = run_ranks(settings, 1, {"prefetch": 2}, init=False)[0]
    assert found["forward"] == [[1, 2], [2, 3], [3], []]
    assert found["backward"] == [[], [0], [1, 0], [2, 1]]
    assert run_ranks(settings, 1, {}, init=False)[0]["forward"] == [[]] * 4


def test_the_factor_is_one_on_every_unit():
    found = run_ranks(settings, 4, {"dp_replicate": 2}, init=False)[0]
    assert found["units"] == 5 and found["factors"] == {1.0}


def reductions(rank, world, options):
    """Collectives of gradients that steps send, and a gradient: one microbatch, three, three reduced one by one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from kforge_parallel import ParallelConfig, launch, parallelize, set_last_microbatch

    class Counts(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = {"reduce_scatter": 0, "allreduce": 0}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for name in self.seen:
                self.seen[name] += str(func).startswith("c10d.") and name in str(func)
            return func(*args, **(kwargs or {}))

    config = ParallelConfig(precision="fp32", **options)
    mesh = launch(config)
    found = []
    for microbatches, each in ((1, False), (3, False), (3, True)):
        model = parallelize(Toy, mesh, config, init=fill, gradients="sum")
        with Counts() as counts:
            for i in range(microbatches):
                set_last_microbatch(model, each or i == microbatches - 1)
                model(torch.ones(2, 4)).sum().backward()
        found.append((counts.seen, model.layers[0].weight.grad.full_tensor()))
    return found


def fill(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(0.5)


@pytest.mark.parametrize("options", [{}, {"dp_replicate": 2}, {"dp_replicate": 4, "dp_shard": 1}])
def test_reduction_waits_for_the_last_microbatch(options):
    """Shards and replicas alike: three microbatches send as much as one, and the sums are those of three."""
    (one, single), (three, deferred), (each, immediate) = run_ranks(reductions, 4, options, init=False)[0]
    assert one == three and sum(one.values()) >= 4
    assert each == {name: 3 * count for name, count in one.items()}
    torch.testing.assert_close(deferred, 3 * single, rtol=1e-6, atol=0)
    torch.testing.assert_close(immediate, deferred, rtol=1e-6, atol=0)


class Shared(nn.Module):
    """A weight, or a whole module, that lies in two units."""

    block_list = "layers"

    def __init__(self, what):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.head = nn.Linear(4, 4)
        if what == "weight":
            self.head.weight = self.layers[1][0].weight
        else:
            self.layers[1][0] = self.layers[0][0]


def shared(rank, world):
    from kforge_parallel import launch, parallelize

    mesh = launch()
    said = []
    for what in ("weight", "module"):
        with pytest.raises(ValueError) as error:
            parallelize(lambda what=what: Shared(what), mesh, precision="fp32")
        said.append(str(error.value))
    return said


def test_what_lies_in_two_units_is_refused():
    weight, module = run_ranks(shared, 1, init=False)[0]
    assert "layers.1.0.weight and head.weight are one parameter in two FSDP units" in weight
    assert "a Linear is used in 2 FSDP units" in module
