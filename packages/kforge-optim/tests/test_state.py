"""Save, load into fresh processes of as many ranks, more, fewer or one, and go on as if nothing had happened."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms import NAMES, config
from optim_models import TinyModel, batches, summed_loss, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kforge_optim import Optimizer, build_optimizer, clip
from kforge_testing import run_ranks

STEPS, HALF = 6, 3
Saved = dict[str, dict[str, Any]]


def parts(name: str) -> tuple[nn.Module, Optimizer]:
    """A model, sharded where there are several ranks, and its optimizer."""
    model: TinyModel = tiny()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh)
        for module in (*model.layers.values(), model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model, build_optimizer(model, config(name, warmup_steps=2), STEPS)


def train(model: nn.Module, optimizer: Optimizer, steps: range, rank: int, world: int) -> None:
    for step, ids in enumerate(batches(STEPS)):
        if step in steps:
            summed_loss(model, ids.tensor_split(world)[rank], ids.numel()).backward()
            optimizer.step(clip.clip_factor(clip.total_norm(model), 0.3), torch.tensor(1.0))
            optimizer.zero_grad()


def whole(model: nn.Module, optimizer: Optimizer) -> Saved:
    """Everything that a checkpoint holds, as whole tensors."""

    def full(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

    state = optimizer.state_dict()
    kinds = {key: {kind: full(tensor) for kind, tensor in kept.items()} for key, kept in state["state"].items()}
    return {
        "model": {key: full(parameter) for key, parameter in model.named_parameters()},
        "optimizer": {**state, "state": kinds},
    }


def flat(saved: Saved) -> dict[str, Tensor]:
    state = saved["optimizer"]["state"]
    return {**saved["model"], **{f"{key}:{kind}": t for key, kinds in state.items() for kind, t in kinds.items()}}


def same(one: Saved, other: Saved) -> bool:
    ours, theirs = flat(one), flat(other)
    return ours.keys() == theirs.keys() and all(
        tensor.reshape(-1).view(torch.uint8).equal(theirs[key].reshape(-1).view(torch.uint8))
        for key, tensor in ours.items()
    )


def _straight(rank: int, world: int) -> dict[str, tuple[Saved, Saved]]:
    """Everything halfway and at the end, of each optimizer."""
    seen = {}
    for name in NAMES:
        model, optimizer = parts(name)
        train(model, optimizer, range(HALF), rank, world)
        halfway = whole(model, optimizer)
        train(model, optimizer, range(HALF, STEPS), rank, world)
        seen[name] = halfway, whole(model, optimizer)
    return seen


def _resumed(rank: int, world: int, saved: dict[str, Saved]) -> dict[str, tuple[Saved, Saved]]:
    """The same of runs that begin with what others saved; no step was taken before."""
    seen = {}
    for name in NAMES:
        model, optimizer = parts(name)
        for key, parameter in model.named_parameters():
            optimizer.set_full_weight(key, saved[name]["model"][key])
            assert parameter.grad is None
        optimizer.load_state_dict(saved[name]["optimizer"])
        assert optimizer.schedule_step == HALF
        loaded = whole(model, optimizer)
        train(model, optimizer, range(HALF, STEPS), rank, world)
        seen[name] = loaded, whole(model, optimizer)
    return seen


@pytest.mark.parametrize(("world", "then"), [(2, 2), (2, 4), (4, 2), (2, 1), (1, 2)])
def test_law_3_saved_loaded_and_gone_on(world: int, then: int) -> None:
    straight = run_ranks(_straight, world)[0] if world > 1 else _straight(0, 1)
    saved = {name: halfway for name, (halfway, _) in straight.items()}
    resumed = run_ranks(_resumed, then, saved)[0] if then > 1 else _resumed(0, 1, saved)
    for name, (halfway, end) in straight.items():
        loaded, gone_on = resumed[name]
        assert same(loaded, halfway), name
        if world == then:
            assert same(gone_on, end), name
        for key, tensor in flat(end).items():
            difference = float((flat(gone_on)[key] - tensor).abs().max())
            assert difference <= 1e-10 * float(tensor.abs().max()), (name, key, difference)


def peak_of_loading(rank: int, world: int, name: str) -> tuple[float, float]:
    """Bytes that loading adds to this process at its peak, and bytes of the state that is loaded."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    optimizer = build_optimizer(model, config(name), STEPS)
    kept = optimizer.state_dict()
    copy = {key: {kind: tensor.clone() for kind, tensor in state.items()} for key, state in kept["state"].items()}
    optimizer.load_state_dict({**kept, "state": copy})  # whatever is made once is made
    nbytes = sum(tensor.numel() * tensor.itemsize for state in copy.values() for tensor in state.values())
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest mark of resident memory begins anew
    before = resident("VmRSS")
    optimizer.load_state_dict({**kept, "state": copy})
    return resident("VmHWM") - before, nbytes


def resident(kind: str) -> float:
    with open("/proc/self/status") as file:
        return next(1024.0 * float(line.split()[1]) for line in file if line.startswith(kind))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the highest mark of memory is Linux's to tell")
@pytest.mark.parametrize("name", ["adamw", "muon", "torch.optim.Adamax"])
def test_loading_takes_no_second_copy_of_the_state(name: str) -> None:
    ((added, nbytes),) = run_ranks(peak_of_loading, 1, name, init=False)
    assert nbytes >= 16 * 4 * 2**20
    assert added < 0.25 * nbytes
