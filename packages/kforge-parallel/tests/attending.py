"""A small model whose attention has a core, with or without experts: what test_context.py cuts along its rows. Other
processes import it."""

from types import SimpleNamespace
from typing import ClassVar

import mixture
import torch
from comparable import PartOfVocabulary
from torch import nn

HEADS, KV_HEADS, WIDTH, VOCAB, TOKENS, ROWS = 4, 2, 3, 12, 16, 8
DIM = mixture.DIM
LENGTHS = [[16], [1, 15], [7, 9], [3, 2, 11], [8, 8], [5, 1, 1, 9], [4, 4, 4, 4], [15, 1]]


def documents(lengths):
    """doc_ids, positions [B,S], and cu_seqlens of rows of documents."""
    docs = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ends = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0).to(torch.int32)
    return docs, positions, ends


def make_batch():
    docs, positions, _ = documents(LENGTHS)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) * 7 % VOCAB
    labels = ids.roll(-1, 1)
    labels[docs != docs.roll(-1, 1)] = -100
    labels[:, -1] = -100
    labels[3] = -100  # a row with nothing to score
    return {"ids": ids, "labels": labels, "positions": positions, "docs": docs}


BATCH = make_batch()


class Core(nn.Module):
    """One query at a time, no kernel."""

    def __init__(self, window=None):
        super().__init__()
        self.scale, self.window = WIDTH**-0.5, window

    def forward(self, q, k, v, rows):
        share, docs, outs = q.shape[1] // k.shape[1], rows.doc_ids, []
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        for at in range(q.shape[2]):
            start = 0 if self.window is None else max(0, at - self.window + 1)
            scores = torch.einsum("bhd,bhkd->bhk", q[:, :, at], k[:, :, start : at + 1]) * self.scale
            other = docs[:, start : at + 1] != docs[:, at : at + 1]
            weights = scores.masked_fill(other[:, None], -torch.inf).softmax(-1)
            outs.append(torch.einsum("bhk,bhkd->bhd", weights, v[:, :, start : at + 1]))
        return torch.stack(outs, 2)


class Attention(nn.Module):
    def __init__(self, window=None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, n * WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(HEADS * WIDTH, DIM)
        self.core = Core(window)

    def forward(self, x, rows):
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q = q * torch.cos(rows.position_ids)[:, None, :, None]
        return self.o(self.core(q, k, v, rows).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, window, experts):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention(window)
        self.moe = mixture.Mixture(4, range(4)) if experts else None

    def forward(self, x, rows, scale):
        x = x + self.attention(self.norm(x), rows)
        return x if self.moe is None else x + self.moe(x, scale)


class Model(nn.Module):
    block_list = "layers"
    shape: ClassVar = {"n_kv_heads": KV_HEADS}
    plan: ClassVar = {
        "embed": "vocab_embedding",
        "layers.*.norm": "sequence",
        "layers.*.attention": "gather",
        "layers.*.attention.q": "colwise",
        "layers.*.attention.k": "colwise_kv",
        "layers.*.attention.v": "colwise_kv",
        "layers.*.attention.o": "rowwise",
        "head": "vocab_loss",
    }

    def __init__(self, experts=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(window, experts) for window in (None, 5))
        self.head = PartOfVocabulary(VOCAB, DIM)

    def forward(self, batch, scale):
        whole = batch.get("whole")
        rows = SimpleNamespace(doc_ids=batch["docs"], position_ids=batch["positions"], columns=batch.get("columns"))
        rows.whole = None if whole is None else SimpleNamespace(doc_ids=whole["docs"])
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x, rows, scale)
        return self.head(x, batch["labels"], scale)


def with_experts():
    return Model(experts=True)


def loss(model, batch, scale):
    return model(batch, scale)
