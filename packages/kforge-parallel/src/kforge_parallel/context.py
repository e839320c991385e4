"""Context parallelism: the ranks of a group have each a part of every row, and attention reaches what the others have.

n ranks, B rows of S tokens, S' = S/n of them here, H query heads, KV key/value heads. `shard_rows` cuts a microbatch
before the model sees it; everything but attention then works on its own tokens. `spread_attention` puts a core of the
style in the place of each attention's own:

    style       tokens of a rank r           attention here                               sent, forward, a layer
    ----------- ---------------------------- -------------------------------------------- --------------------------
    allgather   chunks r, 2n-1-r of 2n       own queries, keys and values of all tokens   K and V, to all
    ulysses     chunk r of n                 all tokens of H/n heads, by the model's own  Q, K, V and out, 1/n of each
                                             core                                         to each

Under a causal mask chunk i sees i + 1 chunks: r and 2n-1-r together see 2n + 1, so all ranks have as much to do.

A core is a module without parameters called ``core``, ``core(q [B,H,S,Dh], k [B,KV,S,Dh], v [B,KV,S,Dv], rows, sinks)
-> [B,H,S,Dv]``, with attributes ``scale`` and ``window``. Of ``rows`` it reads ``columns``, [S'] the place of each
token in its row, and ``whole``, the rows that they are a part of: there, as the style needs them, doc_ids [B,S],
cu_seqlens and max_seqlen. Rows without columns are whole on every rank, which evaluation may want (a cache, attention
weights) and training never does.

Parameters, which FSDP2 shards over this group too, get the sum of all parts' gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from kforge_parallel._torch import varlen
from kforge_parallel.collectives import join_parts, returned, sum_own_part
from kforge_parallel.columns import chunks_of, clipped_ends, columns_of, document_ends, document_ids, seen
from kforge_parallel.kept import keep
from kforge_parallel.layout import hindrance
from kforge_parallel.mesh import Mesh
from kforge_parallel.partial_attention import choose_kernel
from kforge_parallel.ring import Ring, ring_attention

# ------------------------------------------------------------------------------------------ rows


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """This rank's part of a microbatch, for every rank of the group has the whole; the batch itself where cp is 1.

    Tensors of two dimensions or more, [B,S,…], are cut along the second: ids, labels (shifted before, so that the last
    token of a part keeps its label), positions, document numbers. What else there is stays as it is, and there are two
    entries more: ``columns`` [S'], the place of each token in its row, and ``whole``, the batch.

    Raises ValueError for rows that cannot be cut, with a length that can.
    """
    if mesh.cp_size == 1:
        return dict(batch)
    rows = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 1}
    lengths = {name: value.shape[1] for name, value in rows.items()}
    if len({*lengths.values()}) != 1:
        raise ValueError(
            f"a batch of tensors {lengths} long cannot be cut along its rows: all of two dimensions or more must be "
            "[rows, tokens, …], of one number of tokens"
        )
    some = next(iter(rows.values()))
    columns = columns_of(mesh.cp_rank, mesh.cp_size, mesh.config.cp_style, some.shape[1], some.device)
    cut = {name: value.index_select(1, columns) for name, value in rows.items()}
    return {**batch, **cut, "columns": columns, "whole": batch}


# ------------------------------------------------------------------------------------------ transfers


class _GatherRows(torch.autograd.Function):
    """x [B,KV,S',D] of each rank -> y [B,KV,S,D] in the order of the row. dx = own columns of Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        order, n = [], group.size()
        for rank in range(n):
            order += chunks_of(rank, n, "allgather")
        ctx.order = order  # of the chunks, as they come
        chunks = keep("transfers", lambda: join_parts(x, group, 2)).unflatten(2, (2 * n, -1))
        return torch.cat([chunks[:, :, order.index(chunk)] for chunk in range(2 * n)], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        chunks = grad.unflatten(2, (len(ctx.order), -1))
        return sum_own_part(torch.cat([chunks[:, :, chunk] for chunk in ctx.order], 2), ctx.group, 2), None


def _exchange(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Part i of x along dimension ``cut`` to rank i; what comes, joined along ``join`` in order of rank."""
    n = group.size()
    parts = x.unflatten(cut, (n, -1)).movedim(cut, 0).contiguous()
    came = torch.empty_like(parts)
    dist.all_to_all_single(came, parts, group=group)
    return came.movedim(0, join).flatten(join, join + 1).contiguous()


class _Exchange(torch.autograd.Function):
    """x -> `_exchange`; its transpose is the exchange the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.way = (group, join, cut)
        return returned(keep("transfers", lambda: _exchange(x, group, cut, join)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.way), None, None, None


# ------------------------------------------------------------------------------------------ cores


class ContextCore(nn.Module):
    """In the place of an attention core, where ranks have parts of the rows. ``own`` is the core that was there, for
    whole rows."""

    def __init__(self, own: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.own, self.group = own, group
        self.scale: float | None = getattr(own, "scale", None)
        self.window: int | None = getattr(own, "window", None)

    def prepare(self, rows: Any, dtype: torch.dtype) -> Any:
        """What is the same in every layer of this window; called by models whose own core has it."""
        if getattr(rows, "columns", None) is None:
            return _prepared(self.own, rows, dtype)
        rows = copy.copy(rows)
        for name, value in self.parts(rows, dtype).items():
            object.__setattr__(rows, name, value)  # a dataclass may be frozen; this one is a copy
        return rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None = None) -> Tensor:
        """q [B,H,S',Dh], k [B,KV,S',Dh], v [B,KV,S',Dv], after RoPE -> [B,H,S',Dv] in q's dtype."""
        if getattr(rows, "columns", None) is not None:
            return self.attend(q, k, v, rows, sinks)
        if self.training:
            raise ValueError(
                f"these rows are not cut (they have no columns), and every one of {self.group.size()} ranks would "
                "train on all of them; give the model the part that `shard_rows` makes"
            )
        return _call(self.own, q, k, v, rows, sinks)

    def cached(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the own core does with a key/value cache, whose rows are whole."""
        out: Tensor = self.own.cached(*args, **kwargs)  # type: ignore[operator]
        return out

    def parts(self, rows: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Attributes of the rows that save work in every layer."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None) -> Tensor:
        """`forward` for a part of the rows."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"over {self.group.size()} ranks"


def _prepared(core: nn.Module, rows: Any, dtype: torch.dtype) -> Any:
    prepare: Callable[[Any, torch.dtype], Any] | None = getattr(core, "prepare", None)
    return rows if prepare is None else prepare(rows, dtype)


def _call(core: nn.Module, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None) -> Tensor:
    out: Tensor = core(q, k, v, rows) if sinks is None else core(q, k, v, rows, sinks=sinks)
    return out


class UlyssesCore(ContextCore):
    """Each rank computes all tokens of H/n heads (Jacobs et al. 2023, arXiv:2309.14509). Where there are fewer
    key/value heads than ranks, each is sent to all ranks whose queries need it; its gradient is the sum of theirs."""

    def parts(self, rows: Any, dtype: torch.dtype) -> dict[str, Any]:
        return {"whole": _prepared(self.own, rows.whole, dtype)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None) -> Tensor:
        n, heads, kv_heads = self.group.size(), q.shape[1], k.shape[1]
        if heads % n or (kv_heads % n and n % kv_heads):
            raise ValueError(
                f"{heads} query heads and {kv_heads} key/value heads cannot be dealt out over cp = {n}: the first must "
                "be a multiple of it, the second a multiple or a divisor; use another cp, or cp_style = allgather"
            )
        kv = torch.cat((k, v), -1)
        if kv_heads % n:
            kv = kv.repeat_interleave(n // kv_heads, 1)
        q, kv = _Exchange.apply(q, self.group, 1, 2), _Exchange.apply(kv, self.group, 1, 2)
        k, v = kv.split((k.shape[-1], v.shape[-1]), -1)
        if sinks is not None:
            sinks = sinks.chunk(n)[self.group.rank()]
        out: Tensor = _Exchange.apply(_call(self.own, q, k, v, rows.whole, sinks), self.group, 2, 1)
        return out


class AllGatherCore(ContextCore):
    """Each rank computes its own queries, against keys and values of the whole row (Llama 3, arXiv:2407.21783, section
    3.3.2). On CUDA in bf16 or fp16 by torch's variable-length kernel, a chunk of the queries at a time; else, and for
    values of another width than keys, with a mask of B S² / n elements."""

    def parts(self, rows: Any, dtype: torch.dtype) -> dict[str, Any]:
        widths = (getattr(self.own, "head_dim", 0), getattr(self.own, "value_dim", 0))
        return {} if _fused(rows, dtype, widths) else {"masks": self.masks(rows, dtype, len(rows.position_ids))}

    def masks(self, rows: Any, dtype: torch.dtype, batch: int) -> dict[int | None, Tensor]:
        """By window, [B or 1,1,S',S] to be added to the scores: those that there are, and that of this core."""
        tokens = len(rows.columns) * self.group.size()
        docs = document_ids(rows.whole, batch, tokens)
        visible = seen(rows.columns, torch.arange(tokens, device=rows.columns.device), docs, self.window)
        mask = torch.zeros((), dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
        return {**getattr(rows, "masks", {}), self.window: mask[:, None]}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None) -> Tensor:
        _refuse_sinks(sinks, "allgather")
        widths = (k.shape[-1], v.shape[-1])
        k, v = _GatherRows.apply(torch.cat((k, v), -1), self.group).split(widths, -1)
        mask = getattr(rows, "masks", {}).get(self.window)
        if mask is None and _fused(rows, q.dtype, widths):
            return self.by_chunks(q, k, v, rows.whole)
        if mask is None:
            mask = self.masks(rows, q.dtype, len(q))[self.window]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=grouped)

    def by_chunks(self, q: Tensor, k: Tensor, v: Tensor, whole: Any) -> Tensor:
        """Chunk by chunk of the queries, against the columns up to its end: document by document, the last query of
        each being as far as the last key, which is what a causal kernel of unequal lengths takes them for."""
        (batch, _, part, _), tokens = q.shape, k.shape[2]
        ends, longest = document_ends(whole, batch, tokens, q.device)
        outs = []
        chunks = chunks_of(self.group.rank(), self.group.size(), "allgather")
        for chunk, queries in zip(chunks, q.split(part // 2, 2), strict=True):
            start, stop = chunk * (part // 2), (chunk + 1) * (part // 2)
            of_q, of_k = clipped_ends(ends, tokens, start, stop), clipped_ends(ends, tokens, 0, stop)
            flat_q, flat_k, flat_v = (
                x.transpose(1, 2).flatten(0, 1) for x in (queries, k[:, :, :stop], v[:, :, :stop])
            )
            out = varlen(
                flat_q,
                flat_k,
                flat_v,
                of_q,
                of_k,
                min(longest, part // 2),
                min(longest, stop),
                scale=self.scale,
                window=self.window,
            )
            outs.append(out.unflatten(0, (batch, -1)).transpose(1, 2))
        return torch.cat(outs, 2)


def _by_length(whole: Any) -> bool:
    """Whether the documents of rows are told by their lengths, if there are several."""
    return getattr(whole, "cu_seqlens", None) is not None or getattr(whole, "doc_ids", None) is None


def _fused(rows: Any, dtype: torch.dtype, widths: tuple[int, int]) -> bool:
    """Whether torch's variable-length kernel can serve these rows and heads."""
    lengths = _by_length(rows.whole)
    heads = widths[0] == widths[1] and widths[0] % 8 == 0 and 0 < widths[0] <= 256
    return bool(rows.columns.is_cuda) and dtype in (torch.bfloat16, torch.float16) and lengths and heads


class RingCore(ContextCore):
    """`ring_attention`. Sends no more than the gathering does, while it computes, and never holds a whole row."""

    def parts(self, rows: Any, dtype: torch.dtype) -> dict[str, Any]:
        tokens = len(rows.columns) * self.group.size()
        return {"docs": document_ids(rows.whole, len(rows.position_ids), tokens)}

    # Sends to one rank and not to all: no graph has such operations in it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Any, sinks: Tensor | None) -> Tensor:
        _refuse_sinks(sinks, "ring")
        batch, tokens = len(q), q.shape[2] * self.group.size()
        docs = rows.docs if hasattr(rows, "docs") else document_ids(rows.whole, batch, tokens)
        ends, longest = document_ends(rows.whole, batch, tokens, q.device)
        kernel = choose_kernel(q, v, self.window, documents_by_length=_by_length(rows.whole))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return ring_attention(q, k, v, Ring(self.group, tokens, ends, longest, docs, self.window, scale, kernel))


def _refuse_sinks(sinks: Tensor | None, style: str) -> None:
    if sinks is not None:
        raise ValueError(f"sinks came, but {hindrance(style, softcap=False, sinks=True)}")


CORES: dict[str, type[ContextCore]] = {"allgather": AllGatherCore, "ulysses": UlyssesCore, "ring": RingCore}

# ------------------------------------------------------------------------------------------ models


def spread_attention(model: nn.Module, blocks: list[nn.Module], group: dist.ProcessGroup, style: str) -> None:
    """Put a core of the style in the place of every attention core of a model. In place; names of parameters do not
    change. Raises ValueError as `check_attention`."""
    check_attention(model, blocks, group.size(), style)
    for module in _attention(model).values():
        module.core = CORES[style](module.core, group)  # type: ignore[arg-type]


def check_attention(model: nn.Module, blocks: list[nn.Module], cp: int, style: str) -> None:
    """Raise ValueError for a block without an attention core, and for a core that the style cannot take the place
    of."""
    for at, block in enumerate(blocks):
        if not _attention(block):
            raise ValueError(
                f"parallel.cp = {cp}, but block {at} of {type(model).__name__} ({type(block).__name__}) has "
                "no attention core (a child called `core`): what it computes along a row would see a part of it. Give "
                "its attention one, or set parallel.cp to 1"
            )
    for name, module in _attention(model).items():
        core = module.core
        why = hindrance(style, softcap=bool(getattr(core, "softcap", 0)), sinks=bool(getattr(core, "has_sinks", False)))
        if why is None and style != "ulysses" and not (hasattr(core, "scale") and hasattr(core, "window")):
            why = (
                f"{type(core).__name__} does not say what it computes; give it attributes `scale` and `window` if it "
                "is the plain softmax attention of these, or set parallel.cp_style to ulysses, which calls it"
            )
        if why is not None:
            raise ValueError(f"{name}.core cannot be spread over parallel.cp = {cp}: {why}")


def _attention(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, for all that have an attention core."""
    return {n: m for n, m in model.named_modules() if isinstance(getattr(m, "core", None), nn.Module)}
