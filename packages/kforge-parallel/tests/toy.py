"""A small model that exercises what parallelize must get right: blocks, a buffer, ties, float inputs."""

import copy
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.gain


class Toy(nn.Module):
    block_list = "layers"

    def __init__(self, tied=False, dim=6, vocab=11):
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(3)})
        self.head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("shift", torch.full((dim,), 0.5))
        if tied:
            self.head.weight = self.embed.weight

    def fsdp_units(self):
        return [["embed", "head"]] if self.tied else [["embed"], ["head"]]

    def forward(self, ids):
        x = self.embed(ids) + self.shift.to(self.embed.weight.dtype)
        for block in self.layers.values():
            x = block(x)
        return self.head(x)


class Sized(Toy):
    """Says its sizes, for estimates."""

    shape: ClassVar = {"vocab_size": 11, "dim": 6, "n_layers": 3, "n_heads": 2}


def fill(model, skip=()):
    """Values that depend on the name only, each rank its shard."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in skip:
                continue
            seed = sum(map(ord, name))
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(full.to_local())
            else:
                parameter.copy_(full)
        for name, buffer in model.named_buffers():
            if name not in skip:
                buffer.fill_(0.5)


def tied_stages():
    return Staged(tied=True)


IDS = torch.arange(24).view(4, 6) % 11


def plain_steps(tied, steps=3):
    """Losses, gradients of each step and the last weights of one plain process, in float64."""
    model = Toy(tied).double()
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for _ in range(steps):
        loss = model(IDS).logsumexp(-1).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def worst(a, b):
    """Largest difference over the tensors of two dicts, each relative to its tensor's maximum."""
    assert a.keys() == b.keys()
    return max(((a[k] - b[k]).abs().max() / b[k].abs().max()).item() for k in b)


class Staged(Toy):
    """A model that can be cut; a tied head's stage has a copy of the embedding, which holds a weight for both."""

    def __init__(self, tied=False, blocks=5):
        super().__init__(tied)
        self.layers = nn.ModuleDict({str(i): Block(self.head.in_features) for i in range(blocks)})

    def stage(self, first, layers, last):
        part = nn.Module.__new__(Staged)
        nn.Module.__init__(part)
        part.tied = self.tied
        part.layers = nn.ModuleDict({str(i): self.layers[str(i)] for i in layers})
        part.embed = self.embed if first or (last and self.tied) else None
        part.head = self.head if last else None
        if last and not first and self.tied and self.shift is not None:
            part.embed, part.head = copy.deepcopy(self.embed), copy.deepcopy(self.head)
            part.head.weight = part.embed.weight
        part.register_buffer("shift", self.shift if first else None)
        return part

    def fsdp_units(self):
        found = [[name for name in unit if getattr(self, name) is not None] for unit in super().fsdp_units()]
        return [unit for unit in found if unit]

    def forward(self, x):
        if self.shift is not None:
            x = self.embed(x) + self.shift.to(self.embed.weight.dtype)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Shared(Staged):
    """Every stage has its embedding."""

    def stage(self, first, layers, last):
        part = super().stage(first, layers, last)
        part.embed = self.embed
        return part
