"""Models that people know, by name, and a dial of sizes. Standard library only.

``preset("qwen3-4b")`` is a config; ``ModelConfig(**PRESETS["qwen3-4b"] | {"max_seq_len": 8192})`` one that differs.
``preset("depth-12")`` has 12 blocks and everything else that goes with them.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

from kforge_model.config import ModelConfig

Values = dict[str, Any]


def preset(name: str) -> ModelConfig:
    """The config of a preset or of ``depth-N``. Raises ValueError, which names the near ones, when there is none."""
    return ModelConfig(**preset_values(name))


def preset_values(name: str) -> Values:
    """The arguments of ModelConfig that make a preset, or ``depth-N``; all others keep their defaults.

    Raises ValueError, which names the near ones, when there is none.
    """
    if name in PRESETS:
        return dict(PRESETS[name])
    if dial := re.fullmatch(r"depth-([1-9]\d{0,3})", name):
        return depth_values(int(dial[1]))
    near = difflib.get_close_matches(name, [*PRESETS, "depth-12"], n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no model preset {name!r}; {hint}known are {', '.join(PRESETS)} and depth-N, as depth-12")


def depth_config(depth: int, vocab_size: int = 32_768) -> ModelConfig:
    """The model of so many blocks, all else derived: one dial for a family of sizes, after nanochat.

    Width 64 · depth, rounded up to heads of 128 features; rows of 2048 tokens, of which three layers in four see 1024
    and the last one all. ReLU², normalised queries and keys, soft-capped logits, embedding and head apart.
    """
    return ModelConfig(**depth_values(depth, vocab_size))


def depth_values(depth: int, vocab_size: int = 32_768) -> Values:
    """The arguments of ModelConfig for `depth_config`. Raises ValueError for a depth below 1."""
    if depth < 1:
        raise ValueError(f"depth = {depth} must be at least 1 block")
    heads = math.ceil(64 * depth / 128)
    return {
        "vocab_size": vocab_size,
        "dim": 128 * heads,
        "n_layers": depth,
        "n_heads": heads,
        "ffn_dim": 4 * 128 * heads,
        "max_seq_len": 2048,
        "mlp": "relu2",
        "qk_norm": "per_head",
        "logit_softcap": 15.0,
        **(_windows(depth) if depth > 1 else {}),
    }


def _windows(depth: int) -> Values:
    # Letter by letter where the pattern would not end on a full layer.
    return {"window": 1024, "window_pattern": "WWWF" if depth % 4 == 0 else ("WWWF" * depth)[: depth - 1] + "F"}


def _size(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **other: Any) -> Values:
    return {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "ffn_dim": ffn_dim, **other}


def _stretched(factor: float) -> Values:
    """Llama 3's scaling from rows of 8192 tokens to 131,072."""
    scaling = {"rope_scaling": "llama3", "rope_factor": factor, "rope_original_len": 8192}
    return {"max_seq_len": 131_072, **scaling}


_TIED = {"tie_embeddings": True}

# Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, table 3): 8 key/value heads of 128 features at most sizes.
_LLAMA3 = {"vocab_size": 128_256, "n_kv_heads": 8, "max_seq_len": 8192, "rope_theta": 500_000.0}
_LLAMA3_1B = _LLAMA3 | _size(2048, 16, 32, 8192) | _TIED
_LLAMA3_8B = _LLAMA3 | _size(4096, 32, 32, 14_336)

# Qwen3 (Yang et al. 2025, arXiv:2505.09388, table 1).
_QWEN3 = {
    "vocab_size": 151_936,
    "n_kv_heads": 8,
    "head_dim": 128,
    "qk_norm": "per_head",
    "norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_seq_len": 40_960,
}

# Its models with experts (table 2): ffn_dim is that of a dense layer, of which they have none. What evens out the load
# of the experts is published for DeepSeek-V3 alone: set balance_loss to train one of the others.
_QWEN3_MOE = _QWEN3 | {"n_kv_heads": 4, "n_experts": 128, "moe_top_k": 8}

# DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 4.2), with the yarn that has brought it to longer rows and
# without the layer that predicts a further token: mtp_depth = 1 adds it, with experts.
_DEEPSEEK_V3 = {
    "vocab_size": 129_280,
    "max_seq_len": 163_840,
    "norm_eps": 1e-6,
    "attention": "mla",
    "head_dim": 192,
    "rope_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "attn_scale": 192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
    "rope_scaling": "yarn",
    "rope_factor": 40.0,
    "rope_original_len": 4096,
    "rope_high": 32.0,
    "rope_attn_factor": 1.0,
    "n_experts": 256,
    "moe_top_k": 8,
    "moe_pattern": "DDD" + "M" * 59,
    "expert_dim": 2048,
    "shared_experts": 1,
    "router": "sigmoid",
    "router_scale": 2.5,
    "router_groups": 8,
    "router_top_groups": 4,
    "router_bias": True,
    "balance_loss": 1e-4,
}

