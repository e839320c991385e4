"""Parts by name, in code and from packages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kforge_optim import registry
from kforge_optim.registry import Registry


def test_entry_points_that_cannot_be_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints(
        [
            EntryPoint("twice", "one:part", "kforge.things"),
            EntryPoint("twice", "other:part", "kforge.things"),
            EntryPoint("gone", "no_such_package:part", "kforge.things"),
            EntryPoint("moved", "json:no_such_part", "kforge.things"),
            EntryPoint("same", "json:dumps", "kforge.things"),
            EntryPoint("same", "json:dumps", "kforge.things"),  # a package that is on the path twice
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda **select: points.select(**select))
    things: Registry[Any] = Registry("thing", "kforge.things")
    with pytest.raises(ValueError, match="'twice' is an entry point of one:part and other:part; uninstall one"):
        things.get("twice")
    with pytest.raises(
        ImportError, match=r"'gone' is the entry point no_such_package:part .* does not load: No module"
    ):
        things.get("gone")
    with pytest.raises(ImportError, match=r"'moved' is the entry point json:no_such_part .* does not load: .*no_such"):
        things.get("moved")
    assert things.get("same") is json.dumps
