"""State and step on the CPU: the bits of the same optimizer without it, in any storage, on shards, across saves."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from algorithms import NAMES, config
from optim_models import batches, summed_loss, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from kforge_optim import AdamW, GroupRule, OptimConfig, Optimizer, build_optimizer, clip, split
from kforge_optim.optimizer import Storage
from kforge_optim.sharding import local
from kforge_testing import run_ranks

STEPS = 6
GATES = (1.0, 1.0, 0.0, 1.0, 1.0, 0.0)
BY_ELEMENT = [name for name in NAMES if not name.endswith("muon")]
WIDE: dict[str, dict[str, Any]] = {
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "cautious": {"cautious_decay": True},
    "mixed": {"groups": (GroupRule(name="lion", role="matrices", optimizer="lion", lr_scale=0.1),)},
    "average": {"ema_decay": 0.9},
}
Bits = dict[str, Tensor]


class Model(nn.Module):
    """A matrix that is large enough for blocks of 8 bits, a transposed one, and a bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.large = nn.Parameter(torch.randn(20, 300, generator=generator).to(dtype))
        self.turned = nn.Parameter(torch.randn(7, 12, generator=generator).to(dtype).t())
        self.bias = nn.Parameter(torch.randn(12, generator=generator).to(dtype))


def step(model: nn.Module, optimizer: Optimizer, number: int, device: str = "cpu") -> None:
    """One step with random gradients, which are NaN where the gate is 0."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        grad = grad if GATES[number] else grad.fill_(torch.nan)
        parameter.grad = torch.empty_like(parameter).copy_(grad)
    scale, gate = torch.tensor(0.3, device=device), torch.tensor(GATES[number], device=device)
    optimizer.step(scale, gate)
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: Optimizer) -> Bits:
    """Weights, their averages and all state, as bytes."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    tensors |= {f"{name}:{kind}": tensor for name, kept in state.items() for kind, tensor in kept.items()}
    with optimizer.evaluation_weights():
        tensors |= {f"{name} shown": optimizer.full_weight(name).clone() for name, _ in model.named_parameters()}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().reshape(-1).view(torch.uint8)
        for name, tensor in tensors.items()
    }


def same(one: Bits, other: Bits) -> bool:
    return one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def pair(storage: Storage, settings: OptimConfig) -> tuple[nn.Module, Optimizer]:
    model = Model(torch.float32 if storage == "fp32" else torch.bfloat16)
    return model, build_optimizer(model, settings, STEPS, storage=storage, seed=5)


def offloaded(settings: OptimConfig) -> OptimConfig:
    return replace(settings, offload=True)


def rows() -> dict[str, OptimConfig]:
    made = {name: config(name, schedule="constant") for name in BY_ELEMENT}
    return made | {name: OptimConfig(lr=0.02, schedule="constant", **fields) for name, fields in WIDE.items()}


@pytest.mark.parametrize("name", rows())
@pytest.mark.parametrize("storage", ["fp32", "split", "stochastic"])
@pytest.mark.parametrize("chunk", [2**24, 100])
def test_each_step_has_the_bits_of_one_without(
    name: str, storage: Storage, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rows()[name]
    plain, there = pair(storage, settings), pair(storage, offloaded(settings))
    assert same(bits(*plain), bits(*there))
    monkeypatch.setattr(split, "_BATCH_ELEMENTS", chunk)
    for number in range(STEPS):
        before = bits(*there)
        step(*plain, number)
        step(*there, number)
        after = bits(*there)
        assert same(bits(*plain), after), number
        kept = [name for name in after if not name.endswith("shown") or GATES[number] == 0]
        assert same({n: before[n] for n in kept}, {n: after[n] for n in kept}) == (GATES[number] == 0)


def test_what_is_stepped_are_copies_and_the_model_gets_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair("fp32", OptimConfig(lr=0.02, schedule="constant", offload=True))
    monkeypatch.setattr(split, "_BATCH_ELEMENTS", 100)
    seen: list[list[str]] = []
    update = AdamW.update

    def watched(self: AdamW, slots: Any, **given: Any) -> None:
        for slot in slots:
            parameter = model.get_parameter(slot.name)
            assert slot.parameter.data_ptr() != parameter.data_ptr() and slot.parameter.equal(parameter)
            assert slot.parameter.stride() == parameter.stride()
            assert parameter.grad is not None and slot.parameter.grad.equal(parameter.grad)
        seen.append([slot.name for slot in slots])
        update(self, slots, **given)

    monkeypatch.setattr(AdamW, "update", watched)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    step(model, optimizer, 0)
    assert seen == [["turned"], ["large"], ["bias"]]  # by group, then by shape, a hundred elements at a time
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]


