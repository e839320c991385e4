"""Attention of a ring, computed chunk by chunk on one process: what test_partial_attention.py and test_gpu.py compare;
and what torch's kernels of CUDA compute, by the formula, where there is none."""

from types import SimpleNamespace

import attending
import torch

from kforge_parallel.columns import columns_of, document_ids, seen
from kforge_parallel.partial_attention import KERNELS, merge
from kforge_parallel.ring import Ring


def packed(batch, tokens, seed=0):
    """Rows of documents of 1 to half a row: doc_ids, cu_seqlens padded, and the longest."""
    random = torch.Generator().manual_seed(seed)
    lengths = []
    for _ in range(batch):
        cuts = torch.randperm(tokens - 1, generator=random)[: 1 + len(lengths) % 4].sort().values + 1
        lengths.append(torch.diff(torch.tensor([0, *cuts.tolist(), tokens])).tolist())
    docs, _, ends = attending.documents(lengths)
    return docs, torch.cat((ends, ends[-1:].expand(3))), max(n for row in lengths for n in row)


def whole_attention(q, k, v, docs, window, scale):
    """From whole rows, in q's dtype."""
    column = torch.arange(q.shape[2], device=q.device)
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, 1).mT * scale
    scores = scores.masked_fill(~seen(column, column, docs, window)[:, None], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(share, 1)


def rings(size, tokens, docs, ends, longest, window, scale, kernel):
    for rank in range(size):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        yield (
            columns_of(rank, size, "ring", tokens, ends.device),
            Ring(group, tokens, ends, longest, docs, window, scale, kernel),
        )


def ring_by_chunks(q, k, v, grad, size, docs, ends, longest, window, scale, kernel):
    """out, dq, dk, dv of whole rows, as ``size`` ranks of a ring would compute them; rounded where they would."""
    tokens, (forward, backward) = q.shape[2], KERNELS[kernel]
    if docs is None:
        docs = document_ids(None, len(q), tokens)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    gradients = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for columns, ring in rings(size, tokens, docs, ends, longest, window, scale, kernel):
        mine, parts = columns.chunk(2), [None, None]
        every = [(i, pair) for step in range(size) for i, _, pair in ring.pairs(step)]
        for i, pair in every:
            at = slice(*pair.keys)
            part = forward(q[:, :, mine[i]], k[:, :, at], v[:, :, at], pair, scale)
            parts[i] = part if parts[i] is None else merge(*parts[i], *part)
        for half, (value, _) in zip(mine, parts, strict=True):
            out[:, :, half] = value.to(q.dtype)
        for i, pair in every:
            at, half = slice(*pair.keys), mine[i]
            addends = backward(
                grad[:, :, half], q[:, :, half], k[:, :, at], v[:, :, at], out[:, :, half], parts[i][1], pair, scale
            )
            for total, place, addend in zip(gradients, (half, at, at), addends, strict=True):
                total[:, :, place] += addend
    return [out, *(gradient.to(q.dtype) for gradient in gradients)]


# ------------------------------------------------------------------------------------------ kernels of CUDA


def segments(ends_q, ends_k):
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if a < b:
            yield slice(a, b), slice(c, d)


def scores_of(q, k, causal, scale):
    """[H,Q,K] of one segment; the last query is at the last key."""
    share, (queries, keys) = q.shape[1] // k.shape[1], (len(q), len(k))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -torch.inf)
    return scores


def varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window):
    """What `kforge_parallel._torch.varlen` stands for."""
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=q.dtype)
    for mine, theirs in segments(ends_q.tolist(), ends_k.tolist()):
        assert mine.stop - mine.start <= longest_q and theirs.stop - theirs.start <= longest_k
        scores = scores_of(q[mine], k[theirs], True, scale)
        if window is not None:
            keys, queries = scores.shape[2], scores.shape[1]
            scores = scores.masked_fill(torch.ones(queries, keys).bool().tril(keys - queries - window), -torch.inf)
        share = q.shape[1] // k.shape[1]
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[theirs].repeat_interleave(share, 1))
    return out


def flash_forward(q, k, v, ends_q, ends_k, longest_q, longest_k, p, causal, debug, *, scale):
    """A document without keys has NaN and +inf: nobody may read them."""
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.inf, dtype=q.dtype)
    share = q.shape[1] // k.shape[1]
    for mine, theirs in segments(ends_q.tolist(), ends_k.tolist()):
        assert mine.stop - mine.start <= longest_q and theirs.stop - theirs.start <= longest_k
        if theirs.start < theirs.stop:
            scores = scores_of(q[mine], k[theirs], causal, scale)
            out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[theirs].repeat_interleave(share, 1))
            lse[:, mine] = scores.logsumexp(-1)
    return out, lse, None, None, None


def flash_backward(grad, q, k, v, out, lse, ends_q, ends_k, *more, scale):
    """What is of no document stays NaN."""
    causal, share, kv_heads = more[3], q.shape[1] // k.shape[1], k.shape[1]
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for mine, theirs in segments(ends_q.tolist(), ends_k.tolist()):
        weights = (scores_of(q[mine], k[theirs], causal, scale) - lse[:, mine, None]).exp()
        wide_k, wide_v = (x[theirs].repeat_interleave(share, 1) for x in (k, v))
        of_weights = torch.einsum("qhd,khd->hqk", grad[mine], wide_v) - (grad[mine] * out[mine]).sum(-1).T[..., None]
        ds = weights * of_weights * scale
        if theirs.start < theirs.stop:
            found[0][mine] = torch.einsum("hqk,khd->qhd", ds, wide_k)
            dk, dv = torch.einsum("hqk,qhd->khd", ds, q[mine]), torch.einsum("hqk,qhd->khd", weights, grad[mine])
            found[1][theirs], found[2][theirs] = (x.unflatten(1, (kv_heads, share)).sum(2) for x in (dk, dv))
    return found


def efficient_forward(q, k, v, bias, lse, *, scale):
    """The length of an lse is a multiple of 32, filled up with inf."""
    assert lse and bias.stride(2) % 16 == 0 and q.shape[:2] == k.shape[:2] == v.shape[:2] == bias.shape[:2]
    scores = q @ k.mT * scale + bias
    padded = torch.nn.functional.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=torch.inf)
    return scores.softmax(-1) @ v, padded, None, None


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, p, wanted, *, scale):
    assert lse.shape[2] % 32 == 0 and lse[..., q.shape[2] :].isinf().all() and wanted == [True, True, True, False]
    weights = (q @ k.mT * scale + bias - lse[..., : q.shape[2], None]).exp()
    ds = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, weights.mT @ grad, None


KERNELS_OF_CUDA = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
