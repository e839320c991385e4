"""Attention of a chunk of queries to a chunk of keys: a part of a softmax, which others complete.

Of the scores s_ij = scale · q_i·k_j of all keys that query i sees, those of one chunk give

    lse_i = log Σ_j exp s_ij        out_i = Σ_j exp(s_ij - lse_i) v_j

and chunks A and B together (`merge`)

    lse = log(exp lse_A + exp lse_B)        out = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

Backward wants the lse and out of *all* keys: then p_ij = exp(s_ij - lse_i) is the share of a key in the whole softmax,
and each pair of chunks gives addends of the gradients, with D_i = dout_i · out_i:

    dv_j += Σ_i p_ij dout_i      ds_ij = p_ij (dout_i · v_j - D_i)      dq_i += scale Σ_j ds_ij k_j      dk_j alike

Any kernel whose forward gives out and lse, and whose backward takes them, will do. Those of torch, in 2.11 to 2.13 with
one signature each (``torch.ops.aten``):

    kernel     operators                                           takes                              here
    ---------- --------------------------------------------------- ---------------------------------- ----------------
    flash      _flash_attention_forward, _backward                 bf16, fp16; documents of unequal   CUDA, no window
                                                                   length; grouped heads, ≤ 256 wide
    efficient  _scaled_dot_product_efficient_attention, _backward  bf16, fp16, fp32; a mask; keys     CUDA, else
                                                                   and values of unequal width
    cudnn      _scaled_dot_product_cudnn_attention, _backward      bf16, fp16; no documents           not used
    flash_cpu  _scaled_dot_product_flash_attention_for_cpu, _b…    a mask; fp32, fp64                 not used
    exact      none: the formulas, Q K scores at a time            all                                elsewhere

Shapes: B rows, H query heads, KV key/value heads, Q queries, K keys, Dh features of a query or key, Dv of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kforge_parallel import _torch
from kforge_parallel.columns import clipped_ends, seen

UNSEEN = -1e30
"""Added to a score that does not count (in fp16, its lowest number), where -inf would make the softmax of a query that
sees no key NaN: its lse is then of this size, and its share in any sum exactly 0."""


@dataclass(frozen=True)
class Pair:
    """A chunk of queries and a chunk of keys of the same rows: the same chunk, or keys before the queries."""

    queries: tuple[int, int]
    """First column, and the one behind the last."""
    keys: tuple[int, int]
    tokens: int
    """S, of whole rows."""
    ends: Tensor
    """cu_seqlens of the whole rows; of rows of one document each, too."""
    longest: int
    """The longest document in tokens, or anything above."""
    docs: Tensor | None = None
    """[B,S] the document of each token; None: rows of one document each."""
    window: int | None = None

    @property
    def same(self) -> bool:
        """Whether queries and keys are of the same tokens."""
        return self.queries == self.keys

    @property
    def useful(self) -> bool:
        """Whether any query may see a key: the first query the last key."""
        return self.window is None or self.queries[0] - (self.keys[1] - 1) < self.window

    def seen(self, device: torch.device) -> Tensor:
        """[B or 1,Q,K] bool."""
        queries, keys = (torch.arange(*columns, device=device) for columns in (self.queries, self.keys))
        return seen(queries, keys, self.docs, self.window)

    def linked(self) -> tuple[Tensor, Tensor] | None:
        """Where keys come before the queries, without a window: [B,1,Q,1] of whether a query sees any key, [B,1,K,1] of
        whether a key is seen. Only of the document that reaches from the last key to the first query. None: all are."""
        if self.docs is None or self.same:
            return None
        queries, keys = self.docs[:, slice(*self.queries)], self.docs[:, slice(*self.keys)]
        return (queries == keys[:, -1:])[:, None, :, None], (keys == queries[:, :1])[:, None, :, None]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of a softmax as one. out and other [B,H,Q,Dv], their lse [B,H,Q]; lse is finite, other_lse may be -inf.
    All in float32 or wider."""
    both = torch.logaddexp(lse, other_lse)
    return out * (lse - both).exp()[..., None] + other * (other_lse - both).exp()[..., None], both


# ------------------------------------------------------------------------------------------ the formulas


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B,H,Q,D] -> [B,KV,R Q,D]: the queries of a group below one another."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, pair: Pair, scale: float) -> Tensor:
    """[B,KV,R,Q,K], -inf where a query does not see a key."""
    scores = (_grouped(_wide(q), k.shape[1]) @ _wide(k).mT).unflatten(2, (-1, q.shape[2])) * scale
    return scores.masked_fill(~pair.seen(q.device)[:, None, None], float("-inf"))


