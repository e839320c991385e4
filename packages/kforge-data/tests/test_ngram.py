"""Kneser-Ney against dictionaries, probabilities that sum to one, and the tokens that a model is scored on."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kforge_data import KneserNeyBigram, TokenShards, evaluation_batches, ngram_baseline

Make = Callable[..., TokenShards]
VOCAB = 60


def some_documents(seed: int, count: int) -> list[list[int]]:
    """Documents of a skewed chain, so that counts of one, two and many occur; the last ids never do."""
    generator = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        length = int(generator.integers(1, 40))
        result.append([*(generator.zipf(1.6, length) % (VOCAB - 3)).tolist(), 0])
    return result


def slow_model(documents: list[list[int]]) -> tuple[Callable[[int, int], float], Callable[[int], float]]:
    """Chen and Goodman's formulas, with dictionaries."""
    pairs = Counter((a, b) for document in documents for a, b in itertools.pairwise(document))
    context, after, before, unigram = (Counter[int]() for _ in range(4))
    for (a, b), count in pairs.items():
        context[a] += count
        unigram[b] += count
        after[a] += 1
        before[b] += 1

    def discount(counts: Counter) -> float:
        once, twice = (sum(count == n for count in counts.values()) for n in (1, 2))
        assert once and twice  # the data exercise the formula
        return once / (once + 2 * twice)

    d, e, kinds = discount(pairs), discount(before), len(pairs)

    def lower(b: int) -> float:
        return max(before[b] - e, 0) / kinds + e * len(before) / kinds / VOCAB

    def bigram(a: int, b: int) -> float:
        if not context[a]:
            return lower(b)
        return max(pairs[a, b] - d, 0) / context[a] + d * after[a] / context[a] * lower(b)

    return bigram, lambda b: (unigram[b] + 1) / (sum(unigram.values()) + VOCAB)


def test_it_equals_the_formulas(make_shards: Make) -> None:
    train, heldout = some_documents(0, 60), some_documents(1, 30)
    heldout[0] = [VOCAB - 1, 5, VOCAB - 2, 0]  # unseen as context and as word
    result = ngram_baseline(
        make_shards(train, name="a", vocab_size=VOCAB),
        make_shards(heldout, name="b", vocab_size=VOCAB, shard_tokens=100),
        row_tokens=16,
    )
    bigram, unigram = slow_model(train)
    pairs = [(a, b) for document in heldout for a, b in itertools.pairwise(document)]
    assert result.tokens == len(pairs)
    assert result.bigram_nats == pytest.approx(-sum(math.log(bigram(a, b)) for a, b in pairs) / len(pairs), rel=1e-12)
    assert result.unigram_nats == pytest.approx(-sum(math.log(unigram(b)) for _, b in pairs) / len(pairs), rel=1e-12)
    tokens = sum(map(len, heldout))
    bits = result.bigram_nats * tokens / (math.log(2) * 2 * tokens)  # two bytes a token
    assert result.bigram_bits_per_byte == pytest.approx(bits, rel=1e-12)


def test_probabilities_sum_to_one(make_shards: Make) -> None:
    pairs = [np.array(d, np.int64) for d in some_documents(2, 40)]
    model = KneserNeyBigram(((d[:-1], d[1:]) for d in pairs), VOCAB)
    words = np.arange(VOCAB)
    for context in range(VOCAB):
        p = model.probability(np.full(VOCAB, context), words)
        assert p.min() > 0 and p.sum() == pytest.approx(1, rel=1e-12)
    assert model.unigram_probability(words).sum() == pytest.approx(1, rel=1e-12)


def test_counting_in_pieces_is_counting(make_shards: Make) -> None:
    arrays = [np.array(d, np.int64) for d in some_documents(3, 40)]
    first = np.concatenate([d[:-1] for d in arrays])
    second = np.concatenate([d[1:] for d in arrays])
    whole = KneserNeyBigram(iter([(first, second)]), VOCAB)
    pieces = KneserNeyBigram(((d[:-1], d[1:]) for d in arrays), VOCAB)
    words = np.arange(VOCAB)
    for context in range(VOCAB):
        at = np.full(VOCAB, context)
        assert np.array_equal(whole.probability(at, words), pieces.probability(at, words))
    assert whole.discount == pieces.discount


@pytest.mark.parametrize("max_rows", [0, 7])
def test_it_scores_what_a_model_is_scored_on(make_shards: Make, max_rows: int) -> None:
    train = make_shards(some_documents(0, 60), name="a", vocab_size=VOCAB)
    heldout = make_shards(some_documents(1, 60), name="b", vocab_size=VOCAB)
    result = ngram_baseline(train, heldout, row_tokens=16, max_rows=max_rows)
    batches = list(evaluation_batches(heldout, row_tokens=16, microbatch_rows=3, max_rows=max_rows))
    bigram, _ = slow_model([train.document(i).tolist() for i in range(train.documents)])
    pairs = [
        (a, b)
        for batch in batches
        for a, b in zip(batch["input_ids"].reshape(-1).tolist(), batch["labels"].reshape(-1).tolist(), strict=True)
        if b != -100
    ]
    assert result.tokens == len(pairs)
    assert result.bigram_nats == pytest.approx(-sum(math.log(bigram(a, b)) for a, b in pairs) / len(pairs), rel=1e-12)


def test_it_beats_the_unigram_where_context_helps(make_shards: Make) -> None:
    cycle = [[i % 20 for i in range(start, start + 50)] for start in range(30)]
    train, heldout = make_shards(cycle, name="a", vocab_size=20), make_shards(cycle[:5], name="b", vocab_size=20)
    result = ngram_baseline(train, heldout, row_tokens=10)
    assert result.bigram_nats < 0.1 and result.unigram_nats == pytest.approx(math.log(20), rel=0.01)


def test_what_cannot_be_compared(make_shards: Make) -> None:
    a = make_shards([[1, 2, 3]], name="a", vocab_size=10)
    with pytest.raises(ValueError, match="different tokenizers"):
        ngram_baseline(a, make_shards([[1, 2]], name="b", vocab_size=11), row_tokens=4)
    single = make_shards([[1], [2]], name="c", vocab_size=10)
    with pytest.raises(ValueError, match="to count has no two tokens"):
        ngram_baseline(single, a, row_tokens=4)
    with pytest.raises(ValueError, match="nothing can be scored"):
        ngram_baseline(a, single, row_tokens=4)
