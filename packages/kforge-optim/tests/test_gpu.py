"""What is different on a CUDA device: the fused kernel's gate and scale, bfloat16 Newton-Schulz, no waiting."""

from __future__ import annotations

import math

import pytest
import torch
from optim_models import batches, summed_loss, tiny

from kforge_optim import LossScaler, OptimConfig, Optimizer, build_optimizer, clip

pytestmark = pytest.mark.gpu
NAMES = ["adamw", "muon", "normuon"]


def config(name: str, **values: str) -> OptimConfig:
    if name == "normuon":
        name, values = "muon", {"muon_variance_beta": 0.95, "muon_method": "polar_express"}  # type: ignore[dict-item]
    return OptimConfig(name=name, lr=0.01, warmup_steps=2, **values)  # type: ignore[arg-type]


def everything(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"].values()
    tensors = [*model.parameters(), *(tensor for kinds in state for tensor in kinds.values())]
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in tensors]


def one_step(model: torch.nn.Module, optimizer: Optimizer, ids: torch.Tensor, poison: float | None = None) -> None:
    summed_loss(model, ids.to("cuda"), ids.numel()).backward()
    if poison is not None:
        model.layers["0"].up.weight.grad[1, 1] = poison
    norm = clip.total_norm(model)
    optimizer.step(scale=clip.clip_factor(norm, 0.5), gate=torch.isfinite(norm).to(torch.float32))
    optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_gate_0_changes_no_bit(name: str, poison: float) -> None:
    model = tiny(torch.float32).cuda()
    optimizer = build_optimizer(model, config(name), 10)
    for step, ids in enumerate(batches(4)):
        before = everything(model, optimizer)
        one_step(model, optimizer, ids, poison if step == 2 else None)
        same = [torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True)]
        assert all(same) if step == 2 else not any(same[: len(list(model.parameters()))])


@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_cpu_in_float64(name: str) -> None:
    ours, reference = tiny().cuda(), tiny()
    on_cuda, on_cpu = build_optimizer(ours, config(name), 10), build_optimizer(reference, config(name), 10)
    for ids in batches(6):
        one_step(ours, on_cuda, ids)
        summed_loss(reference, ids, ids.numel()).backward()
        on_cpu.step(scale=clip.clip_factor(clip.total_norm(reference), 0.5))
        on_cpu.zero_grad()
    for mine, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-10, atol=1e-10)


def test_adamw_follows_torch_fused() -> None:
    """Not bit for bit: torch's kernel has float64 in between, ours has not."""
    ours, theirs = tiny(torch.float32).cuda(), tiny(torch.float32).cuda()
    optimizer = build_optimizer(ours, OptimConfig(lr=0.01, weight_decay=0.0, schedule="none"), 10)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    for step in range(6):
        generator = torch.Generator("cuda").manual_seed(step)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, device="cuda", generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step(scale=torch.ones((), device="cuda"), gate=torch.ones((), device="cuda"))
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_muon_takes_bfloat16_iterations() -> None:
    moved = {}
    for dtype in ("auto", "bfloat16", "float32"):
        model = torch.nn.Linear(64, 48, bias=False, device="cuda")
        torch.nn.init.zeros_(model.weight)
        model.weight.grad = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)).cuda()
        build_optimizer(model, config("muon", muon_ns_dtype=dtype), 10).step()
        moved[dtype] = model.weight.detach()
    assert torch.equal(moved["auto"], moved["bfloat16"])
    difference = (moved["auto"] - moved["float32"]).abs().max() / moved["float32"].abs().max()
    assert 1e-4 < difference < 5e-2


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait(name: str) -> None:
    model = tiny(torch.float32).cuda()
    optimizer = build_optimizer(model, config(name), 10)
    first, second = batches(2)
    one_step(model, optimizer, first)
    summed_loss(model, second.cuda(), second.numel()).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, norms = clip.total_norm(model, also=optimizer.groups)
        clip.clip_values_(model, 0.1)
        optimizer.step(scale=clip.clip_factor(norm, 0.5), gate=torch.isfinite(norm).to(torch.float32))
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.schedule_step == 2 and all(p.grad is None for p in model.parameters())
    assert sum(float(value) ** 2 for value in norms.values()) == pytest.approx(float(norm) ** 2, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_law_6_split_is_bit_equal_to_fp32(name: str) -> None:
    whole, halves = tiny(torch.float32).cuda(), tiny(torch.bfloat16).cuda()
    fp32 = build_optimizer(whole, config(name), 10)
    split = build_optimizer(halves, config(name), 10, storage="split")
    split.load_full_weights(whole.named_parameters())
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(1000 if name == "adamw" else 50):
        for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
            other.grad = torch.randn(one.shape, device="cuda", generator=generator).to(torch.bfloat16)
            one.grad = other.grad.to(torch.float32)
        gate, scale = torch.tensor(float(step % 7 != 3), device="cuda"), torch.tensor(0.3, device="cuda")
        fp32.step(scale=scale, gate=gate)
        split.step(scale=scale, gate=gate)
    for key, weight in whole.named_parameters():
        assert torch.equal(split.full_weight(key), weight), key


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait_for_split_weights_and_loss_scales(name: str) -> None:
    model = tiny(torch.bfloat16).cuda()
    optimizer = build_optimizer(model, config(name), 10, storage="split")
    scaler = LossScaler(init_scale=4.0, growth_interval=2, device="cuda")
    for step, ids in enumerate(batches(4)):
        (summed_loss(model, ids.cuda(), ids.numel()) * scaler.scale).backward()
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step allocates
        try:
            norm = clip.total_norm(model) / scaler.scale
            clip.clip_values_(model, 0.1, scale=scaler.scale)
            gate = torch.isfinite(norm).to(torch.float32)
            optimizer.step(scale=clip.clip_factor(norm, 0.5) / scaler.scale, gate=gate)
            scaler.update(gate)
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.scale == 16.0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
