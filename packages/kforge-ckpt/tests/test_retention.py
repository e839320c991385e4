"""What is kept is the union of what each rule keeps, and the highest step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateful import Box

from kforge_ckpt import Checkpointer, DamagedCheckpointError, retention
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
        ({"last": 1, "best": 1}, {"scores": {10: None, 20: 1.0, 30: 2.0}}, [10, 20, 90]),
        ({"last": 1, "best": 1, "metric": "accuracy"}, {"scores": {10: 1.0}}, [90]),
        ({"last": 1}, {"protect": [50]}, [50, 90]),
        ({"last": 2}, {"damaged": {90, 70}.__contains__}, [60, 70, 80, 90]),
        ({"last": 2}, {"damaged": {60}.__contains__}, [80, 90]),
        ({"last": 1}, {"damaged": {90}.__contains__, "temporary": [80, 90]}, [70, 80, 90]),
        ({"last": 1, "best": 1}, {"damaged": {20, 40}.__contains__, "scores": {20: 1.0, 30: 2.0, 40: 3}}, [20, 30, 90]),
    ],
)
def test_each_rule(rules: dict[str, Any], more: dict[str, Any], kept: list[int]) -> None:
    steps = range(0, 100, 10)
    if "scores" in more:
        scores = {step: None if value is None else {"loss": value} for step, value in more["scores"].items()}
        more = {**more, "scores": scores}
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


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 50)),
    st.sets(st.integers(0, 50)),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 3),
    st.sets(st.integers(0, 50)),
    st.dictionaries(st.integers(0, 50), st.floats(allow_nan=True)),
)
def test_whole_ones_are_kept_as_if_the_damaged_were_not_there(
    steps: set[int],
    damaged: set[int],
    last: int,
    every: int,
    best: int,
    temporary: set[int],
    scores: dict[int, float],
) -> None:
    more: dict[str, Any] = {"temporary": temporary, "scores": {step: {"loss": value} for step, value in scores.items()}}
    rules = Retention(last=last, every=every, best=best)
    gone = set(rules.expendable(steps, damaged=damaged.__contains__, **more))
    assert gone - damaged == set(rules.expendable(steps - damaged, **more))
    assert gone <= set(rules.expendable(steps, **more)), "damage deletes nothing more"


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
    write_scores(tmp_path / "new", {5: None, **scores})
    assert read_scores(tmp_path / "new") == {5: None, **scores}


@pytest.mark.parametrize("damaged", ["{", "", "[]", '{"a": 1}', '{"1": {"loss": "x"}}', "[" * 100_000], ids=len)
def test_damaged_scores_are_not_no_scores(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "scores.json").write_text(damaged)
    with pytest.raises(DamagedCheckpointError, match=r"scores\.json does not hold scores"):
        read_scores(tmp_path)


@pytest.mark.parametrize("then", ["save", "score"])
def test_damaged_scores_delete_nothing(tmp_path: Path, then: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also not after a restart, nor when others are better. What is new, or scored anew, goes by the rules."""

    def run() -> Checkpointer:
        return Checkpointer(tmp_path, keep_last=1, keep_best=1)

    def save(ckpt: Checkpointer, step: int, loss: float) -> list[int]:
        ckpt.score(step, loss=loss)
        ckpt.save(step, {"box": Box(step=step)})
        ckpt.close()
        return ckpt.steps()

    assert [save(run(), step, loss) for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0))][-1] == [1, 3]
    (tmp_path / "scores.json").write_bytes(b"\x00\x00")
    if then == "save":
        ckpt = run()
        ckpt.save(4, {"box": Box(step=4)})
        ckpt.close()
        assert ckpt.steps() == [1, 3, 4]
        assert read_scores(tmp_path) == {1: None, 3: None, 4: None}
        lost = [1, 3, 4]
    else:
        run().score(3, loss=3.0)
        assert read_scores(tmp_path) == {1: None, 3: {"loss": 3.0}}
        lost = [1, 3]
    assert "does not hold scores" in caplog.text and f"those of steps {str(lost)[1:-1]} are kept" in caplog.text
    (aside,) = tmp_path.glob("scores.json.damaged-*")
    assert aside.read_bytes() == b"\x00\x00"
    caplog.clear()
    assert save(run(), 5, 0.5)[0] == 1 and save(run(), 6, 0.7)[0] == 1
    ckpt = run()
    for step in lost:
        ckpt.score(step, loss=9.0)
    assert save(ckpt, 7, 0.9) == [5, 7] and not caplog.text


def test_scores_that_cannot_be_read_delete_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=1, keep_best=1)
    ckpt.save(1, {"box": Box()})
    ckpt.score(1, loss=1.0)
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == "scores.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    for step in (2, 3):
        ckpt.save(step, {"box": Box()})
        ckpt.wait()
    assert ckpt.steps() == [1, 2, 3] and "cannot be read" in caplog.text
    monkeypatch.undo()
    ckpt.save(4, {"box": Box()})
    ckpt.wait()
    assert ckpt.steps() == [1, 4] and read_scores(tmp_path) == {1: {"loss": 1.0}}


def test_a_score_that_cannot_be_written_ends_no_run_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = Checkpointer(tmp_path, keep_last=1, keep_best=1)
    ckpt.save(1, {"box": Box()})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(retention, "replace_file", full)
        ckpt.score(1, loss=1.0)
        assert "the score of step 1 is not in" in caplog.text and "No space left" in caplog.text
        ckpt.save(2, {"box": Box()})
        ckpt.wait()
        assert ckpt.steps() == [1, 2], "nothing is deleted for a score that is not written"
    ckpt.score(2, loss=2.0)
    assert read_scores(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
    ckpt.save(3, {"box": Box()})
    ckpt.wait()
    assert ckpt.steps() == [1, 3]
