"""Realised shares, epochs, phases: against a dealer that goes row by row, and by counting what comes out."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kforge_data import Loader, Mixture, PackedDocuments, RowBlock, TokenShards, epoch_order

Make = Callable[..., TokenShards]
_ROW = (1 << 48) - 1


class Rows:
    """A source of so many rows of given tokens and documents each, which holds nothing."""

    def __init__(self, rows: int, tokens: int = 8, documents: int = 1) -> None:
        self.rows, self.tokens, self.documents = rows, tokens, documents
        self.fingerprint = f"{rows} {tokens} {documents}"

    def row_count(self, row_tokens: int) -> int:
        return self.rows

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        return self.rows * self.tokens, self.rows * self.documents

    def rows_at(self, positions: Any, *, row_tokens: int, seed: int, shuffle: bool) -> Any:
        return epoch_order(positions, rows=self.rows, seed=seed, shuffle=shuffle)

    def read_rows(self, row_ids: Any, row_tokens: int) -> RowBlock:
        raise NotImplementedError

    def max_documents(self, row_tokens: int) -> int:
        return self.documents


def deal(mixture: Mixture, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    ids = mixture.rows_at(np.arange(first, first + count), row_tokens=8, seed=1, shuffle=True)
    return ids >> 48, ids & _ROW


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6),
    first=st.integers(0, 2**40),
    count=st.integers(1, 3000),
)
def test_over_any_window_shares_are_within_a_row_a_split(weights: list[float], first: int, count: int) -> None:
    mixture = Mixture({f"s{i}": Rows(50 + i) for i in range(len(weights))}, {f"s{i}": w for i, w in enumerate(weights)})
    source, _ = deal(mixture, first, count)
    realised = np.bincount(source, minlength=len(weights))
    asked = count * np.array(weights) / sum(weights)
    assert np.abs(realised - asked).max() <= 1 + len(weights) + count * 2.0**-30
    before, after = mixture.counts(first, 8), mixture.counts(first + count, 8)
    assert [after[name] - before[name] for name in mixture.names] == realised.tolist()


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_source_gives_each_row_once_an_epoch(rows: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(rows), max_size=len(rows)))
    names = [f"s{i}" for i in range(len(rows))]
    epochs = data.draw(st.lists(st.integers(1, 3), min_size=len(rows), max_size=len(rows)))
    mixture = Mixture(
        dict(zip(names, map(Rows, rows), strict=True)),
        dict(zip(names, weights, strict=True)),
        max_epochs=dict(zip(names, epochs, strict=True)),
    )
    limit = mixture.position_limit(8)
    assert limit == sum(n * e for n, e in zip(rows, epochs, strict=True))
    cut = data.draw(st.integers(0, limit))
    pieces = [deal(mixture, 0, cut), deal(mixture, cut, limit - cut)]  # anywhere, as a resume does
    source, row = (np.concatenate(part) for part in zip(*pieces, strict=True))
    for k, (n, e) in enumerate(zip(rows, epochs, strict=True)):
        assert [sorted(epoch) for epoch in row[source == k].reshape(e, n).tolist()] == [list(range(n))] * e
    with pytest.raises(ValueError, match=f"outside of a mixture of {limit} rows"):
        deal(mixture, limit, 1)


def test_a_source_that_is_used_up_leaves_its_share_to_the_others() -> None:
    mixture = Mixture(
        {"a": Rows(10), "b": Rows(100), "c": Rows(100)}, {"a": 2, "b": 1, "c": 1}, max_epochs={"a": 1.5, "b": 1}
    )
    source, row = deal(mixture, 0, 400)
    assert (source[:30] == 0).sum() == 15 and not (source[31:] == 0).any()
    assert sorted(row[source == 0][:10].tolist()) == list(range(10))
    assert (source == 1).sum() == 100 and mixture.position_limit(8) is None
    assert (source[-100:] == 2).all()


def test_a_tiny_weight_is_not_zero() -> None:
    mixture = Mixture({"a": Rows(10), "b": Rows(10)}, {"a": 1.0, "b": 1e-9})
    assert mixture.counts(10**12, 8)["b"] == pytest.approx(1000, rel=0.1)  # in parts of 2**-31: 2 of them
    mixture = Mixture({"a": Rows(10), "b": Rows(10)}, {"a": 1.0, "b": 1e-30})
    assert mixture.counts(10**12, 8)["b"] > 0


def test_temperature_and_what_shares_are_of() -> None:
    sources = {"a": Rows(10, tokens=8, documents=4), "b": Rows(10, tokens=4, documents=1)}
    by_tokens = Mixture(sources, {"a": 1, "b": 1}).shares(8)
    assert by_tokens == pytest.approx({"a": 1 / 3, "b": 2 / 3})
    by_documents = Mixture(sources, {"a": 1, "b": 1}, by="documents").shares(8)
    assert by_documents == pytest.approx({"a": 1 / 5, "b": 4 / 5})
    warm = Mixture({"a": Rows(9), "b": Rows(9)}, {"a": 16, "b": 1}, temperature=2).shares(8)
    assert warm == pytest.approx({"a": 4 / 5, "b": 1 / 5})
    source, _ = deal(Mixture(sources, {"a": 3, "b": 1}), 0, 10_000)
    tokens = np.array([8, 4]) * np.bincount(source)
    assert tokens[0] / tokens.sum() == pytest.approx(0.75, abs=1e-3)


def test_phases_change_weights_at_their_row_and_positions_go_on() -> None:
    rows = {"web": Rows(1000), "code": Rows(1000), "books": Rows(1000)}
    mixture = Mixture(
        rows, {"web": 3, "code": 1, "books": 0}, phases=[(400, {"web": 1, "books": 2}), (600, {"web": 0})]
    )
    source, row = deal(mixture, 0, 900)
    assert np.bincount(source[:400], minlength=3).tolist() == [300, 100, 0]
    assert np.bincount(source[400:600], minlength=3).tolist() == [50, 50, 100]
    assert np.bincount(source[600:], minlength=3).tolist() == [0, 100, 200]
    for k in range(3):  # no row comes twice across phases (S34)
        assert len(set(row[source == k].tolist())) == (source == k).sum()
    plain = Mixture(rows, {"web": 3, "code": 1, "books": 0}, phases=[(10_000, {"books": 1})])
    assert np.array_equal(deal(plain, 0, 400), deal(mixture, 0, 400))


def test_exact_counts_against_fractions() -> None:
    """round(p n) with p in parts of 2**31, far out, where floats would not do."""
    mixture = Mixture({"a": Rows(10), "b": Rows(10)}, {"a": 2, "b": 1})
    part = round(2 / 3 * 2**31)
    for position in (1, 10, 10**9, 2**53 + 1, 2**60):
        expected = math.floor(Fraction(position * part, 2**31) + Fraction(1, 2))
        assert mixture.counts(position, 8)["a"] == expected


def test_c04_each_epoch_of_each_source_has_its_own_order() -> None:
    mixture = Mixture({"a": Rows(16), "b": Rows(16)}, {"a": 1, "b": 1})
    source, row = deal(mixture, 0, 96)
    orders = [tuple(row[source == k][16 * e : 16 * e + 16].tolist()) for k in range(2) for e in range(3)]
    assert all(sorted(order) == list(range(16)) for order in orders) and len(set(orders)) == 6


def test_the_loader_mixes_and_resumes(make_shards: Make, tmp_path: Path) -> None:
    """Also packed rows beside cut ones, ids of other types, other ranks after the resume, and the end."""
    small = make_shards([[i + 1] * 4 for i in range(12)], name="a")
    large = make_shards([[100_000 + i] * (1 + i % 4) for i in range(30)], name="b", vocab_size=200_000)
    source = Mixture(
        {"a": small, "b": PackedDocuments(large, cache=tmp_path)}, {"a": 1, "b": 2}, max_epochs={"a": 2, "b": 1}
    )
    options: dict[str, Any] = {"row_tokens": 4, "global_rows": 4, "seed": 3}
    with Loader(source, **options) as loader:
        whole = [batch for step in loader for batch in step]
    assert sum((batch["row_ids"] >= 0).sum() for batch in whole) == source.position_limit(4)
    for batch in whole:
        real = batch["row_ids"] >= 0
        assert (batch["source_ids"][:, 0].numpy()[real] == batch["row_ids"][real] >> 48).all()
        ids = batch["input_ids"].numpy()[real]
        assert ((ids[:, 0] >= 100_000) == (batch["row_ids"][real] >> 48 == 1)).all()
    with Loader(source, **options) as loader:
        for _ in range(3):
            loader.next()
        state = loader.state_dict()
    ranks = [Loader(pickle.loads(pickle.dumps(source)), rank=r, world=2, **options) for r in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    for batch in whole[3:]:
        parts = [loader.next()[0]["row_ids"] for loader in ranks]
        assert np.concatenate(parts).tolist() == batch["row_ids"].tolist()
    for loader in ranks:
        with pytest.raises(StopIteration):
            loader.next()
        loader.close()


def test_epochs_belong_to_the_sources(make_shards: Make) -> None:
    source = Mixture({"a": make_shards([[1] * 9])})
    with pytest.raises(ValueError, match="counts epochs for each source; give it max_epochs"):
        Loader(source, row_tokens=4, global_rows=1, epochs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": {}}, "no sources"),
        ({"weights": {"a": 1}}, "b has no weight"),
        ({"weights": {"a": 1, "b": 1, "x": 1}}, "weights names x; the sources are a, b"),
        ({"weights": {"a": 1, "b": -1}}, "weight of b = -1"),
        ({"weights": {"a": 1, "b": math.nan}}, "weight of b = nan"),
        ({"weights": {"a": 0, "b": 0}}, "all weights are 0"),
        ({"weights": {"a": 1, "b": 0}}, "b has weight 0 in every phase"),
        ({"temperature": 0}, "temperature = 0"),
        ({"by": "rows"}, "by = 'rows'"),
        ({"max_epochs": {"x": 1}}, "max_epochs names x"),
        ({"max_epochs": {"a": 0}}, "max_epochs of a = 0"),
        ({"phases": [(5, {"x": 1})]}, r"phase 1 \(from row 5\) names x"),
        ({"phases": [(5, {"a": 1}), (5, {"a": 2})]}, "does not come after the phase before"),
        ({"phases": [(0, {"a": 2})]}, "does not come after the phase before"),
        ({"phases": [(5, {"a": 0, "b": 0})]}, r"phase 1 \(from row 5\): all weights are 0"),
        ({"sources": {"a": Mixture({"c": Rows(2)}), "b": Rows(2)}}, "a is a mixture itself"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(**{"sources": {"a": Rows(5), "b": Rows(5)}, **change})


def test_sources_of_different_tokenizers_are_refused(make_shards: Make, tmp_path: Path) -> None:
    a, b, c = (make_shards([[1, 2]], name=name, tokenizer=made) for name, made in (("a", "x"), ("b", "y"), ("c", "")))
    assert Mixture({"a": a, "c": c}).names == ("a", "c")  # unknown is not different
    for other in (b, PackedDocuments(b, cache=tmp_path)):
        with pytest.raises(ValueError, match="was made with the tokenizer y"):
            Mixture({"a": a, "b": other})


def test_an_empty_source_is_refused_by_name(make_shards: Make) -> None:
    with pytest.raises(ValueError, match=r"b: .* holds no tokens"):
        Mixture({"a": Rows(2), "b": make_shards([])}).position_limit(8)


_WEIGHT = st.floats(1e-300, 1e300)


@settings(deadline=None)
@given(st.lists(_WEIGHT, min_size=1, max_size=4), st.floats(1e-3, 1e6))
@example([8.0, 2.0], 1e-3).via("overflowed")
@example([5.0, 5.0], 1e-320).via("was no number")
def test_any_temperature_gives_each_weight_its_share_or_is_refused(weights: list[float], temperature: float) -> None:
    named = {f"s{k}": weight for k, weight in enumerate(weights)}
    with localcontext(Context(prec=60, Emin=-(10**17), Emax=10**17)):
        logs = [Decimal(weight).ln() / Decimal(temperature) for weight in weights]
        powers = [(log - max(logs)).exp() for log in logs]
        right = [power / sum(powers) for power in powers]
    sources = {name: Rows(10) for name in named}
    if min(powers) < Decimal("2.4e-324"):
        with pytest.raises(ValueError, match=r"temperature = .* leaves s\d a share of 0"):
            Mixture(sources, named, temperature=temperature)
    elif min(powers) > Decimal("1e-307"):
        asked = Mixture(sources, named, temperature=temperature).asked()
        assert list(asked.values()) == pytest.approx([float(share) for share in right], rel=1e-8, abs=0)
