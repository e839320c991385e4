"""Damaged checkpoints count for no rule: as many whole ones are kept as if they were not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stateful import Box

from kforge_ckpt import Checkpointer, CheckpointError, tools
from kforge_ckpt.commit import committed
from kforge_ckpt.damage import Damage
from kforge_ckpt.files import Place, place
from kforge_ckpt.mirror import Mirror
from kforge_ckpt.retention import Retention

FILE = "tensors-00000.safetensors"


def box(step: int) -> Box:
    return Box(t=torch.full((8,), float(step)), n=step)


def save(ckpt: Checkpointer, *steps: int) -> list[int]:
    for step in steps:
        assert ckpt.save(step, {"box": box(step)})
    ckpt.close()
    return ckpt.steps()


def cut_short(root: Place, step: int) -> None:
    path = committed(root)[step] / FILE
    content = path.read_bytes()[:-1]
    path.unlink()
    path.write_bytes(content)


def flip(root: Path, step: int) -> None:
    path = root / f"step_{step:08d}" / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["folder", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place(tmp_path / "run" if request.param == "folder" else f"memory://{tmp_path}")


def checkpointer(root: Place, **options: int) -> Checkpointer:
    return Checkpointer(str(root), **options)  # type: ignore[arg-type]


def test_it_is_looked_at_once_and_told_of(root: Place, caplog: pytest.LogCaptureFixture) -> None:
    save(checkpointer(root), 1, 2, 3)
    cut_short(root, 2)
    damage = Damage(root)
    assert not damage.known(2)
    assert [damage(step) for step in (1, 2, 3, 2)] == [False, True, False, True] and damage.known(2)
    assert caplog.text.count("step 2 is damaged, and not counted") == 1
    damage.tell(2, False)
    damage.tell(3, True)
    assert not damage(2) and damage(3)


@pytest.mark.parametrize("restored", [False, True])
def test_as_many_whole_ones_are_kept(root: Place, restored: bool) -> None:
    """Whether the run went on from the one before it, or never looked."""
    assert save(checkpointer(root, keep_last=2), 1, 2, 3) == [2, 3]
    cut_short(root, 3)
    ckpt = checkpointer(root, keep_last=2)
    if restored:
        assert ckpt.restore({"box": box(0)}) == 2
    assert save(ckpt, 4) == [2, 3, 4]  # kept as before, and 2 in its stead
    assert save(ckpt, 5) == [4, 5]


def test_a_flipped_bit_that_a_restore_has_found_counts_too(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path, keep_last=2), 1, 2)
    flip(tmp_path, 2)
    ckpt = Checkpointer(tmp_path, keep_last=2)
    assert ckpt.restore({"box": box(0)}, verify="full") == 1
    assert save(ckpt, 3) == [1, 2, 3]


def test_the_best_whole_one_is_kept(root: Place) -> None:
    ckpt = checkpointer(root, keep_last=1, keep_best=1)
    for step, loss in ((1, 2.0), (2, 1.0)):
        ckpt.score(step, loss=loss)
        save(ckpt, step)
    assert ckpt.steps() == [2]
    for step, loss in ((3, 1.5), (4, 3.0)):
        ckpt.score(step, loss=loss)
        save(ckpt, step)
    assert ckpt.steps() == [2, 4]
    cut_short(root, 2)
    again = checkpointer(root, keep_last=1, keep_best=1)
    again.score(5, loss=2.5)
    assert save(again, 5) == [2, 5]
    assert save(again, 6) == [2, 5, 6]


def test_below_a_damaged_one_latest_names_the_whole_one(root: Place, caplog: pytest.LogCaptureFixture) -> None:
    save(checkpointer(root), 1, 9)
    cut_short(root, 9)
    save(checkpointer(root), 2)
    assert (root / "latest").read_bytes().decode().strip() == committed(root)[2].name
    assert "a restore takes step" not in caplog.text  # it does not


def test_its_step_is_saved_anew_by_a_run_that_never_restored_it(root: Place) -> None:
    save(checkpointer(root), 1, 2)
    cut_short(root, 2)
    ckpt = checkpointer(root)
    assert ckpt.restore({"box": box(0)}, 1) == 1
    assert save(ckpt, 2) == [1, 2]
    found = box(0)
    assert checkpointer(root).restore({"box": found}, verify="full") == 2 and found.values["n"] == 2


def test_nothing_is_deleted_while_it_cannot_be_looked_at(
    root: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpointer(root, keep_last=3), 1, 2, 3)

    def away(damage: Damage, step: int) -> bool:
        raise CheckpointError("the store is away")

    monkeypatch.setattr(Damage, "__call__", away)
    assert save(checkpointer(root, keep_last=1), 4) == [1, 2, 3, 4]
    assert "tidying up" in caplog.text and "the store is away" in caplog.text


def test_the_one_before_damaged_ones_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One whose size is wrong is known before the copy, one with a flipped bit is found by it."""
    target = place(f"memory://{tmp_path}")
    save(Checkpointer(tmp_path / "run", keep_last=4), 1, 2, 3, 4)
    cut_short(tmp_path / "run", 3)
    flip(tmp_path / "run", 4)
    copied = []
    keep, damage = Retention(last=1), Damage(tmp_path / "run")
    mirror = Mirror(tmp_path / "run", target, keep, lambda kind, **values: copied.append(values["step"]), damage)
    mirror.close()
    assert copied == [2] == list(committed(target))
    assert mirror.waiting([1, 2, 3, 4]) == set() and "step 4 is not copied" in caplog.text


def test_a_damaged_copy_is_none_of_those_kept_there(tmp_path: Path) -> None:
    folder, url = tmp_path / "run", f"memory://{tmp_path}"
    save(Checkpointer(folder, keep_last=2, remote=url), 1, 2)
    cut_short(place(url), 2)
    save(Checkpointer(folder, keep_last=2, remote=url), 3)
    assert list(committed(place(url))) == [1, 2, 3]


def test_the_last_whole_one_is_not_removed_unasked(tmp_path: Path) -> None:
    save(Checkpointer(tmp_path), 1, 2, 3)
    for step in (2, 3):
        cut_short(tmp_path, step)
    with pytest.raises(CheckpointError, match="would hold none that is whole, only 2, 3; say --all if"):
        tools.remove(tmp_path, [1])
    tools.remove(tmp_path, [2])
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    tools.remove(tmp_path, [1], all_of_them=True)
    assert Checkpointer(tmp_path).steps() == [3] and (tmp_path / "latest").read_text() == "step_00000003\n"
