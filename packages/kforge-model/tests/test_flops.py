"""Counted FLOPs against torch's counter and hand formulas, counted parameters against the built model's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kforge_model import PRESETS, ModelConfig, Rows, Transformer, flops_per_token, model_shape, num_parameters

BASE = {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 40, "max_seq_len": 64}
MLA = {"attention": "mla", "head_dim": 12, "rope_dim": 4, "v_head_dim": 6, "kv_lora_rank": 10}
CONFIGS = {
    name: ModelConfig(**{**BASE, **options})
    for name, options in {
        "mha": {},
        "gqa": {"n_kv_heads": 2},
        "mqa": {"n_kv_heads": 1, "n_layers": 3},
        "head-dim-tied": {"head_dim": 16, "tie_embeddings": True},
        "default-ffn": {"ffn_dim": None},
        "qwen-like": {"n_kv_heads": 2, "head_dim": 16, "qk_norm": "per_head"},
        "olmo-like": {"n_kv_heads": 2, "qk_norm": "across_heads", "norm_placement": "post"},
        "gemma-like": {"norm_placement": "sandwich", "attn_softcap": 5.0, "mlp": "geglu_tanh", "tie_embeddings": True},
        "layernorm": {"norm": "layernorm", "qk_norm": "per_head", "norm_placement": "sandwich"},
        "gelu-biases": {"mlp": "gelu", "mlp_bias": True, "qkv_bias": True, "out_bias": True},
        "swiglu-biases": {"mlp_bias": True, "qkv_bias": True, "n_kv_heads": 1},
        "relu2": {"mlp": "relu2"},
        "gate-sinks": {"attn_gate": True, "sinks": True, "n_kv_heads": 2},
        "window": {"window": 5, "window_pattern": "WWF", "n_layers": 4},
        "padded-vocabulary": {"vocab_size": 90, "vocab_multiple": 16},
        "mla": MLA,
        "mla-queries": {**MLA, "q_lora_rank": 14, "v_head_dim": None},
        "mla-gate-layernorm": {**MLA, "q_lora_rank": 14, "attn_gate": True, "sinks": True, "norm": "layernorm"},
        "experts": {"n_experts": 6, "expert_dim": 24},
        "experts-shared": {
            "n_experts": 8,
            "moe_top_k": 3,
            "shared_experts": 2,
            "router": "sigmoid",
            "router_bias": True,
        },
        "experts-plain": {"n_experts": 4, "mlp": "relu2", "shared_experts": 1, "expert_dim": 8, "tie_embeddings": True},
        "experts-dense-first": {"n_experts": 8, "moe_pattern": "DMM", "n_layers": 3, "expert_dim": 48, "mtp_depth": 1},
        "mtp": {"mtp_depth": 2, "n_kv_heads": 2},
        "mtp-mla-tied": {**MLA, "mtp_depth": 1, "tie_embeddings": True, "norm_placement": "post"},
        "mtp-window": {"mtp_depth": 2, "window": 5, "window_pattern": "WWF"},
    }.items()
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EXPERTS = [name for name in CONFIGS if name.startswith("experts")]
S = 14


@each_config
def test_number_of_parameters(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    unmet = sum(
        p.numel() * (config.n_experts - config.moe_top_k) // config.n_experts
        for n, p in model.named_parameters()
        if ".experts." in n
    )
    assert num_parameters(config, active=True) == num_parameters(config) - unmet
    shape = model_shape(config)
    assert shape["parameters"] == num_parameters(config)
    blocks = [*model.layers.values(), *(depth.block for depth in model.mtp.values())]
    assert shape["block_parameters"] == max(sum(p.numel() for p in block.parameters()) for block in blocks)
    assert shape.get("n_experts", 0) == config.n_experts
    assert ("ffn_dim" in shape) == any(block.mlp is not None for block in blocks)
    assert shape["vocab_size"] == model.embed.weight.shape[0]
    assert shape["n_kv_heads"] == (config.n_heads if config.attention == "mla" else config.kv_heads)
    assert shape["head_dim"] == config.head_size
    further = {"softcap": config.attn_softcap > 0, "sinks": config.sinks, "mtp_depth": config.mtp_depth}
    assert {name: shape[name] for name in further} == further
    assert all(type(value) in (int, bool) for value in shape.values())


class TokenByToken(nn.Module):
    """An attention core that computes each token's products with the keys it sees, and no others."""

    def __init__(self, documents: Sequence[int], window: int | None, causal: bool) -> None:
        super().__init__()
        self.ranges = []
        for length in documents:
            start = len(self.ranges)
            for p in range(length):
                first = 0 if window is None else max(0, p + 1 - window)
                last = p + 1
                if not causal:
                    first, last = 0, length if window is None else min(length, window)
                self.ranges.append((start + first, start + last))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: object, sinks: Tensor | None = None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = [
            (q[:, :, t : t + 1] @ k[:, :, first:last].mT) @ v[:, :, first:last]
            for t, (first, last) in enumerate(self.ranges)
        ]
        return torch.cat(out, 2)


