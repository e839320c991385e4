"""Attention scores that grow without bound in training: how great they are, and how to shrink those of one head.

MuonClip (Kimi K2, Moonshot AI 2025, arXiv:2507.20534, section 2.1): after an optimizer step, a head whose greatest
score exceeded a threshold has its query and key weights scaled so that it would have been the threshold:

    greatest = max_logits(model, ids, rows)  # [layers, heads]
    for at, layer in enumerate(map(int, model.layers)):
        for head in (greatest[at] > 100).nonzero().flatten().tolist():
            scale_qk(model, layer, head, 100 / greatest[at, head].item())

In a training loop the host does not want to know: `qk_factors` says, on the device, by what each weight is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kforge_model._torch import local_box
from kforge_model.attention import Attention
from kforge_model.core import document_ids
from kforge_model.mla import LatentAttention
from kforge_model.modes import run_for_hooks
from kforge_model.points import block_of, watching_attention
from kforge_model.rows import Rows
from kforge_model.transformer import Transformer

CHUNK_ELEMENTS = 1 << 26
"""Scores that exist at one time in `max_logits`: 256 MiB in float32."""


def max_logits(model: Transformer, ids: Tensor, rows: Rows | None = None) -> Tensor:
    """The greatest score, scale · q · k before any soft-cap, that a query of each head gives to a key it sees.

    ids and rows as of the model, packed rows too. Returns [layers, heads] in float32 or wider, on the model's device,
    the layers being those of the model (or stage) in their order; blocks of further tokens (mtp_depth) are not among
    them. Under tensor parallelism the heads are this rank's; over ranks with other tokens the caller takes the maximum.
    Scores are made for a part of the queries at a time. Runs in eval mode without gradients. Under context
    parallelism ids and rows are whole on every rank, and each computes all.
    """
    found: dict[int, Tensor] = {}

    def watch(layer: int, q: Tensor, k: Tensor, given: Rows, sinks: Tensor | None) -> None:
        found[layer] = _greatest(q, k, given, model.config.window_of(layer)) * model.config.score_scale

    with watching_attention(model, watch):
        run_for_hooks(model, ids, rows)
    return torch.stack([found[int(name)] for name in model.layers])


def _greatest(q: Tensor, k: Tensor, rows: Rows, window: int | None) -> Tensor:
    """q [B,H,S,Dh], k [B,KV,S,Dh] -> [H]."""
    batch, heads, seq, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped, k = q.unflatten(1, (k.shape[1], -1)).to(wide), k[:, :, None].to(wide).mT  # [B,KV,R,S,Dh], [B,KV,1,Dh,S]
    docs = document_ids(rows)
    column = torch.arange(seq, device=q.device)
    step = max(1, CHUNK_ELEMENTS // max(1, batch * heads * seq))
    top = torch.full((heads,), -torch.inf, dtype=wide, device=q.device)
    for start in range(0, seq if batch else 0, step):
        stop = min(start + step, seq)
        first = 0 if window is None else max(0, start - window + 1)  # no query of these sees a key before it
        back = column[start:stop, None] - column[first:stop]
        seen = (back >= 0)[None]
        if window is not None:
            seen = seen & (back < window)
        if docs is not None:
            seen = seen & (docs[:, start:stop, None] == docs[:, None, first:stop])
        scores = grouped[:, :, :, start:stop] @ k[..., first:stop]  # [B,KV,R,step,keys]
        scores = scores.masked_fill_(~seen[:, None, None], -torch.inf)
        top = torch.maximum(top, scores.amax((0, 3, 4)).flatten())
    return top


@torch.no_grad()
def scale_qk(model: Transformer, layer: int, head: int, factor: float) -> None:
    """Multiply all scores of one head by ``factor`` > 0, in place, through the weights that make its queries and keys.

    head counts over the whole model, also where a rank has a part of it; every rank that shares the layer calls this
    alike. Works on plain parameters and on DTensors, cut along any dimensions. What is scaled:

        gqa, several queries a key   the head's query weights and biases by factor: its key serves other heads too
        gqa, one query a key         the query's and the key's weights and biases, each by sqrt(factor)
        mla                          unrotated query and key by sqrt(factor); the rotated query by factor, as the
                                     rotated key serves all heads

    Changes the parameters only: a copy that an optimizer or an average keeps is its owner's to scale.

    Raises ValueError for a factor that is not above 0, a layer or head that is not there, and a model with qk_norm,
    which makes queries and keys of one length whatever the weights' scale.
    """
    config = model.config
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"factor = {factor} must be finite and above 0")
    if not 0 <= head < config.n_heads:
        raise ValueError(f"head = {head} must lie in 0 .. {config.n_heads - 1}")
    _refuse_qk_norm(model)
    attn = block_of(model, layer).attn
    root = math.sqrt(factor)
    if isinstance(attn, LatentAttention):
        plain, width = attn.unrotated, attn.head_dim
        wq = attn.wq if attn.wq is not None else attn.wq_b
        assert wq is not None
        _scale_rows(wq.weight, head * width, plain, root)
        _scale_rows(wq.weight, head * width + plain, attn.rotated, factor)
        _scale_rows(attn.wkv_b.weight, head * (plain + attn.value_dim), plain, root)
        return
    assert isinstance(attn, Attention)
    queries = config.n_heads // config.kv_heads
    for tensor in (attn.wqkv.weight, attn.wqkv.bias):
        if tensor is None:
            continue
        at = (head // queries, head % queries)  # of [KV, R+2, …]: the head's query
        if queries > 1:
            _scale_box(tensor, at, (1, 1), factor)
        else:
            _scale_box(tensor, at, (1, 2), root)  # and the key behind it


def qk_factors(model: Transformer, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What the weights are multiplied by so that all scores of each head are multiplied by its factor.

    factors: [layers, heads] above 0, the layers being those of the model (or stage), the heads those of the whole
    model. Yields (name of a parameter, plain tensor of as many dimensions, each as long as the whole parameter's or 1),
    on the device and in the dtype of ``factors``: 1 where nothing is to change. Shares out factors as `scale_qk` does,
    and raises ValueError for a model with qk_norm, too.
    """
    _refuse_qk_norm(model)
    for name, factor in zip(model.layers, factors, strict=True):
        attn, root = block_of(model, int(name)).attn, factor.sqrt()
        prefix = f"layers.{name}.attn"
        if isinstance(attn, LatentAttention):
            one = torch.ones_like(factor)
            query = torch.cat((_repeated(root, attn.unrotated), _repeated(factor, attn.rotated)), dim=1)
            key = torch.cat((_repeated(root, attn.unrotated), _repeated(one, attn.value_dim)), dim=1)
            yield f"{prefix}.{'wq' if attn.wq is not None else 'wq_b'}.weight", query.reshape(-1, 1)
            yield f"{prefix}.wkv_b.weight", key.reshape(-1, 1)
            continue
        assert isinstance(attn, Attention)
        by_key = factor.unflatten(0, (model.config.kv_heads, -1))  # [KV,R]
        one = torch.ones_like(by_key[:, :1])
        alone = by_key.shape[1] == 1
        parts = torch.cat((by_key.sqrt(), by_key.sqrt(), one) if alone else (by_key, one, one), dim=1)[..., None]
        yield f"{prefix}.wqkv.weight", parts[..., None]
        if attn.wqkv.bias is not None:
            yield f"{prefix}.wqkv.bias", parts


def _repeated(of_heads: Tensor, rows: int) -> Tensor:
    """[H] -> [H, rows]"""
    return of_heads[:, None].expand(-1, rows)


def _refuse_qk_norm(model: Transformer) -> None:
    if model.config.qk_norm != "none":
        raise ValueError(
            f"model.qk_norm = {model.config.qk_norm!r} normalises queries and keys after their weights, so scaling "
            "these changes nothing; qk_norm already bounds the scores"
        )


def _scale_rows(weight: Tensor, first: int, count: int, factor: float) -> None:
    _scale_box(weight, (first,), (count,), factor)


def _scale_box(tensor: Tensor, start: tuple[int, ...], size: tuple[int, ...], factor: float) -> None:
    """Multiply a box of the whole tensor, given along its first dimensions, as far as this rank has it."""
    local, offset = local_box(tensor) if isinstance(tensor, DTensor) else (tensor, (0,) * tensor.ndim)
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        low = max(first - offset[dim], 0)
        high = min(first + count - offset[dim], local.shape[dim])
        if high <= low:
            return
        local = local.narrow(dim, low, high - low)
    local.mul_(factor)
