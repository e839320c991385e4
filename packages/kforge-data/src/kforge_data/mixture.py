"""Several sources as one, in stated shares: position -> (source, position in it) as a pure function.

Sources are dealt by a chain of splits, the largest share first. A split of share p sends the n-th row that reaches it
(from 0) to its source where round(p (n+1)) > round(p n), and on to the next split otherwise. So the number of rows of
each source before any position has a closed form, differs from its share by less than one row a split, and costs
nothing to compute anywhere. Shares are kept in 2**-31 parts of what reaches a split, and none rounds to nothing.

The sequence is cut where shares change: at phases, and where a source has given all the epochs that it may.

With sources that are read in lanes, the mixture has as many: position p is row p // L of lane p mod L, and each lane
deals by itself, from a place in the pattern of its own so that together they keep the shares. So the n-th row that
lane l takes of a source is row n*L + l of it, which lies in the source's lane l. Without, L is 1.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kforge_data.best_fit import hash_seed
from kforge_data.order import Permutation
from kforge_data.sources import LanedSource, MeasuredSource, RowBlock, merged
from kforge_data.streams import check_alike

if TYPE_CHECKING:
    from numpy.typing import NDArray

BY = ("tokens", "documents")
_UNIT = 1 << 31
ROW_BITS = 48  # a row's number is source * 2**48 + row
_FOREVER = 1 << 62


class _Stretch(NamedTuple):
    """Positions of one lane, from ``first`` on, in which shares do not change."""

    first: int
    order: tuple[int, ...]
    """Sources that are read, in the order of their splits."""
    parts: tuple[int, ...]
    """What each split but the last takes, in 2**-31 of what reaches it."""
    before: tuple[int, ...]
    """Rows that each source of the mixture has given in this lane before ``first``."""
    offsets: tuple[int, ...]
    """What each split adds before it rounds, in 2**-31: half of a row, or the place of a lane in the pattern."""


class Mixture:
    """Sources in shares of the tokens, or the documents, that they give. A `Source` for the `Loader`.

    Args:
        sources: name -> source. None may be a mixture itself.
        weights: name -> weight, any positive scale; every source must have one. None: all alike. 0 switches a source
            off until a phase gives it a weight.
        temperature: shares are proportional to weight ** (1 / temperature); above 1 evens them out.
        by: what the shares are of, "tokens" or "documents", by the means of each source's rows.
        max_epochs: name -> how often a source may be gone through (1.5 is one and a half times). Where it has been, its
            share goes to the others in proportion; when all have been, the sequence ends. Others repeat for ever.
        phases: (first row, weights) of later parts of the sequence, ascending: other weights from that position on.
            Names left out keep the weight they had.
        allow_unread: a source may have weight 0 in every phase.

    ValueError for unknown names, weights that are negative, all zero or not numbers, phases that overlap or go
    backwards, sources of different tokenizers, and sources that are never read, unless these are allowed.
    """

    def __init__(
        self,
        sources: Mapping[str, MeasuredSource],
        weights: Mapping[str, float] | None = None,
        *,
        temperature: float = 1.0,
        by: str = "tokens",
        max_epochs: Mapping[str, float] | None = None,
        phases: Sequence[tuple[int, Mapping[str, float]]] = (),
        allow_unread: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("a mixture of no sources; name at least one")
        if by not in BY:
            raise ValueError(f"by = {by!r} is not one of {', '.join(BY)}")
        if not temperature > 0.0:
            raise ValueError(f"temperature = {temperature} must be above 0; 1 leaves weights as they are")
        for name, source in sources.items():
            if isinstance(source, Mixture):
                raise ValueError(f"{name} is a mixture itself; name its sources in this one")
        self.names = tuple(sources)
        """Names of the sources; `source_ids` of a batch are places in it."""
        self._sources = tuple(sources.values())
        self._by, self._temperature = by, temperature
        known: list[Any] = [source for source in self._sources if getattr(source, "tokenizer", "")]
        for source in known[1:]:
            check_alike(known[0], source)
        _check_names("max_epochs", max_epochs or {}, self.names)
        for name, epochs in (max_epochs or {}).items():
            if not epochs > 0:
                raise ValueError(f"max_epochs of {name} = {epochs} must be above 0; leave the source out instead")
        self._max_epochs = tuple(float((max_epochs or {}).get(name, math.inf)) for name in self.names)
        given = dict(weights) if weights is not None else dict.fromkeys(self.names, 1.0)
        if missing := [name for name in self.names if name not in given]:
            raise ValueError(f"{', '.join(missing)} has no weight; give each source one (0: not before a later phase)")
        self._phases = _read_phases(self.names, given, phases)
        for _, weights_there in self._phases:
            _check_temperature(self.names, weights_there, temperature)
        for k, name in enumerate(() if allow_unread else self.names):
            if not any(weights[k] for _, weights in self._phases):
                raise ValueError(f"{name} has weight 0 in every phase and would never be read; leave it out")
        self.laned: dict[int, LanedSource] = {
            k: source for k, source in enumerate(self._sources) if isinstance(source, LanedSource)
        }
        """The sources that are read in lanes, by their place in `names`."""
        self._check_lanes()
        self.lanes = max((source.lanes for source in self.laned.values()), default=0)
        """Lanes of the sequence; 0 if no source has any."""
        content = [list(self.names), [s.fingerprint for s in self._sources], by, temperature, self._phases]
        content.append([repr(epochs) for epochs in self._max_epochs])
        self.fingerprint = "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()
        self._stretches: dict[tuple[int, int], tuple[list[_Stretch], int | None]] = {}

    def _check_lanes(self) -> None:
        """ValueError for what a mixture with sources in lanes cannot be."""
        found = {self.names[k]: source.lanes for k, source in self.laned.items()}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} {lanes}" for name, lanes in found.items())
            raise ValueError(f"the sources of a mixture must have the same number of lanes; these have {told}")
        if found and self._by == "documents":
            raise ValueError(
                f"{min(found)} does not know its documents before it is read, so shares by documents cannot be kept; "
                'mix by "tokens"'
            )
        for k in self.laned:
            if self._max_epochs[k] != math.inf:
                raise ValueError(
                    f"{self.names[k]} does not know its rows before it is read, so max_epochs cannot be kept; leave it "
                    "out, or tokenize it before"
                )
        last = self._phases[-1][1]
        if found and not any(w and e == math.inf for w, e in zip(last, self._max_epochs, strict=True)):
            raise ValueError(
                f"a mixture with lanes ({min(found)}) does not end, and in its last phase every source that has a "
                "weight has max_epochs; give one without a weight"
            )

    def ordered(self, *, seed: int, shuffle: bool) -> Mixture:
        """The same, with its sources in lanes in the order of a seed and not begun. A `Loader` calls it."""
        other = copy.copy(self)
        other.laned = {
            k: source.ordered(seed=hash_seed(seed, self.names[k]), shuffle=shuffle) for k, source in self.laned.items()
        }
        other._sources = tuple(other.laned.get(k, source) for k, source in enumerate(self._sources))
        return other

    def lane_rows(self, position: int, row_tokens: int) -> dict[int, NDArray[np.int64]]:
        """Rows [L] that each lane of each source in lanes has given before a position, by place in `names`."""
        given = self._given(position, row_tokens)
        return {k: given[:, k] for k in self.laned}

    def __repr__(self) -> str:
        return f"Mixture({', '.join(f'{n}: {s!r}' for n, s in zip(self.names, self._sources, strict=True))})"

    def describe(self) -> dict[str, Any]:
        """What the fingerprint is of, for people: plain data."""
        phases = {f"weights from row {first}": dict(zip(self.names, w, strict=True)) for first, w in self._phases}
        parts = {name: source.fingerprint for name, source in zip(self.names, self._sources, strict=True)}
        limits = {n: e for n, e in zip(self.names, self._max_epochs, strict=True) if e != math.inf}
        return {**parts, **phases, "by": self._by, "temperature": self._temperature, "max_epochs": limits}

    # Shares.

    def shares(self, row_tokens: int, position: int = 0) -> dict[str, float]:
        """Share of the rows that each source has at a position."""
        return dict(zip(self.names, self._row_shares(self._weights_at(position), row_tokens), strict=True))

    def counts(self, position: int, row_tokens: int) -> dict[str, int]:
        """Rows that each source gives before a position."""
        return dict(zip(self.names, self._given(position, row_tokens).sum(axis=0).tolist(), strict=True))

    def _given(self, position: int, row_tokens: int) -> NDArray[np.int64]:
        """Rows that each lane has given of each source before a position; [L, K]."""
        lanes, given = max(self.lanes, 1), []
        for lane in range(lanes):
            at = -((lane - position) // lanes)
            stretch = self._stretch_of(at, row_tokens, lane)
            inside = _counts(stretch, np.array([at - stretch.first], np.int64), len(self.names))[:, 0]
            given.append(inside + np.array(stretch.before))
        return np.array(given)

    def row_sizes(self, row_tokens: int) -> dict[str, tuple[int, float]]:
        """Of each source: rows of one epoch, and tokens (or documents, if shares are of these) of a row, the mean."""
        sizes = {}
        for name, source in zip(self.names, self._sources, strict=True):
            rows = source.row_count(row_tokens)
            sizes[name] = rows, source.epoch_size(row_tokens)[self._by == "documents"] / rows
        return sizes

    def asked(self, position: int = 0) -> dict[str, float]:
        """Share of the tokens (or documents) that the weights ask for at a position."""
        powers = _powers(self._weights_at(position), self._temperature)
        return {name: power / sum(powers) for name, power in zip(self.names, powers, strict=True)}

    def position_limit(self, row_tokens: int) -> int | None:
        """Rows after which every source has given all its epochs; None if that never happens."""
        return self._layout(row_tokens, 0)[1]

    def _weights_at(self, position: int) -> tuple[float, ...]:
        return [weights for first, weights in self._phases if first <= position][-1]

    def _row_shares(self, weights: Sequence[float], row_tokens: int) -> list[float]:
        """Shares of rows [K] at which tokens, or documents, come in proportion to weights."""
        shares = []
        for power, source in zip(_powers(weights, self._temperature), self._sources, strict=True):
            if not power:
                shares.append(0.0)
                continue
            a_row = source.epoch_size(row_tokens)[self._by == "documents"] / source.row_count(row_tokens)
            shares.append(power / a_row)
        total = sum(shares)
        return [share / total for share in shares]

    # Stretches of equal shares.

    def _layout(self, row_tokens: int, lane: int) -> tuple[list[_Stretch], int | None]:
        if (row_tokens, lane) not in self._stretches:
            self._stretches[row_tokens, lane] = self._lay_out(row_tokens, lane)
        return self._stretches[row_tokens, lane]

    def _lay_out(self, row_tokens: int, lane: int) -> tuple[list[_Stretch], int | None]:
        """Stretches of a lane, and where it ends."""
        limits, lanes = [], max(self.lanes, 1)
        for name, source, epochs in zip(self.names, self._sources, self._max_epochs, strict=True):
            rows = source.row_count(row_tokens)
            if rows < 1:
                raise ValueError(f"{name}: {source!r} holds no tokens, so nothing of it can be mixed in")
            if rows >= 1 << ROW_BITS:
                raise ValueError(f"{name} has {rows} rows; a mixture numbers up to 2**{ROW_BITS}")
            limits.append(_FOREVER if epochs == math.inf else -((lane - math.ceil(epochs * rows)) // lanes))
        stretches: list[_Stretch] = []
        before = [0] * len(self.names)
        begins = [-((lane - first) // lanes) for first, _ in self._phases]
        for number, (first, (_, weights)) in enumerate(zip(begins, self._phases, strict=True)):
            until = begins[number + 1] if number + 1 < len(begins) else _FOREVER
            while first < until:
                open_ = [w if b < limit else 0.0 for w, b, limit in zip(weights, before, limits, strict=True)]
                if not any(open_):
                    return stretches, first
                stretch = _stretch(first, self._row_shares(open_, row_tokens), tuple(before), lane, self.lanes)
                stretches.append(stretch)
                length = min([until - first, *(self._reaches(stretch, k, limits[k]) for k in stretch.order)])
                if first + length >= _FOREVER:
                    return stretches, None
                given = _counts(stretch, np.array([length], np.int64), len(self.names))[:, 0].tolist()
                before = [b + n for b, n in zip(before, given, strict=True)]
                first += length
        raise AssertionError("the last phase has no end")

    def _reaches(self, stretch: _Stretch, source: int, limit: int) -> int:
        """Positions of a stretch after which a source has given ``limit`` rows in all; by bisection."""
        if limit >= _FOREVER:
            return _FOREVER
        low, high = 0, _FOREVER - stretch.first
        while low < high:
            middle = (low + high) // 2
            given = _counts(stretch, np.array([middle], np.int64), len(self.names))[source, 0]
            low, high = (low, middle) if stretch.before[source] + given >= limit else (middle + 1, high)
        return low

    def _stretch_of(self, position: int, row_tokens: int, lane: int) -> _Stretch:
        stretches, limit = self._layout(row_tokens, lane)
        if position < 0 or (limit is not None and position > limit):
            raise ValueError(f"position {position} lies outside of a mixture of {limit} rows")
        return [stretch for stretch in stretches if stretch.first <= position][-1]

    # What makes it a Source.

    def row_count(self, row_tokens: int) -> int:
        """Rows of all sources together, each once."""
        return sum(source.row_count(row_tokens) for source in self._sources)

    def epoch_size(self, row_tokens: int) -> tuple[int, int]:
        """Tokens and documents of all sources together, each once."""
        sizes = [source.epoch_size(row_tokens) for source in self._sources]
        return sum(tokens for tokens, _ in sizes), sum(documents for _, documents in sizes)

    def rows_at(self, positions: NDArray[np.int64], *, row_tokens: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
        """Row ids at these positions, source * 2**48 + its row. Each source has an order, and epochs, of its own."""
        positions, lanes = np.asarray(positions, np.int64), max(self.lanes, 1)
        result = np.empty_like(positions)
        at, lane_of = np.divmod(positions, lanes)
        for lane in np.unique(lane_of).tolist():
            own = np.flatnonzero(lane_of == lane)
            source, index = self._deal(at[own], row_tokens, lane)
            for k in np.unique(source).tolist():
                mine = source == k
                rows = self._sources[k].rows_at(
                    index[mine] * lanes + lane,
                    row_tokens=row_tokens,
                    seed=hash_seed(seed, self.names[k]),
                    shuffle=shuffle,
                )
                result[own[mine]] = rows + (k << ROW_BITS)
        return result

    def _deal(
        self, positions: NDArray[np.int64], row_tokens: int, lane: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source at each of these positions of a lane, and how many rows of it the lane has given before."""
        stretches, limit = self._layout(row_tokens, lane)
        if positions.size and (positions.min() < 0 or (limit is not None and positions.max() >= limit)):
            raise ValueError(f"position {positions.min()}..{positions.max()} lies outside of a mixture of {limit} rows")
        which = np.searchsorted([stretch.first for stretch in stretches], positions, side="right") - 1
        source, index = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(which).tolist():
            here, stretch = np.flatnonzero(which == number), stretches[number]
            source[here], index[here] = _deal(stretch, positions[here] - stretch.first)
            index[here] += np.array(stretch.before)[source[here]]
        return source, index

    def read_rows(self, row_ids: NDArray[np.int64], row_tokens: int) -> RowBlock:
        """The rows of these ids; `source_ids` says which source each is from."""
        row_ids = np.asarray(row_ids, np.int64).reshape(-1)
        source = row_ids >> ROW_BITS
        if row_ids.size and (source.min() < 0 or source.max() >= len(self._sources)):
            raise ValueError(f"row {row_ids.min()}..{row_ids.max()} is of no source of this mixture")
        blocks = []
        for k in np.unique(source).tolist():
            here = np.flatnonzero(source == k)
            block = self._sources[k].read_rows(row_ids[here] - (k << ROW_BITS), row_tokens)
            blocks.append((here, block))
        block = merged(blocks, len(row_ids), row_tokens)
        return replace(block, source_ids=source.astype(np.int16))

    def max_documents(self, row_tokens: int) -> int:
        """The most documents in any one row of any source."""
        return max(source.max_documents(row_tokens) for source in self._sources)