def counted(config: ModelConfig, documents: Sequence[int], causal: bool) -> int:
    """FLOPs of forward and backward by torch's counter, attention token by token."""
    model = Transformer(config)
    blocks = [*model.layers.values(), *(depth.block for depth in (model.mtp or {}).values())]
    assert len(blocks) == config.n_layers + config.mtp_depth
    for block in blocks:
        block.attn.core = TokenByToken(documents, block.attn.window, causal)
    ids = torch.zeros(1, sum(documents), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss, _ = model(ids, Rows.plain(1, ids.shape[1], ids.device), labels=ids, scale=1.0)
        loss.backward()
    return counter.get_total_flops()


@each_config
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("documents", [(S,), (2, 8, 1, 3)], ids=["row", "packed"])
def test_against_torchs_counter(config: ModelConfig, documents: tuple[int, ...], causal: bool) -> None:
    padding = 6 * (config.vocab_rows - config.vocab_size) * config.dim  # products that no token asked for
    found = counted(config, documents, causal) / S - padding
    assert found == pytest.approx(flops_per_token(config, documents, causal), rel=1e-12)
    if len(documents) == 1:
        assert flops_per_token(config, S, causal) == flops_per_token(config, documents, causal)


@pytest.mark.parametrize(
    "name", ["mha", "gqa", "mqa", "head-dim-tied", "gelu-biases", "mla", "mtp", "gemma-like", *EXPERTS]
)
def test_against_torchs_counter_with_the_models_own_core(name: str) -> None:
    config = CONFIGS[name]
    model = Transformer(config)
    ids = torch.zeros(2, S, dtype=torch.int64)
    # The math kernel is plain products, so its backward is counted without flash attention's recomputation.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _ = model(ids, labels=ids, scale=1.0)
        loss.backward()
    assert counter.get_total_flops() == pytest.approx(2 * S * flops_per_token(config, S, causal=False), rel=0.01)


def test_by_hand() -> None:
    config = ModelConfig(**PRESETS["llama3-8b"])
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    for seq in (1024, 8192):
        assert flops_per_token(config, seq, causal=False) == 6 * matrices + 12 * 32 * 4096 * seq
        assert flops_per_token(config, seq) == 6 * matrices + 6 * 32 * 4096 * (seq + 1)
    tied = ModelConfig(**{**PRESETS["llama3-8b"], "tie_embeddings": True})
    assert flops_per_token(tied, 1024) == flops_per_token(config, 1024)  # the head's product is there either way
    mistral = ModelConfig(**PRESETS["mistral-7b"])
    seen = (sum(range(1, 4097)) + 4096 * 4096) / 8192  # tokens 4097 .. 8192 see 4096 each
    whole = flops_per_token(ModelConfig(**{**PRESETS["mistral-7b"], "window": None}), 1)
    assert whole is not None
    assert flops_per_token(mistral, 8192) == whole + 12 * 32 * 4096 * (seen - 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lengths", [1024, 8192, (1000, 24, 5000, 2168)], ids=["1k", "8k", "packed"])
def test_c35_utilisation_of_moe_models_is_not_overstated(tied: bool, lengths: int | tuple[int, ...]) -> None:
    """Of 8 experts of a dense model's size, top 2 and one shared cost three times its feed-forward half, and not nine;
    the head is counted, the look-up is not."""
    sizes = {"vocab_size": 32_000, "dim": 512, "n_layers": 6, "n_heads": 8, "ffn_dim": 1536, "tie_embeddings": tied}
    dense = ModelConfig(**sizes)
    sparse = ModelConfig(**sizes, n_experts=8)
    shared = ModelConfig(**sizes, n_experts=8, shared_experts=1)
    feed_forward, router = 6 * 6 * 3 * 512 * 1536, 6 * 6 * 512 * 8
    cost, with_experts, with_shared = (flops_per_token(config, lengths) for config in (dense, sparse, shared))
    assert with_experts == cost + feed_forward + router
    assert with_shared == cost + 2 * feed_forward + router
    parts = [lengths] if isinstance(lengths, int) else lengths
    pairs = sum(n * (n + 1) / 2 for n in parts) / sum(parts)
    by_hand = 6 * (6 * 4 * 512**2 + 6 * 3 * 3 * 512 * 1536 + 6 * 512 * 8 + 512 * 32_000) + 12 * 6 * 512 * pairs
    assert with_shared == pytest.approx(by_hand, rel=1e-12)
    every, active = num_parameters(shared), num_parameters(shared, active=True)
    assert every is not None and active is not None and every - active == 6 * 6 * 3 * 512 * 1536


def test_c35_what_experts_compute_again_is_not_counted() -> None:
    from torch.utils.checkpoint import checkpoint

    config = CONFIGS["experts-shared"]
    model = Transformer(config)
    ids = torch.zeros(2, S, dtype=torch.int64)
    for block in model.layers.values():
        plain = block.forward
        block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _ = model(ids, labels=ids, scale=1.0)
        loss.backward()
    counted_once = 2 * S * flops_per_token(config, S, causal=False)
    head = 3 * 2 * 2 * S * config.dim * config.vocab_size
    assert counter.get_total_flops() == pytest.approx(head + (counted_once - head) * 4 / 3, rel=0.01)


def test_a_window_as_long_as_the_row_is_none() -> None:
    config = CONFIGS["gqa"]
    for causal in (True, False):
        wide = ModelConfig(**{**BASE, "n_kv_heads": 2, "window": S})
        assert flops_per_token(wide, S, causal) == flops_per_token(config, S, causal)
        assert flops_per_token(wide, S + 1, causal) < flops_per_token(config, S + 1, causal)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=20), window=st.none() | st.integers(1, 400))
