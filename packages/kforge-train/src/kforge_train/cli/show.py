"""The resolved config for eyes (TOML, with the origin of each value behind it) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import json

from kforge_train.resolve import Resolved
from kforge_train.toml import to_toml


def as_text(resolved: Resolved) -> str:
    """TOML that can be used as a file again; behind each value stands where it came from."""
    return to_toml(resolved.config, comments=resolved.origin)


def as_json(resolved: Resolved) -> str:
    """`{"config": {section: {key: value}}, "origin": {path: text}}`."""
    return json.dumps({"config": dataclasses.asdict(resolved.config), "origin": resolved.origin}, indent=2)
