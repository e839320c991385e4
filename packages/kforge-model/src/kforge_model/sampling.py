"""One token from the logits of each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kforge_model.inputs import at_hand


def check_sampling(*, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> None:
    """Raise ValueError for a setting of `sample` that means nothing."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature} must be 0 (most likely token) or above, and finite")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} must be 0 (off) or above")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p = {top_p} must lie in [0, 1]; 1 turns it off, 0 keeps the most likely token only")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p = {min_p} must lie in [0, 1]; 0 turns it off, 1 keeps the most likely token only")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty = {repetition_penalty} must be above 0 and finite; 1 turns it off")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seen: Tensor | None = None,
    seen_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token id for each row of logits [B,V] -> [B] int64.

    In this order, each working on what the one before left:

    1. repetition_penalty r: logits of the ids in ``seen`` [B,N] int64 (where ``seen_mask`` [B,N] bool is true; None:
       everywhere) are divided by r where positive and multiplied by it elsewhere (CTRL, Keskar et al. 2019,
       arXiv:1909.05858, section 4.1). 1: off.
    2. temperature divides the logits; 0 takes the most likely token, of equal ones the first, and ignores the rest.
    3. top_k keeps the k most likely. 0, or k at or above V: all.
    4. top_p keeps the fewest whose probabilities reach it (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751),
       never fewer than one. 1: all.
    5. min_p keeps those at least min_p times as likely as the most likely (Nguyen et al. 2024, arXiv:2407.01082).
       0: all.

    The generator lives on the logits' device; None: the default one. Raises ValueError for a negative temperature or
    top_k, a top_p or min_p outside [0, 1], a repetition_penalty at or below 0 or without ``seen``, and what is not
    finite of these; on the CPU, where it can be read, also for a row whose greatest logit is not finite.
    """
    check_sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    if repetition_penalty != 1 and seen is None:
        raise ValueError(f"repetition_penalty = {repetition_penalty} wants to know the ids seen so far")
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if repetition_penalty != 1:
        assert seen is not None
        scores = _penalise(scores, repetition_penalty, seen, seen_mask)
    greatest = scores.amax(-1, keepdim=True)
    if at_hand(greatest) and not bool(greatest.isfinite().all()):
        row = int((~greatest.isfinite()).flatten().nonzero()[0])
        raise ValueError(f"the greatest logit of row {row} is {greatest[row].item()}: the model gives no token there")
    if temperature == 0:
        return scores.argmax(-1)
    coldest = torch.finfo(scores.dtype).tiny  # below it, division makes NaN of the largest
    scores = (scores - greatest) / max(temperature, coldest)  # the largest is 0, however low the temperature
    if not top_k and top_p == 1 and min_p == 0:
        return _draw(scores.softmax(-1), generator)
    scores, ids = scores.sort(dim=-1, descending=True, stable=True)
    if top_k:
        scores, ids = scores[:, :top_k], ids[:, :top_k]
    p = scores.softmax(-1)
    drop = torch.zeros_like(p, dtype=torch.bool)
    if top_p < 1:
        drop |= p.cumsum(-1) - p >= top_p
    if min_p > 0:
        drop |= p < min_p * p[:, :1]
    drop[:, 0] = False
    return ids.gather(1, _draw(p.masked_fill(drop, 0.0), generator)[:, None]).squeeze(1)


def _draw(p: Tensor, generator: torch.Generator | None) -> Tensor:
    """An index of each row of p [B,N], as likely as p says; p need not sum to 1.

    The least of independent exponential variables with rates p is the i-th with probability p_i / Σp. That is what
    torch.multinomial computes, but on CUDA it waits for the device first, to see that p is sound.
    """
    waits = torch.empty_like(p).exponential_(generator=generator).clamp_(min=torch.finfo(p.dtype).tiny)
    return (p / waits).argmax(-1)


def _penalise(logits: Tensor, penalty: float, seen: Tensor, seen_mask: Tensor | None) -> Tensor:
    rows, vocab = logits.shape
    if seen_mask is not None:
        seen = seen.where(seen_mask, vocab)  # a column beyond the vocabulary, cut off again
    hit = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device).scatter_(1, seen, True)[:, :vocab]
    return torch.where(hit, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
