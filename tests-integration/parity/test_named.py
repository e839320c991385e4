"""Faults that trainers of this kind have shipped, each as a test of its own."""

from functools import partial
from itertools import starmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import LIMIT_S, VARIANTS, Variant, world_of
from torch.distributed.tensor import DTensor
from worker import SEED, build, model_config, of_all_stages, optim_config, parallel_config, start, weights_of, window

from kforge_ckpt import Checkpointer
from kforge_model import Transformer, num_parameters
from kforge_optim import build_optimizer, clip
from kforge_testing import run_ranks as run_ranks_within
from kforge_train.engine import PlainEngine, build_engine

run_ranks = partial(run_ranks_within, timeout_s=LIMIT_S)


def worst(a, b):
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


def step_of_sgd(model, mesh, variant):
    """Loss and norm of one step at a rate of 0.1."""
    engine = build_engine(model, mesh)
    batches = window(0, variant, mesh.data_rank, mesh.data_size)
    loss = engine.forward_backward(batches, 1.0 / engine.scored_tokens(batches))
    norm = clip.total_norm(model, stages=mesh.pp_size, stages_holding=engine.copies)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    dist.all_reduce(loss)
    return loss.item(), norm.item()


# ------------------------------------------------------------------------------------------ C17


def accumulate(rank, world, layout, counts):
    mesh = start(layout)
    results = []
    for count in counts:
        variant = Variant(accumulate=count)
        model = build(layout, "untied", variant, mesh)
        results.append((*step_of_sgd(model, mesh, variant), of_all_stages(weights_of(model), mesh)))
    return results


@pytest.mark.parametrize("layout", ["one", "shard2", "rep2", "tp2", "pp2-gpipe"])
def test_c17_accumulation_shrinks_no_gradient(layout):
    """One SGD step from 1, 3 and 6 microbatches of each rank, with unequal numbers of scored tokens."""
    ((loss, norm, weights),) = run_ranks(accumulate, 1, "one", [1])[0]
    for results in run_ranks(accumulate, world_of(layout), layout, [1, 3, 6]):
        for other_loss, other_norm, other_weights in results:
            assert other_loss == pytest.approx(loss, rel=1e-12)
            assert other_norm == pytest.approx(norm, rel=1e-12)
            assert worst(other_weights, weights) < 1e-12


# ------------------------------------------------------------------------------------------ C18


