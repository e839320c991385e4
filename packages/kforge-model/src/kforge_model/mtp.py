"""Multi-token prediction: further tokens in training, each by a block of its own (DeepSeek-V3, arXiv:2412.19437,
section 2.2).

With h⁰ what the head reads of the model, its hidden states after the final norm, E the embedding shared with the model
and t the tokens, depth k computes (equations 21 to 23)

    h^k_i = norm_k(Block_k(P_k [norm(h^(k-1)_i) ; norm(E(t_(i+k)))]))        predicts t_(i+k+1), by the shared head

The report leaves open on which side of a norm h^(k-1) is taken. The published weights are read here as transformers
5.24 (`MtpModel`) reads them: after it, at every depth, so that h^k is what the head reads, too.

The loss is the main loss + weight · mean over k of Σ_i scale · nll^k_i, its equation 25 with the sum over tokens that
every loss here has: microbatches and ranks add up. What would cross the end of a document or row is not scored, and
causality keeps it from what is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kforge_model.block import Block
from kforge_model.config import ModelConfig
from kforge_model.core import document_ids
from kforge_model.linear import linear
from kforge_model.norm import build_norm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows

IGNORE = -100


class NextToken(nn.Module):
    """One depth of multi-token prediction: from what the head reads of the depth before, and the embeddings of a later
    token, to what it reads of this one."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.plan = {"hidden_norm": "sequence", "embed_norm": "sequence", "proj": "sequence", "norm": "sequence"}
        self.hidden_norm = build_norm(config, config.dim)
        self.embed_norm = build_norm(config, config.dim)
        self.proj = linear(2 * config.dim, config.dim, False, "matrix")
        self.block = Block(config, layer)
        self.norm = build_norm(config, config.dim)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Rotary, rows: Rows) -> Tensor:
        """hidden, embedded [B,S,D] -> [B,S,D]."""
        joined = torch.cat((self.hidden_norm(hidden), self.embed_norm(embedded)), dim=-1)
        hidden = self.norm(self.block(self.proj(joined), rotary, rows))
        return hidden


def later_tokens(ids: Tensor, depth: int) -> Tensor:
    """ids [B,S] and, below them, what stands 1 .. depth tokens later: [(1 + depth) B, S]. Past the row's end: 0."""
    return torch.cat([ids, *(_shifted(ids, k, 0) for k in range(1, depth + 1))])


def later_labels(labels: Tensor, rows: Rows, depth: int) -> Tensor:
    """labels [B,S] and, below them, those of each depth: [(1 + depth) B, S]; -100 past the end of the document."""
    docs = document_ids(rows)
    below = [labels]
    for k in range(1, depth + 1):
        later = _shifted(labels, k, IGNORE)
        if docs is not None:
            later = later.masked_fill(_shifted(docs, k, -1) != docs, IGNORE)
        below.append(later)
    return torch.cat(below)


def _shifted(x: Tensor, by: int, fill: int) -> Tensor:
    """x [B,S] moved to the left; ``fill`` comes in at the right."""
    by = min(by, x.shape[1])
    return torch.cat((x[:, by:], x.new_full((x.shape[0], by), fill)), dim=1)
