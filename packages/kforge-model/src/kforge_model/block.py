"""One layer of the decoder."""

from __future__ import annotations

from torch import Tensor, nn

from kforge_model.attention import Attention
from kforge_model.cache import LayerCache
from kforge_model.config import ModelConfig
from kforge_model.mlp import SwiGLU
from kforge_model.norm import RMSNorm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows


class Block(nn.Module):
    """Pre-norm residual block: x + attn(attn_norm(x)), then x + mlp(mlp_norm(x)).

    The unit of FSDP, of activation checkpointing and of compilation; traces into one graph.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.ffn_size)

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D], in x's dtype."""
        x = x + self.attn(self.attn_norm(x), rotary, rows, cache)
        return x + self.mlp(self.mlp_norm(x))
