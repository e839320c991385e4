"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values go round a group of ranks, and each rank merges
what its queries make of them. No rank ever holds more than two parts of a row.

n ranks; rank r has the chunks r and 2n-1-r of 2n of every row (zig-zag, github.com/zhuzilin/ring-flash-attention), and
at step t the keys and values of rank r - t. A chunk of queries sees the chunks of keys before it whole, and its own
causally: in the first step there are three such pairs on every rank, in each later one two.

    forward    n - 1 times K, V [B,KV,S',Dh + Dv] to the next rank, while the pairs at hand are computed
    backward   K, V again; and their gradients, which go round with them in float32 or wider and are home after n steps

Kept for backward: q, k, v, out and lse of the own tokens. What is between is computed again from the lse
(`partial_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kforge_parallel.columns import chunks_of
from kforge_parallel.partial_attention import KERNELS, Pair, merge


@dataclass(frozen=True)
class Ring:
    """A ring of ranks and the rows that go round it."""

    group: dist.ProcessGroup
    tokens: int
    """S, of whole rows."""
    ends: Tensor
    longest: int
    docs: Tensor | None
    window: int | None
    scale: float
    kernel: str
    """One of `KERNELS`."""

    def pairs(self, step: int) -> Iterator[tuple[int, int, Pair]]:
        """(which half of the own queries, which half of the keys at hand, the pair) of a step, the same chunk first."""
        rank, size = self.group.rank(), self.group.size()
        length = self.tokens // (2 * size)
        found = []
        for i, mine in enumerate(chunks_of(rank, size, "ring")):
            for j, theirs in enumerate(chunks_of((rank - step) % size, size, "ring")):
                if theirs <= mine:
                    queries, keys = ((chunk * length, (chunk + 1) * length) for chunk in (mine, theirs))
                    pair = Pair(queries, keys, self.tokens, self.ends, self.longest, self.docs, self.window)
                    found.append((i, j, pair))
        yield from sorted((p for p in found if p[2].useful), key=lambda p: not p[2].same)

    def send(self, x: Tensor) -> Transfer:
        """Begin to send a tensor to the next rank and to get the one of the rank before."""
        return Transfer(x, self.group)


class Transfer:
    """One tensor on its way to the next rank, and one of the same shape from the rank before."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self.sent, self.came = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        to, source = (dist.get_global_rank(group, other % size) for other in (rank + 1, rank - 1))
        self.work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, to, group),
                dist.P2POp(dist.irecv, self.came, source, group),
            ]
        )

    def wait(self) -> Tensor:
        """What came."""
        for work in self.work:
            work.wait()
        return self.came


class _RingAttention(torch.autograd.Function):
    """The module's docstring. Halves of q, k and v are the two chunks of the rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        widths, n, kernel = (k.shape[-1], v.shape[-1]), ring.group.size(), KERNELS[ring.kernel]
        queries = q.chunk(2, 2)
        outs: list[tuple[Tensor, Tensor] | None] = [None, None]
        kv = torch.cat((k, v), -1)
        for step in range(n):
            transfer = ring.send(kv) if step < n - 1 else None
            keys, values = (x.chunk(2, 2) for x in kv.split(widths, -1))
            for i, j, pair in ring.pairs(step):
                part = kernel.forward(queries[i], keys[j], values[j], pair, ring.scale)
                before = outs[i]
                outs[i] = part if before is None else merge(*before, *part)
            if transfer is not None:
                kv = transfer.wait()
        (first, first_lse), (last, last_lse) = (part for part in outs if part is not None)
        out, lse = torch.cat((first, last), 2).to(q.dtype), torch.cat((first_lse, last_lse), 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        widths, n, kernel = (k.shape[-1], v.shape[-1]), ring.group.size(), KERNELS[ring.kernel]
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, grads, outs, lses = (x.chunk(2, 2) for x in (q, grad, out, lse))
        dq = torch.zeros_like(q, dtype=wide)
        kv = torch.cat((k, v), -1)
        dkv = torch.zeros_like(kv, dtype=wide)
        of_gradients: Transfer | None = None
        for step in range(n):
            transfer = ring.send(kv) if step < n - 1 else None
            keys, values = (x.chunk(2, 2) for x in kv.split(widths, -1))
            here = torch.zeros_like(dkv)
            of_keys, of_values = (x.chunk(2, 2) for x in here.split(widths, -1))
            for i, j, pair in ring.pairs(step):
                addends = kernel.backward(grads[i], queries[i], keys[j], values[j], outs[i], lses[i], pair, ring.scale)
                for total, addend in zip((dq.chunk(2, 2)[i], of_keys[j], of_values[j]), addends, strict=True):
                    total.add_(addend)
            if of_gradients is not None:
                here += of_gradients.wait()
            of_gradients = ring.send(here)
            if transfer is not None:
                kv = transfer.wait()
        assert of_gradients is not None
        dk, dv = of_gradients.wait().split(widths, -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Causal attention of this rank's queries to the keys of all: q [B,H,S',Dh], k [B,KV,S',Dh], v [B,KV,S',Dv] ->
    [B,H,S',Dv] in q's dtype. Collective."""
    out: Tensor = _RingAttention.apply(q, k, v, ring)
    return out
