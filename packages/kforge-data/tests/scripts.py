"""The script machine: a run that is killed, resumed and dealt to other processes, as often as a script says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from kforge_data import Loader, merge_states

GLOBAL_ROWS = 4
Step = dict[int, tuple[int, ...]]
"""Row id -> what the row holds, over all processes; without the padding in the place of rows in quarantine."""


class Session(NamedTuple):
    """From one start to the kill after it."""

    kept: int
    """Steps until the state is saved."""
    lost: int
    """Steps from there until the kill: nobody will know of them."""
    world: int
    microbatch_rows: int
    workers: int
    skipped: frozenset[int] = frozenset()
    """Rows, by their place in the sequence, that are put into quarantine when it starts."""


def sessions() -> st.SearchStrategy[list[Session]]:
    """Scripts of up to four sessions, on any number of processes that divides the lanes of the tests' streams."""
    numbers = (st.integers(0, 5), st.integers(0, 3), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 2))
    skipped = st.just(frozenset()) | st.frozensets(st.integers(0, 90), max_size=5)
    return st.lists(st.builds(Session, *numbers, skipped), min_size=1, max_size=4)


def without(straight: Sequence[Step], script: Sequence[Session]) -> tuple[list[Step], list[int]]:
    """What a script keeps of an undisturbed run, and the rows that it has in quarantine in the end."""
    order = [name for step in straight for name in step]
    kept: list[Step] = []
    bad: set[int] = set()
    for session in script:
        bad |= {order[place] for place in session.skipped}
        for step in straight[len(kept) : len(kept) + session.kept]:
            kept.append({name: ids for name, ids in step.items() if name not in bad})
    return kept, sorted(bad)


def play(
    make: Callable[[], Any],
    script: Sequence[Session],
    *,
    state: dict[str, Any] | None = None,
    order: Sequence[int] = (),
    **options: Any,
) -> tuple[list[Step], dict[str, Any]]:
    """The steps that a script keeps, from a state on, and the state after them. Each process opens the source anew.
    ``order``: the rows of the sequence, by which sessions say what they skip."""
    kept: list[Step] = []
    for session in script:
        loaders = [
            Loader(
                make(),
                rank=rank,
                world=session.world,
                global_rows=GLOBAL_ROWS,
                microbatch_rows=session.microbatch_rows,
                workers=session.workers,
                **options,
            )
            for rank in range(session.world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            if session.skipped:
                loader.quarantine(order[place] for place in session.skipped)
        for number in range(session.kept + session.lost):
            if number == session.kept:
                state = saved(loaders)
            step: Step = {}
            rows = 0
            for loader in loaders:
                for batch in loader.next():
                    for name, ids in zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True):
                        assert name not in step, f"row {name} is there twice"
                        rows += 1
                        if name != -1:
                            step[name] = tuple(ids)
            assert rows == GLOBAL_ROWS
            if number < session.kept:
                kept.append(step)
        if not session.lost:
            state = saved(loaders)
        for loader in loaders:
            loader.close()
    assert state is not None
    return kept, state


def saved(loaders: Sequence[Loader]) -> dict[str, Any]:
    """The states of all ranks as one, through JSON."""
    state: dict[str, Any] = json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))
    return state
