"""What a model costs, counted from its sizes. Standard library only."""

from __future__ import annotations

from kforge_model.config import ModelConfig


def _block_matrices(config: ModelConfig) -> int:
    """Elements of the matrices of one block: q and o, k and v, the three of SwiGLU."""
    heads = 2 * config.n_heads + 2 * config.kv_heads
    return config.dim * (heads * config.head_size + 3 * config.ffn_size)


def _block_norms(config: ModelConfig) -> int:
    """Elements of the norms of one block."""
    return 2 * config.dim + (2 * config.head_size if config.qk_norm else 0)


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model; a tied weight counts once."""
    tables = 1 if config.tie_embeddings else 2
    blocks = config.n_layers * (_block_matrices(config) + _block_norms(config))
    return tables * config.vocab_size * config.dim + blocks + config.dim


def flops_per_token(config: ModelConfig, seq_len: float, causal: bool = True) -> float:
    """Floating-point operations a token of training costs: matrix products only, forward and backward.

    Forward: 2 for each element of a matrix that the token meets (the head counts, the embedding's look-up does not)
    and 4 * H * Dh * seq_len a layer for scores and weighted sum. Backward twice that. What is computed again
    (activation checkpointing, flash attention's backward) does not count.

    causal: a token sees half of its row on average, so attention counts half. ``causal=False`` counts it in full:
    the convention of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), which most published figures
    follow. seq_len: tokens a row; for packed documents Σ length² / Σ length over the documents.
    """
    matrices = config.n_layers * _block_matrices(config) + config.vocab_size * config.dim
    attention = config.n_layers * 4 * config.n_heads * config.head_size * seq_len * (0.5 if causal else 1.0)
    return 3.0 * (2 * matrices + attention)


def model_shape(config: ModelConfig) -> dict[str, int | bool]:
    """The sizes that validators and estimates ask for, defaults resolved, as plain data."""
    return {
        "vocab_size": config.vocab_size,
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "ffn_dim": config.ffn_size,
        "max_seq_len": config.max_seq_len,
        "tie_embeddings": config.tie_embeddings,
        "parameters": num_parameters(config),
        "block_parameters": _block_matrices(config) + _block_norms(config),
    }
