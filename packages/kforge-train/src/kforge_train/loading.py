"""The loader's place in a checkpoint: what all ranks have alike, and where the lanes of each stand."""

from __future__ import annotations

from typing import Any

from kforge_ckpt import PerRank
from kforge_data import Loader, merge_states


class LoaderState:
    """A `Loader` as a checkpoint sees it. Each rank saves the lanes that it reads; any number of ranks goes on from all
    of them."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The loader's, whose ``lanes``, if it has any, are this rank's own."""
        state = self._loader.state_dict()
        return {**state, "lanes": PerRank(state["lanes"])} if "lanes" in state else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the lanes of all ranks that saved."""
        if isinstance(state.get("lanes"), list):
            state = merge_states([{**state, "lanes": lanes} for lanes in state["lanes"] if lanes is not None])
        self._loader.load_state_dict(state)
