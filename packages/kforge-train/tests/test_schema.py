"""Values of files have their field's type already; text of the command line becomes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from kforge_train.schema import Mismatch, fit, from_text, type_name

Word = Literal["a", "b"]


@dataclass(frozen=True)
class Entry:
    name: str
    share: float | None = None

    def __post_init__(self) -> None:
        if self.share == 0:
            raise ValueError("share = 0 is nothing")


Entries = tuple[Entry, ...]


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (int, 3, 3),
        (float, 3, 3.0),
        (float, 3e-4, 3e-4),
        (bool, True, True),
        (str, "none", "none"),
        (Word, "a", "a"),
        (int | None, None, None),
        (int | None, "none", None),
        (str | None, "x", "x"),
        (tuple[float, float], [1, 0.5], (1.0, 0.5)),
        (tuple[str, ...], [], ()),
        (list[int], [1, 2], [1, 2]),
        (dict[str, float], {"web": 8}, {"web": 8.0}),
        (Mapping[str, Any], {}, {}),
        (tuple[dict[str, Any], ...], [{"steps": 3}, {}], ({"steps": 3}, {})),
        (Entries, [{"name": "x"}, {"name": "y", "share": 1}], (Entry("x"), Entry("y", 1.0))),
        (Entries, (Entry("x"),), (Entry("x"),)),
        (Mapping[str, Any], {"a": [1, (True, "x")], "b": {"c": 0.5}}, {"a": [1, [True, "x"]], "b": {"c": 0.5}}),
    ],
)
def test_fit_takes(kind: Any, value: Any, made: Any) -> None:
    result = fit(kind, value)
    assert result == made and type(result) is type(made)


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (int, "3", "whole number"),
        (int, 3.0, "whole number"),
        (int, True, "whole number"),
        (float, "1e-3", "a number"),
        (float, False, "a number"),
        (bool, 1, "true or false"),
        (bool, "true", "true or false"),
        (str, 3, "text"),
        (Word, "c", "one of a, b"),
        (int | None, "3", "whole number, or 'none'"),
        (tuple[float, float], [1.0], "2 values"),
        (tuple[float, float], 1.0, "a list"),
        (tuple[int, ...], [1, "2"], "whole number"),
        (tuple[dict[str, Any], ...], {"steps": 3}, r'a list, as \[\{"key": 1\}\]'),
        (tuple[dict[str, Any], ...], ["steps"], "a table"),
        (Entries, {"name": "x"}, r'a list, as \[\{"key": 1\}\]'),
        (Entries, ["x"], "must have tables with name, share"),
        (Entries, [{"nam": "x"}], "key 'nam', which there is not; did you mean name?"),
        (Entries, [{"zzz": "x"}], "key 'zzz', which there is not; it may have name, share"),
        (Entries, [{"name": 3}], "a table with name = 3: must be text"),
        (Entries, [{"share": 1.0}], "a table without name"),
        (Entries, [{"name": "x", "share": 0}], "share = 0 is nothing"),
        (dict[str, float], 3, "a table"),
        (Mapping[str, Any], "x", "a table, on the command line as"),
        (Mapping[str, Any], {"a": None}, "numbers, text"),
        (Mapping[str, Any], {"a": [float("nan")]}, "finite"),
        (Mapping[str, Any], {1: 2}, "text"),
    ],
)
def test_fit_refuses(kind: Any, value: Any, says: str) -> None:
    with pytest.raises(Mismatch, match=says):
        fit(kind, value)


@pytest.mark.parametrize(
    ("kind", "text", "made"),
    [
        (int, "3", 3),
        (int, "-1", -1),
        (int, "1_000", 1000),
        (float, "3e-4", 3e-4),
        (bool, "true", True),
        (bool, "False", False),
        (str, "3", "3"),
        (str, "none", "none"),
        (int | None, "none", None),
        (int | None, "3", 3),
        (Word, "b", "b"),
        (tuple[float, float], "0.9,0.95", [0.9, 0.95]),
        (tuple[float, float], "[0.9, 0.95]", [0.9, 0.95]),
        (tuple[str, ...], "SIGTERM,SIGINT", ["SIGTERM", "SIGINT"]),
        (tuple[str, ...], '["SIGTERM"]', ["SIGTERM"]),
        (tuple[str, ...], "[]", []),
        (Mapping[str, Any], '{"a": [1, 0.5], "b": {"c": true}}', {"a": [1, 0.5], "b": {"c": True}}),
        (tuple[dict[str, Any], ...], '[{"a": 1, "b": "x"}, {}]', [{"a": 1, "b": "x"}, {}]),
    ],
)
def test_text_becomes_the_fields_type(kind: Any, text: str, made: Any) -> None:
    value = from_text(kind, text)
    assert value == made and type(value) is type(made)
    fit(kind, value)


TABLE = Mapping[str, Any]
TABLES = tuple[dict[str, Any], ...]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((int, "x"), (int, "3.5"), (bool, "maybe"), (Word, "c"), (int | None, "x")),
        *((TABLE, "x"), (TABLE, "[1]"), (TABLE, "{a: 1}"), (TABLE, "none")),
        *((TABLES, "x"), (TABLES, '{"a": 1}'), (TABLES, "none")),
    ],
)
def test_text_that_cannot_be_a_value_is_left_to_be_refused(kind: Any, text: str) -> None:
    assert from_text(kind, text) == text
    with pytest.raises(Mismatch):
        fit(kind, text)


def test_names_of_types() -> None:
    kinds = [int, int | None, Word, tuple[float, float], tuple[str, ...], Mapping[str, Any], TABLES]
    assert [type_name(kind) for kind in kinds] == ["int", "int|none", "a|b", "float,float", "str,...", "JSON", "JSON"]
