"""States of a loader: those of all ranks as one, and what makes two of them positions in different sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from kforge_data.sources import Source

STATE_VERSION = 1
_MOST = 1 << 62  # of any number in a state but the seed: what a permutation can number
_LANE = ("lane", "row", "shard", "document", "used", "offset")


def check_state(state: Any) -> None:
    """ValueError that names the field, and says what it is and what it should be, unless these are the fields of a
    state. Nothing is compared with what a loader reads."""
    if not isinstance(state, Mapping):
        _refuse("it", state, "a dict, as state_dict() gives it")
    if (version := state.get("version")) != STATE_VERSION or isinstance(version, bool):
        raise ValueError(
            f"a loader state of version {version!r}; this loader reads {STATE_VERSION}. Load it with the kforge-data "
            "that wrote it, or start the data anew by not loading it"
        )
    for key in ("position", "base_step", "base_position"):
        _number(key, _field(state, key))
    for key in ("row_tokens", "global_rows"):
        _number(key, _field(state, key), 1)
    seed, shuffle = _field(state, "seed"), _field(state, "shuffle")
    if not isinstance(seed, int) or isinstance(seed, bool):
        _refuse("seed", seed, "a whole number")
    if not isinstance(shuffle, bool):
        _refuse("shuffle", shuffle, "true or false")
    if not isinstance(fingerprint := _field(state, "fingerprint"), str):
        _refuse("fingerprint", fingerprint, "a string")
    if not isinstance(source := state.get("source", {}), Mapping):
        _refuse("source", source, "a table of what the source says of itself")
    for i, phase in enumerate(_list("batch_phases", state.get("batch_phases", []))):
        for number in _list(f"batch_phases[{i}]", phase, 2):
            _number(f"batch_phases[{i}]", number, 1)
    for i, phase in enumerate(_list("phases", state.get("phases", []))):
        name = f"phases[{i}]"
        first, row_tokens, content = _list(name, phase, 3)
        _number(f"{name}[0]", first)
        _number(f"{name}[1]", row_tokens, 1)
        if not isinstance(content, str):
            _refuse(f"{name}[2]", content, "a string")
        if first > state["position"]:
            _refuse(f"{name}[0]", first, f"at most the position, {state['position']}")
    for i, row in enumerate(_list("quarantined", state.get("quarantined", []))):
        _number(f"quarantined[{i}]", row, most=(1 << 63) - 1)
    if state["base_position"] > state["position"]:
        _refuse("base_position", state["base_position"], f"at most the position, {state['position']}")
    _check_lanes(state)


def _check_lanes(state: Mapping[str, Any]) -> None:
    if not isinstance(lanes := state.get("lanes", {}), Mapping):
        _refuse("lanes", lanes, "a table of the lanes of each source")
    for source, rows in lanes.items():
        if not (isinstance(source, str) and source.isascii() and source.isdigit()):
            _refuse("lanes", source, "the number of a source, where it is a key")
        for i, row in enumerate(_list(f"lanes.{source}", rows)):
            for what, number in zip(_LANE, _list(f"lanes.{source}[{i}]", row, len(_LANE)), strict=True):
                _number(f"lanes.{source}[{i}], the {what},", number)


def _field(state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        raise ValueError(f"the loader state has no {key}; {_DAMAGED}")
    return state[key]


def _list(name: str, value: Any, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
        _refuse(name, value, "a list" if length is None else f"a list of {length}")
    found: Sequence[Any] = value
    return found


def _number(name: str, value: Any, least: int = 0, most: int = _MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(name, value, f"a whole number from {least} to {most}")


_DAMAGED = (
    "it is damaged, or was changed by hand. Load an earlier one, or start the data anew by not loading it; nothing of "
    "it was taken"
)


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{name} of the loader state is {_short(repr(value))}, and must be {wanted}: {_DAMAGED}")


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of the states that all ranks had after the same step: that of any, with the lanes of all.

    Where no source has lanes the states are the same already. ValueError for states of different steps, and for damaged
    ones.
    """
    if not states:
        raise ValueError("no states to merge")
    for state in states:
        check_state(state)
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
