"""What a model costs, counted from its sizes. Standard library only.

A part that a package adds can be anything, so what depends on one is None here: not a made-up number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kforge_model.config import ModelConfig

_NORMS = {"rmsnorm": 1, "layernorm": 2}
"""Name of a norm -> its parameters a feature."""
_MLPS = {"swiglu": 3, "geglu": 3, "geglu_tanh": 3, "gelu": 2, "gelu_tanh": 2, "relu": 2, "relu2": 2}
"""Name of a feed-forward half -> its matrices."""
_ROUTERS = ("softmax", "sigmoid")
"""Routers that are one matrix."""


def num_parameters(config: ModelConfig, *, active: bool = False) -> int | None:
    """Parameters of the model; a tied weight counts once. None: a norm, feed-forward half, router or model that a
    package adds. A router's bias is not trained by gradients and is none.

    active: those that one token meets: of the experts of a layer moe_top_k, beside the shared ones. In a dense model
    all of them.
    """
    blocks = _over_layers(config, lambda layer: _block_parameters(config, layer, active))
    if blocks is None:
        return None
    tables = 1 if config.tie_embeddings else 2
    norm = _NORMS[config.norm] * config.dim
    # A further predicted token: norms of hidden state and embedding, their projection, a block, the norm at its end.
    further = config.mtp_depth * (3 * norm + 2 * config.dim**2)
    return tables * config.vocab_rows * config.dim + blocks + norm + further


def flops_per_token(config: ModelConfig, seq_len: float | Iterable[int], causal: bool = True) -> float | None:
    """Floating-point operations a token of training costs: matrix products only, forward and backward.

    Forward: 2 for each element of a matrix that the token meets, and 2 · H · (Dqk + Dv) a layer for each key that it
    sees. Backward twice that. The head counts with the rows that tokens have, once for each token that is predicted
    (`mtp_depth`); the embedding's look-up does not. Of the experts of a layer moe_top_k count, and the shared ones and
    the router; what expert_capacity drops is not taken off. What is computed again (activation checkpointing, flash
    attention's backward) does not count, nor do elementwise operations.

    seq_len: tokens of a row, or the lengths of the documents that rows are packed of, each of which is attended to by
    itself. A mean over documents, Σ length² / Σ length, gives the same as the lengths where no layer has a window.
    causal: a token sees itself and what is before it, in windowed layers at most `window` tokens in all.
    ``causal=False`` lets it see its whole row or document, in windowed layers `window` tokens: the convention of PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), which most published figures follow.

    None: a feed-forward half, router or model that a package adds. Raises ValueError for a length below 1.
    """
    lengths = Counter(seq_len if isinstance(seq_len, Iterable) else (seq_len,))
    del lengths[0]  # cu_seqlens are padded by repeating the last: documents of no tokens
    if not lengths or min(lengths) < 1:
        raise ValueError(f"seq_len = {seq_len} must be at least 1 token")
    matrices = _over_layers(config, lambda layer: _block_matrices(config, layer, active=True))
    if matrices is None:
        return None
    blocks = config.n_layers + config.mtp_depth
    heads = (1 + config.mtp_depth) * config.vocab_size * config.dim
    met = matrices + config.mtp_depth * 2 * config.dim**2 + heads

    tokens = sum(length * count for length, count in lengths.items())
    seen = 0.0  # keys, by a token on average, in all layers together
    for window, layers in Counter(config.window_of(layer) for layer in range(blocks)).items():
        pairs = sum(count * length * _seen(length, window, causal) for length, count in lengths.items())
        seen += layers * pairs / tokens
    return 3.0 * (2 * met + 2 * config.n_heads * (config.head_size + config.value_size) * seen)


def model_shape(config: ModelConfig) -> dict[str, int | bool]:
    """The sizes that validators and estimates ask for, defaults resolved, as plain data.

    vocab_size are the rows of embedding and head, padding included, as those are what is cut. ffn_dim is absent where
    every layer has experts; n_experts, moe_top_k, moe_layers (how many have experts), expert_dim and shared_dim where
    none has; mlp_matrices where the feed-forward half is not kforge's. loss_chunk_tokens is 0 for all logits at once.
    "parameters" and "block_parameters" (of the greatest block) where they cannot be counted (`num_parameters`).
    """
    shape: dict[str, int | bool] = {
        "vocab_size": config.vocab_rows,
        "dim": config.dim,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_seq_len": config.max_seq_len,
        "tie_embeddings": config.tie_embeddings,
        "softcap": bool(config.attn_softcap),
        "sinks": config.sinks,
        "mtp_depth": config.mtp_depth,
        "loss_chunk_tokens": 0 if config.loss == "cross_entropy" else config.loss_chunk_tokens,
        "qk_norm": config.qk_norm != "none",
    }
    layers = range(config.n_layers + config.mtp_depth)
    if not all(map(config.has_experts, layers)):
        shape["ffn_dim"] = config.ffn_size
    if config.mlp in _MLPS:
        shape["mlp_matrices"] = _MLPS[config.mlp]
    if config.n_experts:
        shape |= {
            "n_experts": config.n_experts,
            "moe_top_k": config.moe_top_k,
            "moe_layers": sum(map(config.has_experts, range(config.n_layers))),
            "expert_dim": config.expert_size,
            "shared_dim": config.shared_size,
        }
    parameters, blocks = num_parameters(config), [_block_parameters(config, layer) for layer in layers]
    if parameters is not None:
        shape |= {"parameters": parameters, "block_parameters": max(block for block in blocks if block is not None)}
    return shape


def _over_layers(config: ModelConfig, count: Callable[[int], int | None]) -> int | None:
    """The sum over all layers, those of further tokens included. None: one of them is not known."""
    counts = [count(layer) for layer in range(config.n_layers + config.mtp_depth)]
    known = [number for number in counts if number is not None]
    return sum(known) if len(known) == len(counts) else None


def _seen(length: float, window: int | None, causal: bool) -> float:
    """Keys that a token of a document of ``length`` tokens sees, on average."""
    most = length if window is None else min(length, window)
    # The first `most` tokens see 1, 2, … of them, the others `most`.
    return most - most * (most - 1) / (2 * length) if causal else most


def _block_matrices(config: ModelConfig, layer: int, active: bool = False) -> int | None:
    """Elements of the matrices of one block; active: of those that one token meets. None: they cannot be known."""
    if config.kind != "transformer" or config.mlp not in _MLPS:
        return None
    row = _MLPS[config.mlp] * config.dim  # of matrices, for each hidden feature
    if not config.has_experts(layer):
        return _attention_matrices(config) + row * config.ffn_size
    if config.router not in _ROUTERS:
        return None
    experts = config.moe_top_k if active else config.n_experts
    hidden = experts * config.expert_size + config.shared_size
    return _attention_matrices(config) + row * hidden + config.dim * config.n_experts


def _attention_matrices(config: ModelConfig) -> int:
    dim, heads, width, value = config.dim, config.n_heads, config.head_size, config.value_size
    output = heads * value * dim * (2 if config.attn_gate else 1)
    if config.attention == "gqa":
        return output + dim * (heads + 2 * config.kv_heads) * width
    rank, query_rank = config.kv_lora_rank or 0, config.q_lora_rank
    queries = dim * heads * width if query_rank is None else query_rank * (dim + heads * width)
    latent = dim * (rank + config.rope_size) + rank * heads * (width - config.rope_size + value)
    return output + queries + latent


def _block_parameters(config: ModelConfig, layer: int, active: bool = False) -> int | None:
    """Parameters of one block; active: of those that one token meets. None: they cannot be known."""
    matrices = _block_matrices(config, layer, active)
    if matrices is None or config.norm not in _NORMS:
        return None
    heads, kv_heads, width = config.n_heads, config.kv_heads, config.head_size
    normed = config.dim * (4 if config.norm_placement == "sandwich" else 2)
    if config.attention == "mla":
        normed += (config.kv_lora_rank or 0) + (config.q_lora_rank or 0)
    normed += {"none": 0, "per_head": 2 * width, "across_heads": (heads + kv_heads) * width}[config.qk_norm]
    biases = 0
    if config.qkv_bias:
        biases += (heads + 2 * kv_heads) * width
    if config.out_bias:
        biases += config.dim
    if config.mlp_bias:
        biases += (_MLPS[config.mlp] - 1) * config.ffn_size + config.dim
    sinks = heads if config.sinks else 0
    return matrices + _NORMS[config.norm] * normed + biases + sinks
