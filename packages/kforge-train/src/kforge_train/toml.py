"""A config as TOML text, such that reading it back gives an equal config."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from kforge_train.schema import NONE_WORD


def to_toml(config: Any, comments: dict[str, str] | None = None) -> str:
    """A config dataclass as TOML: a table for each section, None left out where it is the default.

    `comments` maps a path such as `optim.lr` to the text of a comment behind its line; with it, values that are None
    stand as comments too.
    """
    lines: list[str] = []
    _table(config, "", lines, comments)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(config: Any, path: str, lines: list[str], comments: dict[str, str] | None) -> None:
    tables = []
    if path:
        lines += ["", f"[{path[:-1]}]"]
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), path + field.name
        if dataclasses.is_dataclass(value):
            tables.append((value, name + "."))
            continue
        line = f"{field.name} = {_value(NONE_WORD if value is None else value)}"
        if value is None and field.default is None:
            if comments is None:
                continue
            line = f"# {field.name} = {NONE_WORD}"
        lines.append(f"{line:<36}  # {comments[name]}" if comments is not None else line)
    for value, name in tables:
        _table(value, name, lines, comments)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if dataclasses.is_dataclass(value):  # in a list: what is None there is the default
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return _value({name: item for name, item in fields if item is not None and item != {}})
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(value: str) -> str:
    # A JSON string is a TOML string, but for DEL, which JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
