"""Generation with a cache is what the model without one says, whatever the model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kforge_model import ModelConfig, Rows, Transformer
from kforge_model.cache import KVCache
from kforge_model.generation import generate, score, stream
from kforge_model.sampling import sample

MLA = {"attention": "mla", "kv_lora_rank": 12, "head_dim": 12, "rope_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {"n_kv_heads": 2},
    "mha": {},
    "mqa": {"n_kv_heads": 1, "qk_norm": "per_head", "qkv_bias": True},
    "window": {"n_kv_heads": 2, "window": 4},
    "window_pattern": {"n_kv_heads": 2, "window": 5, "window_pattern": "WF", "rope_theta_window": 100.0},
    "sinks_softcap": {"n_kv_heads": 2, "sinks": True, "attn_softcap": 2.0, "attn_scale": 0.5},
    "mla": MLA,
    "mla_all": {**MLA, "q_lora_rank": 10, "v_head_dim": 6, "sinks": True, "attn_softcap": 3.0, "window": 6,
                "window_pattern": "FW", "attn_gate": True},
    "further": {"mtp_depth": 1, "norm_placement": "sandwich", "vocab_multiple": 16, "logit_softcap": 5.0,
                "attn_gate": True, "embed_scale": 2.0, "rope_dim": 4},
}  # fmt: skip


def build(kind: str) -> Transformer:
    config = ModelConfig(vocab_size=37, dim=32, n_layers=3, n_heads=4, max_seq_len=40, init_std=0.3, **KINDS[kind])
    model = Transformer(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.fixture(params=KINDS)
def any_model(request: pytest.FixtureRequest) -> Transformer:
    return build(request.param)


@pytest.fixture
def model() -> Transformer:
    return build("gqa")


@torch.no_grad()
def whole_forwards(model: Transformer, prompt: Tensor, n: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    ids = prompt
    for _ in range(n):
        ids = torch.cat([ids, choose(model(ids)[:, -1])[:, None]], 1)
    return ids


def test_greedy_equals_a_full_forward_for_every_token(any_model: Transformer) -> None:
    prompt = torch.randint(37, (3, 5))
    right = whole_forwards(any_model, prompt, 14, lambda logits: logits.argmax(-1))
    for chunk in (None, 1, 2, 3, 5, 8):
        assert torch.equal(generate(any_model, prompt, 14, temperature=0, prefill_chunk=chunk), right)


@torch.no_grad()
def test_cached_logits_equal_full_logits(any_model: Transformer) -> None:
    """One token at a time, and several at once: prefill in chunks is prefill."""
    ids = torch.randint(37, (2, 20))
    full = any_model(ids)
    for chunk in (None, 7):
        cache = KVCache(any_model.config, 20, chunk=chunk)
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 20)):
            part = any_model(ids[:, start:stop], cache=cache)
            assert part.shape == (2, 1, 37) and cache.length == stop
            assert (part[:, 0] - full[:, stop - 1]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="cache holds 20"):
        any_model(ids[:, :1], cache=cache)


@torch.no_grad()
def test_ragged_rows_are_each_alone(any_model: Transformer) -> None:
    lengths = (3, 9, 1, 6)
    ids = [torch.randint(37, (n + 6,)) for n in lengths]
    alone = [any_model(row[None])[0] for row in ids]
    padded = torch.stack([torch.nn.functional.pad(row, (9 - n, 0)) for row, n in zip(ids, lengths, strict=True)])
    padding = torch.tensor([9 - n for n in lengths])
    for chunk in (15, 4):
        cache = KVCache(any_model.config, 15, padding=padding, chunk=chunk)
        for part in padded[:, :9].split(chunk, 1):
            logits = any_model(part, cache=cache)
        for step in range(6):
            for row, right, n in zip(logits[:, 0], alone, lengths, strict=True):
                assert (row - right[n + step - 1]).abs().max() < 1e-12
            logits = any_model(padded[:, 9 + step : 10 + step], cache=cache)
    prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    for got, prompt in zip(generate(any_model, prompts, 12, temperature=0), prompts, strict=True):
        assert torch.equal(got, generate(any_model, prompt[None], 12, temperature=0)[0])


def test_sampling_equals_a_full_forward_with_the_same_draws(model: Transformer) -> None:
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01}
    prompt = torch.randint(37, (3, 5))
    generator = torch.Generator().manual_seed(5)
    right = whole_forwards(model, prompt, 12, lambda logits: sample(logits, generator=generator, **options))
    for _ in range(2):
        assert torch.equal(generate(model, prompt, 12, seed=5, **options), right)


def test_the_penalty_counts_prompt_and_new_tokens_but_no_padding(model: Transformer) -> None:
    prompts = [torch.randint(1, 37, (n,)) for n in (2, 7)]
    got = generate(model, prompts, 12, temperature=0, repetition_penalty=1.8)
    for row, prompt in zip(got, prompts, strict=True):
        ids = prompt[None]
        for _ in range(12):
            with torch.no_grad():
                logits = model(ids)[0, -1]
            for token in set(ids[0].tolist()):
                logits[token] = logits[token] / 1.8 if logits[token] > 0 else logits[token] * 1.8
            ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        assert torch.equal(row, ids[0])


def test_ended_rows_get_no_more_tokens(model: Transformer) -> None:
    prompts = [torch.randint(37, (n,)) for n in (5, 3, 8, 5)]
    free = generate(model, prompts, 20, temperature=0)
    stops = (int(free[0][8]), int(free[1][6]))
    seen: list[Tensor] = []
    got = generate(model, prompts, 20, temperature=0, stop_tokens=stops, on_token=seen.append)
    steps = torch.stack(seen, 1)
    longest = 0
    for row, whole, prompt, step in zip(got, free, prompts, steps, strict=True):
        hits = [at for at, token in enumerate(whole[len(prompt) :].tolist()) if token in stops]
        n = hits[0] + 1 if hits else 20
        longest = max(longest, n)
        assert torch.equal(row, whole[: len(prompt) + n])  # the stop token is the last
        assert torch.equal(step[:n], row[len(prompt) :]) and (step[n:] == -1).all()
    assert steps.shape == (4, longest)


def test_a_tensor_of_prompts_gives_a_tensor(model: Transformer) -> None:
    prompt = torch.randint(37, (4, 5))
    rows = generate(model, list(prompt), 20, temperature=0)
    stop = int(rows[0][8])
    rows = generate(model, prompt.tolist(), 20, temperature=0, stop_tokens=[stop])
    got = generate(model, prompt, 20, temperature=0, stop_tokens=[stop])
    assert got.shape == (4, max(map(len, rows)))
    for row, right in zip(got, rows, strict=True):
        assert torch.equal(row[: len(right)], right) and (row[len(right) :] == -1).all()


def test_a_stream_comes_token_by_token_and_closes(model: Transformer) -> None:
    model.train()
    prompt = torch.randint(37, (2, 5))
    right = generate(model, prompt, 6, temperature=0)[:, 5:]
    assert torch.equal(torch.stack(list(stream(model, prompt, 6, temperature=0)), 1), right)
    tokens = stream(model, prompt, 6, temperature=0)
    assert torch.equal(next(tokens), right[:, 0]) and torch.is_grad_enabled()
    tokens.close()  # type: ignore[attr-defined]
    assert all(module.training for module in model.modules())


def test_score_is_the_log_probability_of_each_token(any_model: Transformer) -> None:
    any_model.train()
    ids = torch.randint(37, (2, 12))
    with torch.no_grad():
        logp = any_model(ids).log_softmax(-1)
    right = torch.zeros(2, 12, dtype=torch.float64)
    right[:, 1:] = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert (score(any_model, ids) - right).abs().max() < 1e-12
    assert all(module.training for module in any_model.modules())
    packed = score(any_model, ids, Rows.packed([[5, 7], [12]]))
    pieces = torch.cat([score(any_model, ids[:1, :5]), score(any_model, ids[:1, 5:])], 1)
    assert (packed[0] - pieces[0]).abs().max() < 1e-12 and (packed[1] - right[1]).abs().max() < 1e-12


def test_score_ignores_smoothing_and_z_loss(model: Transformer) -> None:
    config = ModelConfig(
        vocab_size=37, dim=32, n_layers=1, n_heads=4, label_smoothing=0.2, z_loss=0.1, loss="cross_entropy"
    )
    other = Transformer(config).double()
    ids = torch.randint(37, (1, 6))
    logp = other(ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert (score(other, ids)[:, 1:] - logp).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("backend", "options", "kinds"),
    [
        ("eager", {"window": 4, "window_pattern": "WF"}, 2),
        ("aot_eager", {"window": 4, "window_pattern": "WF", "n_kv_heads": 1, "sinks": True}, 2),
        ("aot_eager", MLA, 1),
    ],
)
def test_compiled_blocks_are_traced_once_for_the_prompt_and_once_for_a_token(
    backend: str, options: dict[str, Any], kinds: int
) -> None:
    """Decoding never traces again, however many tokens, and neither do other prompts of the same shape."""
    config = ModelConfig(vocab_size=37, dim=16, n_layers=4, n_heads=2, max_seq_len=40, **options)
    model = Transformer(config).double()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    right = generate(model, prompts, 12, temperature=0)
    traced: list[int] = []
    compiler: Any = torch._dynamo.lookup_backend(backend)

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(1)
        return compiler(graph, inputs)

    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend=counting, fullgraph=True)
    for others in (prompts, [[4, 3, 2], [1, 0, 6, 7, 8], [5]]):
        got = generate(model, others, 12, temperature=0)
        if others is prompts:
            assert all(torch.equal(one, two) for one, two in zip(got, right, strict=True))
    assert len(traced) == kinds * 2  # layers of one kind share what is traced
    torch._dynamo.reset()


def test_modes_come_back(model: Transformer) -> None:
    model.train()
    model.layers["1"].eval()
    before = [module.training for module in model.modules()]
    generate(model, torch.zeros(1, 1, dtype=torch.int64), 2)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="ids hold 99"):
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
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[1], []], 1)
    with pytest.raises(ValueError, match="no prompts"):
        generate(model, [], 1)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, prompt, -1)
    with pytest.raises(ValueError, match="prefill_chunk = 0"):
        generate(model, prompt, 1, prefill_chunk=0)
    for bad in ([[0.5, 1.0]], torch.rand(1, 3), [torch.tensor([True])]):
        with pytest.raises(ValueError, match="holds no token ids"):
            generate(model, bad, 1)
    for token in (-1, model.config.vocab_size, 2.0):
        with pytest.raises(ValueError, match=f"stop_tokens has {token}"):
            generate(model, [[1]], 1, stop_tokens=[3, token])
    for name, value in (("top_k", 1.5), ("prefill_chunk", True)):
        with pytest.raises(ValueError, match=f"{name} = {value}"):
            generate(model, [[1]], 1, **{name: value})
    with pytest.raises(ValueError, match=r"max_new_tokens = 2\.0"):
        generate(model, [[1]], 2.0)
    with pytest.raises(ValueError, match="top_p"):
        stream(model, prompt, 1, top_p=1.5)  # at once, not at the first token
    model.layers["1"].attn.core = nn.Identity()  # type: ignore[union-attr, assignment]
    with pytest.raises(ValueError, match="Identity, has no method cached"):
        generate(model, prompt, 1)
    with pytest.raises(TypeError, match="eos_id"):
        generate(model, prompt, 1, eos_id=3)  # type: ignore[call-overload]


@torch.no_grad()
def test_after_an_error_the_cache_is_as_it_was(any_model: Transformer) -> None:
    """Out of memory in the last layer, say: the same tokens fed again give what they would have given."""
    ids = torch.randint(37, (2, 12))
    full = any_model(ids)
    cache = KVCache(any_model.config, 12, chunk=6)
    any_model(ids[:, :6], cache=cache)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = any_model.layers["2"].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        any_model(ids[:, 6:], cache=cache)
    handle.remove()
    for wrong in ({"rows": Rows.plain(2, 1)}, {"labels": ids[:, :1], "scale": 1.0}):
        with pytest.raises(ValueError, match="and cache exclude one another"):
            any_model(ids[:, :1], cache=cache, **wrong)
    assert cache.length == 6
    assert (any_model(ids[:, 6:], cache=cache)[:, 0] - full[:, -1]).abs().max() < 1e-12


@torch.no_grad()
def test_a_cache_of_another_model_or_dtype_is_refused(model: Transformer) -> None:
    ids = torch.randint(37, (2, 6))
    with pytest.raises(ValueError, match=r"made for another config; make it with KVCache\(model\.config, …\)"):
        model(ids, cache=KVCache(build("window").config, 20))
    cache = KVCache(model.config, 20)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"holds torch\.float64 on cpu, and is given torch\.float32 on cpu"):
        model.float()(ids, cache=cache)
