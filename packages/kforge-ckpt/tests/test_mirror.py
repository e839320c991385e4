"""A local folder, and copies of its checkpoints in S3 made beside the run."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import Box

from kforge_ckpt import Checkpointer, CheckpointError, CkptConfig, commit, files, retrying
from kforge_ckpt.damage import Damage
from kforge_ckpt.files import entries, place
from kforge_ckpt.mirror import Mirror
from kforge_ckpt.retention import Retention, read_scores
from kforge_ckpt.retrying import Patience
from kforge_testing import RankFailure, run_ranks


def box(step: int) -> Box:
    return Box(t=torch.full((64, 8), float(step)), n=step)


def save(folder: Path, url: str, *steps: int, **options: Any) -> Checkpointer:
    ckpt = Checkpointer(folder, remote=url, **options)
    try:
        for step in steps:
            ckpt.save(step, {"box": box(step)})
    finally:
        ckpt.close()
    return ckpt


def restored(ckpt: Checkpointer) -> int | None:
    found = box(0)
    step = ckpt.restore({"box": found}, verify="full")
    assert step is None or (found.values["n"] == step and found.values["t"].equal(box(step).values["t"]))
    return step


@pytest.mark.parametrize("options", [{}, {"mode": "async", "overlap": True}], ids=["sync", "async"])
def test_a_bare_node_goes_on_from_the_copies(s3: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    url, folder = f"s3://{s3.bucket}/run", tmp_path / "run"
    told: list[tuple[str, int]] = []
    ckpt = Checkpointer(
        folder, remote=url, keep_last=2, on_event=lambda kind, v: told.append((kind, v["step"])), **options
    )
    for step in (1, 2, 3):
        ckpt.save(step, {"box": box(step)}, temporary=step == 3, meta={"tokens": step})
        ckpt.score(step, loss=float(step))
    ckpt.close()
    assert list(commit.committed(place(url)))[-1] == 3
    copied = [step for kind, step in told if kind == "checkpoint_copied"]
    assert copied == sorted(copied) and copied[-1] == 3
    assert commit.is_temporary(commit.committed(place(url))[3])
    shutil.rmtree(folder)
    again = Checkpointer(folder, remote=url, keep_last=2)
    assert restored(again) == 3 and again.meta(3) == {"tokens": 3} and again.latest() == 3
    again.save(4, {"box": box(4)})
    again.close()
    assert list(commit.committed(folder)) == [4] and again.steps()[-2:] == [2, 4]
    assert 3 not in commit.committed(place(url))  # it was of use until there was a later one


def test_copies_are_those_that_cp_makes(s3: Any, tmp_path: Path) -> None:
    url, folder = f"s3://{s3.bucket}/run", tmp_path / "run"
    save(folder, url, 5)
    (copy,) = commit.committed(place(url)).values()
    local = folder / "step_00000005"
    assert {name: (copy / name).read_bytes() for name in entries(copy)} == {
        path.name: path.read_bytes() for path in local.iterdir()
    }
    assert (place(url) / "latest").read_bytes().decode().strip() == copy.name


def test_while_the_store_is_away_all_is_kept_here(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outcome: no save fails, nothing is deleted that is nowhere else, `close` raises; the next run copies what the
    rules keep, the oldest first, and then deletes."""
    monkeypatch.setattr(retrying, "PATIENCE", Patience(attempts=2))
    url, folder = f"s3://{s3.bucket}/run", tmp_path / "run"
    s3.fault = lambda request: s3.error(503, "SlowDown")
    with pytest.raises(CheckpointError, match=rf"of {folder} were not copied to {url}: .* given up after 2 attempts"):
        save(folder, url, 1, 2, 3, 4, keep_last=2)
    assert list(commit.committed(folder)) == [1, 2, 3, 4] and "but not copied to" in caplog.text
    s3.clear()
    save(folder, url, 5, keep_last=3)
    assert list(commit.committed(place(url))) == [3, 4, 5]
    markers = [r.path for r in s3.requests if r.method == "PUT" and r.path.endswith("COMMITTED")]
    assert [int(re.findall(r"step_(\d+)", path)[0]) for path in markers] == sorted([3, 4, 5])
    save(folder, url, 6, keep_last=2)
    assert list(commit.committed(folder)) == list(commit.committed(place(url))) == [5, 6]


