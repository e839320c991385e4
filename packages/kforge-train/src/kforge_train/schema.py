"""Types of config fields: what they are called, and whether a value fits. Standard library only.

A validator library would do; this one is here because it is a page long, starts in no time, and tells text of the
command line (converted to the field's type) from values of a file (which must have it already).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

NONE_WORD = "none"
"""How None is written on a command line and in TOML, which has no null."""

BOOLS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}


class Mismatch(ValueError):
    """A value does not have the type of its field; the message completes the sentence `optim.lr = "x" …`."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One settable value of a config."""

    path: str
    kind: Any
    default: Any


def field_kinds(cls: type) -> dict[str, Any]:
    """Field name -> its type, of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def leaves(cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Every settable value of a dataclass and of the dataclasses in it, in order."""
    kinds = field_kinds(cls)
    for field in dataclasses.fields(cls):
        kind, path = kinds[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from leaves(typing.cast(type, kind), path + ".")
        else:
            factory = field.default_factory
            yield Leaf(path, kind, field.default if factory is dataclasses.MISSING else factory())


def type_name(kind: Any) -> str:
    """A field's type in the words of the command line: `int`, `bf16|fp32`, `float,float`, `int|none`, `JSON`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is type(None):
        return NONE_WORD
    if origin is Literal:
        return "|".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return "|".join(type_name(arg) for arg in args)
    if _is_list_of_tables(kind):
        return "JSON"
    if origin in (tuple, list):
        return ",".join("..." if arg is Ellipsis else type_name(arg) for arg in args) or "list"
    if origin in (dict, Mapping):
        return "JSON"
    return getattr(kind, "__name__", str(kind))


def _is_list_of_tables(kind: Any) -> bool:
    """On the command line such a list is JSON: its tables have commas of their own."""
    return get_origin(kind) in (tuple, list) and any(
        dataclasses.is_dataclass(arg) or get_origin(arg) in (dict, Mapping) for arg in get_args(kind)
    )


def _allows_none(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def from_text(kind: Any, text: str) -> Any:
    """Text of the command line as a value of `kind`. Text that cannot be one comes back as it is, for `fit` to name."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if _allows_none(kind) and text.lower() == NONE_WORD:
            return None
        for arg in args:
            value = from_text(arg, text)
            if _fits(arg, value):
                return value
        return text
    if kind is bool:
        return BOOLS.get(text.lower(), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    if origin is Literal:
        return next((arg for arg in args if str(arg) == text), text)
    if _is_list_of_tables(kind):
        return _from_json(text, list)
    if origin in (tuple, list):
        inner = text.strip()
        inner = inner[1:-1] if inner[:1] + inner[-1:] in ("[]", "()") else inner
        parts = [part.strip().strip("\"'") for part in inner.split(",") if part.strip()]
        same = origin is list or args[-1] is Ellipsis
        return [from_text(args[0] if same else args[min(i, len(args) - 1)], part) for i, part in enumerate(parts)]
    if origin in (dict, Mapping):
        return _from_json(text, dict)
    return text


def _from_json(text: str, kind: type) -> Any:
    """Text as JSON of the kind that is wanted, else as it is."""
    try:
        made = json.loads(text)
    except ValueError:
        return text
    return made if isinstance(made, kind) else text


def fit(kind: Any, value: Any) -> Any:
    """`value` as a value of `kind`; lists become tuples and whole numbers floats, nothing else is converted.

    Raises Mismatch with what was expected.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _fit_anything(value)
    if origin in (Union, types.UnionType):
        if _allows_none(kind) and (value is None or value == NONE_WORD):
            return None
        for arg in args:
            if _fits(arg, value):
                return fit(arg, value)
        wanted = [arg for arg in args if arg is not type(None)]
        if len(wanted) == 1:
            try:
                fit(wanted[0], value)
            except Mismatch as error:
                raise Mismatch(f"{error}, or {NONE_WORD!r}") from None
        raise Mismatch(f"must be one of {type_name(kind)}")
    if origin is Literal:
        if not any(type(arg) is type(value) and arg == value for arg in args):
            raise Mismatch(f"must be one of {', '.join(str(arg) for arg in args)}")
        return value
    if origin in (tuple, list):
        return _fit_sequence(kind, value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise Mismatch('must be a table, on the command line as {"key": 1}')
        return {fit(args[0], key): fit(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind) and not isinstance(value, typing.cast(type, kind)):
        return _fit_table(typing.cast(type, kind), value)
    if kind is bool and not isinstance(value, bool):
        raise Mismatch("must be true or false")
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise Mismatch("must be a whole number")
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Mismatch("must be a number")
        if not math.isfinite(value):
            raise Mismatch("must be a finite number")
        return float(value)
    if kind is str and not isinstance(value, str):
        raise Mismatch("must be text")
    if isinstance(kind, type) and not isinstance(value, kind):
        raise Mismatch(f"must be {type_name(kind)}")
    return value


def _fit_sequence(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if not isinstance(value, (list, tuple)):
        example = '[{"key": 1}]' if _is_list_of_tables(kind) else f"[{type_name(kind)}]"
        raise Mismatch(f"must be a list, as {example}")
    if origin is list or args[-1] is Ellipsis:
        return origin(fit(args[0], item) for item in value)
    if len(value) != len(args):
        raise Mismatch(f"must be a list of {len(args)} values, as [{type_name(kind)}]")
    return tuple(fit(arg, item) for arg, item in zip(args, value, strict=True))


def _fit_table(cls: type, value: Any) -> Any:
    """A table of a list as the dataclass whose fields it has. What the class itself refuses is a mismatch, too."""
    kinds = field_kinds(cls)
    if not isinstance(value, Mapping):
        raise Mismatch(f"must have tables with {', '.join(kinds)}")
    made: dict[str, Any] = {}
    for key, item in value.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it may have {', '.join(kinds)}"
            raise Mismatch(f"has a table with the key {key!r}, which there is not; {hint}")
        try:
            made[key] = fit(kinds[key], item)
        except Mismatch as error:
            raise Mismatch(f"has a table with {key} = {json.dumps(item, default=str)}: {error}") from None
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in made and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise Mismatch(f"has a table without {', '.join(missing)}")
    try:
        return cls(**made)
    except ValueError as error:
        raise Mismatch(str(error)) from None


def _fit_anything(value: Any) -> Any:
    """A value of any type that TOML and JSON can both say, so that it is saved, compared and read again as it is."""
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return fit(float, value)
    if isinstance(value, (list, tuple)):
        return [_fit_anything(item) for item in value]
    if isinstance(value, Mapping):
        return {fit(str, key): _fit_anything(item) for key, item in value.items()}
    raise Mismatch("must be of numbers, text, true and false, lists and tables")


def _fits(kind: Any, value: Any) -> bool:
    try:
        fit(kind, value)
    except Mismatch:
        return False
    return True
