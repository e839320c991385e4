"""Rows of another length from a step on: which rows come, and that a resume anywhere changes none of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kforge_data import (
    DataConfig,
    Loader,
    Mixture,
    PackedDocuments,
    RowPhase,
    TokenShards,
    training_phases,
    training_sources,
)

Make = Callable[..., TokenShards]
PHASES = [(3, 16), (6, 4)]
OPTIONS: dict[str, Any] = {"row_tokens": 8, "global_rows": 4, "seed": 5}


def text(make_shards: Make, name: str = "shards", seed: int = 0) -> TokenShards:
    rng = np.random.default_rng(seed)
    return make_shards([[*rng.integers(1, 900, rng.integers(1, 30)).tolist(), 0] for _ in range(60)], name=name)


def read(loader: Loader, steps: int) -> list[list[Any]]:
    """Of each step the tokens, labels and names of its rows, as this rank has them."""
    result = []
    for _ in range(steps):
        rows: list[Any] = []
        for batch in loader.next():
            rows += zip(batch["input_ids"].tolist(), batch["labels"].tolist(), batch["row_ids"].tolist(), strict=True)
        result.append(rows)
    return result


@pytest.mark.parametrize("kind", ["cut", "best_fit", "mixture"])
def test_each_phase_reads_rows_of_its_own(make_shards: Make, tmp_path: Path, kind: str) -> None:
    """What a phase gives is what a loader of that length alone gives."""
    shards: Any = text(make_shards)
    if kind == "best_fit":
        shards = PackedDocuments(shards, cache=tmp_path)
    if kind == "mixture":
        shards = Mixture({"a": shards, "b": text(make_shards, "other", 1)}, {"a": 3, "b": 1})
    phases = [RowPhase(step, length) for step, length in PHASES]
    with Loader(shards, **OPTIONS, phases=phases) as loader:
        steps = read(loader, 9)
        named = loader.rows_of(range(9))
    assert [len(steps[k][0][0]) for k in range(9)] == [8] * 3 + [16] * 3 + [4] * 3
    assert named.tolist() == [row for step in steps for _, _, row in step]
    from kforge_data.best_fit import hash_seed

    for number, (first, length) in enumerate([(0, 8), *PHASES]):
        seed = hash_seed(5, number) if number else 5
        with Loader(shards, **{**OPTIONS, "row_tokens": length, "seed": seed}) as alone:
            expected = [[(ids, labels, row + (number << 56)) for ids, labels, row in step] for step in read(alone, 3)]
        assert steps[first : first + 3] == expected


@pytest.mark.parametrize("worker_kind", ["thread", "fork"])
@pytest.mark.parametrize("stop", [1, 3, 4, 6, 8])
def test_a_resume_anywhere_on_other_ranks(make_shards: Make, stop: int, worker_kind: str) -> None:
    shards, phases = text(make_shards), [RowPhase(step, length) for step, length in PHASES]
    with Loader(shards, **OPTIONS, phases=phases) as loader:
        whole = read(loader, 10)
    with Loader(shards, **OPTIONS, phases=phases, workers=2, worker_kind=worker_kind) as loader:
        assert read(loader, stop) == whole[:stop]
        state = json.loads(json.dumps(loader.state_dict()))
    parts = []
    for rank in range(2):
        with Loader(shards, **OPTIONS, phases=phases, rank=rank, world=2, microbatch_rows=1) as loader:
            loader.load_state_dict(state)
            assert loader.step == stop and loader.row_tokens == [8, 8, 8, 16, 16, 16, 4, 4, 4, 4][stop]
            parts.append(read(loader, 10 - stop))
            assert loader.state_dict()["position"] == 40
    assert [one + other for one, other in zip(*parts, strict=True)] == whole[stop:]


def test_another_size_of_steps_moves_no_row(make_shards: Make) -> None:
    """A phase that has begun stays where it began; one to come begins at its step, wherever that is now."""
    shards, phases = text(make_shards), [RowPhase(step, length) for step, length in PHASES]
    with Loader(shards, **OPTIONS, phases=phases) as loader:
        whole = read(loader, 6)
        loader.load_state_dict(loader.state_dict())
        state = loader.state_dict()
    for at in (4, 5):  # inside the second phase
        with Loader(shards, **OPTIONS, phases=phases) as loader:
            read(loader, at)
            state = loader.state_dict()
        with Loader(shards, **{**OPTIONS, "global_rows": 2}, phases=phases) as loader:
            loader.load_state_dict(state)
            steps = read(loader, 6 - at + 1)
            again = loader.state_dict()
            rest = read(loader, 2)
        assert list(itertools.chain(*steps[: 6 - at])) == list(itertools.chain(*whole[at:]))[: 2 * (6 - at)]
        assert all(len(row[0]) == 4 for row in steps[-1])
        with Loader(shards, **{**OPTIONS, "global_rows": 2}, phases=phases) as loader:
            loader.load_state_dict(again)
            assert read(loader, 2) == rest


def test_rows_in_quarantine_are_those_of_their_phase(make_shards: Make) -> None:
    shards, phases = text(make_shards), [RowPhase(1, 16)]
    with Loader(shards, **OPTIONS, phases=phases) as loader:
        first, second = read(loader, 1)[0], read(loader, 1)[0]
        bad = second[1][2]
    with Loader(shards, **OPTIONS, phases=phases) as loader:
        loader.quarantine([bad])
        assert read(loader, 1)[0] == first  # a row of this number in another phase is another row
        (again,) = read(loader, 1)
    assert [row for *_, row in again] == [row for *_, row in second if row != bad] + [-1]


def test_what_a_resume_refuses(make_shards: Make) -> None:
    shards = text(make_shards)
    with Loader(shards, **OPTIONS, phases=[RowPhase(1, 16)]) as loader:
        read(loader, 1)
        before = loader.state_dict()
        read(loader, 1)
        begun = loader.state_dict()
    with Loader(shards, **OPTIONS) as loader:
        loader.load_state_dict(before)  # what has not begun may be thought over
        with pytest.raises(
            ValueError, match=r"phases that have begun were rows of 16 tokens of sha256:.* and are none"
        ):
            loader.load_state_dict(begun)
    with (
        Loader(shards, **OPTIONS, phases=[RowPhase(1, 4)]) as loader,
        pytest.raises(ValueError, match=r"were rows of 16 tokens .* and are rows of 4 tokens"),
    ):
        loader.load_state_dict(begun)
    with Loader(shards, **OPTIONS, phases=[RowPhase(1, 4)], accept_changed_data=True) as loader:
        loader.load_state_dict(begun)
        assert loader.row_tokens == 4


def test_a_mixture_ends_in_the_phase_in_which_it_is_used_up(numbered: Make) -> None:
    source = Mixture({"a": numbered(6)}, max_epochs={"a": 1})
    with Loader(source, row_tokens=4, global_rows=4, phases=[RowPhase(1, 8)]) as loader:
        assert [len(batch["row_ids"]) for window in loader for batch in window] == [4, 4]
        assert loader.position == 4 + 3
    with Loader(source, row_tokens=4, global_rows=4, phases=[RowPhase(5, 8)]) as loader:
        assert len(list(loader)) == 2 and loader.position == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"phases": [RowPhase(3, 8), RowPhase(3, 4)]}, "step 3 does not come after that from step 3"),
        ({"phases": [RowPhase(0, 8)]}, "step 0 does not come after"),
        ({"phases": [RowPhase(3, 0)]}, "row_tokens = 0"),
        ({"phases": [RowPhase(3, 8)], "epochs": 1}, "epochs are counted in rows of one length"),
    ],
)
def test_what_phases_cannot_be(numbered: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(numbered(6), row_tokens=4, global_rows=1, **options)


def test_from_a_config(numbered: Make) -> None:
    """Weights that are in force, and what is left of max_epochs, go over into rows of another length."""
    one, two = numbered(40, name="one"), numbered(40, name="two")
    config = DataConfig(
        row_tokens=4,
        global_rows=4,
        mixture=(
            {"name": "a", "path": str(one.path), "weight": 3, "max_epochs": 1},
            {"name": "b", "path": str(two.path)},
        ),
        phases=(
            {"step": 2, "weights": {"a": 1}},
            {"step": 4, "row_tokens": 8},
            {"step": 6, "weights": {"b": 3}},
            {"step": 8, "row_tokens": 4, "weights": {"a": 0}},
        ),
    )
    assert config.row_lengths() == ((0, 4), (4, 8), (8, 4))
    assert [config.row_tokens_at(step) for step in (0, 3, 4, 7, 8, 99)] == [4, 4, 8, 8, 4, 4]
    sources = training_sources(config)
    first, second, third = (source for source in sources if isinstance(source, Mixture))
    given = first.counts(16, 4)
    assert given == {"a": 10, "b": 6}  # two steps of 3 : 1, two of 1 : 1
    assert second.asked(0) == {"a": 0.5, "b": 0.5} and second.asked(8) == pytest.approx({"a": 0.25, "b": 0.75})
    assert third.asked(0) == {"a": 0.0, "b": 1.0}
    assert second.describe()["max_epochs"] == {"a": 0.75}
    phases = training_phases(config, sources)
    with Loader(sources[0], row_tokens=4, global_rows=4, phases=phases) as loader:
        names = [batch["source_ids"][:, 0].tolist() for _ in range(12) for batch in loader.next()]
    assert [sum(part) for part in names] == [1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4]


def test_a_config_whose_sources_are_used_up(numbered: Make) -> None:
    mixture = ({"name": "a", "path": str(numbered(8).path), "max_epochs": 1},)
    config = DataConfig(row_tokens=4, global_rows=4, mixture=mixture, phases=({"step": 2, "row_tokens": 8},))
    with pytest.raises(ValueError, match="at step 2 every source that has a weight has given its max_epochs"):
        training_sources(config)
    unread = ({**mixture[0], "weight": 0}, {"name": "b", "path": mixture[0]["path"]})
    with pytest.raises(ValueError, match="a has weight 0 in every phase"):
        training_sources(DataConfig(mixture=unread))
