"""Transfers inside one group of ranks, each an autograd function whose backward is its transpose.

n ranks of a group; x, y this rank's tensor; Σ a sum over ranks; parts are joined and cut along one dimension.

    copy      y = x                      dx = Σ dy
    reduce    y = Σ x                    dx = dy
    gather    y = all x, joined          dx = own part of Σ dy
    scatter   y = own part of Σ x        dx = all dy, joined
    summed    y = x                      dx = Σ dy, in float32 or wider, rounded once
    join      y = all x, joined          dx = own part of dy
    part      y = own part of x          dx = all dy, joined

copy and gather stand before a product whose weight is cut, reduce and scatter after one; summed is for a weight that
every rank holds whole and uses on another part of the data. join and part are for what all ranks then compute, or have
computed, alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kforge_parallel._torch import all_gather, reduce_scatter
from kforge_parallel.kept import keep


def join_parts(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The tensors x of all ranks, of one shape, joined along ``dim`` in order of rank; contiguous."""
    n = group.size()
    parts = x.new_empty((n, *x.shape))
    all_gather(parts.flatten(0, 1) if x.ndim else parts, x.contiguous(), group=group)
    dim = dim % x.ndim
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def sum_own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks; contiguous. The dimension divides by the group."""
    n = group.size()
    dim = dim % x.ndim
    parts = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


def sum_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def returned(x: Tensor) -> Tensor:
    """The result of a forward. Dynamo of torch 2.11 drops the gradient of a function that returns a tensor which a
    collective has filled in place, without a word; a copy it follows."""
    return x.clone() if torch.compiler.is_compiling() else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_all(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return returned(keep("transfers", lambda: sum_all(x, group)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return returned(keep("transfers", lambda: join_parts(x, group, dim)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_own_part(grad, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return returned(keep("transfers", lambda: sum_own_part(x, group, dim)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return join_parts(grad, ctx.group, ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return returned(keep("transfers", lambda: join_parts(x, group, dim)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grad, ctx.group, ctx.dim), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_part(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return join_parts(grad, ctx.group, ctx.dim), None, None


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return sum_all(wide, ctx.group).to(grad.dtype), None


def copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x itself; its gradients are summed over ranks."""
    return _Copy.apply(x, group)


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over ranks."""
    return _Reduce.apply(x, group)


def gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All ranks' parts, joined; a gradient is summed over ranks and cut again."""
    return _Gather.apply(x, group, dim)


def scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part of the sum over ranks."""
    return _Scatter.apply(x, group, dim)


def join(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All ranks' parts, joined, for what every rank computes alike: a gradient is cut, and not summed."""
    return _Join.apply(x, group, dim)


def part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part of what every rank has; gradients are joined. The dimension divides by the group."""
    return _Part.apply(x, group, dim)


def summed(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The weight itself; its gradient is the sum over ranks, taken in float32 or wider."""
    return _Summed.apply(weight, group)
