"""The public names of every package, with their signatures: a change of them is seen in review, not by users.

    python tools/public_names.py --check     # exit 1 and a list, when tools/public_names.json differs
    python tools/public_names.py --write     # after a change that is meant

A public name is one that a package's `__init__` exports. The packages must be importable, with torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tools" / "public_names.json"


def modules() -> list[str]:
    """Import names of all packages."""
    return sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/_version.py"))


def exported(module: str) -> dict[str, Any]:
    """Public name -> the thing itself, of a package."""
    package = importlib.import_module(module)
    return {name: getattr(package, name) for name in sorted(package.__all__) if name != "__version__"}


def signature(thing: Any) -> str:
    """How a thing is called, as text; what kind of thing it is where it cannot be called."""
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return type(thing).__name__
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are text anyway
    return re.sub(r"<(\w+)[^<>]*? at 0x[0-9a-f]+>", r"<\1>", text)  # addresses differ from run to run


def describe(thing: Any) -> Any:
    """Signature of a function; signature, fields and public methods of a class."""
    if inspect.isclass(thing):
        if issubclass(thing, enum.Enum):
            return {"values": {member.name: member.value for member in thing}}
        members: dict[str, str] = {}
        for name, value in vars(thing).items():
            if name.startswith("_"):
                continue
            if isinstance(value, property):
                members[name] = "property"
            elif isinstance(value, (staticmethod, classmethod)):
                members[name] = f"{type(value).__name__}{signature(value.__func__)}"
            elif inspect.isfunction(value):
                members[name] = signature(value)
        data = dataclasses.is_dataclass(thing)
        answer: dict[str, Any] = {"fields": _fields(thing)} if data else {"call": signature(thing)}
        return {**answer, "members": dict(sorted(members.items()))} if members else answer
    return signature(thing)


def _fields(thing: Any) -> list[str]:
    lines = []
    for field in dataclasses.fields(thing):
        made = field.default_factory is not dataclasses.MISSING
        default = "..." if made else "" if field.default is dataclasses.MISSING else repr(field.default)
        lines.append(f"{field.name}: {field.type}" + (f" = {default}" if default else ""))
    return lines


def names() -> dict[str, dict[str, Any]]:
    """Every package's public names, described."""
    return {module: {name: describe(thing) for name, thing in exported(module).items()} for module in modules()}


def undocumented() -> list[str]:
    """Public functions and classes without a docstring of their own."""
    missing = []
    for module in modules():
        for name, thing in exported(module).items():
            callable_thing = inspect.isclass(thing) or inspect.isroutine(thing)
            generated = dataclasses.is_dataclass(thing) and str(thing.__doc__).startswith(f"{name}(")
            if callable_thing and (not (thing.__doc__ or "").strip() or generated):
                missing.append(f"{module}.{name}")
    return missing


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What came, went or changed from one snapshot to another."""
    lines = []
    for module in sorted({*old, *new}):
        before, after = old.get(module, {}), new.get(module, {})
        for name in sorted({*before, *after}):
            if name not in after:
                lines.append(f"{module}.{name}: gone")
            elif name not in before:
                lines.append(f"{module}.{name}: new, {json.dumps(after[name])}")
            elif before[name] != after[name]:
                lines.append(f"{module}.{name}: was {json.dumps(before[name])}, is {json.dumps(after[name])}")
    return lines


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the snapshot")
    action.add_argument("--write", action="store_true", help="make the snapshot anew")
    args = parser.parse_args()
    if args.write:
        SNAPSHOT.write_text(json.dumps(names(), indent=1, ensure_ascii=False) + "\n", "utf-8")
        return 0
    found = differences(json.loads(SNAPSHOT.read_text("utf-8")), names())
    print("\n".join(found) or "as in the snapshot")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
