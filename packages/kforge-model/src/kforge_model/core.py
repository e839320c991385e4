"""Attention proper, after the projections: one module without parameters, and the kernels that it chooses from.

Shapes: B rows, S tokens a row, H query heads, KV key/value heads (H is a multiple of KV), Dh features of a query or
key, Dv of a value. A query at column i of a row sees the keys at columns j <= i of its own document, and of those the
last ``window`` where there is one.

    kernel   rows              where                         options
    -------- ----------------- ----------------------------- -----------------------------------------
    sdpa     plain             anywhere                      none
    varlen   plain, packed     CUDA in bf16 or fp16          window
    flex     plain, packed     CUDA but for float64          window, soft-cap, sinks, Dv other than Dh
    masked   plain, packed     anywhere; B S² mask elements  all

`auto` takes the first that can. None repeats key/value heads in memory. On CUDA packed rows make no mask, but in
float64, which no kernel there takes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kforge_model._torch import varlen_causal
from kforge_model.config import ModelConfig
from kforge_model.flex import flex, flex_blocks
from kforge_model.registry import ATTENTION_CORES
from kforge_model.rows import Rows, check_rows

_log = logging.getLogger("kforge_model")

KERNELS = ("sdpa", "varlen", "flex", "masked")

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


@dataclass(frozen=True)
class PreparedRows(Rows):
    """Rows with what the cores would otherwise make anew in every layer, by window (None: layers that see all)."""

    masks: Mapping[int | None, Tensor] = field(default_factory=dict)
    """[B,1,S,S] added to the scores: 0 where a query may look, -inf elsewhere."""
    blocks: Mapping[int | None, Any] = field(default_factory=dict)
    """Which blocks of the scores flex has to compute."""
    row_ends: Tensor | None = None
    """cu_seqlens of rows that are one document each, for varlen."""


def document_ids(rows: Rows) -> Tensor | None:
    """[B,S] a number for each token's document, the same inside it and never falling; None for plain rows. Does not
    wait for the device."""
    if rows.doc_ids is not None or rows.cu_seqlens is None:
        return rows.doc_ids
    batch, seq = rows.position_ids.shape
    tokens = torch.arange(batch * seq, device=rows.cu_seqlens.device, dtype=rows.cu_seqlens.dtype)
    return torch.searchsorted(rows.cu_seqlens[1:].contiguous(), tokens, right=True).view(batch, seq)


def attention_mask(rows: Rows, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[B,1,S,S] (B is 1 for plain rows) to be added to the scores, in ``dtype``: 0 where a query may look, -inf
    elsewhere. Built on the rows' device without waiting for it."""
    seq, device = rows.position_ids.shape[1], rows.position_ids.device
    column = torch.arange(seq, device=device)
    back = column[:, None] - column[None, :]
    seen = (back >= 0)[None]
    if window is not None:
        seen = seen & (back < window)
    docs = document_ids(rows)
    if docs is not None:
        seen = seen & (docs[:, :, None] == docs[:, None, :])
    return torch.zeros((), dtype=dtype, device=device).masked_fill(~seen, float("-inf"))[:, None]


def attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [B,H,S,Dh], k [B,KV,T,Dh], v [B,KV,T,Dv], mask [B or 1,1,S,T] of 0 and -inf -> [B,H,S,Dv] in q's dtype.

    p = softmax(softcap · tanh(scale q kᵀ / softcap) + mask), with ``sinks`` [H] one more score a head in the softmax's
    sum that gathers nothing; then p v. A query must see a key.
    """
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    weights = attention_weights_of(q, k, mask, scale=scale, softcap=softcap, sinks=sinks).to(v.dtype)
    share = q.shape[1] // k.shape[1]
    grouped = weights.unflatten(1, (-1, share)).flatten(2, 3)  # the queries of a group stand below one another
    return (grouped @ v).unflatten(2, (share, q.shape[2])).flatten(1, 2)


def attention_weights_of(
    q: Tensor, k: Tensor, mask: Tensor, *, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """What each query takes of each key, [B,H,S,T] in float32 or wider; arguments as of `attend_masked`.

    The scores are made in float32 or wider, too, as the fused kernels make theirs: a score of 50 in bfloat16 is off by
    up to 0.125, and the weight by 13 %.
    """
    share = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (-1, share)).flatten(2, 3)
    scores = (grouped @ k.to(wide).mT).unflatten(2, (share, q.shape[2])).flatten(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask.to(wide)
    if sinks is None:
        return scores.softmax(-1)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks.to(wide)[:, None, None])
    return (scores - total).exp()


class AttentionCore(nn.Module):
    """Attention proper, without parameters: the module that context parallelism puts its own in place of.

    ``sinks`` [H] come with the call, as the parameter belongs to whoever calls.
    """

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.value_dim = config.head_size, config.value_size
        self.scale, self.softcap = config.score_scale, config.attn_softcap
        self.window, self.has_sinks = window, config.sinks
        self.choice = config.attention_core

    def prepare(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """What is the same in every layer of this window, computed once: called by the model before its blocks, for one
        layer of every window in turn. A core in this one's place may have a ``prepare`` of its own, or none. Raises
        ValueError as `check_rows` does."""
        check_rows(rows)
        packed = rows.cu_seqlens is not None or rows.doc_ids is not None
        kernel = self.kernel(rows, rows.position_ids.device, dtype)
        _announce(kernel, "packed" if packed else "plain", dtype, rows.position_ids.device.type)
        if kernel == "sdpa":
            return rows
        known = {f.name: getattr(rows, f.name) for f in fields(PreparedRows) if hasattr(rows, f.name)}
        if kernel == "varlen" and rows.cu_seqlens is None:
            batch, seq = rows.position_ids.shape
            device = rows.position_ids.device
            known["row_ends"] = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)
        elif kernel == "masked":
            masks = {**known.get("masks", {}), self.window: attention_mask(rows, dtype, self.window)}
            known["masks"] = masks
        elif kernel == "flex":
            batch, seq = rows.position_ids.shape
            blocks = flex_blocks(document_ids(rows), batch, seq, self.window, rows.position_ids.device)
            known["blocks"] = {**known.get("blocks", {}), self.window: blocks}
        return PreparedRows(**known)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, sinks: Tensor | None = None) -> Tensor:
        """q [B,H,S,Dh], k [B,KV,S,Dh], v [B,KV,S,Dv], after RoPE -> [B,H,S,Dv] in q's dtype."""
        kernel = self.kernel(rows, q.device, q.dtype)
        grouped = q.shape[1] != k.shape[1]
        if kernel == "sdpa":
            if _prefers_cudnn(q.device.type, q.device.index):
                with sdpa_kernel(_HOPPER_ORDER, set_priority=True):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        if kernel == "varlen":
            batch, _, seq, _ = q.shape
            # A compiled graph is made for the number it sees. No document is longer than a row: that is one for all.
            ends, longest = rows.cu_seqlens, seq if torch.compiler.is_compiling() else rows.max_seqlen
            if ends is None:
                ends, longest = getattr(rows, "row_ends", None), seq
            if ends is None:
                ends = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=q.device)
            # [B,H,S,Dh] is a view of [B,S,H,Dh], so no copy is made here.
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            out = varlen_causal(q, k, v, ends, longest, scale=self.scale, window=self.window)
            return out.unflatten(0, (batch, seq)).transpose(1, 2)
        if kernel == "flex":
            blocks = getattr(rows, "blocks", {}).get(self.window)
            if blocks is None:
                blocks = flex_blocks(document_ids(rows), q.shape[0], q.shape[2], self.window, q.device)
            return flex(q, k, v, blocks, scale=self.scale, softcap=self.softcap, sinks=sinks)
        mask = getattr(rows, "masks", {}).get(self.window)
        if mask is None:
            mask = attention_mask(rows, q.dtype, self.window)
        return self.cached(q, k, v, mask, sinks)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
        """As `attend_masked`: queries against all that a key/value cache holds."""
        return attend_masked(q, k, v, mask, scale=self.scale, softcap=self.softcap, sinks=sinks)

    def kernel(self, rows: Rows, device: torch.device, dtype: torch.dtype) -> str:
        """Name of the kernel that serves these rows. Raises ValueError when the one that was asked for cannot."""
        if self.choice == "auto":
            return next(name for name in KERNELS if self._hindrance(name, rows, device, dtype) is None)
        hindrance = self._hindrance(self.choice, rows, device, dtype)
        if hindrance is not None:
            raise ValueError(
                f"model.attention_core = {self.choice!r} cannot serve this model here: {hindrance}; use 'auto'"
            )
        return self.choice

    def _hindrance(self, name: str, rows: Rows, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a kernel cannot be used; None: it can."""
        if name == "masked":
            return None
        if name == "sdpa":
            if rows.cu_seqlens is not None or rows.doc_ids is not None:
                return "it takes rows of one document only"
            if self.window is not None and self.window < rows.position_ids.shape[1]:
                return f"it has no window ({self.window} tokens)"
        if name in ("sdpa", "varlen") and (self.softcap or self.has_sinks):
            return f"it has no {'soft-cap' if self.softcap else 'sinks'}"
        if name in ("varlen", "flex") and device.type != "cuda":
            return f"it runs on CUDA only, and this is {device.type}"
        if name == "varlen":
            if dtype not in (torch.bfloat16, torch.float16):
                return f"it takes bf16 and fp16, not {dtype}"
            if self.head_dim != self.value_dim or self.head_dim % 8 or self.head_dim > 256:
                return (
                    f"its heads are a multiple of 8 wide, at most 256, queries and values alike, not "
                    f"{self.head_dim} and {self.value_dim}"
                )
            if rows.doc_ids is not None and rows.cu_seqlens is None:
                return "it reads cu_seqlens, and the rows have doc_ids only"
        if name == "flex":
            if dtype == torch.float64:
                return "it does not take float64"
            if min(self.head_dim, self.value_dim) < 16:
                return f"its heads are at least 16 wide, not {min(self.head_dim, self.value_dim)}"
        return None

    def extra_repr(self) -> str:
        said = {"window": self.window, "softcap": self.softcap, "sinks": self.has_sinks, "core": self.choice}
        return ", ".join(f"{name}={value}" for name, value in said.items() if value not in (None, 0.0, False, "auto"))


@cache
def _announce(kernel: str, rows: str, dtype: torch.dtype, device: str) -> None:
    _log.info("attention: %s for %s rows in %s on %s", kernel, rows, str(dtype).removeprefix("torch."), device)


for _name in ("auto", *KERNELS):
    ATTENTION_CORES.register(_name)(AttentionCore)


def build_core(config: ModelConfig, window: int | None) -> nn.Module:
    """The attention core that ``config`` names, for a layer with that window."""
    core: nn.Module = ATTENTION_CORES.get(config.attention_core)(config, window)
    return core
