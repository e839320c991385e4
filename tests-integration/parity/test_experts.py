"""What a job with experts keeps beside its weights, in layouts: the routers' biases, the load, checkpoints."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import LIMIT_S, VARIANTS, world_of
from worker import ROWS, TOKENS, build, optim_config, start, weights_of, window

from kforge_ckpt import Checkpointer
from kforge_optim import build_optimizer, clip
from kforge_testing import run_ranks as run_ranks_within
from kforge_train.balance import update_balance
from kforge_train.engine import PlainEngine

run_ranks = partial(run_ranks_within, timeout_s=LIMIT_S)
BIAS = "layers.1.moe.router.bias"


def biases(rank, world, layout, recompute):
    """This rank's bias at the start, after a step, after one that is skipped, and after one more; and each's load."""
    mesh = start(layout)
    variant = replace(VARIANTS["packed-3"], parallel={"recompute": recompute})
    model = build(layout, "experts-bias", variant, mesh)
    engine = PlainEngine(model, mesh)
    bias = dict(model.named_buffers())[BIAS]
    seen, loads = [bias.tolist()], []
    for step, gate in enumerate((1.0, 0.0, 1.0)):
        batches = window(0, variant, mesh.data_rank, mesh.data_size)
        engine.forward_backward(batches, 1.0 / engine.scored_tokens(batches))
        with torch.no_grad():  # what is only looked at does not count
            model(batches[0]["input_ids"])
        mixture = model.layers["1"].moe
        mine = mixture.counted()[:8]
        load = update_balance(model, mesh, torch.tensor(gate), step, 3)
        assert not mixture.counted().any()
        seen.append(bias.tolist())
        loads.append((mine.sum().item(), {name: value.item() for name, value in load.items()}))
    return seen, loads


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["shard2-ep2", "shard2-tp2-ep4"])
def test_biases_are_alike_and_move_once_a_step_that_is_taken(layout, recompute):
    ((seen, loads),) = run_ranks(biases, 1, "one", "none")
    before, first, skipped, second = map(torch.tensor, seen)
    assert not before.any()
    assert {round(abs(move), 6) for move in first.tolist()} <= {0.05, 0.0}  # 0: exactly the mean load
    assert torch.equal(first, skipped) and not torch.equal(skipped, second)
    assert loads[0][0] == 2 * ROWS * TOKENS
    ranks = run_ranks(biases, world_of(layout), layout, recompute)
    for others, loads_there in ranks:
        assert others == seen
        for (_, numbers), (_, right) in zip(loads_there, loads, strict=True):
            assert numbers == pytest.approx(right, rel=1e-12)
    assert sum(loads_there[0][0] for _, loads_there in ranks) == 2 * ROWS * TOKENS


def go_on(rank, world, layout, optimizer, folder, first, last):
    """Train steps first .. last - 1 from what the folder holds, save, and return all weights."""
    mesh = start(layout)
    variant = VARIANTS["packed"]
    model = build(layout, "experts-bias", variant, mesh)
    config = replace(optim_config("fp64"), name=optimizer, muon_variance_beta=0.9)
    state = {"model": model, "optim": build_optimizer(model, config, 6)}
    state["optim"].init_state()
    checkpointer = Checkpointer(folder)
    assert checkpointer.restore(state) == (first or None)
    engine = PlainEngine(model, mesh)
    for step in range(first, last):
        batches = window(step, variant, mesh.data_rank, mesh.data_size)
        engine.forward_backward(batches, 1.0 / engine.scored_tokens(batches))
        state["optim"].step(scale=clip.clip_factor(clip.total_norm(model), config.clip_norm))
        state["optim"].zero_grad()
        update_balance(model, mesh, torch.ones(()), step, 6)
    checkpointer.save(last, state)
    return weights_of(model)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_goes_from_one_ep_to_another(optimizer, tmp_path):
    """ep 2, then 4 over tp, then 1, then none: the weights and biases of one process that was never stopped."""
    right = run_ranks(go_on, 1, "one", optimizer, str(tmp_path / "one"), 0, 6)[0]
    for at, layout in enumerate(("shard4-ep2", "shard2-tp2-ep4", "shard2")):
        run_ranks(go_on, world_of(layout), layout, optimizer, str(tmp_path / "many"), at, at + 1)
    found = run_ranks(go_on, 1, "one", optimizer, str(tmp_path / "many"), 3, 6)[0]
    assert found.keys() == right.keys() and BIAS in found
    assert right[BIAS].any()
    for name, weight in right.items():
        assert (found[name] - weight).abs().max() <= 1e-10 * weight.abs().max(), name
