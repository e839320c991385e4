"""A state that is damaged, or was changed by hand, is refused with the field that is wrong, and changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamed import numbered_texts

from kforge_data import (
    Loader,
    MegatronTokens,
    Mixture,
    PackedDocuments,
    RowPhase,
    StreamedDocuments,
    TokenFiles,
    Tokenizer,
    TokenShards,
    merge_states,
    write_megatron,
)

Make = Callable[..., TokenShards]
KINDS = ("shards", "npy", "megatron", "packed", "mixture", "stream", "mixture with streams", "phases")
WRONG: list[Any] = [None, "x", -1, 1.5, True, [], [1], {}, {"0": 1}, [[1, 2]], [["x"] * 6], float("nan"), 10**30]


@pytest.fixture
def opened(numbered: Make, tokenizer: Tokenizer, tmp_path: Path) -> Callable[[str], Loader]:
    """A loader of each kind of source after three steps, with growing batches and a row in quarantine."""

    def make(kind: str) -> Loader:
        shards = numbered(200, name=kind, overwrite=True)
        source: Any = shards
        options: dict[str, Any] = {}
        stream = StreamedDocuments(numbered_texts(60, 3), tokenizer, lanes=2, block_documents=4)
        if kind == "npy":
            np.save(tmp_path / "t.npy", shards.read(0, 800))
            source = TokenFiles(tmp_path / "t.npy", cache=tmp_path / "cache")
        elif kind == "megatron":
            write_megatron(shards, tmp_path / "m")
            source = MegatronTokens(tmp_path / "m", vocab_size=1 << 16)
        elif kind == "packed":
            source = PackedDocuments(shards, cache=tmp_path / "cache")
        elif kind == "mixture":
            source = Mixture({"a": shards, "b": numbered(90, name="other", overwrite=True)}, {"a": 2, "b": 1})
        elif kind == "stream":
            source = stream
        elif kind == "mixture with streams":
            source = Mixture({"a": shards, "b": stream}, {"a": 2, "b": 1})
        elif kind == "phases":
            options["phases"] = [RowPhase(2, 8)]
        sizes: dict[str, Any] = {"row_tokens": 4, "global_rows": 4, "batch_phases": [(1, 2)], "workers": 0}
        loader = Loader(source, **sizes, **options)
        for _ in range(3):
            loader.next()
        loader.quarantine([3])
        return loader

    return make


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a state, but for what a source says of itself, which is for people."""
    items: list[tuple[Any, Any]] = []
    if isinstance(state, dict):
        items = [(key, value) for key, value in state.items() if key != "source"]
    elif isinstance(state, list):
        items = list(enumerate(state))
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(state: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """The state with another value at a place, or nothing there."""
    result = copy.deepcopy(state)
    at = result
    for key in path[:-1]:
        at = at[key]
    if value:
        at[path[-1]] = value[0]
    else:
        del at[path[-1]]
    return result


OPTIONAL = {"batch_phases", "phases", "quarantined", "lanes"}


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_wrong_in_a_state_is_named_and_nothing_is_taken(
    kind: str, accept: bool, opened: Callable[[str], Loader]
) -> None:
    loader = opened(kind)
    loader._accept_changed_data = accept
    state = json.loads(json.dumps(loader.state_dict()))
    refused = 0
    for path in places(state):
        for value in [(), *((wrong,) for wrong in WRONG)]:
            damaged = changed(state, path, *value)
            try:
                loader.load_state_dict(damaged)
            except ValueError as error:
                refused += 1
                assert loader.state_dict() == state, (path, value)
                if (not value or not isinstance(value[0], int)) and path[0] != "version":
                    told = path[0].removesuffix("s") in str(error) or "belongs to another sequence" in str(error)
                    assert told, (path, value, str(error))
            else:  # what could have been saved: another number, a phase less
                loader.load_state_dict(state)
                assert loader.state_dict() == state
    assert refused > 100
    expected = [batch["input_ids"].tolist() for batch in loader.next()]
    again = opened(kind)
    again.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in again.next()] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"position": "9"},
            r"^position of the loader state is '9', and must be a whole number from 0 .*: it is damaged",
        ),
        ({"position": 9.0}, r"^position of the loader state is 9.0"),
        ({"shuffle": 1}, r"^shuffle of the loader state is 1, and must be true or false: it is damaged"),
        ({"base_position": 99}, r"^base_position of the loader state is 99, and must be at most the position, 10"),
        ({"phases": [[0, 8]]}, r"^phases\[0\] of the loader state is \[0, 8\], and must be a list of 3"),
        ({"phases": [[11, 4, "x"]]}, r"^phases\[0\]\[0\] of the loader state is 11, and must be at most the position"),
        ({"quarantined": [1, "2"]}, r"^quarantined\[1\] of the loader state is '2', and must be a whole number"),
        ({"lanes": {"a": []}}, r"^lanes of the loader state is 'a', and must be the number of a source"),
        ({"lanes": {"0": [[0, 1, 2, -3, 4, 5]]}}, r"^lanes.0\[0\], the document, of the loader state is -3"),
        ({"version": "1"}, r"^a loader state of version '1'; this loader reads 1"),
        ("x", r"^it of the loader state is 'x', and must be a dict, as state_dict\(\) gives it"),
    ],
)
def test_what_it_says(change: Any, message: str, opened: Callable[[str], Loader]) -> None:
    loader = opened("shards")
    state = loader.state_dict()
    damaged: Any = {**state, **change} if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(damaged)
    with pytest.raises(ValueError, match=message):
        merge_states([state, damaged])


def test_a_field_that_is_not_there(opened: Callable[[str], Loader]) -> None:
    loader = opened("shards")
    state = loader.state_dict()
    for key in [key for key in state if key not in OPTIONAL | {"version", "source"}]:
        with pytest.raises(
            ValueError, match=rf"^the loader state has no {key}; it is damaged, .* nothing of it was taken"
        ):
            loader.load_state_dict({name: value for name, value in state.items() if name != key})


def test_a_refused_load_leaves_what_is_read_ahead_right(numbered: Make, tokenizer: Tokenizer) -> None:
    """A lane that stands too far is seen only when all else has been taken up; threads read on meanwhile."""
    source = StreamedDocuments(numbered_texts(60, 3), tokenizer, lanes=2, block_documents=4)
    with (
        Loader(source, row_tokens=4, global_rows=2, workers=2) as loader,
        Loader(source, row_tokens=4, global_rows=2, workers=0) as quiet,
    ):
        for step in range(6):
            (ours,), (theirs,) = loader.next(), quiet.next()
            assert ours["input_ids"].tolist() == theirs["input_ids"].tolist(), step
            state = loader.state_dict()
            state["position"] = 2 * (step + 20)
            state["lanes"]["0"][1][1] = 99
            with pytest.raises(ValueError, match=f"lane 1 stands at row 99 in the state, and has given {step + 20} at"):
                loader.load_state_dict(state)
