"""States of a loader: those of all ranks as one, and what makes two of them positions in different sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kforge_data.sources import Source

STATE_VERSION = 1


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of the states that all ranks had after the same step: that of any, with the lanes of all.

    Where no source has lanes the states are the same already. ValueError for states of different steps.
    """
    if not states:
        raise ValueError("no states to merge")
    if len({state["position"] for state in states}) > 1:
        told = ", ".join(str(state["position"]) for state in states)
        raise ValueError(f"the states are of different steps, at positions {told}")
    lanes: dict[str, dict[int, list[int]]] = {}
    for state in states:
        for number, rows in state.get("lanes", {}).items():
            lanes.setdefault(number, {}).update((int(row[0]), list(row)) for row in rows)
    merged = {number: [rows[lane] for lane in sorted(rows)] for number, rows in lanes.items()}
    return {**states[0], "lanes": merged} if lanes else dict(states[0])


def describe(source: Source) -> dict[str, Any]:
    """What a source says of itself, for people; its fingerprint if it says nothing."""
    own = getattr(source, "describe", None)
    return own() if callable(own) else {"content": source.fingerprint}


def differences(state: dict[str, Any], ours: dict[str, Any]) -> str:
    """What makes two states positions in different sequences, in words; empty if nothing does."""
    found = [
        f"{key} was {_short(state.get(key))} and is {_short(ours[key])}"
        for key in ("seed", "row_tokens", "shuffle")
        if state.get(key) != ours[key]
    ]
    if state.get("fingerprint") != ours["fingerprint"]:
        before, now = state.get("source") or {"content": state.get("fingerprint")}, ours["source"]
        parts = [
            f"{key} was {_short(before.get(key, '(not there)'))} and is {_short(now.get(key, '(not there)'))}"
            for key in [*before, *(key for key in now if key not in before)]
            if before.get(key) != now.get(key)
        ]
        found.append(f"of the source, {', '.join(parts) or 'something'}")
    phases = [[phase[1:] for phase in one.get("phases", [])] for one in (state, ours)]
    if phases[0] != phases[1]:
        words = [[f"rows of {length} tokens of {content[:19]}" for length, content in one] for one in phases]
        before, now = (", ".join(one) or "none" for one in words)
        found.append(f"phases that have begun were {before} and are {now}")
    return "; ".join(found)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:24] + "…"
