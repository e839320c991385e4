"""Megatron's .bin and .idx: written byte for byte as the format says, read back, damage refused."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kforge_data import MegatronTokens, TokenShards, open_tokens, write_megatron

Make = Callable[..., TokenShards]


def written(path: Path, sequences: list[list[int]], documents: list[int], kind: str = "<i4", code: int = 4) -> None:
    """The format by its definition."""
    sizes = [len(sequence) for sequence in sequences]
    width = np.dtype(kind).itemsize
    data = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(documents))
    data += np.array(sizes, "<i4").tobytes()
    data += np.array([width * sum(sizes[:i]) for i in range(len(sizes))], "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(data + np.array(documents, "<i8").tobytes())
    path.with_suffix(".bin").write_bytes(np.array([t for s in sequences for t in s], kind).tobytes())


def test_sequences_of_one_document_are_one(tmp_path: Path) -> None:
    written(tmp_path / "m", [[1, 2], [3], [], [4, 5, 0]], [0, 2, 3, 4])
    stream = MegatronTokens(tmp_path / "m", cache=tmp_path / "cache")
    assert [stream.document(i).tolist() for i in range(stream.documents)] == [[1, 2, 3], [4, 5, 0]]
    assert stream.vocab_size == 6 and stream.dtype == np.uint32
    again = pickle.loads(pickle.dumps(stream))
    assert again.fingerprint == stream.fingerprint and again.tokens == 6


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9), wide=st.booleans()
)
def test_what_is_written_is_the_format(
    make_shards: Make, tmp_path: Path, documents: list[list[int]], wide: bool
) -> None:
    shards = make_shards(documents, vocab_size=100_000 if wide else 100, shard_tokens=9, overwrite=True)
    write_megatron(shards, tmp_path / "a")
    written(tmp_path / "b", documents, list(range(len(documents) + 1)), *(("<i4", 4) if wide else ("<u2", 8)))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "a").with_suffix(suffix).read_bytes() == (tmp_path / "b").with_suffix(suffix).read_bytes()
    stream = MegatronTokens(tmp_path / "a.idx", vocab_size=100, eos_id=0)
    assert [stream.document(i).tolist() for i in range(stream.documents)] == documents
    assert stream.eos_id == 0
    del stream


def test_a_name_with_dots_is_kept(make_shards: Make, tmp_path: Path) -> None:
    write_megatron(make_shards([[1, 0], [2, 0]]), tmp_path / "web")
    write_megatron(make_shards([[3, 0]], name="other"), tmp_path / "web.v2")
    assert MegatronTokens(tmp_path / "web", vocab_size=9).tokens == 4
    for name in ("web.v2", "web.v2.idx", "web.v2.bin"):
        assert open_tokens(tmp_path / name, vocab_size=9).read(0, 2).tolist() == [3, 0]


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "m", [[1, -1]], [0, 1])
    with pytest.raises(ValueError, match="id -1 of int32 is negative"):
        MegatronTokens(tmp_path / "m", cache=tmp_path / "cache")


def test_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with pytest.raises(ValueError, match=r"m.idx does not exist"):
        MegatronTokens(path)
    written(path, [[1, 2], [3]], [0, 1, 2])
    whole = path.with_suffix(".idx").read_bytes()
    for change, message in [
        (b"x" + whole[1:], "no Megatron index"),
        (whole[:9] + struct.pack("<Q", 2) + whole[17:], "version 2"),
        (whole[:17] + b"\x06" + whole[18:], "names type 6"),
        (whole[:-1], "cut short"),
        (whole[:42] + struct.pack("<q", 1) + whole[50:], "do not lie end to end"),
        (whole[:-8] + struct.pack("<q", 1), "do not run from 0 to 2"),
    ]:
        path.with_suffix(".idx").write_bytes(change)
        with pytest.raises(ValueError, match=message):
            MegatronTokens(path)
    path.with_suffix(".idx").write_bytes(whole)
    path.with_suffix(".bin").write_bytes(b"\x00" * 8)
    with pytest.raises(ValueError, match=r"has 8 bytes; m.idx says 12"):
        MegatronTokens(path)
