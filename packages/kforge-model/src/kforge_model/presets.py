"""Sizes of known models, as plain data: ``ModelConfig(**PRESETS["llama3-8b"])``. Standard library only."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096,
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_seq_len": 512,
        "tie_embeddings": True,
    },
    "llama3-1b": {
        "vocab_size": 128_256,
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "ffn_dim": 8192,
        "max_seq_len": 131_072,
        "rope_theta": 500_000.0,
        "tie_embeddings": True,
    },
    "llama3-8b": {
        "vocab_size": 128_256,
        "dim": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "n_kv_heads": 8,
        "ffn_dim": 14_336,
        "max_seq_len": 8192,
        "rope_theta": 500_000.0,
    },
}
"""Name -> keyword arguments of ModelConfig."""
