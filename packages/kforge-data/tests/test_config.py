"""DataConfig refuses what cannot be, and its fields are those of the loader."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from kforge_data import DataConfig, Loader
from kforge_data.batch_size import BatchSize

A = {"name": "a", "path": "shards"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_tokens": 0}, "data.row_tokens = 0"),
        ({"global_rows": 0}, "data.global_rows = 0"),
        ({"microbatch_rows": 0}, "data.microbatch_rows = 0"),
        ({"workers": -1}, "data.workers = -1"),
        ({"packing": "tight"}, "data.packing = 'tight' is not one of cut, best_fit, truncate"),
        ({"worker_kind": "fibre"}, "data.worker_kind = 'fibre' is not one of thread, fork, spawn"),
        ({"mixture_by": "rows"}, "data.mixture_by = 'rows'"),
        ({"mixture_temperature": 0.0}, "data.mixture_temperature = 0.0"),
        ({"train": "x", "mixture": (A,)}, "both set"),
        ({"mixture": ({"name": "a"},)}, r"data.mixture\[0\].path is missing"),
        ({"mixture": ({**A, "wieght": 1},)}, "no key 'wieght'; it has name, path, weight, max_epochs"),
        ({"mixture": ({**A, "weight": -1},)}, r"data.mixture\[0\].weight = -1"),
        ({"mixture": (A, A)}, "names a source twice, of a, a"),
        ({"phases": ({"step": 2, "weights": {}},)}, "no data.mixture"),
        ({"phases": ({"step": 2},)}, r"data.phases\[0\] changes nothing; give it weights, row_tokens"),
        ({"phases": ({"step": 2, "row_tokens": 0},)}, r"data.phases\[0\].row_tokens = 0"),
        ({"phases": ({"step": 2, "lr": 1},)}, "has no key 'lr'; it has step, weights, row_tokens"),
        ({"mixture": (A,), "phases": ({"step": 2, "weights": {"a": 0}},)}, "from here on all weights are 0"),
        (
            {"phases": ({"step": 2, "row_tokens": 8},), "batch_phases": ({"rows": 2, "tokens": 9},)},
            "give steps in place of tokens",
        ),
        ({"mixture": (A,), "phases": ({"step": 2, "weights": {"b": 1}},)}, r"phases\[0\] names b; the sources are a"),
        ({"mixture": (A,), "phases": ({"step": 0, "weights": {}},)}, "must be a step of at least 1"),
        ({"mixture": (A,), "phases": ({"step": 2, "weights": 3},)}, "must be a table"),
        ({"mixture": (A,), "phases": ({"step": 2, "weights": {}},) * 2}, "does not come after the phase before"),
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


SOURCE = {
    *("train", "heldout", "tokenizer", "mixture", "mixture_by", "mixture_temperature", "phases"),
    *("dtype", "eos_id", "packing", "cache", "cache_wait_s", "text_field", "lanes", "stream_block"),
    *("mask_short", "mask_duplicates"),
    *("mask_repetition", "repetition_period", "answer_start", "answer_end"),
}
"""Fields that say what the source is, and what is done to its rows."""


def test_defaults_and_names_are_those_of_the_loader() -> None:
    arguments = inspect.signature(Loader).parameters
    for field in dataclasses.fields(DataConfig):
        if field.name in SOURCE:
            continue
        assert field.name in arguments
        default = arguments[field.name].default
        assert default is inspect.Parameter.empty or default == field.default


def test_phases_are_read_into_steps() -> None:
    tables = ({"tokens": 1000, "rows": 4}, {"steps": 3, "rows": 8})
    config = DataConfig(row_tokens=100, global_rows=16, batch_phases=tables)  # 400 tokens a step: 3 steps
    assert config.batch_size() == BatchSize(16, ((3, 4), (3, 8)))
    assert DataConfig(global_rows=16).batch_size() == BatchSize(16)
