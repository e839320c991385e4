"""From defaults, presets, files and the command line to one `JobConfig`, with the origin of every value.

    defaults  <  preset or file, each over the one it `extends`  <  command line

Layers are plain tables, merged before one validation: a command line may mend what a file has wrong, and every fault
is told at once. A file is TOML with the sections of `JobConfig`, and may begin with `extends = "preset or path"`; a
path is relative to the file that names it.

Every layer may name a model that it starts from, as `model.preset = "qwen3-4b"` (`kforge_model.presets`). That is a
whole model: the layer's own keys of [model] go over it, and none of those of the layers below hold any more. What is
resolved has plain values only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kforge_model.presets import preset_values
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError as ConfigError
from kforge_train.schema import Mismatch, field_kinds, fit, from_text, leaves
from kforge_train.toml import to_toml as to_toml

COMMAND_LINE = "command line"
DEFAULT = "default"
MODEL_PRESET = "model.preset"
"""A key of a layer, though not of the config that comes out."""


@dataclass(frozen=True)
class Resolved:
    """A validated job and where each of its values came from."""

    config: JobConfig
    """The job."""
    origin: dict[str, str]
    """Path of a value, as `optim.lr` -> `default`, `preset tiny`, `file x.toml`, `model preset qwen3-4b` or `command
    line`."""


@dataclass(frozen=True)
class _Layer:
    table: dict[str, Any]
    origin: str


def preset_names() -> list[str]:
    """Names of the presets in this package."""
    folder = resources.files("kforge_train") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def resolve_config(
    source: str | Path | None = None, overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
) -> Resolved:
    """The job that a preset or TOML file and overrides describe.

    `source` is a preset's name or a file; None means defaults only. `overrides` maps paths to values, as
    `{"optim.lr": 3e-4}`. A value given as text is converted to the type of its field, as on the command line (a text
    field keeps it; `none` is None; a list is `0.9,0.95` or `[0.9, 0.95]`); any other value must have the field's type.

    Raises ConfigError that names every unknown key (with its near ones), wrong type and impossible combination, and
    where each came from.
    """
    faults: list[str] = []
    values: dict[str, tuple[Any, str]] = {}
    unknown_model = None  # what is wrong with the last model preset; those before it do not count
    for layer in _file_layers(source):
        model = layer.table.get("model")
        if isinstance(model, dict) and "preset" in model:
            unknown_model = _start_from(model.pop("preset"), layer.origin, values)
        _flatten(JobConfig, layer.table, "", layer.origin, values, faults)
    kinds = {leaf.path: leaf.kind for leaf in leaves(JobConfig)}
    given = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    for name in [value for path, value in given if path == MODEL_PRESET][-1:]:
        unknown_model = _start_from(name, COMMAND_LINE, values)
    if unknown_model is not None:
        faults.append(unknown_model)
    for path, value in given:
        if path == MODEL_PRESET:
            continue
        if path in kinds:
            values[path] = (from_text(kinds[path], value) if isinstance(value, str) else value, COMMAND_LINE)
        else:
            faults.append(f"{path} ({COMMAND_LINE}): {_unknown(path)}")
    config = _build(JobConfig, "", values, faults)
    if faults or config is None:
        raise ConfigError("\n".join(faults))
    return Resolved(config, {path: values[path][1] if path in values else DEFAULT for path in kinds})


def load_config(path: str | Path) -> JobConfig:
    """The job of a TOML file, such as the `config.toml` that a run saves."""
    return resolve_config(Path(path)).config


def _file_layers(source: str | Path | None) -> list[_Layer]:
    """The file and what it extends, the deepest first."""
    if source is not None and not str(source):
        raise ConfigError("the name of the preset or file is empty; leave it away to take the defaults")
    layers: list[_Layer] = []
    chain: list[str] = []
    base = Path()
    while source is not None:
        text, origin, identity, base = _read(source, base)
        if identity in chain:
            raise ConfigError(f"{origin}: extends itself ({' -> '.join([*chain, identity])}); cut the circle")
        chain.append(identity)
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{origin}: not valid TOML: {error}") from None
        source = table.pop("extends", None)
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"{origin}: extends = {_show(source)} must be the name of a preset or a path")
        layers.insert(0, _Layer(table, origin))
    return layers


def _read(source: str | Path, base: Path) -> tuple[str, str, str, Path]:
    """Text, origin, identity and folder of a preset or file."""
    if isinstance(source, str) and source in preset_names():
        text = (resources.files("kforge_train") / "presets" / f"{source}.toml").read_text("utf-8")
        return text, f"preset {source}", f"preset {source}", Path()
    path = base / source
    try:
        return path.read_text("utf-8-sig"), f"file {path}", str(path.resolve()), path.parent
    except FileNotFoundError:
        near = difflib.get_close_matches(str(source), preset_names(), n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"{path} is neither a file nor a preset{hint} (presets: {', '.join(preset_names())})"
        ) from None
    except IsADirectoryError:
        job = path / "config.toml"
        meant = f"the folder of a run; its job is {job}" if job.is_file() else "a folder; name a preset or a TOML file"
        raise ConfigError(f"{path} is {meant}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _start_from(name: Any, origin: str, values: dict[str, tuple[Any, str]]) -> str | None:
    """Put the values of a model preset in the place of all of [model] that `values` has; tell what is wrong with it."""
    try:
        if not isinstance(name, str):
            raise ValueError("must be the name of a model preset")
        preset = preset_values(name)
    except ValueError as error:
        return f"{MODEL_PRESET} = {_show(name)} ({origin}): {error}"
    for path in [path for path in values if path.startswith("model.")]:
        del values[path]
    values.update({f"model.{key}": (value, f"model preset {name}") for key, value in preset.items()})
    return None


def _flatten(
    cls: type,
    table: dict[str, Any],
    prefix: str,
    origin: str,
    values: dict[str, tuple[Any, str]],
    faults: list[str],
) -> None:
    kinds = field_kinds(cls)
    for key, value in table.items():
        path = prefix + key
        if key not in kinds:
            faults.append(f"{path} ({origin}): {_unknown(path)}")
        elif not dataclasses.is_dataclass(kinds[key]):
            values[path] = (value, origin)
        elif isinstance(value, dict):
            _flatten(typing.cast(type, kinds[key]), value, path + ".", origin, values, faults)
        else:
            faults.append(f"{path} = {_show(value)} ({origin}): is a section; write [{path}] and its keys below")


def _build(cls: type, prefix: str, values: dict[str, tuple[Any, str]], faults: list[str]) -> Any:
    """The dataclass with the values below `prefix`, or None after adding to `faults`."""
    before = len(faults)
    made: dict[str, Any] = {}
    for name, kind in field_kinds(cls).items():
        path = prefix + name
        if dataclasses.is_dataclass(kind):
            made[name] = _build(typing.cast(type, kind), path + ".", values, faults)
        elif path in values:
            value, origin = values[path]
            try:
                made[name] = fit(kind, value)
            except Mismatch as error:
                faults.append(f"{path} = {_show(value)} ({origin}): {error}")
    if len(faults) > before:
        return None
    try:
        return cls(**made)
    except ValueError as error:
        faults.append(f"{error}{_sources(str(error), prefix, values)}")
        return None


def _sources(message: str, prefix: str, values: dict[str, tuple[Any, str]]) -> str:
    """Where the values that a message speaks of were set."""
    said = []
    for path, (_, origin) in values.items():
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", message):
            said.append(f"{path}: {origin}")
    return f" ({'; '.join(said)})" if said else ""


def _unknown(path: str) -> str:
    """What to say of a path that is no value: the section's keys, or the near ones."""
    paths = [*(leaf.path for leaf in leaves(JobConfig)), MODEL_PRESET]
    inside = [known for known in paths if known.startswith(path + ".")]
    if inside:
        return f"is a section; its keys are {', '.join(inside)}"
    last = path.rpartition(".")[2]
    same_name = [known for known in paths if known.rpartition(".")[2] == last]
    near = list(dict.fromkeys(same_name + difflib.get_close_matches(path, paths, n=3, cutoff=0.75)))[:3]
    if not near:
        by_name = {known.rpartition(".")[2]: known for known in paths}
        near = [by_name[name] for name in difflib.get_close_matches(last, by_name, n=3)]
    sections = list(field_kinds(JobConfig))
    return (
        f"no such key; did you mean {' or '.join(near)}?" if near else f"no such key; sections: {', '.join(sections)}"
    )


def _show(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
