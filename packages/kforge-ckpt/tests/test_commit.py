from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kforge_ckpt import CheckpointError, DamagedCheckpointError, commit
from kforge_ckpt.files import FileRecord, checksum, checksum_text


def make(root: Path, step: int, name: str | None = None) -> Path:
    folder = commit.stage(root, step)
    files = {"a.json": commit.write_json(folder / "a.json", {"value": step})}
    final = commit.commit(root, folder, step, files)
    return final if name is None else final.rename(root / name)


def test_readers_see_committed_folders_only_and_by_number(tmp_path: Path) -> None:
    """Names are numbers, not text, and what only looks like a checkpoint is left alone."""
    for step, name in ((500, "step_500"), (1000, "step_1000"), (2500, "step_2500")):
        make(tmp_path, step, name)
    make(tmp_path, 2600, "step_2600.tmp")
    (tmp_path / "step_3000").mkdir()
    (tmp_path / "step_abc").mkdir()
    (tmp_path / "step_9999").write_text("a file")
    (tmp_path / "step_٣").mkdir()
    assert list(commit.committed(tmp_path)) == [500, 1000, 2500]
    make(tmp_path, 700)  # another width of padding
    assert list(commit.committed(tmp_path)) == [500, 700, 1000, 2500]
    assert commit.committed(tmp_path)[700].name == "step_00000700"
    assert commit.committed(tmp_path / "absent") == {}


def test_a_step_in_two_paddings_is_the_one_that_we_write(tmp_path: Path) -> None:
    make(tmp_path, 5, "step_5")
    make(tmp_path, 5)
    assert commit.committed(tmp_path) == {5: tmp_path / "step_00000005"}


def test_cleaning_removes_dead_stagings_by_their_exact_name(tmp_path: Path) -> None:
    dead = tmp_path / "step_00000003.tmp-1a2b3c4d"
    dead.mkdir()
    (dead / "half").write_bytes(b"x")
    for name in ("step_00000003.tmp", "step_00000003.tmp-xyz", "step_3.tmp-12345678.bak", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000003.tmp-12345678").write_text("a file")
    (tmp_path / ".latest.tmp").write_text("step_00000002")
    left = commit.leftovers(tmp_path)
    assert left == [dead, tmp_path / ".latest.tmp"]
    for path in left:
        commit.discard(path)
    assert not dead.exists()
    assert len(list(tmp_path.iterdir())) == 5


def test_a_folder_in_the_way_without_a_marker_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "step_00000004").mkdir()
    (tmp_path / "step_00000004" / "mine.txt").write_text("keep")
    make(tmp_path, 4)
    assert list(commit.committed(tmp_path)) == [4]
    (aside,) = (path for path in tmp_path.iterdir() if "unmarked" in path.name)
    assert (aside / "mine.txt").read_text() == "keep"


def test_deleting_leaves_nothing(tmp_path: Path) -> None:
    aside = commit.put_aside(tmp_path, make(tmp_path, 4))
    assert commit.committed(tmp_path) == {} and commit.leftovers(tmp_path) == [aside]
    commit.remove(aside)
    assert list(tmp_path.iterdir()) == []


def test_latest_names_a_folder(tmp_path: Path) -> None:
    for step in (1, 2):
        commit.point_latest(tmp_path, make(tmp_path, step))
        assert (tmp_path / "latest").read_text() == f"{commit.folder_name(step)}\n"
    assert not (tmp_path / ".latest.tmp").exists()


def test_a_file_that_rank_0_does_not_see_is_no_checkpoint(tmp_path: Path) -> None:
    folder = commit.stage(tmp_path, 1)
    with pytest.raises(CheckpointError, match="one shared folder"):
        commit.commit(tmp_path, folder, 1, {"tensors-00001.safetensors": FileRecord(3, "crc32:00000000")})
    (folder / "short").write_bytes(b"ab")
    with pytest.raises(CheckpointError, match="2 bytes where 3 were written"):
        commit.commit(tmp_path, folder, 1, {"short": FileRecord(3, "crc32:00000000")})
    assert commit.committed(tmp_path) == {}


