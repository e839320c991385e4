"""What test_testing.py compares; a module of its own, as other processes import it by name."""

from typing import ClassVar

import torch
from torch import nn
from toy import IDS, Toy, fill

BATCH = {"ids": IDS, "labels": torch.where(IDS % 4 == 0, -100, (IDS + 1) % 11)}
BATCH["labels"][1] = -100  # a row with nothing to score


def loss(model, batch, scale):
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") * scale


def mean_of_its_own(model, batch, scale):
    """The classic fault: each rank's mean over what it has itself."""
    here = max(1, int((batch["labels"] != -100).sum()))
    return loss(model, batch, 1 / here) / 2


def tied():
    return Toy(True)


def fill_by_rank(model):
    """Each rank draws its own part."""
    fill(model)
    with torch.no_grad():
        weight = model.layers["1"].gain
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local.copy_(torch.arange(local.numel()))


class Forgets(Toy):
    """A parameter that no gradient reaches in a layout."""

    def forward(self, ids):
        if hasattr(self.head.weight, "to_local") or torch.distributed.get_world_size() > 1:
            self.layers["2"].gain.requires_grad_(False)
        return super().forward(ids)


class Fails(Toy):
    def forward(self, ids):
        raise RuntimeError("out of cheese")


class Waits(Toy):
    def forward(self, ids):
        while True:
            pass


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class PartOfVocabulary(nn.Module):
    """Cross-entropy over this rank's rows of the weight, or over all of them."""

    group, vocab_start = None, 0

    def __init__(self, vocab, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, dim))

    def forward(self, x, labels, scale):
        z = x @ self.weight.t()
        own = labels - self.vocab_start
        mine = (own >= 0) & (own < z.shape[-1])
        target = self.over_ranks(z.gather(-1, own.where(mine, 0)[..., None]).squeeze(-1).where(mine, 0))
        nll = self.over_ranks(z.exp().sum(-1)).log() - target
        return (nll * scale).where(labels != -100, 0).sum()

    def over_ranks(self, addend):
        """The sum over ranks as a value; this rank's addend to whoever asks for gradients."""
        total = addend.detach().clone()
        if self.group is not None:
            torch.distributed.all_reduce(total, group=self.group)
        return addend + (total - addend.detach())


class Split(nn.Module):
    """Rows are parts between its matrices, and the vocabulary is cut."""

    plan: ClassVar = {
        "embed": "vocab_embedding",
        "layers.*.0": "colwise",
        "layers.*.2": "rowwise",
        "head": "vocab_loss",
    }

    def __init__(self, dim=6, vocab=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim)) for _ in range(2))
        self.head = PartOfVocabulary(vocab, dim)

    def forward(self, ids, labels, scale):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x, labels, scale)


def split_loss(model, batch, scale):
    return model(batch["ids"], batch["labels"], scale)
