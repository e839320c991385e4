"""Generation with a cache is what the model without one says, and sampling draws from what it claims."""

from __future__ import annotations

import pytest
import torch

from kforge_model import KVCache, ModelConfig, Transformer, generate, sample


@pytest.fixture
def model() -> Transformer:
    config = ModelConfig(vocab_size=37, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, max_seq_len=40, init_std=0.3)
    return Transformer(config).double()


def test_greedy_equals_a_full_forward_for_every_token(model: Transformer) -> None:
    prompt = torch.randint(37, (3, 5))
    right = prompt
    for _ in range(20):
        right = torch.cat([right, model(right)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, prompt, 20, temperature=0), right)


def test_cached_logits_equal_full_logits(model: Transformer) -> None:
    ids = torch.randint(37, (2, 20))
    full = model(ids)
    cache = KVCache(20)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 20)):  # one at a time, and several at once
        part = model(ids[:, start:stop], cache=cache)
        assert part.shape == (2, 1, 37) and cache.length == stop
        assert (part[:, 0] - full[:, stop - 1]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="cache holds 20"):
        model(ids[:, :1], cache=cache)


def test_sampling_equals_a_full_forward_with_the_same_generator(model: Transformer) -> None:
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.8}
    prompt = torch.randint(37, (3, 5))
    generator = torch.Generator().manual_seed(5)
    right = prompt
    for _ in range(12):
        right = torch.cat([right, sample(model(right)[:, -1], generator=generator, **options)[:, None]], 1)
    for _ in range(2):
        got = generate(model, prompt, 12, generator=torch.Generator().manual_seed(5), **options)
        assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.5}, [3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.85}, [0, 1, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # of the three left, 0.5 / 0.95 and 0.3 / 0.95 make 0.84
        ({"top_p": 1e-9}, [3]),
    ],
)
def test_frequencies(options: dict[str, float], kept: list[int]) -> None:
    p = torch.tensor([0.15, 0.3, 0.05, 0.5], dtype=torch.float64)
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    drawn = sample(p.log().expand(n, 4), generator=generator, **options)  # type: ignore[arg-type]
    frequency = torch.bincount(drawn, minlength=4) / n
    right = torch.zeros(4, dtype=torch.float64)
    right[kept] = p[kept] / p[kept].sum()
    assert ((frequency > 0) == (right > 0)).all()
    assert (frequency - right).abs().max() < 4 * 0.5 / n**0.5


def test_temperature_sharpens_and_zero_takes_the_first() -> None:
    p = torch.tensor([0.2, 0.8], dtype=torch.float64)
    drawn = sample(p.log().expand(20_000, 2), temperature=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.double().mean().item() == pytest.approx(0.64 / 0.68, abs=0.01)
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), temperature=0).tolist() == [1]


def test_rows_stop_at_their_own_end(model: Transformer) -> None:
    prompt = torch.randint(37, (4, 5))
    free = generate(model, prompt, 20, temperature=0)
    eos = int(free[0, 8])
    got = generate(model, prompt, 20, temperature=0, eos_id=eos)
    ends = []
    for row, whole in zip(got, free, strict=True):
        hits = (whole[5:] == eos).nonzero().flatten().tolist()
        end = 5 + hits[0] + 1 if hits else 25
        ends.append(end)
        assert torch.equal(row[:end], whole[: len(row[:end])])
        assert (row[end:] == eos).all()
    assert got.shape[1] == max(ends)


def test_modes_come_back(model: Transformer) -> None:
    model.train()
    model.layers["1"].eval()
    before = [module.training for module in model.modules()]
    generate(model, torch.zeros(1, 1, dtype=torch.int64), 2)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(IndexError):
        generate(model, torch.full((1, 2), 99), 2)
    assert [module.training for module in model.modules()] == before


def test_user_errors(model: Transformer) -> None:
    prompt = torch.zeros(1, 30, dtype=torch.int64)
    assert generate(model, prompt, 10).shape == (1, 40)
    assert torch.equal(generate(model, prompt, 0), prompt)
    with pytest.raises(ValueError, match="exceed max_seq_len = 40"):
        generate(model, prompt, 11)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, prompt[:, :0], 1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, prompt, -1)
    for options in (
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            generate(model, prompt, 1, **options)  # type: ignore[arg-type]
