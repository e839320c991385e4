"""A model that owes nothing to kforge-model: fused weights, biases, LayerNorm, and a plan passed from outside."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import ROWS, TOKENS, VOCAB
from torch import nn

DIM, GROUPS, QUERIES, HEAD = 16, 2, 2, 4

PLAN = {
    "embed": "vocab_embedding",
    "layers.*.attn_norm": "sequence",
    "layers.*.attn": "gather",
    "layers.*.attn.qkv": "colwise",
    "layers.*.attn.out": "rowwise",
    "layers.*.mlp_norm": "sequence",
    "layers.*.mlp": "gather",
    "layers.*.mlp.gate_up": "packed_colwise",
    "layers.*.mlp.between": "colwise",
    "layers.*.mlp.down": "rowwise",
    "norm": "sequence",
    "head": "vocab_loss",
}


class Attention(nn.Module):
    """Query, key and value weights in one, a group of heads after the other."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(GROUPS, (QUERIES + 2) * HEAD, DIM) * 0.3)
        self.out = nn.Linear(GROUPS * QUERIES * HEAD, DIM)

    def forward(self, x):
        qkv = torch.einsum("bsd,gfd->bgsf", x, self.qkv).unflatten(-1, (QUERIES + 2, HEAD))
        q, k, v = qkv.split((QUERIES, 1, 1), -2)  # each [B,G,S,heads,Dh]
        q, k, v = q.transpose(2, 3).flatten(1, 2), k.squeeze(3), v.squeeze(3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gate and up projections in one weight of two parts; a scale of each hidden feature."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2, 3 * DIM, DIM) * 0.3)
        self.between = nn.Parameter(torch.randn(3 * DIM))
        self.down = nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        gate, up = torch.einsum("bsd,pfd->pbsf", x, self.gate_up)
        return self.down(F.silu(gate) * up * self.between)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Cross-entropy over this rank's part of the vocabulary; the whole of it where there is no group."""

    def __init__(self):
        super().__init__()
        self.group, self.vocab_start = None, 0
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.3)

    def forward(self, x, labels, scale):
        z = x @ self.weight.t()
        own = labels - self.vocab_start
        mine = (own >= 0) & (own < z.shape[-1])
        target = z.gather(-1, own.where(mine, 0)[..., None]).squeeze(-1).where(mine, 0)
        top = self.over_ranks(z.detach().amax(-1), dist.ReduceOp.MAX)
        total = (z - top[..., None]).exp().sum(-1)
        # The sum over ranks as a value, this rank's addend as a function.
        total = total + (self.over_ranks(total.detach()) - total.detach())
        target = target + (self.over_ranks(target.detach()) - target.detach())
        return ((total.log() + top - target) * scale).where(labels != -100, 0).sum()

    def over_ranks(self, value, op=dist.ReduceOp.SUM):
        if self.group is not None:
            value = value.clone()
            dist.all_reduce(value, op, self.group)
        return value


class Foreign(nn.Module):
    """Built with values on every rank, as it has no way to be filled afterwards."""

    def __init__(self, fault=None):
        super().__init__()
        if fault is not None:
            import mutations

            mutations.plant(fault)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = Head()
        with torch.no_grad():  # torch starts these at 1 and 0, which hides faults
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.normal_(std=0.5)

    def forward(self, ids, labels, scale):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x), labels, scale)


def loss(model, batch, scale):
    return model(batch["ids"], batch["labels"], scale)


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ROWS, TOKENS, generator=generator) < 0.3, -100)
    labels[3] = -100
    return {"ids": ids, "labels": labels}


def own_norm(model):
    """The norm that kforge-train clips by."""
    from kforge_optim import clip

    return clip.total_norm(model)
