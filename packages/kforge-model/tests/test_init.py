"""The same bits in every layout, the right distribution, and the values of the generator as published."""

from __future__ import annotations

import hashlib
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

import kforge_model.init as init_module
from kforge_model import ModelConfig, Transformer, init_normal_
from kforge_testing import run_ranks


def scalar_normal(seed: int, name: str, index: int) -> float:
    """The definition, in Python integers."""
    mask = (1 << 64) - 1
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return statistics.NormalDist().inv_cdf(((z >> 12) + 0.5) / 2**52)


def test_values_are_those_of_the_definition() -> None:
    got = init_normal_(torch.empty(50, 20, dtype=torch.float64), 7, "layers.0.attn.wqkv.weight", 1.0)
    right = [scalar_normal(7, "layers.0.attn.wqkv.weight", i) for i in range(1000)]
    assert (got.flatten() - torch.tensor(right, dtype=torch.float64)).abs().max() < 1e-12


def test_finalizer_is_splitmix64() -> None:
    """First outputs of the published generator from state 1234567 (Java's SplittableRandom and its C translation)."""
    state = 1234567
    z = (torch.arange(5) + 1) * init_module.GOLDEN + state
    z = init_module._xor_shift_(z, 30) * init_module.MIX_1
    z = init_module._xor_shift_(z, 27) * init_module.MIX_2
    z = init_module._xor_shift_(z, 31)
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value % (1 << 64) for value in z.tolist()] == published


def test_distribution() -> None:
    x = init_normal_(torch.empty(1 << 20, dtype=torch.float64), 3, "w", 1.0)
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert abs((x[1:] * x[:-1]).mean()) < 4 / n**0.5
    other = init_normal_(torch.empty_like(x), 3, "v", 1.0)
    assert abs((x * other).mean()) < 4 / n**0.5
    below = (x[:, None] < torch.linspace(-3, 3, 13, dtype=torch.float64)).double().mean(0)
    right = torch.special.ndtr(torch.linspace(-3, 3, 13, dtype=torch.float64))
    assert (below - right).abs().max() < 4 * 0.5 / n**0.5


def test_depends_on_seed_name_and_index_only(monkeypatch: pytest.MonkeyPatch) -> None:
    base = init_normal_(torch.empty(40, 25), 1, "w", 0.02)
    assert torch.equal(init_normal_(torch.empty(1000), 1, "w", 0.02), base.flatten())
    assert not torch.equal(init_normal_(torch.empty(40, 25), 2, "w", 0.02), base)
    assert not torch.equal(init_normal_(torch.empty(40, 25), 1, "v", 0.02), base)
    strided = init_normal_(torch.empty(25, 40).t(), 1, "w", 0.02)
    assert torch.equal(strided, base) and not strided.is_contiguous()
    monkeypatch.setattr(init_module, "CHUNK", 7)
    assert torch.equal(init_normal_(torch.empty(40, 25), 1, "w", 0.02), base)
    half = init_normal_(torch.empty(40, 25, dtype=torch.bfloat16), 1, "w", 0.02)
    assert torch.equal(half, base.bfloat16())
    state = torch.get_rng_state()
    init_normal_(torch.empty(10), 1, "w", 1.0)
    assert torch.equal(torch.get_rng_state(), state)


def _shards(rank: int, world: int) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    layouts: dict[str, Any] = {}
    flat = init_device_mesh("cpu", (world,))
    for shape in ((7, 5), (2, 9), (3, 4, 5)):
        for placement in (Shard(0), Shard(1), Replicate()):
            layouts[f"{shape} {placement}"] = distribute_tensor(torch.full(shape, math.nan), flat, [placement])
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
            layouts[f"(7, 5) {placements}"] = distribute_tensor(torch.full((7, 5), math.nan), square, placements)
    out = {}
    for name, tensor in layouts.items():
        assert isinstance(tensor, DTensor)
        out[name] = init_normal_(tensor, 5, "w", 0.02).full_tensor()  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_of_any_layout_make_the_same_whole(world: int) -> None:
    for rank_result in run_ranks(_shards, world):
        for name, got in rank_result.items():
            whole = init_normal_(torch.empty(got.shape), 5, "w", 0.02)
            assert torch.equal(got, whole), name


def test_refuses_what_it_cannot_fill() -> None:
    with pytest.raises(ValueError, match=r"to_empty"):
        init_normal_(torch.empty(3, device="meta"), 1, "w", 1.0)


CONFIG = ModelConfig(vocab_size=131, dim=24, n_layers=3, n_heads=3, ffn_dim=40, max_seq_len=64)