def test_a_step_without_gradients_is_a_step() -> None:
    model, optimizer = pair("fp32", OptimConfig(lr=0.02, schedule="constant", offload=True))
    before = bits(model, optimizer)
    optimizer.step()
    assert optimizer.schedule_step == 1 and same(before, bits(model, optimizer))


def test_float32_gradients_of_bfloat16_weights_are_taken_as_they_are() -> None:
    made = []
    for offload in (False, True):
        model, optimizer = pair("split", OptimConfig(lr=0.02, schedule="constant", offload=offload))
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
        optimizer.step()
        made.append(bits(model, optimizer))
    assert same(*made)


def test_weights_that_others_write_are_seen() -> None:
    """A checkpoint, a clip of scores: the device's weights are the only ones."""
    made = []
    for offload in (False, True):
        model, optimizer = pair("split", OptimConfig(lr=0.02, schedule="constant", offload=offload))
        step(model, optimizer, 0)
        optimizer.multiply([("large", torch.full((1, 300), 0.5))])
        with torch.no_grad():
            model.get_parameter("bias").zero_()
        step(model, optimizer, 1)
        made.append(bits(model, optimizer))
    assert same(*made)


@pytest.mark.parametrize("storage", ["fp32", "split"])
def test_law_3_a_run_goes_from_one_to_the_other_and_back(storage: Storage) -> None:
    settings = OptimConfig(lr=0.02, schedule="linear", moments="bf16")
    straight = pair(storage, settings)
    for number in range(STEPS):
        step(*straight, number)
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    for first, one in ((0, settings), (2, offloaded(settings)), (4, settings)):
        model, optimizer = pair(storage, one)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for number in range(first, first + 2):
            step(model, optimizer, number)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert same(bits(*straight), bits(model, optimizer))


def _sharded(rank: int, world: int) -> list[tuple[str, Bits, Bits]]:
    """Bits of every optimizer on shards, plain and offloaded."""
    mesh = init_device_mesh("cpu", (world,))
    results = []
    for name in BY_ELEMENT:
        both = []
        for settings in (config(name, warmup_steps=2), offloaded(config(name, warmup_steps=2))):
            model = tiny()
            for module in (*model.layers.values(), model):
                fully_shard(module, mesh=mesh)
            for module in (*model.layers.values(), model):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            optimizer = build_optimizer(model, settings, STEPS)
            for number, ids in enumerate(batches(STEPS)):
                summed_loss(model, ids.tensor_split(world)[rank], ids.numel()).backward()
                optimizer.step(clip.clip_factor(clip.total_norm(model), 0.3), torch.tensor(GATES[number]))
                optimizer.zero_grad()
            state = optimizer.state_dict()["state"]
            assert isinstance(next(iter(state["layers.0.up.weight"].values())), Tensor)
            assert all(isinstance(t, DTensor) for kept in state.values() for t in kept.values() if t.ndim)
            both.append(bits(model, optimizer))
        results.append((name, both[0], both[1]))
    assert dist.get_world_size() == world
    return results


def test_law_1_on_shards_too() -> None:
    for ranks in zip(*run_ranks(_sharded, 2, timeout_s=120), strict=True):
        for name, plain, there in ranks:
            assert same(plain, there), name