def test_documents(lengths: list[int], window: int | None) -> None:
    config = ModelConfig(**{**BASE, "window": window})
    for causal in (True, False):
        together = flops_per_token(config, lengths, causal) * sum(lengths)
        assert together == pytest.approx(sum(n * flops_per_token(config, n, causal) for n in lengths), rel=1e-12)
        assert flops_per_token(config, torch.tensor([*lengths, 0, 0]).numpy(), causal) * sum(lengths) == together
        if window is None:
            mean = sum(n * n for n in lengths) / sum(lengths)
            assert flops_per_token(config, mean, causal) * sum(lengths) == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("seq_len", [0, -3, 0.5, [], [0], [4, -1]])
def test_rows_of_no_tokens_are_refused(seq_len: float | list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        flops_per_token(CONFIGS["gqa"], seq_len)


def test_what_a_package_adds_cannot_be_counted() -> None:
    for changed in ({"mlp": "mine"}, {"mlp": "swiglu-mine"}, {"kind": "mine"}, {"n_experts": 4, "router": "mine"}):
        config = ModelConfig(**{**BASE, **changed})
        assert num_parameters(config) is None and flops_per_token(config, S) is None
        assert not {"parameters", "block_parameters"} & set(model_shape(config))
        assert model_shape(config)["n_heads"] == 4
    config = ModelConfig(**{**BASE, "norm": "mine"})
    assert num_parameters(config) is None and "parameters" not in model_shape(config)
    assert flops_per_token(config, S) == flops_per_token(CONFIGS["mha"], S)  # norms are no matrix products
    for changed in ({"loss": "mine"}, {"attention_core": "mine"}):
        config = ModelConfig(**{**BASE, **changed})
        assert model_shape(config) == model_shape(CONFIGS["mha"])
        assert flops_per_token(config, S) == flops_per_token(CONFIGS["mha"], S)


def test_names_that_are_counted_are_those_that_kforge_has() -> None:
    from kforge_model import flops
    from kforge_model.mlp import GATED, PLAIN
    from kforge_model.moe.router import ROUTERS, Router

    assert {*flops._ROUTERS} == {name for name in ROUTERS.names() if ROUTERS.get(name).__module__ == Router.__module__}
    assert {**dict.fromkeys(GATED, 3), **dict.fromkeys(PLAIN, 2)} == flops._MLPS
