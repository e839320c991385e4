"""A set exists or it does not: what is refused, aborted or killed leaves nothing or what was there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kforge_data import ShardWriter, TokenShards, verify_shards

Make = Callable[..., TokenShards]


def test_ids_outside_of_the_vocabulary_are_refused_and_nothing_stays(tmp_path: Path) -> None:
    for bad in (100, -1):
        with (
            pytest.raises(ValueError, match=f"id {bad} is outside of a vocabulary of 100"),
            ShardWriter(tmp_path / "deep" / "s", vocab_size=100, shard_tokens=2) as writer,
        ):
            writer.add([1, 2, 3])
            writer.add([1, bad])
        assert list(tmp_path.iterdir()) == []


def test_abort_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    writer = ShardWriter(tmp_path, vocab_size=10)
    writer.add([1])
    writer.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_writer_killed_before_the_end_leaves_no_set(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom kforge_data import ShardWriter\n"
        "w = ShardWriter(sys.argv[1], vocab_size=10, shard_tokens=2, overwrite=True)\n"
        "for _ in range(5): w.add([1, 2])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "s")]
    assert subprocess.run(command, check=False).returncode == -9
    assert any((tmp_path / "s").iterdir())
    with pytest.raises(ValueError, match="never finished"):
        TokenShards(tmp_path / "s")
    # A second try needs no cleaning up, and removes the leftovers.
    with ShardWriter(tmp_path / "s", vocab_size=10) as writer:
        writer.add([3])
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0-00000.bin", "0-00000.docs", "index.json"]
    # Killed while it replaces a finished set: the finished one is whole.
    assert subprocess.run(command, check=False).returncode == -9
    assert verify_shards(tmp_path / "s") == []
    assert TokenShards(tmp_path / "s").read(0, 1).tolist() == [3]


def test_overwriting_is_asked_for_and_keeps_open_readers_alive(make_shards: Make) -> None:
    old = make_shards([[1, 2, 3]])
    with pytest.raises(ValueError, match="already holds token shards"):
        make_shards([[4]])
    new = make_shards([[4], [5]], overwrite=True)
    assert new.read(0, 2).tolist() == [4, 5] and old.read(0, 3).tolist() == [1, 2, 3]
    assert len(list(new.path.iterdir())) == 3


def test_a_finished_writer_takes_no_more(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", vocab_size=10)
    writer.add([1])
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.add([2])
    with pytest.raises(ValueError, match="finished"):
        writer.finish()
    writer.abort()
    assert TokenShards(tmp_path / "s").tokens == 1


def test_a_failed_finish_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError),
        ShardWriter(tmp_path / "s", vocab_size=10, meta={"what": object()}) as writer,
    ):
        writer.add([1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"vocab_size": 2**33}, "does not fit into 32-bit"),
        ({"vocab_size": 10, "dtype": "int8"}, "'int8' is not one of"),
        ({"vocab_size": 10, "shard_tokens": 0}, "shard_tokens = 0"),
        ({"vocab_size": 10, "eos_id": 10}, "eos_id = 10"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardWriter(tmp_path / "s", **options)  # type: ignore[arg-type]


def test_documents_that_cannot_be(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", vocab_size=10)
    with pytest.raises(ValueError, match="integers"):
        writer.add([0.5])
    with pytest.raises(ValueError, match=r"ids of shape \[2, 2\]; one document is"):
        writer.add([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="lengths sum to 3"):
        writer.add_batch([1, 2], [3], [0])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        ShardWriter(tmp_path / "file", vocab_size=10)