def test_access_denied_is_told_at_once_and_ends_no_run(
    s3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, folder = f"s3://{s3.bucket}/run", tmp_path / "run"
    s3.fault = lambda request: s3.error(403, "AccessDenied")
    with pytest.raises(CheckpointError, match=r"were not copied to .*Check that the credentials"):
        save(folder, url, 1)
    assert "was denied: HTTP 403" in caplog.text
    ckpt = Checkpointer(folder)
    assert restored(ckpt) == 1


def test_a_damaged_one_here_is_taken_from_there(tmp_path: Path) -> None:
    url, folder = f"memory://{tmp_path}", tmp_path / "run"
    save(folder, url, 1, 2)
    file = folder / "step_00000002" / "tensors-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert restored(Checkpointer(folder, remote=url)) == 2
    file.write_bytes(file.read_bytes() + b"\x00")


def test_a_flipped_bit_here_is_not_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, folder = f"memory://{tmp_path}", tmp_path / "run"
    save(folder, f"memory://{tmp_path}/elsewhere", 1)
    file = folder / "step_00000001" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    save(folder, url, 2)
    assert list(commit.committed(place(url))) == [2] and "step 1 is not copied" in caplog.text
    assert not [name for name in entries(place(url)) if name.startswith("step_00000001")]


def copy_and_die(rank: int, world: int, folder: str, url: str, point: str) -> None:
    ckpt = Checkpointer(folder, remote=url)
    ckpt.save(1, {"box": box(1)})
    ckpt.close()
    ckpt.save(2, {"box": box(2)})
    before = files.write_file

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    import kforge_ckpt.mirror as mirror

    def write(path: Any, blocks: Any) -> Any:
        if path.name.startswith(point):
            die()
        return before(path, blocks)

    mirror.write_file = write  # type: ignore[attr-defined]
    ckpt.save(3, {"box": box(3)})
    ckpt.close()


@pytest.mark.parametrize("point", ["state", "tensors-"])
def test_kill_9_in_the_middle_of_a_copy(s3: Any, tmp_path: Path, point: str) -> None:
    """Outcome: nothing of it is seen; the next run sends what is missing, and not again what is there."""
    url, folder = f"s3://{s3.bucket}/run", tmp_path / "run"
    with pytest.raises(RankFailure):
        run_ranks(copy_and_die, 1, str(folder), url, point, init=False, env=s3.environment)
    there = list(commit.committed(place(url)))
    assert there in ([1], [1, 2])
    bare = Checkpointer(tmp_path / "bare", remote=url)
    assert restored(bare) == there[-1]
    partial = {key for key in s3.names() if "step_" in key}
    s3.requests.clear()
    save(folder, url, 4)
    assert list(commit.committed(place(url)))[-1] == 4
    assert restored(Checkpointer(tmp_path / "bare", remote=url)) == 4
    sent = {request.path.split("/", 2)[2] for request in s3.requests if request.method == "PUT"}
    assert not partial & sent
    assert all(commit.MARKER in entries(place(url) / name) for name in entries(place(url)) if name.startswith("step_"))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a folder, or no remote"):
        Checkpointer("memory://a", remote="memory://b")
    with pytest.raises(ValueError, match="is no URL"):
        Checkpointer(tmp_path, remote=str(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"ckpt\.remote = 'bucket/run' is no URL"):
        CkptConfig(remote="bucket/run")
    with pytest.raises(ValueError, match=r"ckpt\.remote = 's3://b' is for a folder, and ckpt\.dir is a URL"):
        CkptConfig(dir="s3://a", remote="s3://b")
    with pytest.raises(ValueError, match=r"ckpt\.writer = 'process' is for a folder"):
        CkptConfig(dir="s3://a", writer="process")


def test_a_bare_node_forgets_no_score_of_the_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one whose scores are damaged: the best copy stays, and good scores are not replaced by bad ones."""
    url, folder = f"memory://{tmp_path}", tmp_path / "run"

    def save(step: int, loss: float) -> list[int]:
        ckpt = Checkpointer(folder, remote=url, keep_last=1, keep_best=1)
        ckpt.score(step, loss=loss)
        ckpt.save(step, {"box": box(step)})
        ckpt.close()
        return list(commit.committed(place(url)))

    assert [save(1, 1.0), save(2, 2.0)][-1] == [1, 2]
    shutil.rmtree(folder)
    assert [save(3, 3.0), save(4, 4.0)][-1] == [1, 4]
    assert read_scores(place(url)) == {step: {"loss": float(step)} for step in (1, 2, 3, 4)}
    (folder / "scores.json").write_text("{")
    assert save(5, 5.0)[0] == 1 and "does not hold scores" in caplog.text
    assert (read_scores(place(url)) or {})[1] == {"loss": 1.0}
    (place(url) / "scores.json").write_bytes(b"{")
    assert save(6, 6.0)[0] == 1


def test_damaged_scores_of_a_folder_keep_all_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, folder = f"memory://{tmp_path}", tmp_path / "run"
    save(folder, url, 1, 2, keep_last=2)
    (folder / "scores.json").write_text("{")
    mirror = Mirror(folder, place(url), Retention(last=1, best=1), lambda *_, **__: None, Damage(folder))
    Checkpointer(folder, keep_last=3).save(3, {"box": box(3)})
    mirror.close()
    assert list(commit.committed(place(url))) == [1, 2, 3] and "no copy in" in caplog.text
