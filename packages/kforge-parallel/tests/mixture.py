"""A small model with a mixture of experts in every block: what test_expert.py spreads. Other processes import it."""

from typing import ClassVar

import torch
from comparable import PartOfVocabulary
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

DIM, WIDE, VOCAB, EXPERTS = 6, 8, 12, 8

IDS = torch.arange(8 * 8).view(8, 8) * 5 % VOCAB
BATCH = {"ids": IDS, "labels": torch.where(IDS % 5 == 0, -100, (IDS + 1) % VOCAB)}
BATCH["labels"][1] = -100  # a row with nothing to score


class Experts(nn.Module):
    """Counts rows of each expert, one expert after the other."""

    def __init__(self, experts, dim=DIM, wide=WIDE):
        super().__init__()
        self.w_up = nn.Parameter(torch.randn(experts, 2, wide, dim) / 2)
        self.w_down = nn.Parameter(torch.randn(experts, dim, wide) / 2)

    def forward(self, x, counts):
        parts = zip(x.split(counts.tolist()), self.w_up, self.w_down, strict=True)
        return torch.cat([(torch.tanh(part @ up[0].T) * (part @ up[1].T)) @ down.T for part, up, down in parts])


class Local(nn.Module):
    """Every expert computes every token, and what was not asked for is left: nothing to get wrong."""

    def forward(self, x, ids, weights, experts):
        n = len(experts.w_down)
        every = experts(x.repeat(n, 1), torch.full((n,), len(x))).view(n, *x.shape)
        return (every[ids, torch.arange(len(x))[:, None]] * weights[..., None]).sum(1)

    def sum_counts(self, counts):
        return counts


class WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, loss):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=grad.dtype)


class Mixture(nn.Module):
    """``only``: the experts that a token may go to; the others get none."""

    def __init__(self, experts, only, k=2):
        super().__init__()
        self.router = nn.Linear(DIM, experts)
        self.experts = Experts(experts)
        self.exchange = Local()
        self.shared = nn.Linear(DIM, DIM)
        self.only, self.k = only, k

    def forward(self, x, scale):
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        allowed = scores.detach().clone()
        allowed[:, [e for e in range(scores.shape[1]) if e not in self.only]] = -1
        ids = allowed.topk(self.k).indices
        y = self.exchange(flat, ids, scores.gather(1, ids), self.experts).view_as(x)
        counts = (ids.view(len(x), -1, 1) == torch.arange(scores.shape[1])).sum(1)
        counts = self.exchange.sum_counts(counts)  # [B,E], of the whole row
        uneven = (counts * scores.view(*x.shape[:2], -1).sum(1) / counts.sum(1, keepdim=True)).sum()
        return WithLoss.apply(y + self.shared(x), scale * uneven)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x):
        return self.o(torch.tanh(self.q(x).cumsum(1)))


class Block(nn.Module):
    def __init__(self, experts, only):
        super().__init__()
        self.norm, self.mixer, self.moe = nn.LayerNorm(DIM), Mixer(), Mixture(experts, only)

    def forward(self, x, scale):
        x = x + self.mixer(self.norm(x))
        return x + self.moe(x, scale)


class Model(nn.Module):
    block_list = "layers"
    plan: ClassVar = {
        "embed": "vocab_embedding",
        "layers.*.norm": "sequence",
        "layers.*.mixer": "gather",
        "layers.*.mixer.q": "colwise",
        "layers.*.mixer.o": "rowwise",
        "layers.*.moe.router": "sequence",
        "layers.*.moe.shared": "sequence",
        "layers.*.moe.experts": "experts",
        "head": "vocab_loss",
    }

    def __init__(self, experts=EXPERTS):
        super().__init__()
        # Of the first block one expert in three gets nothing, of the second the first half: ranks with no row at all.
        only = [[e for e in range(experts) if e % 3], list(range(experts // 2, experts))]
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(experts, some) for some in only)
        self.head = PartOfVocabulary(VOCAB, DIM)

    def forward(self, ids, labels, scale):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x, labels, scale)


def loss(model, batch, scale):
    return model(batch["ids"], batch["labels"], scale)


def fill(model):
    """Values by name and place in the whole tensor, each rank its part."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = torch.Generator().manual_seed(sum(map(ord, name)))
            whole = torch.randn(parameter.shape, generator=seed, dtype=torch.float64) / 2
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(whole.to_local())
            else:
                parameter.copy_(whole)


def four():
    return Model(4)


def counted_apart():
    """Each rank of a row counts its own part only."""
    import kforge_parallel.expert

    kforge_parallel.expert.sum_all = lambda counts, group: counts
    return Model()


def averaged():
    """The factor of torch's own on the experts' gradients."""
    from torch.distributed.fsdp import FSDPModule

    FSDPModule.set_gradient_divide_factor = lambda self, factor: None
    return Model()


def unsorted():
    """Rows that come from several ranks are not sorted by expert."""
    from kforge_parallel.expert import Route

    wait = Route.wait

    def as_they_come(self):
        wait(self)
        self.by_expert = self.by_rank = torch.arange(len(self.by_rank))

    Route.wait = as_they_come
    return Model()