@pytest.mark.parametrize(
    "fields", [{"name": "muon"}, {"groups": (GroupRule(name="m", role="matrices", optimizer="muon"),)}]
)
def test_what_takes_whole_matrices_is_refused(fields: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    assert build_optimizer(model, OptimConfig(**fields), STEPS)
    with pytest.raises(ValueError, match=r"optim\.offload: muon multiplies whole matrices.*adamw or lion"):
        build_optimizer(model, OptimConfig(**fields, offload=True), STEPS)


def on_device(storage: Storage, settings: OptimConfig) -> tuple[nn.Module, Optimizer]:
    model = Model(torch.float32 if storage == "fp32" else torch.bfloat16).cuda()
    return model, build_optimizer(model, settings, STEPS, storage=storage, seed=5)


def on_cpu(all_bits: Bits) -> Bits:
    return {name: tensor.cpu() for name, tensor in all_bits.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", rows())
@pytest.mark.parametrize("storage", ["fp32", "split", "stochastic"])
@pytest.mark.parametrize("chunk", [2**24, 100])
def test_a_device_s_steps_have_the_bits_of_the_cpu(
    name: str, storage: Storage, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "_BATCH_ELEMENTS", chunk)
    settings = replace(rows()[name], ema_decay=0.0)  # an average on the device has other roundings
    plain, there = pair(storage, settings), on_device(storage, offloaded(settings))
    for number in range(STEPS):
        step(*plain, number)
        step(*there, number, device="cuda")
        assert same(bits(*plain), on_cpu(bits(*there))), number
    model, optimizer = there
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert all(t.device.type == "cpu" for kept in optimizer.state_dict()["state"].values() for t in kept.values())


@pytest.mark.gpu
def test_a_device_holds_weights_and_gradients_alone() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(16)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer = build_optimizer(model, OptimConfig(lr=0.02, offload=True), STEPS)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.step(torch.ones((), device="cuda"), torch.ones((), device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.gpu
def test_copies_are_beside_the_step_and_the_next_kernel_sees_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for events alone, so what is copied is pinned; and the current stream for what goes up."""
    monkeypatch.setattr(split, "_BATCH_ELEMENTS", 2**20)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(16)))
    optimizer = build_optimizer(model, OptimConfig(name="lion", lr=0.5, schedule="none", offload=True), STEPS)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
        parameter.grad = torch.ones_like(parameter)
    one = torch.ones((), device="cuda")
    optimizer.init_state()
    torch.cuda.set_sync_debug_mode("error")  # an event's wait is no fault to it
    try:
        optimizer.step(one, one)
        sums = torch.stack([parameter.sum() for parameter in model.parameters()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sums.tolist() == [-0.5 * 2**20] * 16


def _sharded_on_device(rank: int, world: int) -> list[str]:
    """Names of rows whose weights on shards of a device are those of one CPU, and go on from a saved state."""
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,))
    equal = []
    for name, of_row in rows().items():
        settings = replace(of_row, ema_decay=0.0)
        plain, plain_optimizer = pair("split", settings)
        model = Model(torch.bfloat16).cuda()
        model.turned = nn.Parameter(model.turned.detach().contiguous())  # FSDP2 takes no others
        fully_shard(model, mesh=mesh)
        optimizer = build_optimizer(model, offloaded(settings), STEPS, storage="split", seed=5)
        for number in range(STEPS):
            step(plain, plain_optimizer, number)
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                grad = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
                grad = grad if GATES[number] else grad.fill_(torch.nan)
                parameter.grad = distribute_tensor(grad.cuda(), mesh, parameter.placements)
            if number == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = build_optimizer(model, offloaded(settings), STEPS, storage="split", seed=5)
                optimizer.load_state_dict(saved)
            optimizer.step(torch.tensor(0.3, device="cuda"), torch.tensor(GATES[number], device="cuda"))
        kept = [tensor for kinds in optimizer.state_dict()["state"].values() for tensor in kinds.values()]
        assert all(isinstance(tensor, DTensor) for tensor in kept if tensor.ndim)
        assert all(local(tensor).device.type == "cpu" for tensor in kept)
        whole = {key: optimizer.full_weight(key).full_tensor().cpu() for key, _ in model.named_parameters()}
        if all(plain_optimizer.full_weight(key).equal(weight) for key, weight in whole.items()):
            equal.append(name)
    return equal


@pytest.mark.gpu
def test_shards_on_a_device_have_the_bits_of_the_cpu() -> None:
    assert run_ranks(_sharded_on_device, 1, init=False, timeout_s=120) == [list(rows())]
