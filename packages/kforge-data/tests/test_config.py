"""DataConfig refuses what cannot be, and its fields are those of the loader."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from kforge_data import DataConfig, Loader


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_tokens": 0}, "data.row_tokens = 0"),
        ({"global_rows": 0}, "data.global_rows = 0"),
        ({"microbatch_rows": 0}, "data.microbatch_rows = 0"),
        ({"workers": -1}, "data.workers = -1"),
    ],
)
def test_what_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)  # type: ignore[arg-type]


def test_defaults_and_names_are_those_of_the_loader() -> None:
    arguments = inspect.signature(Loader).parameters
    for field in dataclasses.fields(DataConfig):
        if field.name in ("train", "heldout", "tokenizer"):
            continue
        assert field.name in arguments
        default = arguments[field.name].default
        assert default is inspect.Parameter.empty or default == field.default
