"""What test_testing.py compares; a module of its own, as other processes import it by name."""

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
