"""DataConfig refuses what cannot be, and its fields are those of the loader."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from kforge_data import DataConfig, Loader
from kforge_data.batch_size import BatchSize


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_tokens": 0}, "data.row_tokens = 0"),
        ({"global_rows": 0}, "data.global_rows = 0"),
        ({"microbatch_rows": 0}, "data.microbatch_rows = 0"),
        ({"workers": -1}, "data.workers = -1"),
        ({"batch_phases": ({"steps": 2},)}, r"data.batch_phases\[0\].rows is missing"),
        ({"batch_phases": ({"rows": 2},)}, "how long it is, in steps or in tokens, one of the two"),
        ({"batch_phases": ({"rows": 2, "steps": 1, "tokens": 9},)}, "in steps or in tokens, one of the two"),
        ({"batch_phases": ({"rows": 2, "until": 9},)}, "has no key 'until'; a phase has steps, tokens, rows"),
        ({"batch_phases": ({"rows": 2, "steps": 2}, {"rows": 0, "steps": 1})}, r"batch_phases\[1\].rows = 0"),
        ({"batch_phases": ({"rows": True, "steps": 1},)}, "rows = True must be a whole number"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


def test_defaults_and_names_are_those_of_the_loader() -> None:
    arguments = inspect.signature(Loader).parameters
    for field in dataclasses.fields(DataConfig):
        if field.name in ("train", "heldout", "tokenizer"):
            continue
        assert field.name in arguments
        default = arguments[field.name].default
        assert default is inspect.Parameter.empty or default == field.default


def test_phases_are_read_into_steps() -> None:
    tables = ({"tokens": 1000, "rows": 4}, {"steps": 3, "rows": 8})
    config = DataConfig(row_tokens=100, global_rows=16, batch_phases=tables)  # 400 tokens a step: 3 steps
    assert config.batch_size() == BatchSize(16, ((3, 4), (3, 8)))
    assert DataConfig(global_rows=16).batch_size() == BatchSize(16)
