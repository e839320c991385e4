"""What counting alone reaches: unigram and Kneser-Ney bigram losses, as a floor that a trained model must beat.

Counted on one source, evaluated on another, over exactly the tokens that a model is scored on: the pairs (input,
label) of packed rows with label != -100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kforge_data.evaluation import evaluation_rows
from kforge_data.packing import IGNORE, row_labels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kforge_data.shards import TokenShards
    from kforge_data.sources import Source

_CHUNK_TOKENS = 1 << 22


class NgramBaseline(NamedTuple):
    """Mean losses over the scored tokens of the held-out rows, in nats per token."""

    tokens: int
    """Scored tokens."""
    unigram_nats: float
    bigram_nats: float
    discount: float
    """The absolute discount of the bigram counts."""
    unigram_bits_per_byte: float
    bigram_bits_per_byte: float


def scored_pairs(
    source: Source, row_tokens: int, row_ids: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(token, next token) of everything that these rows score, a few rows at a time; int64 [n] each."""
    rows = max(1, _CHUNK_TOKENS // row_tokens)
    for at in range(0, len(row_ids), rows):
        block = source.read_rows(row_ids[at : at + rows], row_tokens)
        labels = row_labels(block)
        scored = labels != IGNORE
        yield block.tokens[:, :row_tokens][scored].astype(np.int64), labels[scored]


class KneserNeyBigram:
    """Interpolated Kneser-Ney bigram with absolute discounting (Chen and Goodman, 1999, section 2.7).

        p(w|v) = max(c(vw) - D, 0) / c(v) + D t(v) / c(v) q(w)
        q(w)   = max(n(w) - E, 0) / N + E u / N / V

    c counts pairs, t(v) the kinds of tokens seen after v, n(w) the kinds seen before w, N = Σ n, u the kinds w with
    n(w) > 0, V the vocabulary. D = n1 / (n1 + 2 n2) of the pairs seen once and twice; E likewise of n(w). After an
    unseen v, p = q. The unigram is (c(w) + 1) / (C + V).
    """

    def __init__(self, pairs: Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for first, second in pairs:
            new_keys, new_counts = np.unique(first * vocab_size + second, return_counts=True)
            keys, counts = _merge(keys, counts, new_keys, new_counts)
        if not keys.size:
            raise ValueError("the source to count has no two tokens of one document side by side")
        before, after = np.divmod(keys, vocab_size)
        self._keys, self._counts = keys, counts.astype(np.float64)
        self._context = np.bincount(before, weights=counts, minlength=vocab_size)
        kinds_after = np.bincount(before, minlength=vocab_size)
        kinds_before = np.bincount(after, minlength=vocab_size)
        self.discount = _absolute_discount(counts)
        lower = _absolute_discount(kinds_before)
        total = kinds_before.sum()
        reserved = lower * (kinds_before > 0).sum() / total
        self._continuation = np.maximum(kinds_before - lower, 0) / total + reserved / vocab_size
        seen = np.maximum(self._context, 1)
        self._backoff = np.where(self._context > 0, self.discount * kinds_after / seen, 1.0)
        unigram = np.bincount(after, weights=counts, minlength=vocab_size) + 1
        self._unigram = unigram / unigram.sum()

    def probability(self, tokens: NDArray[np.int64], following: NDArray[np.int64]) -> NDArray[np.float64]:
        """p(following | tokens), elementwise [n]."""
        wanted = tokens * self.vocab_size + following
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        counts = np.where(self._keys[at] == wanted, self._counts[at], 0.0)
        direct = np.maximum(counts - self.discount, 0.0) / np.maximum(self._context[tokens], 1)
        return direct + self._backoff[tokens] * self._continuation[following]

    def unigram_probability(self, following: NDArray[np.int64]) -> NDArray[np.float64]:
        """p(following) without context, elementwise [n]."""
        return self._unigram[following]


def _merge(
    keys: NDArray[np.int64], counts: NDArray[np.int64], new_keys: NDArray[np.int64], new_counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not keys.size:
        return new_keys, new_counts.astype(np.int64)
    merged, inverse = np.unique(np.concatenate([keys, new_keys]), return_inverse=True)
    total = np.bincount(inverse.reshape(-1), weights=np.concatenate([counts, new_counts]))
    return merged, total.astype(np.int64)


def _absolute_discount(counts: NDArray[np.integer]) -> float:
    """n1 / (n1 + 2 n2) (Ney, Essen and Kneser, 1994); 0.5 where nothing was seen once, to leave room for the unseen."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def ngram_baseline(train: TokenShards, heldout: TokenShards, *, row_tokens: int, max_rows: int = 0) -> NgramBaseline:
    """Count on `train`, evaluate on the rows of `heldout` that `evaluation_batches` reads with the same numbers."""
    if train.vocab_size != heldout.vocab_size or train.index.tokenizer != heldout.index.tokenizer:
        raise ValueError(f"{train.path} and {heldout.path} were made with different tokenizers")
    model = KneserNeyBigram(
        scored_pairs(train, row_tokens, evaluation_rows(train, row_tokens=row_tokens)), train.vocab_size
    )
    tokens, unigram, bigram = 0, 0.0, 0.0
    for first, second in scored_pairs(
        heldout, row_tokens, evaluation_rows(heldout, row_tokens=row_tokens, max_rows=max_rows)
    ):
        tokens += len(first)
        unigram -= float(np.log(model.unigram_probability(second)).sum())
        bigram -= float(np.log(model.probability(first, second)).sum())
    if not tokens:
        raise ValueError(f"{heldout.path} has no two tokens of one document side by side, so nothing can be scored")
    unigram, bigram = unigram / tokens, bigram / tokens
    return NgramBaseline(
        tokens=tokens,
        unigram_nats=unigram,
        bigram_nats=bigram,
        discount=model.discount,
        unigram_bits_per_byte=heldout.bits_per_byte(unigram),
        bigram_bits_per_byte=heldout.bits_per_byte(bigram),
    )