def exact_forward(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """out [B,H,Q,Dv] and lse [B,H,Q], in float32 or wider; 0 and -inf for a query that sees no key."""
    scores = _scores(q, k, pair, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    out = (weights.flatten(2, 3) @ _wide(v)).unflatten(2, (-1, q.shape[2]))
    return out.flatten(1, 2), lse.flatten(1, 2)


def exact_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: Pair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Addends of dq, dk and dv, in float32 or wider; out and lse are of all keys."""
    kv_heads = k.shape[1]
    scores = _scores(q, k, pair, scale)
    weights = (scores - lse.unflatten(1, (kv_heads, -1))[..., None]).exp().flatten(2, 3)  # [B,KV,R Q,K]
    grad, out = _grouped(_wide(grad), kv_heads), _grouped(_wide(out), kv_heads)
    dv = weights.mT @ grad
    ds = weights * (grad @ _wide(v).mT - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (ds @ _wide(k)).unflatten(2, (-1, q.shape[2])).flatten(1, 2)
    return dq, ds.mT @ _grouped(_wide(q), kv_heads), dv


# ------------------------------------------------------------------------------------------ flash


def _rows(x: Tensor) -> Tensor:
    """[B,H,Q,D] -> [B Q,H,D], and an lse [B,H,Q] -> [H,B Q]."""
    return x.transpose(1, 2).flatten(0, 1) if x.ndim == 4 else x.transpose(0, 1).flatten(1, 2)


def _lengths(pair: Pair) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of queries and keys, and the greatest length of each."""
    (q0, q1), (k0, k1) = pair.queries, pair.keys
    ends = clipped_ends(pair.ends, pair.tokens, q0, q1), clipped_ends(pair.ends, pair.tokens, k0, k1)
    return *ends, min(pair.longest, q1 - q0), min(pair.longest, k1 - k0)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """As `exact_forward`, without a window."""
    batch = len(q)
    out, lse = _torch.flash_forward(_rows(q), _rows(k), _rows(v), _lengths(pair), pair.same, scale)
    out, lse = _wide(out.unflatten(0, (batch, -1)).transpose(1, 2)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
    linked = pair.linked()
    if linked is not None:  # what the kernel leaves for a document without keys is its own affair
        out, lse = out.where(linked[0], 0), lse.where(linked[0][..., 0], float("-inf"))
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: Pair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `exact_backward`, without a window; gradients are rounded to q's dtype."""
    found = _torch.flash_backward(
        _rows(grad),
        _rows(q),
        _rows(k),
        _rows(v),
        _rows(out),
        _rows(lse).contiguous(),
        _lengths(pair),
        pair.same,
        scale,
    )
    dq, dk, dv = (x.unflatten(0, (len(q), -1)).transpose(1, 2) for x in found)
    linked = pair.linked()
    if linked is not None:
        dq, dk, dv = dq.where(linked[0], 0), dk.where(linked[1], 0), dv.where(linked[1], 0)
    return dq, dk, dv


# ------------------------------------------------------------------------------------------ efficient


def _bias(q: Tensor, pair: Pair) -> Tensor:
    """[B,H,Q,K] of 0 and `UNSEEN`, its rows aligned as the kernel wants them."""
    visible = pair.seen(q.device)
    keys, unseen = visible.shape[2], max(UNSEEN, torch.finfo(q.dtype).min)
    bias = torch.full((len(visible), 1, visible.shape[1], -(-keys // 16) * 16), unseen, dtype=q.dtype, device=q.device)
    bias = bias[..., :keys].masked_fill_(visible[:, None], 0)
    return bias.expand(len(q), q.shape[1], -1, -1)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, pair: Pair, scale: float) -> tuple[Tensor, Tensor]:
    """As `exact_forward`, but for lse of about `UNSEEN` in place of -inf. Makes a mask of B Q K elements, and of each
    key/value head one for each query head."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    out, lse = _torch.efficient_forward(q, k, v, _bias(q, pair), scale)
    return _wide(out), lse


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pair: Pair, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `exact_backward`; gradients are rounded to q's dtype."""
    kv_heads, share = k.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    dq, dk, dv = _torch.efficient_backward(grad, q, k, v, _bias(q, pair), out, lse, scale)
    if share > 1:
        dk, dv = (_wide(x).unflatten(1, (kv_heads, share)).sum(2) for x in (dk, dv))
    return dq, dk, dv


# ------------------------------------------------------------------------------------------ choice


class Kernel(NamedTuple):
    """``forward(q, k, v, pair, scale) -> out, lse``; ``backward(grad, q, k, v, out, lse, pair, scale) -> addends``."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


KERNELS = {
    "flash": Kernel(flash_forward, flash_backward),
    "efficient": Kernel(efficient_forward, efficient_backward),
    "exact": Kernel(exact_forward, exact_backward),
}


def choose_kernel(q: Tensor, v: Tensor, window: int | None, *, documents_by_length: bool) -> str:
    """Name of the kernel for queries [B,H,Q,Dh] and values [B,KV,K,Dv]. documents_by_length: there is a cu_seqlens, or
    rows are of one document each."""
    if not q.is_cuda or q.dtype == torch.float64:
        return "exact"
    width = q.shape[-1]
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if narrow and window is None and documents_by_length and width == v.shape[-1] <= 256 and width % 8 == 0:
        return "flash"
    return "efficient"