def test_contents_checks_sizes_and_checksums(tmp_path: Path) -> None:
    folder = make(tmp_path, 6)
    contents = commit.Contents(folder)
    contents.check(full=True)
    assert contents.step == 6 and contents.json("a.json") == {"value": 6}
    data = (folder / "a.json").read_bytes()
    (folder / "a.json").write_bytes(data.replace(b"6", b"7"))
    contents.check()
    with pytest.raises(DamagedCheckpointError, match=r"a\.json is damaged: its checksum"):
        contents.check(full=True)
    with pytest.raises(DamagedCheckpointError, match=r"a\.json is damaged: its checksum"):
        contents.json("a.json")
    (folder / "a.json").write_bytes(data + b" ")
    with pytest.raises(DamagedCheckpointError, match=r"a\.json has \d+ bytes where \d+ were written"):
        contents.check()
    (folder / "a.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"a\.json cannot be read"):
        contents.check()


def test_every_file_falls_to_exactly_one_reader(tmp_path: Path) -> None:
    folder = commit.stage(tmp_path, 1)
    files = {f"f{i}.json": commit.write_json(folder / f"f{i}.json", {}) for i in range(5)}
    contents = commit.Contents(commit.commit(tmp_path, folder, 1, files))
    for i in range(5):
        intact = (contents.folder / f"f{i}.json").read_bytes()
        (contents.folder / f"f{i}.json").write_bytes(b"")
        failures = 0
        for part in range(3):
            try:
                contents.check(part, 3)
            except DamagedCheckpointError:
                failures += 1
        assert failures == 1
        (contents.folder / f"f{i}.json").write_bytes(intact)


@pytest.mark.parametrize("marker", [b"", b"[]", b"{}", b"\x80\x04.", b'{"format": 1}', b'{"format": 1, "manifest": 3}'])
def test_a_marker_that_is_none_is_refused(tmp_path: Path, marker: bytes) -> None:
    folder = make(tmp_path, 1)
    (folder / "COMMITTED").write_bytes(marker)
    with pytest.raises(DamagedCheckpointError, match="COMMITTED"):
        commit.Contents(folder)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    (folder / "COMMITTED").write_text(json.dumps({"format": 2}))
    with pytest.raises(CheckpointError, match="format 2, written by a newer kforge-ckpt"):
        commit.Contents(folder)


@pytest.mark.parametrize("name", ["../a.json", "/etc/passwd", ".hidden", "a/b", ""])
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, 1)
    manifest = {"format": 1, "step": 1, "files": {name: {"size": 1, "checksum": "crc32:00000000"}}}
    data = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMITTED").write_text(json.dumps({"format": 1, "step": 1, "manifest": checksum_text(checksum(data))}))
    with pytest.raises(DamagedCheckpointError, match="no file of a checkpoint"):
        commit.Contents(folder)


def test_a_link_to_nowhere_and_what_goes_away_hide_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1)
    (tmp_path / "best").symlink_to("step_00000099")
    assert list(commit.committed(tmp_path)) == [1]
    scandir = os.scandir

    def then_gone(path: Path) -> Any:
        found = list(scandir(path))
        (tmp_path / ".latest.tmp").unlink(missing_ok=True)
        return nullcontext(iter(found))

    (tmp_path / ".latest.tmp").write_text("as a save does between two looks of a reader")
    monkeypatch.setattr(os, "scandir", then_gone)
    assert list(commit.committed(tmp_path)) == [1]


def test_what_is_under_way_in_this_process_is_not_left_behind(tmp_path: Path) -> None:
    folder = commit.stage(tmp_path, 1)
    assert commit.leftovers(tmp_path) == []
    commit.discard(folder)
    folder.mkdir()
    assert commit.leftovers(tmp_path) == [folder]
