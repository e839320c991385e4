"""What the model is: sizes and choices, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: pre-norm blocks of grouped-query attention with RoPE and a SwiGLU MLP."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    vocab_size: int = 4096
    """Rows of the embedding and of the head, in tokens. At least the tokenizer's size."""
    dim: int = 256
    """Width of the residual stream, in features."""
    n_layers: int = 4
    """Number of blocks."""
    n_heads: int = 4
    """Query heads of a block."""
    n_kv_heads: int | None = None
    """Key and value heads of a block; must divide n_heads. None: as many as n_heads."""
    head_dim: int | None = None
    """Width of one head, in features; even, as RoPE rotates pairs. None: dim / n_heads."""
    ffn_dim: int | None = None
    """Hidden width of the SwiGLU MLP, in features. None: 8/3 of dim, rounded up to a multiple of 64."""
    qk_norm: bool = False
    """Normalise each query and key head (RMSNorm over head_dim, before RoPE), as Qwen3 does: keeps logits bounded."""
    max_seq_len: int = 4096
    """Longest row and longest generated text, in tokens. RoPE is computed where needed, so this costs nothing."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square inside every RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding's weight as the head's."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections of a block get this over sqrt(2 n_layers)."""
    loss_chunk_tokens: int = 4096
    """Tokens whose logits exist at one time in the head. Smaller: less memory; the loss is the same."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "max_seq_len", "loss_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)} must be at least 1")
        if self.kv_heads < 1 or self.n_heads % self.kv_heads:
            raise ValueError(
                f"model.n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}; "
                "every key/value head serves the same number of query heads"
            )
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                f"model.dim = {self.dim} is not a multiple of n_heads = {self.n_heads}; change one, or set head_dim"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"model.head_dim = {self.head_size} must be even and positive: RoPE rotates pairs")
        if self.ffn_size < 1:
            raise ValueError(f"model.ffn_dim = {self.ffn_dim} must be at least 1")
        for name in ("rope_theta", "norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name} = {getattr(self, name)} must be above 0")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head, with the default resolved."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_size(self) -> int:
        """Hidden width of the MLP, with the default resolved."""
        return -(-(8 * self.dim // 3) // 64) * 64 if self.ffn_dim is None else self.ffn_dim
