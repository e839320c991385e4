"""Causal grouped-query attention: projections, norms and RoPE around a core that knows nothing of them.

Shapes: B rows, S tokens a row, H query heads, KV key/value heads (H is a multiple of KV; R = H / KV), Dh features a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kforge_model.cache import LayerCache
from kforge_model.config import ModelConfig
from kforge_model.core import build_core
from kforge_model.linear import StackedLinear, linear
from kforge_model.norm import build_norm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with RoPE.

    ``wqkv.weight`` is [KV, R+2, Dh, D]: for each key/value head its R query heads, its key, its value. A head is thus
    a slice of whichever part of the weight a rank has. Head h of H is query h mod R of group h div R.

    ``core`` computes attention after norms and RoPE; it has no parameters and may be exchanged. The number of heads is
    read off the projections' outputs, so under tensor parallelism the core sees this rank's heads only.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        heads, kv_heads, width = config.n_heads, config.kv_heads, config.head_size
        self.head_dim = width
        self.window: int | None = config.window_of(layer)
        self.across_heads = config.qk_norm == "across_heads"
        self.plan = {"": "gather", "wqkv": "colwise_qkv", "wo": "rowwise"}
        self.init: dict[str, str] = {}
        self.wqkv = StackedLinear(config.dim, (kv_heads, heads // kv_heads + 2, width), config.qkv_bias)
        self.wo = linear(heads * width, config.dim, config.out_bias, "residual")
        self.q_norm = self.k_norm = self.w_gate = self.sinks = None
        if config.qk_norm != "none":
            widths = (heads * width, kv_heads * width) if self.across_heads else (width, width)
            self.q_norm, self.k_norm = (build_norm(config, n) for n in widths)
            words = ("colwise", "colwise_kv") if self.across_heads else ("replicate", "replicate")
            self.plan.update(zip(("q_norm", "k_norm"), words, strict=True))
        if config.attn_gate:
            self.w_gate = linear(config.dim, heads * width, False, "matrix")
            self.plan["w_gate"] = "colwise"
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(heads))
            self.plan["sinks"], self.init["sinks"] = "colwise", "zeros"
        self.core = build_core(config, self.window)

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D]. With a cache, x follows the tokens in it, and rows are the cache's."""
        q, k, v = self.project(x, rotary)
        if cache is None:
            out = self.core(q, k, v, rows) if self.sinks is None else self.core(q, k, v, rows, sinks=self.sinks)
        else:
            k, v = cache.append(k, v, rows.slots[self.window])  # type: ignore[attr-defined]
            out = self.core.cached(q, k, v, rows.masks[self.window], self.sinks)  # type: ignore[attr-defined, operator]
        out = out.transpose(1, 2).flatten(2)
        if self.w_gate is not None:
            # Qiu et al. 2025, arXiv:2505.06708, G1: after the core, elementwise, sigmoid.
            out = out * torch.sigmoid(self.w_gate(x))
        return self.wo(out)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """What the core is given of x [B,S,D]: q [B,H,S,Dh], k and v [B,KV,S,Dh], after norms and RoPE."""
        qkv = self.wqkv(x)  # [B,S,KV,R+2,Dh]
        q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            if self.across_heads:
                q = self.q_norm(q.flatten(2)).view(q.shape)
                k = self.k_norm(k.flatten(2)).view(k.shape)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        # Rotated as [B,S,…,Dh], which makes them contiguous, then seen as [B,H,S,Dh]: the layout that every kernel
        # reads without a copy.
        q, k = rotary.rotate(q).flatten(2, 3), rotary.rotate(k).squeeze(3)
        return q.transpose(1, 2), k.transpose(1, 2), v.squeeze(3).transpose(1, 2)
