"""Causal grouped-query attention: projections and RoPE around a core that knows nothing of either.

Shapes: B rows, S tokens a row, H query heads, KV key/value heads (H is a multiple of KV), Dh features a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kforge_model._torch import varlen_causal
from kforge_model.cache import LayerCache
from kforge_model.config import ModelConfig
from kforge_model.norm import RMSNorm
from kforge_model.rope import Rotary
from kforge_model.rows import MaskedRows, Rows

# On Hopper cuDNN's kernel takes half the time of flash-2 (1.93 against 3.74 ms forward and backward, causal,
# 2 x 32 x 4096 x 128 with 8 kv heads); torch by itself would take flash first. What cuDNN cannot do (float32, or a
# deterministic backward when that is asked for) falls through to the next.
_HOPPER_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prefers_cudnn(device_type: str, device_index: int | None) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability(device_index) >= (9, 0)


def attention_mask(rows: Rows, dtype: torch.dtype) -> Tensor:
    """Block-diagonal causal mask [B,1,S,S] of packed rows, to be added to the scores: 0 or -inf, in ``dtype``.

    Built on the rows' device from doc_ids, or from cu_seqlens where there are none, without waiting for the device.
    """
    batch, seq = rows.position_ids.shape
    docs = rows.doc_ids
    if docs is None:
        if rows.cu_seqlens is None:
            raise ValueError("plain rows need no mask: neither doc_ids nor cu_seqlens is set")
        tokens = torch.arange(batch * seq, device=rows.cu_seqlens.device, dtype=rows.cu_seqlens.dtype)
        docs = torch.searchsorted(rows.cu_seqlens[1:].contiguous(), tokens, right=True).view(batch, seq)
    seen = (docs[:, :, None] == docs[:, None, :]).tril()
    return torch.zeros((), dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))[:, None]


class SdpaCore(nn.Module):
    """Attention proper, without parameters: the module that context parallelism puts its own in place of.

    Plain rows: SDPA with ``is_causal`` and ``enable_gqa``, so the key/value heads are not repeated in memory. Packed
    rows: on CUDA in bf16 or fp16 the variable-length flash kernel, which reads cu_seqlens and makes no mask;
    everywhere else, and in other dtypes, SDPA with a block-diagonal causal mask.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def prepare(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """What is the same in every layer, computed once: called by the model before its blocks.

        Returns rows with the mask where one is needed, else the rows themselves. A core in this one's place may
        have a ``prepare`` of its own, or none, and then gets the rows as they came.
        """
        plain = rows.cu_seqlens is None and rows.doc_ids is None
        if plain or self._takes_varlen(rows, rows.position_ids.device, dtype):
            return rows
        mask = attention_mask(rows, dtype)
        return MaskedRows(rows.position_ids, rows.cu_seqlens, rows.max_seqlen, rows.doc_ids, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """q [B,H,S,Dh], k [B,KV,S,Dh], v [B,KV,S,Dh], after RoPE -> [B,H,S,Dh] in q's dtype."""
        grouped = q.shape[1] != k.shape[1]
        if rows.cu_seqlens is None and rows.doc_ids is None:
            if _prefers_cudnn(q.device.type, q.device.index):
                with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if rows.cu_seqlens is not None and self._takes_varlen(rows, q.device, q.dtype):
            batch, _, seq, _ = q.shape
            # [B,H,S,Dh] is a view of [B,S,H,Dh], so no copy is made here.
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            out = varlen_causal(q, k, v, rows.cu_seqlens, rows.max_seqlen)
            return out.unflatten(0, (batch, seq)).transpose(1, 2)
        mask = getattr(rows, "mask", None)
        if mask is None:
            mask = attention_mask(rows, q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    def _takes_varlen(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> bool:
        # Limits of the flash kernel: half precision, heads of a multiple of 8 and up to 256 features.
        return (
            rows.cu_seqlens is not None
            and device.type == "cuda"
            and dtype in (torch.bfloat16, torch.float16)
            and self.head_dim % 8 == 0
            and self.head_dim <= 256
        )


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last Sq tokens to all Sk so far: q [B,H,Sq,Dh], k and v [B,KV,Sk,Dh] -> [B,H,Sq,Dh]."""
    new, total = q.shape[2], k.shape[2]
    mask = None
    if new > 1:  # a single new token sees everything
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with RoPE, without biases; with ``qk_norm`` each
    head of queries and keys is normalised first, by one weight for all heads (Henry et al. 2020, arXiv:2010.04245).

    ``wq``, ``wk``, ``wv``, ``wo`` are separate plain linears; ``core`` is a submodule without parameters that may be
    exchanged. The number of heads is read off the projections' outputs, so under tensor parallelism the core sees
    this rank's heads only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.core = SdpaCore(self.head_dim)

    def forward(self, x: Tensor, rotary: Rotary, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """x [B,S,D] -> [B,S,D]. With a cache, x follows the tokens in it."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # Rotated as [B,S,H,Dh], then seen as [B,H,S,Dh]: the layout that every kernel reads without a copy.
        q, k, v = rotary.rotate(q).transpose(1, 2), rotary.rotate(k).transpose(1, 2), v.transpose(1, 2)
        before = 0 if cache is None else cache.length
        if cache is not None:
            k, v = cache.append(k, v)
        out = self.core(q, k, v, rows) if before == 0 else attend_to_cache(q, k, v)
        return self.wo(out.transpose(1, 2).flatten(2))
