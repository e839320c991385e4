"""Rotations are right at any position and survive whatever is done to the model's dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kforge_model import ModelConfig, Rotary, Transformer, rope_frequencies
from kforge_testing import run_ranks

POSITIONS = [0, *range(255, 261), 4095, 32767]


def reference_angles(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """[..., Dh/2] float64, one scalar at a time."""
    return torch.tensor(
        [[float(p) / theta ** (2 * i / head_dim) for i in range(head_dim // 2)] for p in positions.flatten()],
        dtype=torch.float64,
    ).view(*positions.shape, head_dim // 2)


def frequencies(head_dim: int, theta: float) -> Tensor:
    return rope_frequencies(ModelConfig(dim=head_dim, n_heads=1, rope_theta=theta))[0]


def scaled(kind: str, head_dim: int, theta: float, factor: float, length: int, low: float, high: float) -> list[float]:
    """Radians a position of each pair, one at a time, as the papers say."""
    result = []
    if kind == "ntk":
        theta = theta * factor ** (head_dim / (head_dim - 2))

    def place(turns: float) -> float:  # the pair that turns so often over the original length
        return head_dim / 2 * math.log(length / (2 * math.pi * turns), theta)

    for i in range(head_dim // 2):
        f = theta ** (-2 * i / head_dim)
        wavelength = 2 * math.pi / f
        if kind == "linear":
            f = f / factor
        elif kind == "llama3":
            if wavelength > length / low:
                f = f / factor
            elif wavelength >= length / high:
                smooth = (length / wavelength - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        elif kind == "yarn":
            first, last = math.floor(place(high)), math.ceil(place(low))
            ramp = min(max((i - first) / (last - first), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
        result.append(f)
    return result


@pytest.mark.parametrize(
    ("kind", "factor", "length", "low", "high"),
    [
        ("linear", 4.0, None, 1.0, 4.0),
        ("ntk", 4.0, None, 1.0, 4.0),
        ("llama3", 8.0, 8192, 1.0, 4.0),
        ("yarn", 16.0, 4096, 1.0, 32.0),
    ],
)
def test_scalings(kind: Any, factor: float, length: int | None, low: float, high: float) -> None:
    config = ModelConfig(
        dim=128, n_heads=1, rope_theta=500_000.0, rope_scaling=kind, rope_factor=factor, rope_original_len=length,
        rope_low=low, rope_high=high,
    )  # fmt: skip
    got, magnitude = rope_frequencies(config)
    right = torch.tensor(scaled(kind, 128, 500_000.0, factor, length or 0, low, high), dtype=torch.float64)
    assert (got / right - 1).abs().max() < 1e-12
    assert magnitude == pytest.approx(0.1 * math.log(16) + 1 if kind == "yarn" else 1.0)


def test_a_window_with_its_own_base_is_not_scaled() -> None:
    config = ModelConfig(dim=32, n_heads=1, window=4, rope_theta_window=77.0, rope_scaling="linear", rope_factor=8.0)
    assert torch.allclose(rope_frequencies(config, 4)[0], frequencies(32, 77.0), rtol=1e-14)
    assert torch.allclose(rope_frequencies(config)[0], frequencies(32, 10_000.0) / 8, rtol=1e-14)


def test_part_of_a_head_is_rotated_and_the_rest_left() -> None:
    x = torch.randn(2, 5, 3, 12, dtype=torch.float64)
    rotary = Rotary.at(torch.arange(5).expand(2, 5), frequencies(8, 100.0), torch.float64, 2.0)
    got = rotary.rotate(x)
    assert torch.equal(got[..., 8:], x[..., 8:])
    plain = Rotary.at(torch.arange(5).expand(2, 5), frequencies(8, 100.0), torch.float64)
    assert (got[..., :8] - 2 * plain.rotate(x[..., :8])).abs().max() < 1e-13


def rotary_of(model: Transformer, positions: Tensor) -> Rotary:
    """The rotations that the blocks of a model really get."""
    seen: list[Rotary] = []
    handle = model.layers["0"].register_forward_pre_hook(lambda _, args: seen.append(args[1]))

    class Given:
        position_ids, cu_seqlens, doc_ids, max_seqlen = positions, None, None, positions.shape[1]

    with torch.no_grad():
        model(torch.zeros_like(positions), Given())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("how", ["fp32", "cast", "meta"])
def test_tables_after_a_cast_to_bf16(theta: float, how: str) -> None:
    config = ModelConfig(vocab_size=8, dim=64, n_layers=1, n_heads=1, max_seq_len=64, rope_theta=theta)
    if how == "meta":
        with torch.device("meta"):
            model = Transformer(config).to(torch.bfloat16)
        model.to_empty(device="cpu")
        model.init_weights(1)
    else:
        model = Transformer(config).to(torch.bfloat16 if how == "cast" else torch.float32)
    positions = torch.tensor([POSITIONS])
    rotary = rotary_of(model, positions)
    angle = reference_angles(positions, 64, theta)[:, :, None]
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    for table, right in ((rotary.cos, angle.cos()), (rotary.sin, angle.sin())):
        assert (table.double() - right).abs().max() < 1e-6
        assert (table.bfloat16().double() - right).abs().max() < 4e-3  # what one last rounding costs, and no more
    at = {position: rotary.sin[0, column] for column, position in enumerate(POSITIONS)}
    assert not torch.equal(at[256], at[257])


def test_rotation_is_a_complex_product_of_the_two_halves() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.randint(0, 1000, (2, 5))
    angle = reference_angles(positions, 8, 10_000.0)[:, :, None]
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    right = torch.cat((turned.real, turned.imag), -1)
    got = Rotary.at(positions, frequencies(8, 10_000.0), torch.float64).rotate(x)
    assert (got - right).abs().max() < 1e-12


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        at = [Rotary.at(torch.tensor([[p]]), frequencies(16, 500_000.0), torch.float64) for p in (i, j)]
        return float((at[0].rotate(q) * at[1].rotate(k)).sum())

    assert score(7, 3) == pytest.approx(score(30_007, 30_003), abs=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_half_precision_input_is_turned_in_float32_and_rounded_once() -> None:
    x = torch.randn(1, 64, 2, 16).bfloat16()
    positions = torch.arange(64)[None]
    got = Rotary.at(positions, frequencies(16, 10_000.0), torch.bfloat16).rotate(x)
    right = Rotary.at(positions, frequencies(16, 10_000.0), torch.float64).rotate(x.double())
    assert got.dtype == torch.bfloat16
    assert (got.double() - right).abs().max() <= right.abs().max() * 2**-8
    assert (got == right.bfloat16()).float().mean() > 0.999


def _fsdp_tables(rank: int, world: int) -> list[torch.dtype]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Transformer(ModelConfig(vocab_size=8, dim=16, n_layers=2, n_heads=1, max_seq_len=8))
    for policy_target in (*model.layers.values(), model):  # the default policy casts every tensor argument
        fully_shard(policy_target, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[Rotary] = []
    for block in model.layers.values():
        block.attn.core.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[1].cos.dtype))
    model(torch.zeros(1, 8, dtype=torch.int64))
    return seen


def test_fsdp_mixed_precision_leaves_the_tables_alone() -> None:
    assert run_ranks(_fsdp_tables, 2)[0] == [torch.float32, torch.bfloat16] * 2
