"""What is kept is the union of what each rule keeps, and the highest step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_ckpt.retention import Retention, read_scores, write_scores


@pytest.mark.parametrize(
    ("rules", "more", "kept"),
    [
        ({"last": 1}, {}, [90]),
        ({"last": 2, "every": 30}, {}, [0, 30, 60, 80, 90]),
        ({"last": 1, "steps": (20, 50, 1000)}, {}, [20, 50, 90]),
        ({"last": 1, "doubling_from": 10}, {}, [10, 20, 40, 80, 90]),
        ({"last": 1, "doubling_from": 30}, {}, [30, 60, 90]),
        ({"last": 2}, {"temporary": [80, 70]}, [60, 90]),  # neither of use any more
        ({"last": 2}, {"temporary": [90]}, [70, 80, 90]),  # of use, and counted by nobody
        ({"last": 1, "every": 20}, {"temporary": [80, 70]}, [0, 20, 40, 60, 80, 90]),
        ({"last": 1, "best": 2}, {"scores": {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan")}}, [20, 30, 90]),
        ({"last": 1, "best": 2, "highest": True}, {"scores": {10: 3.0, 20: 1.0, 30: 2.0}}, [10, 30, 90]),
        ({"last": 1, "best": 1}, {"scores": {10: 1.0, 20: 1.0, 95: 0.0}}, [20, 90]),
        ({"last": 1, "best": 1, "metric": "accuracy"}, {"scores": {10: 1.0}}, [90]),
        ({"last": 1}, {"protect": [50]}, [50, 90]),
    ],
)
def test_each_rule(rules: dict[str, Any], more: dict[str, Any], kept: list[int]) -> None:
    steps = range(0, 100, 10)
    if "scores" in more:
        more = {"scores": {step: {"loss": value} for step, value in more["scores"].items()}}
    gone = Retention(**rules).expendable(steps, **more)
    assert [step for step in steps if step not in gone] == kept


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 200)),
    st.integers(1, 5),
    st.integers(0, 20),
    st.sets(st.integers(0, 200)),
    st.integers(0, 20),
    st.integers(0, 3),
    st.sets(st.integers(0, 200)),
    st.dictionaries(st.integers(0, 200), st.floats(allow_nan=True)),
)
def test_no_rule_deletes_what_another_keeps(
    steps: set[int],
    last: int,
    every: int,
    listed: set[int],
    doubling: int,
    best: int,
    temporary: set[int],
    scores: dict[int, float],
) -> None:
    more: dict[str, Any] = {
        "temporary": temporary,
        "scores": {step: {"loss": value} for step, value in scores.items()},
    }
    rules = {"every": every, "steps": tuple(listed), "doubling_from": doubling, "best": best}
    gone = set(Retention(last=last, **rules).expendable(steps, **more))  # type: ignore[arg-type]
    assert gone <= steps and (not steps or max(steps) not in gone)
    alone = [{"last": last}, *({"last": 1, name: value} for name, value in rules.items())]
    for rule in alone:
        kept = steps - set(Retention(**rule).expendable(steps, **more))  # type: ignore[arg-type]
        if rule.keys() != {"last"}:
            kept -= set(sorted(steps - temporary)[-1:]) | set(sorted(steps)[-1:])
        assert not gone & kept, rule


def test_numbers_that_cannot_be() -> None:
    for rules, words in (
        ({"last": 0}, "keep_last = 0 must be at least 1"),
        ({"every": -1}, "keep_every = -1 must be 0"),
        ({"doubling_from": -1}, "keep_doubling_from = -1 must be 0"),
        ({"best": -1}, "keep_best = -1 must be 0"),
        ({"steps": (3, -1)}, r"keep_steps = \[3, -1\] must be steps"),
    ):
        with pytest.raises(ValueError, match=words):
            Retention(**rules)  # type: ignore[arg-type]


def test_scores_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_scores(tmp_path / "no") == {}
    scores = {10: {"loss": 2.5, "accuracy": 0.5}, 200: {"loss": float("inf")}}
    write_scores(tmp_path / "new", scores)
    assert read_scores(tmp_path / "new") == scores
    for damaged in ("{", "[]", '{"a": 1}', '{"1": {"loss": "x"}}'):
        (tmp_path / "scores.json").write_text(damaged)
        assert read_scores(tmp_path) == {}
