from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_metrics import Event

NAMES = ("NaN", "Infinity", "-Infinity")  # these strings stand for numbers in a file
TEXT = st.text().filter(lambda text: text not in NAMES)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
EVENTS = st.builds(
    Event,
    kind=st.text(min_size=1),
    step=st.integers(0, 10**15),
    time=st.floats(0, 1e12),
    rank=st.integers(0, 10**6),
    values=st.dictionaries(st.text(), VALUES, max_size=5),
)


def forbid(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@settings(deadline=None)
@given(EVENTS)
def test_json_round_trip(event: Event) -> None:
    line = event.to_json()
    assert line.isascii() and "\n" not in line and "\r" not in line
    json.loads(line, parse_constant=forbid)
    assert Event.from_json(line) == event


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_numbers_that_are_not_finite_are_strings_in_valid_json(value: float, name: str) -> None:
    line = Event("step", 3, 0.0, values={"loss": value, "more": [value]}).to_json()
    assert json.loads(line, parse_constant=forbid)["values"] == {"loss": name, "more": [name]}
    assert float(name) == value or math.isnan(value)
    back = Event.from_json(line).values
    assert isinstance(back["loss"], float) and repr(back["loss"]) == repr(value) == repr(back["more"][0])


def test_what_is_not_plain_becomes_plain() -> None:
    class Code(enum.IntEnum):
        SEVEN = 7

    class Word(str):
        pass

    @dataclass
    class Config:
        width: int
        path: Path

    values = {
        "tensor": torch.tensor(1.5),
        "vector": torch.tensor([1, 2]),
        "numpy": np.float32(0.5),
        "nan": np.float64("nan"),
        "tuple": (1, (2,)),
        "set": {3, 1, 2},
        "config": Config(8, Path("a/b")),
        "dtype": torch.bfloat16,
        "enum": Code.SEVEN,
        "word": Word("stop"),
        5: "key",
    }
    back = Event.from_json(Event("start", 0, 0.0, values=values).to_json()).values  # type: ignore[arg-type]
    assert math.isnan(back.pop("nan"))
    assert back == {
        "tensor": 1.5,
        "vector": [1, 2],
        "numpy": 0.5,
        "tuple": [1, [2]],
        "set": [1, 2, 3],
        "config": {"width": 8, "path": "a/b"},
        "dtype": "torch.bfloat16",
        "enum": 7,
        "word": "stop",
        "5": "key",
    }


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"kind": "step"}', '{"kind":"a","step":"x","time":0,"rank":0}'])
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        Event.from_json(line)
