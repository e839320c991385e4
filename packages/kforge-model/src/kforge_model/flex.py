"""FlexAttention on CUDA: a kernel made for the mask at hand, which computes only the blocks of scores that are seen.

Which those are follows from the first and the last document of each block of columns, so the S × S mask is never made.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Columns of a block; what FlexAttention's kernels are tuned for."""


def seen_blocks(docs: Tensor | None, batch: int, seq: int, window: int | None, device: Any) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries needs, [B or 1, n, n] bool for n blocks of columns: all of them, and
    those in which every query sees every key. docs [B,S] as of `document_ids`."""
    n = -(-seq // BLOCK)
    block = torch.arange(n, device=device)
    back = (block[:, None] - block[None, :])[None]
    seen = back >= 0
    whole = back > 0
    if window is not None:
        seen = seen & (back * BLOCK - (BLOCK - 1) < window)
        whole = whole & (back * BLOCK + (BLOCK - 1) < window)
    if docs is not None:
        first = docs[:, ::BLOCK]
        last = docs[:, (block * BLOCK + BLOCK - 1).clamp(max=seq - 1)]
        seen = seen & (last[:, None, :] >= first[:, :, None])
        whole = whole & (first[:, None, :] == last[:, :, None])
    return seen, whole & seen


def flex_blocks(docs: Tensor | None, batch: int, seq: int, window: int | None, device: Any) -> BlockMask:
    """The mask of `attention_mask` in FlexAttention's form. docs [B,S] never falls along a row; None: plain rows."""
    seen, whole = seen_blocks(docs, batch, seq, window, device)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k < window)
        if docs is not None:
            seen = seen & (docs[b, q] == docs[b, k])
        return seen

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks[:, None].to(torch.int32)
        order = blocks.argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)

    partial, full = listed(seen & ~whole), listed(whole)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(seq, seq))


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `attend_masked`, the mask being ``blocks``. A sink takes sigmoid(logsumexp - sink) of what is left."""

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    attend = flex_attention if torch.compiler.is_compiling() else _compiled()
    score_mod, grouped = (capped if softcap else None), q.shape[1] != k.shape[1]
    if sinks is None:
        out: Tensor = attend(q, k, v, score_mod, blocks, scale, grouped)
        return out
    out, aux = attend(q, k, v, score_mod, blocks, scale, grouped, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return (out * kept.unsqueeze(-1)).to(q.dtype)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)
