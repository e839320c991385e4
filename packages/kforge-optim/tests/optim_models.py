"""Small models that the tests of this package share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = Norm(dim)
        self.up = nn.Linear(dim, hidden, bias=True)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class TinyModel(nn.Module):
    """Embedding, blocks, norm, head. Widths of 10 and 14 do not divide by 3 or 4."""

    def __init__(self, vocab: int = 29, dim: int = 10, hidden: int = 14, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim, hidden) for i in range(layers)})
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))


def tiny(dtype: torch.dtype = torch.float64, **sizes: int | bool) -> TinyModel:
    """The same weights on every call and every rank."""
    torch.manual_seed(7)
    return TinyModel(**sizes).to(dtype)


def batches(steps: int, rows: int = 12, columns: int = 5, vocab: int = 29) -> Iterator[Tensor]:
    """``steps`` global batches of ids [rows, columns], the same on every rank."""
    for step in range(steps):
        yield torch.randint(vocab, (rows, columns), generator=torch.Generator().manual_seed(step))


def summed_loss(model: nn.Module, ids: Tensor, total: int) -> Tensor:
    """Sum over ``ids`` of the next-token loss, over ``total``: losses of ranks add up to the mean."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / total
