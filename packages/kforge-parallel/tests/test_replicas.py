import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kforge_parallel.replicas import bits_digest
from kforge_testing import RankFailure, run_ranks


@settings(deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]), st.integers(0, 5), st.integers(0, 15))
def test_a_digest_sees_every_bit_and_every_place(dtype, index, bit):
    tensor = torch.arange(6, dtype=dtype).view(2, 3).mT
    other = tensor.clone()
    flat = other.reshape(-1).clone()
    bits = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    bits[index] ^= torch.tensor(1 << bit, dtype=torch.int64).to(bits.dtype)
    assert bits_digest(tensor) == bits_digest(tensor.contiguous())
    assert bits_digest(flat) != bits_digest(tensor.reshape(-1))
    swapped = tensor.reshape(-1)[[1, 0, 2, 3, 4, 5]]
    assert bits_digest(swapped) != bits_digest(tensor.reshape(-1))


class Toy(nn.Module):
    plan = {"up": "colwise", "down": "rowwise", "norm": "sequence"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)


def replicas(rank, world, name, odd):
    """What check_replicas says when rank `odd` holds one other value of parameter `name`."""
    from kforge_parallel import ParallelConfig, check_replicas, launch, parallelize

    mesh = launch(ParallelConfig(precision="fp32", dp_replicate=2, dp_shard=1, tp=2))
    model = parallelize(Toy, mesh, gradients="sum")
    if rank == odd:
        with torch.no_grad():
            model.get_parameter(name).to_local().view(-1)[0] += 1e-3
    try:
        check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return "alike"


def test_replicas_that_differ_are_named_on_every_rank():
    assert run_ranks(replicas, 4, "norm.weight", -1) == ["alike"] * 4
    # A norm lies on all four ranks; a matrix is cut over tp: ranks 0 and 2 hold one half.
    for message in run_ranks(replicas, 4, "up.weight", 2):
        assert message.startswith("ranks [2] hold other values than rank 0") and "(tp 0)" in message
    for message in run_ranks(replicas, 4, "norm.weight", 3):
        assert message.startswith("ranks [3] hold other values than rank 0") and "(whole)" in message


def stages(rank, world, odd):
    """Two stages of two replicas each; `odd` holds one other value."""
    from toy import Staged, fill

    from kforge_parallel import ParallelConfig, check_replicas, launch, parallelize

    mesh = launch(ParallelConfig(precision="fp32", pp=2, dp_replicate=2, dp_shard=1))
    model = parallelize(Staged, mesh, init=fill, gradients="sum")
    if rank == odd:
        with torch.no_grad():
            list(model.parameters())[-1].to_local().view(-1)[0] += 1e-3
    try:
        check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return "alike"


def test_stages_hold_other_parameters_and_are_not_compared():
    assert run_ranks(stages, 4, -1) == ["alike"] * 4
    for message in run_ranks(stages, 4, 3):
        assert message.startswith("ranks [3] hold other values than rank 2")


class Biased(nn.Module):
    """A buffer that is trained beside the optimizer, and one that is a rank's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4), persistent=False)


def buffers(rank, world, name):
    from kforge_parallel import check_replicas, launch, parallelize

    model = parallelize(Biased, launch(), precision="fp32")
    if rank == 1:
        model.get_buffer(name)[2] = 1e-3
    try:
        check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return "alike"


def test_buffers_that_a_checkpoint_holds_are_compared():
    for message in run_ranks(buffers, 2, "bias", init=False):
        assert message.startswith("ranks [1] hold other values than rank 0") and "(whole)" in message
    assert run_ranks(buffers, 2, "table", init=False) == ["alike"] * 2


def filled(rank, world, layout, seeds):
    """A model whose init draws with torch's own generator, as init functions for one process do."""
    from kforge_parallel import ParallelConfig, launch, parallelize

    def init(model):
        torch.manual_seed(seeds[rank])
        for name, parameter in model.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.normal_(parameter.to_local())

    mesh = launch(ParallelConfig(precision="fp32", **layout))
    parallelize(Toy, mesh, init=init)


def test_shards_with_the_same_numbers_and_replicas_with_others_are_refused_when_built():
    with pytest.raises(RankFailure, match=r"same numbers in its part of norm\.weight, up\.weight, down\.weight"):
        run_ranks(filled, 2, {}, [0, 0])
    with pytest.raises(RankFailure, match=r"ranks \[1\] hold other values than rank 0"):
        run_ranks(filled, 2, {"dp_replicate": 2}, [0, 1])
    run_ranks(filled, 2, {}, [0, 1])
