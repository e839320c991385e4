"""What the tests save."""

from __future__ import annotations

from typing import Any


class Box:
    """The smallest Stateful: a dict."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