# OLMo 2 (OLMo team 2025, arXiv:2501.00656, table 3).
_OLMO2 = {
    "vocab_size": 100_352,
    "norm_placement": "post",
    "qk_norm": "across_heads",
    "norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}

# Gemma 2 and 3 (arXiv:2408.00118, table 1; arXiv:2503.19786, table 1).
_GEMMA = {
    "head_dim": 256,
    "norm_placement": "sandwich",
    "norm_eps": 1e-6,
    "mlp": "geglu_tanh",
    **_TIED,
}

PRESETS: dict[str, Values] = {
    "tiny": {
        "vocab_size": 4096,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_seq_len": 512,
        **_TIED,
    },
    "tiny-moe": {
        "vocab_size": 4096,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_seq_len": 512,
        "n_experts": 8,
        "expert_dim": 64,
        "balance_loss": 0.01,
        **_TIED,
    },
    "llama3-1b": _LLAMA3_1B,
    "llama3-8b": _LLAMA3_8B,
    # Llama 3's vocabulary and proportions at sizes between those that Meta has published.
    "llama3-13b": _LLAMA3 | _size(5120, 40, 40, 17_920),
    "llama3-29b": _LLAMA3 | _size(6144, 56, 48, 21_504),
    "llama3.1-8b": _LLAMA3_8B | _stretched(8.0),
    "llama3.1-70b": _LLAMA3 | _size(8192, 80, 64, 28_672) | _stretched(8.0),
    "llama3.1-405b": _LLAMA3 | _size(16_384, 126, 128, 53_248) | _stretched(8.0),
    "llama3.2-1b": _LLAMA3_1B | _stretched(32.0),
    "llama3.2-3b": _LLAMA3 | _size(3072, 28, 24, 8192) | _TIED | _stretched(32.0),
    "qwen3-0.6b": _QWEN3 | _size(1024, 28, 16, 3072) | _TIED,
    "qwen3-1.7b": _QWEN3 | _size(2048, 28, 16, 6144) | _TIED,
    "qwen3-4b": _QWEN3 | _size(2560, 36, 32, 9728) | _TIED,
    "qwen3-8b": _QWEN3 | _size(4096, 36, 32, 12_288),
    "qwen3-14b": _QWEN3 | _size(5120, 40, 40, 17_408),
    "qwen3-32b": _QWEN3 | _size(5120, 64, 64, 25_600),
    "qwen3-30b-a3b": _QWEN3_MOE | _size(2048, 48, 32, 6144, expert_dim=768),
    "qwen3-235b-a22b": _QWEN3_MOE | _size(4096, 94, 64, 12_288, expert_dim=1536),
    "deepseek-v3": _DEEPSEEK_V3 | _size(7168, 61, 128, 18_432),
    "olmo2-1b": _OLMO2 | _size(2048, 16, 16, 8192),
    "olmo2-7b": _OLMO2 | _size(4096, 32, 32, 11_008),
    "olmo2-13b": _OLMO2 | _size(5120, 40, 40, 13_824),
    "olmo2-32b": _OLMO2 | _size(5120, 64, 40, 27_648, n_kv_heads=8),
    # Mistral 7B as first published (Jiang et al. 2023, arXiv:2310.06825): later versions have no window.
    "mistral-7b": _size(4096, 32, 32, 14_336, vocab_size=32_000, n_kv_heads=8, max_seq_len=32_768, window=4096),
    # The vocabulary of Llama 3 at a size for one node.
    "moe-9b-a3b": _LLAMA3 | _size(2048, 24, 16, 7168, n_kv_heads=4, n_experts=8, balance_loss=0.01),
    # Jiang et al. 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": _size(4096, 32, 32, 14_336, vocab_size=32_000, n_kv_heads=8, max_seq_len=32_768, n_experts=8)
    | {"rope_theta": 1_000_000.0},
    "gemma2-2b": _GEMMA
    | _size(2304, 26, 8, 9216, vocab_size=256_000, n_kv_heads=4, max_seq_len=8192)
    | {"embed_scale": 2304**0.5, "attn_softcap": 50.0, "logit_softcap": 30.0}
    | {"window": 4096, "window_pattern": "WF"},
    "gemma3-1b": _GEMMA
    | _size(1152, 26, 4, 6912, vocab_size=262_144, n_kv_heads=1, max_seq_len=32_768)
    | {"embed_scale": 1152**0.5, "qk_norm": "per_head"}
    | {"window": 512, "window_pattern": "WWWWWF", "rope_theta": 1_000_000.0, "rope_theta_window": 10_000.0},
}
"""Name -> arguments of ModelConfig. Sizes are the published ones, tokenizer and weights are not here."""
