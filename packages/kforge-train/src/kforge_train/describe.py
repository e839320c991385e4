"""What each config field is, from the docstring that follows it in the source. Neither torch nor an import of it."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kforge_model.presets import PRESETS
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError
from kforge_train.schema import NONE_WORD, field_kinds, leaves, type_name

_INDENT: dict[str, Any] = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
_PRESET = """\
The model to start from, in place of all of [model] that a preset or file has; other --model keys go over it. One of
{}, or depth-N, as depth-12."""


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below it in the class body, as one line of text.

    Fields without one are absent. ``cls`` must come from a module whose source can be read.
    """
    return dict(_module_docs(cls.__module__).get(cls.__name__, {}))


@lru_cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = docs.setdefault(node.name, {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                fields[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def list_fields() -> str:
    """The sections of `JobConfig`, each with the names of its fields."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    sections = field_docs(JobConfig)
    blocks = []
    for name, cls in field_kinds(JobConfig).items():
        names = [leaf.path for leaf in leaves(typing.cast(type, cls))]
        text = ", ".join(["preset"] * (name == "model") + names)
        body = textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        blocks.append(f"{name}: {sections[name]}\n{body}")
    return "\n\n".join(blocks)


def describe_config(topics: Sequence[str] = ("all",)) -> str:
    """Fields of `JobConfig` by section: flag, type, default and docstring.

    topics: names of sections or fields ("optim", "optim.lr"), or "all". Another one is a `ConfigError`.
    """
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    sections, found = field_docs(JobConfig), set()
    blocks = []
    for name, cls in field_kinds(JobConfig).items():
        docs = field_docs(typing.cast(type, cls))
        fields = {}
        if name == "model":
            text = textwrap.wrap(_PRESET.format(", ".join(PRESETS)), width, **_INDENT)
            fields["model.preset"] = ["  --model.preset NAME", *text]
        for leaf in leaves(typing.cast(type, cls)):
            flag = f"  --{name}.{leaf.path} {type_name(leaf.kind)}  (default: {_text(leaf.default)})"
            fields[f"{name}.{leaf.path}"] = [flag, *textwrap.wrap(docs[leaf.path], width, **_INDENT)]
        shown = [path for path in fields if {"all", name, path} & set(topics)]
        found |= {"all", name, *fields} & set(topics)
        if shown:
            blocks.append("\n".join([f"{name}: {sections[name]}", *(line for path in shown for line in fields[path])]))
    for topic in topics:
        if topic not in found:
            raise ConfigError(
                f"--help {topic}: no section or field is called so; write a section ({', '.join(sections)}), a field "
                "as optim.lr, or all"
            )
    return "\n\n".join(blocks)


def _text(value: Any) -> str:
    if value is None:
        return NONE_WORD
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(_text(item) for item in value) or "[]"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return str(value) if value != "" else '""'
