"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434, section 2.1).

Shapes: B rows, S tokens a row, H heads, r features of the latent, Dh = Dn + Dr features of a query or key, of which
the last Dr are rotated, Dv of a value.

    latent c = norm(Wa x)  [r]       rotated key k' = RoPE(Wa' x)  [Dr], one for all heads
    head h:  k = [Wk_h c, k']        v = Wv_h c        q = [Wq_h x, RoPE(Wq'_h x)]

A cache holds c and k' alone. As q · Wk_h c = (Wk_hᵀ q) · c, a query is brought to the latent instead of every key to
its head: attention over a cache is that of H queries to one key/value head of r + Dr features (its appendix C).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kforge_model.cache import LayerCache
from kforge_model.config import ModelConfig
from kforge_model.core import build_core
from kforge_model.linear import linear
from kforge_model.norm import build_norm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from one latent a token.

    ``wkv_a.weight`` [r + Dr, D], ``wkv_b.weight`` [H (Dn + Dv), r], for each head its key's rows, then its value's;
    ``wq.weight`` [H Dh, D], or through a latent of the queries, ``wq_a`` and ``wq_b``.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        heads, dim, rank = config.n_heads, config.dim, config.kv_lora_rank
        assert rank is not None
        self.head_dim = config.head_size
        self.window: int | None = config.window_of(layer)
        self.rank, self.rotated, self.unrotated = rank, config.rope_size, config.head_size - config.rope_size
        self.value_dim = config.value_size
        self.plan = {"": "gather", "wkv_a": "replicate", "kv_a_norm": "replicate", "wkv_b": "colwise", "wo": "rowwise"}
        self.init: dict[str, str] = {}
        self.wq = self.wq_a = self.q_a_norm = self.wq_b = self.w_gate = self.sinks = None
        if config.q_lora_rank is None:
            self.wq = linear(dim, heads * self.head_dim, False, "matrix")
            self.plan["wq"] = "colwise"
        else:
            self.wq_a = linear(dim, config.q_lora_rank, False, "matrix")
            self.q_a_norm = build_norm(config, config.q_lora_rank)
            self.wq_b = linear(config.q_lora_rank, heads * self.head_dim, False, "matrix")
            self.plan.update(wq_a="replicate", q_a_norm="replicate", wq_b="colwise")
        self.wkv_a = linear(dim, rank + self.rotated, False, "matrix")
        self.kv_a_norm = build_norm(config, rank)
        self.wkv_b = linear(rank, heads * (self.unrotated + self.value_dim), False, "matrix")
        self.wo = linear(heads * self.value_dim, dim, config.out_bias, "residual")
        if config.attn_gate:
            self.w_gate = linear(dim, heads * self.value_dim, False, "matrix")
            self.plan["w_gate"] = "colwise"
        if config.sinks:
            self.sinks = nn.Parameter(torch.zeros(heads))
            self.plan["sinks"], self.init["sinks"] = "colwise", "zeros"
        self.core = build_core(config, self.window)

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D]. With a cache, x follows the tokens in it, and rows are the cache's."""
        if cache is None:
            q, k, v = self.project(x, rotary)
            out = self.core(q, k, v, rows) if self.sinks is None else self.core(q, k, v, rows, sinks=self.sinks)
        else:
            out = self._from_cache(x, rotary, rows, cache)
        out = out.transpose(1, 2).flatten(2)
        if self.w_gate is not None:
            out = out * torch.sigmoid(self.w_gate(x))
        return self.wo(out)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """What the core is given of x [B,S,D]: q and k [B,H,S,Dh], v [B,H,S,Dv], after norms and RoPE."""
        q, q_rotated = self._queries(x, rotary)
        latent, k_rotated = self._latent(x, rotary)
        kv = self.wkv_b(latent).unflatten(-1, (-1, self.unrotated + self.value_dim))
        k, v = kv.split((self.unrotated, self.value_dim), dim=-1)
        q = torch.cat((q, q_rotated), dim=-1)
        k = torch.cat((k, k_rotated.expand(*k.shape[:3], -1)), dim=-1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _queries(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The unrotated part [B,S,H,Dn] and the rotated part [B,S,H,Dr]."""
        if self.wq is not None:
            q = self.wq(x)
        else:
            assert self.wq_a is not None and self.q_a_norm is not None and self.wq_b is not None
            q = self.wq_b(self.q_a_norm(self.wq_a(x)))
        plain, rotated = q.unflatten(-1, (-1, self.head_dim)).split((self.unrotated, self.rotated), dim=-1)
        return plain, rotary.rotate(rotated)

    def _latent(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The latent [B,S,r] and the rotated key [B,S,1,Dr]."""
        latent, key = self.wkv_a(x).split((self.rank, self.rotated), dim=-1)
        return self.kv_a_norm(latent), rotary.rotate(key.unsqueeze(2))

    def _from_cache(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache) -> Tensor:
        """[B,H,S,Dv], by way of the latent: what the module's docstring derives."""
        q, q_rotated = self._queries(x, rotary)
        latent, key = self._latent(x, rotary)
        slots, mask = rows.slots[self.window], rows.masks[self.window]  # type: ignore[attr-defined]
        latents, keys = cache.append(latent[:, None], key.transpose(1, 2), slots)
        heads = self.wkv_b.weight.unflatten(0, (-1, self.unrotated + self.value_dim))
        to_key, to_value = heads.split((self.unrotated, self.value_dim), dim=1)
        q = torch.einsum("bshn,hnr->bhsr", q, to_key)
        q = torch.cat((q, q_rotated.transpose(1, 2)), dim=-1)
        out = self.core.cached(q, torch.cat((latents, keys), dim=-1), latents, mask, self.sinks)  # type: ignore[operator]
        return torch.einsum("bhsr,hvr->bhsv", out, to_value)