def build_on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_and_plain_models_start_from_the_same_bits(tied: bool) -> None:
    config = ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": tied})
    plain = Transformer(config)
    plain.init_weights(11)
    model = build_on_meta(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.init_weights(11)
    for (name, one), (other, two) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(one, two)
        wanted = {"wo": 0.02 / 6**0.5, "w_down": 0.02 / 6**0.5}.get(name.split(".")[-2], 0.02)
        if "norm" in name:
            assert torch.equal(one, torch.ones(24))
        else:
            assert one.std().item() == pytest.approx(wanted, rel=5 / (2 * one.numel()) ** 0.5)
    assert not torch.equal(plain.layers["0"].attn.wqkv.weight, plain.layers["1"].attn.wqkv.weight)
    plain.init_weights(12)
    assert not torch.equal(plain.layers["0"].attn.wqkv.weight, model.layers["0"].attn.wqkv.weight)


def _fsdp_model(rank: int, world: int, tied: bool) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = build_on_meta(ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": tied}))
    for block in model.layers.values():
        fully_shard(block)
    for unit in model.fsdp_units():
        fully_shard([model.get_submodule(name) for name in unit])
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_weights(11)
    assert model.head is not None and model.embed is not None
    assert (model.head.weight is model.embed.weight) == tied
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_models_start_from_the_same_bits(world: int, tied: bool) -> None:
    plain = Transformer(ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": tied}))
    plain.init_weights(11)
    for got in run_ranks(_fsdp_model, world, tied):
        assert list(got) == [name for name, _ in plain.named_parameters()]
        for name, parameter in plain.named_parameters():
            assert torch.equal(got[name], parameter), name


def test_nothing_is_left_as_it_lay_in_memory() -> None:
    with pytest.raises(ValueError, match="meta device"):
        build_on_meta(CONFIG).init_weights(0)
    model = Transformer(CONFIG)
    model.layers["0"].attn.scale = torch.nn.Parameter(torch.empty(1))
    model.register_buffer("counts", torch.empty(1))
    with pytest.raises(ValueError, match=r"counts, layers.0.attn.scale"):
        model.init_weights(0)


def test_truncated_normal_has_the_shape_and_no_tails() -> None:
    x = init_normal_(torch.empty(1 << 20, dtype=torch.float64), 3, "w", 0.5, cut=2.0)
    c, phi = 2.0, math.exp(-2.0) / math.sqrt(2 * math.pi)
    mass = math.erf(c / math.sqrt(2))
    assert x.abs().max() <= 2.0 * 0.5 and x.abs().max() > 1.99 * 0.5
    assert abs(x.mean()) < 4e-3
    assert x.std().item() == pytest.approx(0.5 * math.sqrt(1 - 2 * c * phi / mass), rel=3e-3)
    inside = math.erf(1 / math.sqrt(2)) / mass  # within one deviation
    assert (x.abs() < 0.5).double().mean().item() == pytest.approx(inside, abs=3e-3)


@pytest.mark.parametrize("option", ["normal", "truncated_normal"])
def test_every_word_has_its_deviation_under_mup(option: Any) -> None:
    config = ModelConfig(
        vocab_size=512, dim=256, n_layers=2, n_heads=4, init=option, init_std=0.04, mup_base_dim=64,
        qkv_bias=True, sinks=True, norm="layernorm",
    )  # fmt: skip
    model = Transformer(config)
    model.init_weights(2)
    width = 0.5  # sqrt(64 / 256)
    wanted = {"embed": 0.04, "head": 0.04, "wqkv": 0.04 * width, "w_gate_up": 0.04 * width}
    wanted |= dict.fromkeys(("wo", "w_down"), 0.04 * width / 2)  # 1 / sqrt(2 * 2 layers)
    cut = 0.9866 if option == "truncated_normal" else 1.0  # deviation of a normal cut off at three
    scales = model.lr_scales()
    for name, parameter in model.named_parameters():
        owner, leaf = name.split(".")[-2:]
        if leaf in ("bias", "sinks"):
            assert not parameter.any(), name
        elif "norm" in owner:
            assert (parameter == 1).all(), name
        else:
            std = parameter.std().item()
            assert std == pytest.approx(wanted[owner] * cut, rel=5 / (2 * parameter.numel()) ** 0.5), name
            assert (parameter.abs().max() <= 3 * wanted[owner]) == (option == "truncated_normal"), name
        assert scales[name] == (0.25 if owner in ("wqkv", "wo", "w_gate_up", "w_down") and leaf == "weight" else 1.0)
    hidden = torch.randn(1, 3, 256)
    assert model.head is not None
    assert torch.allclose(model.head(hidden), hidden @ model.head.weight.T / 4, rtol=1e-5)


def test_a_word_that_nobody_knows_is_refused() -> None:
    model = Transformer(CONFIG)
    model.layers["1"].attn.init = {"extra": "orthogonal"}
    model.layers["1"].attn.extra = torch.nn.Parameter(torch.empty(1))
    with pytest.raises(ValueError, match=r"layers.1.attn.extra is to start as 'orthogonal'; known are ones"):
        model.init_weights(0)
