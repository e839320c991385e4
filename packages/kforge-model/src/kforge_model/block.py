"""One layer of the decoder."""

from __future__ import annotations

from torch import Tensor, nn

from kforge_model.attention import Attention
from kforge_model.cache import LayerCache
from kforge_model.config import ModelConfig
from kforge_model.mla import LatentAttention
from kforge_model.mlp import build_mlp
from kforge_model.moe.layer import MoE
from kforge_model.norm import build_norm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows


class Block(nn.Module):
    """Residual block: x + post(attn(pre(x))), then the same with mlp. ``norm_placement`` says which norms there are.

    pre: before each half (Xiong et al. 2020, arXiv:2002.04745); post: on what each half adds (OLMo 2, arXiv:2501.00656,
    section 3.2); sandwich: both. ``layer`` is its place in the model; where it has experts, ``moe`` stands in for
    ``mlp``. The unit of FSDP, of activation checkpointing and of compilation; without experts it traces into one graph.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        pre, post = config.norm_placement != "post", config.norm_placement != "pre"
        self.attn_norm = build_norm(config, config.dim) if pre else None
        attention = Attention if config.attention == "gqa" else LatentAttention
        self.attn: Attention | LatentAttention = attention(config, layer)
        self.attn_post_norm = build_norm(config, config.dim) if post else None
        self.mlp_norm = build_norm(config, config.dim) if pre else None
        experts = config.has_experts(layer)
        self.mlp = None if experts else build_mlp(config)
        self.moe = MoE(config, layer) if experts else None
        self.mlp_post_norm = build_norm(config, config.dim) if post else None
        self.plan = {name: "sequence" for name, module in self.named_children() if name.endswith("norm")}

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D], in x's dtype."""
        x = x + _of(self.attn_post_norm, self.attn(_of(self.attn_norm, x), rotary, rows, cache))
        y = _of(self.mlp_norm, x)
        if self.moe is not None:
            y = self.moe(y, rows)
        elif self.mlp is not None:
            y = self.mlp(y)
        return x + _of(self.mlp_post_norm, y)


def _of(norm: nn.Module | None, x: Tensor) -> Tensor:
    y: Tensor = x if norm is None else norm(x)
    return y