def _powers(weights: Sequence[float], temperature: float) -> list[float]:
    """weight ** (1 / temperature), by which shares go, over the largest of them, as a small temperature makes huge
    numbers."""
    largest = max(weights)
    return [math.exp((math.log(weight) - math.log(largest)) / temperature) if weight else 0.0 for weight in weights]


def _check_temperature(names: Sequence[str], weights: Sequence[float], temperature: float) -> None:
    for name, weight, power in zip(names, weights, _powers(weights, temperature), strict=True):
        if weight and not power:
            raise ValueError(
                f"temperature = {temperature} leaves {name} a share of 0, as its weight is {weight} and the largest "
                f"{max(weights)}; give a temperature nearer 1, or the weight 0"
            )


def _check_names(what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{what} names {', '.join(unknown)}; the sources are {', '.join(names)}")


def _read_phases(
    names: tuple[str, ...], weights: dict[str, float], phases: Sequence[tuple[int, Mapping[str, float]]]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """(first row, weights [K]) of each phase, the one from row 0 included."""
    result: list[tuple[int, tuple[float, ...]]] = []
    for number, (first, changed) in enumerate([(0, weights), *phases]):
        what = "weights" if not number else f"phase {number} (from row {first})"
        _check_names(what, changed, names)
        for name, weight in changed.items():
            if not (isinstance(weight, int | float) and 0 <= weight < math.inf):
                raise ValueError(f"{what}: the weight of {name} = {weight} must be a number of at least 0")
        weights = {**weights, **changed}
        if not any(weights.values()):
            raise ValueError(f"{what}: all weights are 0, so there is nothing to read")
        if result and first <= result[-1][0]:
            raise ValueError(f"{what} does not come after the phase before, which begins at row {result[-1][0]}")
        result.append((first, tuple(float(weights[name]) for name in names)))
    return tuple(result)


def _stretch(first: int, shares: Sequence[float], before: tuple[int, ...], lane: int, lanes: int) -> _Stretch:
    order = tuple(sorted((k for k, share in enumerate(shares) if share > 0), key=lambda k: (-shares[k], k)))
    parts, left = [], 1.0
    for k in order[:-1]:
        parts.append(min(_UNIT - 1, max(1, round(shares[k] / left * _UNIT))))
        left = max(left - shares[k], 1e-300)
    offsets = tuple(_offset(lane, lanes, split) for split in range(len(parts)))
    return _Stretch(first, order, tuple(parts), before, offsets)


def _offset(lane: int, lanes: int, split: int) -> int:
    """Half a row without lanes; with them, the parts of a row spread evenly over the lanes, so that the sum over lanes
    of what each has rounded is what there is to take, in an order that is another for every split."""
    if not lanes:
        return _UNIT // 2
    place = int(Permutation(lanes, seed=hash_seed("lanes of a mixture", lanes, split))(np.array([lane]))[0])
    return (2 * place + 1) * _UNIT // (2 * lanes)


def _taken(n: NDArray[np.int64], part: int, offset: int) -> NDArray[np.int64]:
    """floor((n * part + offset) / 2**31), without overflow for n below 2**62."""
    high, low = np.divmod(n, _UNIT)
    return high * part + (low * part + offset) // _UNIT


def _counts(stretch: _Stretch, n: NDArray[np.int64], sources: int) -> NDArray[np.int64]:
    """Rows of each source in the first n of a stretch; [sources, len(n)]."""
    result = np.zeros((sources, len(n)), np.int64)
    for k, part, offset in zip(stretch.order, stretch.parts, stretch.offsets, strict=False):
        result[k] = _taken(n, part, offset)
        n = n - result[k]
    result[stretch.order[-1]] = n
    return result


def _deal(stretch: _Stretch, n: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source of the n-th row of a stretch, and how many rows that source has given in it before; [len(n)] each."""
    source = np.full(len(n), stretch.order[-1], np.int64)
    index = n.copy()
    open_ = np.arange(len(n))
    for k, part, offset in zip(stretch.order, stretch.parts, stretch.offsets, strict=False):
        taken = _taken(index[open_], part, offset)
        mine = _taken(index[open_] + 1, part, offset) > taken
        source[open_[mine]] = k
        index[open_[mine]] = taken[mine]
        open_, taken = open_[~mine], taken[~mine]
        index[open_] -= taken
    return source, index