def replicated(model):
    """Parameters that every tensor-parallel rank holds whole."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, DTensor) and p.placements[-1].is_replicate()}


def alike_over(group, tensor):
    """Whether a tensor has the same bits on all ranks of a group."""
    local = tensor.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return all(torch.equal(part, local) for part in parts)


def twenty_steps(rank, world, layout, folder):
    mesh = start(layout)
    variant = VARIANTS["packed"]
    model = build(layout, "qk-norm", variant, mesh)
    optimizer = build_optimizer(model, optim_config("fp64"), 20)
    engine = PlainEngine(model, mesh)
    shared = replicated(model) if mesh.tp_size > 1 else {}
    different = set()
    for step in range(20):
        batches = window(step, variant, mesh.data_rank, mesh.data_size)
        engine.forward_backward(batches, 1.0 / engine.scored_tokens(batches))
        different |= {f"gradient of {n}" for n, p in shared.items() if not alike_over(mesh.tp.get_group(), p.grad)}
        optimizer.step()
        optimizer.zero_grad()
        different |= {n for n, p in shared.items() if not alike_over(mesh.tp.get_group(), p)}
    if folder:
        Checkpointer(folder).save(20, {"model": model})
    return sorted(shared), sorted(different), weights_of(model)


def saved_elements(folder, name):
    """Elements that a checkpoint holds of a tensor, over all files."""
    from safetensors import safe_open

    total = 0
    for path in Path(folder).rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(key).numel() for key in file.keys() if name in key)  # noqa: SIM118
    return total


@pytest.mark.parametrize("layout", ["tp2", "tp2-whole"])
def test_c18_whole_weights_stay_alike_over_tensor_parallel_ranks(layout, tmp_path):
    """Every norm, head norms included: gradients and weights bit-equal over ranks for 20 steps, and those of tp 1."""
    ((_, _, weights),) = run_ranks(twenty_steps, 1, "one", None)
    for shared, different, others in run_ranks(twenty_steps, world_of(layout), layout, str(tmp_path)):
        norms = {f"layers.{i}.{name}.weight" for i in "01" for name in ("attn_norm", "mlp_norm")} | {"norm.weight"}
        norms |= {f"layers.{i}.attn.{name}.weight" for i in "01" for name in ("q_norm", "k_norm")}
        assert norms <= set(shared)
        assert different == []
        assert worst(others, weights) < 1e-9
    assert saved_elements(tmp_path, "layers.0.attn_norm.weight") == weights["layers.0.attn_norm.weight"].numel()
    assert saved_elements(tmp_path, "layers.0.attn.q_norm.weight") == weights["layers.0.attn.q_norm.weight"].numel()


# ------------------------------------------------------------------------------------------ C20


def is_one_weight(model):
    local = [p.to_local() if isinstance(p, DTensor) else p for p in (model.embed.weight, model.head.weight)]
    names = [name for name, _ in model.named_parameters()]
    return (
        model.embed.weight is model.head.weight
        and local[0].data_ptr() == local[1].data_ptr()
        and "head.weight" not in names
        and sum(p.numel() for p in model.parameters()) == num_parameters(model.config)
    )


def tied_through_its_life(rank, world, layout, folder):
    """Whether embedding and head are one after the build, a step, a save and a restore; the weights after the step."""
    mesh = start(layout)
    variant = VARIANTS["packed"]
    model = build(layout, "tied", variant, mesh)
    one = [is_one_weight(model)]
    loss, norm = step_of_sgd(model, mesh, variant)
    one.append(is_one_weight(model))
    Checkpointer(folder).save(1, {"model": model})
    one.append(is_one_weight(model))
    other = build(layout, "tied", variant, mesh)
    Checkpointer(folder).restore({"model": other})
    one.append(is_one_weight(other))
    groups = build_optimizer(other, optim_config("fp64"), 10).groups
    owners = [group.name for group in groups for name in group.parameters if name in ("embed.weight", "head.weight")]
    again = all(starmap(torch.equal, zip(weights_of(model).values(), weights_of(other).values(), strict=True)))
    step_of_sgd(other, mesh, variant)
    one.append(is_one_weight(other))
    return one, owners, again, loss, norm, weights_of(model), weights_of(other)


def two_plain_steps(rank, world):
    from worker import loss_of

    model = Transformer(model_config("tied")).double()
    model.init_weights(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = window(0, VARIANTS["packed"], 0, 1)
    results = []
    for _ in range(2):
        loss = loss_of(model, batch, 1 / (batch["labels"] != -100).sum().double())
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item(), weights_of(model)))
    return results


@pytest.mark.parametrize("layout", ["one", "shard2", "rep2", "tp2", "shard2-tp2"])
def test_c20_tied_embeddings_stay_one_weight(layout, tmp_path):
    """Built on meta, stepped, saved, restored, stepped: one tensor, counted once, and what plain torch computes."""
    ((loss, norm, first), (_, _, second)) = run_ranks(two_plain_steps, 1)[0]
    assert parallel_config(layout, VARIANTS["packed"]).precision == "fp64"
    for one, owners, again, *results in run_ranks(tied_through_its_life, world_of(layout), layout, str(tmp_path)):
        assert one == [True] * 5
        assert owners == ["embeddings"]
        assert again
        assert results[0] == pytest.approx(loss, rel=1e-12)
        assert results[1] == pytest.approx(norm, rel=1e-12)
        assert worst(results[2], first) < 1e-12
        assert worst(results[3], second) < 1e-12
