"""The kernel against its formulas in float32, an operation at a time on the CPU, for each way of storing.

On a machine without a GPU, TRITON_INTERPRET=1 runs them where Triton is installed, with `-m gpu`.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from torch import Tensor, nn

from kforge_optim import AdamW, OptimConfig, Optimizer, Slot, build_optimizer, join_float32, split_float32
from kforge_optim import moments as kept
from kforge_optim.algorithm import Rates
from kforge_optim.rounding import WEIGHT, Box, noise, noise_key, sixteen, to_bfloat16
from kforge_optim.split import new_remainder

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
SHAPES = [(8, 512), (5,), (), (3, 700), (17, 256), (64, 130), (2, 3, 1024)]
WAYS = [
    (storage, moments, grad, cautious)
    for storage, moments, grad, cautious in itertools.product(
        ("fp32", "split", "stochastic"), ("fp32", "bf16", "int8"), (torch.float32, torch.bfloat16), (False, True)
    )
    if (storage, grad) != ("fp32", torch.bfloat16)
]


def full_weight(slot: Slot) -> Tensor:
    weight = slot.parameter.detach()
    return weight.float() if slot.remainder is None else join_float32(weight, slot.remainder)


def full_moment(slot: Slot, kind: str) -> Tensor:
    stored = slot.state[kind]
    if stored.dtype != torch.uint8:
        return stored.float()
    scale = slot.state[f"{kind}_scale"].repeat_interleave(256, dim=-1)[..., : stored.shape[-1]]
    return kept.codes(kind == "exp_avg", stored.device)[stored.int()] * scale


def formulas(
    before: list[Tensor], grad: Tensor, scale: Tensor, taken: int, algorithm: AdamW, rates: Rates
) -> tuple[Tensor, Tensor, Tensor]:
    """New weight, first and second moment, float32 on the CPU."""
    w, m, v = (tensor.cpu() for tensor in before)
    g = grad.cpu().float() * scale.cpu()
    b1, b2 = algorithm.betas
    c1 = torch.tensor(rates.lr / (1 - b1**taken), dtype=torch.float32)
    c2 = torch.tensor(1 / math.sqrt(1 - b2**taken), dtype=torch.float32)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + ((1 - b2) * g) * g
    decayed = w - (rates.lr * rates.weight_decay) * w
    if algorithm.cautious_decay:
        decayed = torch.where(m * w >= 0, decayed, w)
    root = v.double().sqrt().float()  # rounded right, which torch's own root of float32 is not on every CPU
    return decayed - (c1 * m) / (root * c2 + algorithm.eps), m, v


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.cpu().reshape(-1).view(torch.uint8).equal(other.cpu().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(("storage", "moments", "grad_dtype", "cautious"), WAYS)
def test_every_way_of_storing_equals_the_formulas(
    storage: str, moments: str, grad_dtype: torch.dtype, cautious: bool
) -> None:
    from kforge_optim import adamw_kernel

    algorithm = AdamW(moments=moments, cautious_decay=cautious)
    generator = torch.Generator().manual_seed(0)
    slots = []
    for i, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(torch.float32 if storage == "fp32" else torch.bfloat16)
        slot = Slot(f"w{i}", nn.Parameter(value.to(DEVICE), requires_grad=False))
        slot.remainder = new_remainder(slot.parameter) if storage == "split" else None
        slot.state = algorithm.init_state(slot.parameter)
        slots.append(slot)
    scale = torch.tensor(0.7, device=DEVICE)
    for step in range(3):
        before = []
        for slot in slots:
            slot.parameter.grad_dtype = grad_dtype
            slot.parameter.grad = torch.randn(slot.parameter.shape, generator=generator).to(DEVICE, grad_dtype)
            before.append([t.clone() for t in (full_weight(slot), *(full_moment(slot, kind) for kind in MOMENTS))])
        rates = Rates(1e-2, 0.1, step=step, seed=5)
        with torch.no_grad():
            adamw_kernel.update(slots, algorithm, rates, scale, torch.ones((), device=DEVICE))
        for slot, old in zip(slots, before, strict=True):
            assert slot.parameter.grad is not None
            w, *new = formulas(old, slot.parameter.grad, scale, step + 1, algorithm, rates)
            bits = noise(torch.arange(w.numel()), noise_key(5, step, slot.name)).view(w.shape)
            if storage == "split":
                assert slot.remainder is not None
                high, low = split_float32(w)
                assert same_bits(slot.parameter.detach(), high) and same_bits(slot.remainder, low), slot.name
            else:
                expected = w if storage == "fp32" else to_bfloat16(w, sixteen(bits, WEIGHT))
                assert same_bits(slot.parameter.detach(), expected), slot.name
            for kind, moment in zip(MOMENTS, new, strict=True):
                assert_stored(slot, kind, moment, bits)
            assert slot.state["step"] == step + 1

    saved = [[t.clone() for t in (slot.parameter.detach(), *slot.state.values())] for slot in slots]
    for slot in slots:
        assert slot.parameter.grad is not None
        slot.parameter.grad.fill_(math.nan)
    adamw_kernel.update(slots, algorithm, Rates(1e-2, 0.1, step=3), None, torch.zeros((), device=DEVICE))
    for slot, old in zip(slots, saved, strict=True):
        assert all(map(same_bits, (slot.parameter.detach(), *slot.state.values()), old))


MOMENTS = ("exp_avg", "exp_avg_sq")


def assert_stored(slot: Slot, kind: str, moment: Tensor, bits: Tensor) -> None:
    stored = slot.state[kind].cpu()
    if stored.dtype == torch.float32:
        assert same_bits(stored, moment), (slot.name, kind)
        return
    scale, block = None, None
    if stored.dtype == torch.uint8:
        block = kept.block_of(0, moment.shape[-1], moment.device)
        scale = slot.state[f"{kind}_scale"].cpu().view(-1, kept.blocks(moment.shape[-1]))
        assert same_bits(scale, kept.largest(moment.reshape(-1), scale, block))
    expected = kept.narrow(moment.reshape(-1), bits.reshape(-1), scale, block, kind == "exp_avg")
    assert same_bits(stored, expected), (slot.name, kind)


def test_one_launch_for_many_tensors_at_any_address() -> None:
    """300 tensors that begin at every second byte of 16, their sizes from 1 to 9,000."""
    from kforge_optim import adamw_kernel

    algorithm = AdamW(moments="bf16")
    generator = torch.Generator().manual_seed(0)
    slots = []
    for i in range(300):
        size, first = int(torch.randint(1, 9000, (), generator=generator)), i % 8
        room = torch.randn(size + first, generator=generator).bfloat16().to(DEVICE)
        slot = Slot(f"w{i}", nn.Parameter(room[first:], requires_grad=False))
        slot.remainder, slot.state = new_remainder(slot.parameter), algorithm.init_state(slot.parameter)
        slot.parameter.grad = torch.randn(size + first, generator=generator).bfloat16().to(DEVICE)[first:]
        slots.append(slot)
    before = [full_weight(slot) for slot in slots]
    rates, one = Rates(1e-2, 0.1), torch.ones((), device=DEVICE)
    adamw_kernel.update(slots, algorithm, rates, None, None)
    for slot, old in zip(slots, before, strict=True):
        assert slot.parameter.grad is not None
        zero = torch.zeros_like(old)
        w, _, _ = formulas([old, zero, zero], slot.parameter.grad, one, 1, algorithm, rates)
        assert same_bits(full_weight(slot), w), slot.name


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("storage", ["stochastic", "split"])
@pytest.mark.parametrize(
    ("offset", "local"), [((1, 0, 0), (2, 6, 512)), ((0, 2, 0), (3, 3, 512)), ((0, 0, 256), (3, 6, 256))]
)
def test_shards_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, storage: str, moments: str, offset: tuple[int, ...], local: tuple[int, ...]
) -> None:
    """Pieces of a tensor [3, 6, 512] as one run, as several, and as columns take the random bits of their place."""
    from kforge_optim import adamw_kernel

    shape = (3, 6, 512)
    piece = tuple(slice(first, first + size) for first, size in zip(offset, local, strict=True))
    generator = torch.Generator().manual_seed(1)
    value, grad = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    results = []
    for cut in (False, True):
        box = Box(local, shape, offset) if cut else Box(shape, shape, (0, 0, 0))
        monkeypatch.setattr(adamw_kernel.Box, "of", lambda tensor, box=box: box)
        algorithm = AdamW(moments=moments)
        slot = Slot("w", nn.Parameter(value[piece].contiguous() if cut else value.clone(), requires_grad=False))
        slot.parameter.grad = grad[piece].contiguous() if cut else grad
        slot.remainder = new_remainder(slot.parameter) if storage == "split" else None
        slot.state = {"step": torch.zeros((), device=DEVICE), **kept.new_moments(value, moments)}
        if cut:
            slot.state |= {kind: slot.state[kind][piece].contiguous() for kind in MOMENTS}
            columns = slice(offset[2] // 256, (offset[2] + local[2]) // 256)
            scales = [kind for kind in slot.state if kind.endswith("_scale")]
            slot.state |= {kind: slot.state[kind][(*piece[:2], columns)].contiguous() for kind in scales}
        assert adamw_kernel.divide([slot]) == ([slot], [])
        adamw_kernel.update([slot], algorithm, Rates(1e-2, 0.1), None, None)
        results.append({"w": slot.parameter.detach(), **slot.state})
    for name in ("w", *MOMENTS):
        assert same_bits(results[1][name], results[0][name][piece].contiguous()), name


def test_what_is_left_to_others() -> None:
    from kforge_optim import adamw_kernel

    algorithm = AdamW()
    for weight, taken in (
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4, dtype=torch.float64), False),
        (torch.zeros(4, 3).t(), False),
    ):
        slot = Slot("w", nn.Parameter(weight.to(DEVICE)))
        slot.state = algorithm.init_state(slot.parameter)
        assert adamw_kernel.divide([slot]) == (([slot], []) if taken else ([], [slot]))


def test_split_bf16_moments_take_8_bytes_and_no_wide_copy() -> None:
    """Under the allocator's eyes: a step makes nothing of the size of a weight."""
    model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device=DEVICE)
    optimizer: Optimizer = build_optimizer(model, OptimConfig(moments="bf16"), 10, storage="split")
    optimizer.init_state()
    model.weight.grad = torch.ones_like(model.weight)
    state = optimizer.state_dict()["state"]["weight"]
    size = sum(tensor.numel() * tensor.itemsize for tensor in (model.weight, *state.values()))
    assert size / model.weight.numel() == pytest.approx(8, abs=1e-5)
    optimizer.step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step(scale=torch.ones((), device=DEVICE), gate=torch.ones((), device=DEVICE))
        assert torch.cuda.max_memory_allocated() - before < 0.01 * model.weight.numel()
