import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kforge_testing import run_ranks
from kforge_train import ConfigError
from kforge_train.agree import bits_digest, check_agreement, digest, on_first_rank


def compare(rank, world, facts_of_ranks):
    try:
        check_agreement(facts_of_ranks[rank])
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_equal_facts_agree():
    facts = {"config": {"lr": 0.1, "path": "x"}, "versions": ["2.13"]}
    assert run_ranks(compare, 2, [facts, dict(reversed(facts.items()))]) == ["agreed", "agreed"]


@pytest.mark.parametrize("odd", [1, 2])
def test_the_rank_and_the_fact_that_differ_are_named_on_every_rank(odd):
    facts = [{"config": {"lr": 0.1}, "training data": "a"} for _ in range(3)]
    facts[odd] = {"config": {"lr": 0.1}, "training data": "b"}
    for message in run_ranks(compare, 3, facts):
        assert message.startswith(f"ranks [{odd}] have another training data than rank 0")
        assert digest("a") in message and digest("b") in message


def test_one_process_agrees_with_itself():
    check_agreement({"config": object()})


def refused_on_the_first(rank, world):
    called = []

    def act():
        called.append(rank)
        raise ConfigError("the folder is taken")

    with pytest.raises(ConfigError, match="the folder is taken"):
        on_first_rank(act)
    return called


def test_what_the_first_rank_refuses_is_raised_on_all():
    assert run_ranks(refused_on_the_first, 2) == [[0], []]


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


LAYOUT = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}


def replicas(rank, world, name, odd):
    """What check_replicas says when rank `odd` holds one other value of parameter `name`."""
    from kforge_model import ModelConfig, Transformer
    from kforge_parallel import ParallelConfig, launch, parallelize
    from kforge_train.agree import check_replicas

    config = ParallelConfig(precision="fp32", **LAYOUT)
    mesh = launch(config)
    sizes = ModelConfig(vocab_size=16, dim=8, n_layers=1, n_heads=2)
    model = parallelize(lambda: Transformer(sizes), mesh, config, init=lambda m: m.init_weights(3), gradients="sum")
    if rank == odd:
        with torch.no_grad():
            model.get_parameter(name).to_local().view(-1)[0] += 1e-7
    try:
        check_replicas(model)
    except RuntimeError as error:
        return str(error)
    return "alike"


def test_replicas_that_differ_are_named_on_every_rank():
    assert run_ranks(replicas, 4, "norm.weight", -1) == ["alike"] * 4
    # A norm lies on all four ranks, in one shard of size one each; a matrix is cut over tp: 0 and 2 hold one half.
    for message in run_ranks(replicas, 4, "layers.0.attn.wq.weight", 2):
        assert message.startswith("ranks [2] hold other values than rank 0") and "tp 0" in message
    for message in run_ranks(replicas, 4, "norm.weight", 3):
        assert message.startswith("ranks [3] hold other values than rank 0")
