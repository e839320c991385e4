""".npy and raw .bin token files: the type is stated or read, never guessed (S25); documents are found by their ends."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kforge_data.raw
from kforge_data import Loader, TokenFiles


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_ids_come_back(tmp_path: Path, dtype: str, suffix: str) -> None:
    ids = np.array([5, 6, 0, 7, 8, 9, 0, 1], dtype)
    file = tmp_path / f"t.{suffix}"
    np.save(file, ids) if suffix == "npy" else ids.tofile(file)
    stream = TokenFiles(file, dtype=dtype if suffix == "bin" else None, eos_id=0, cache=tmp_path / "cache")
    assert stream.read(0, 8).tolist() == ids.tolist() and stream.vocab_size == 10
    assert [stream.document(i).tolist() for i in range(stream.documents)] == [[5, 6, 0], [7, 8, 9, 0], [1]]
    again = pickle.loads(pickle.dumps(stream))
    assert again.fingerprint == stream.fingerprint and again.read(3, 5).tolist() == [7, 8]


def test_an_even_number_of_16_bit_ids_is_not_read_as_32_bit(tmp_path: Path) -> None:
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "t.bin")
    with pytest.raises(ValueError, match="cannot be told from its bytes; give dtype"):
        TokenFiles(tmp_path / "t.bin", cache=tmp_path)
    assert TokenFiles(tmp_path / "t.bin", dtype="uint16", cache=tmp_path).read(0, 8).tolist() == list(range(8))
    with pytest.raises(ValueError, match=r"id 458758 is outside of a vocabulary of 100; wrong dtype\?"):
        TokenFiles(tmp_path / "t.bin", dtype="uint32", vocab_size=100, cache=tmp_path)
    with pytest.raises(ValueError, match="no whole number of uint32"):
        np.arange(7, dtype=np.uint16).tofile(tmp_path / "t.bin")
        TokenFiles(tmp_path / "t.bin", dtype="uint32", cache=tmp_path)


@settings(deadline=None, max_examples=40)
@given(files=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4), scan=st.integers(1, 9))
def test_documents_end_where_the_end_of_text_is(files: list[list[int]], scan: int) -> None:
    with pytest.MonkeyPatch.context() as patch, __import__("tempfile").TemporaryDirectory() as folder:
        patch.setattr(kforge_data.raw, "_SCAN", scan)
        for i, ids in enumerate(files):
            np.save(Path(folder) / f"{i}.npy", np.array(ids, np.uint16))
        expected: list[list[int]] = []
        for ids in filter(None, files):
            expected.append([])
            for i, token in enumerate(ids):
                expected[-1].append(token)
                if token == 0 and i + 1 < len(ids):
                    expected.append([])
        if not expected:
            with pytest.raises(ValueError, match="no tokens in there"):
                TokenFiles(folder, eos_id=0, vocab_size=4, cache=Path(folder) / "c")
            return
        stream = TokenFiles(folder, eos_id=0, vocab_size=4, cache=Path(folder) / "c")
        assert [stream.document(i).tolist() for i in range(stream.documents)] == expected
        bounds = stream.document_bounds(0, stream.documents)
        assert bounds.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
        middle = stream.documents // 2
        assert stream.document_bounds(middle, stream.documents).tolist() == bounds[middle:].tolist()
        del stream


def test_the_pass_over_the_files_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 0, 2], np.uint16))
    first = TokenFiles(tmp_path, eos_id=0, cache=tmp_path / "cache")
    monkeypatch.setattr(kforge_data.raw, "_scan", None)
    assert TokenFiles(tmp_path, eos_id=0, cache=tmp_path / "cache").documents == first.documents == 2
    np.save(tmp_path / "a.npy", np.array([1, 0, 3], np.uint16))
    with pytest.raises(TypeError):  # another content is looked at anew
        TokenFiles(tmp_path, eos_id=0, cache=tmp_path / "cache")


def test_the_loader_reads_it_without_an_end_of_text(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.int32))
    stream = TokenFiles(tmp_path / "a.npy", cache=tmp_path)
    with Loader(stream, row_tokens=5, global_rows=2, shuffle=False, epochs=1) as loader:
        (batch,) = loader.next()
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, -100]]


def test_what_cannot_be(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros(3, np.float32))
    np.save(tmp_path / "two.npy", np.zeros((2, 2), np.uint16))
    np.save(tmp_path / "ok.npy", np.zeros(2, np.uint16))
    np.save(tmp_path / "wide.npy", np.zeros(2, np.uint32))
    np.save(tmp_path / "negative.npy", np.array([-1], np.int32))
    (tmp_path / "bad.npy").write_bytes(b"xx")
    (tmp_path / "t.txt").write_text("x")
    for arguments, message in [
        ({"paths": tmp_path / "f.npy"}, "token ids are integers"),
        ({"paths": tmp_path / "two.npy"}, "token ids are integers"),
        ({"paths": tmp_path / "bad.npy"}, "is no .npy file"),
        ({"paths": tmp_path / "ok.npy", "dtype": "uint32"}, "says that it is uint16"),
        ({"paths": [tmp_path / "ok.npy", tmp_path / "wide.npy"]}, "differ in type"),
        ({"paths": tmp_path / "negative.npy", "vocab_size": 9}, "id -1 of int32 is negative"),
        ({"paths": tmp_path / "t.txt"}, "format is not guessed"),
        ({"paths": tmp_path / "none.npy"}, "does not exist"),
        ({"paths": []}, "no .npy or .bin file"),
        ({"paths": tmp_path / "ok.npy", "dtype": "float32"}, "dtype = 'float32' is not one of"),
        ({"paths": tmp_path / "ok.npy", "eos_id": 7}, "eos_id = 7 is not an id"),
    ]:
        with pytest.raises(ValueError, match=message):
            TokenFiles(**arguments, cache=tmp_path / "cache")


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    """-1 of 16 bits is read as 65535, which a vocabulary may have."""
    for kind in (np.int16, np.int64):
        np.save(tmp_path / "t.npy", np.array([1, -1, 2], kind))
        for vocab_size in (None, 1 << 16):
            with pytest.raises(ValueError, match=rf"id -1 of {np.dtype(kind)} is negative"):
                TokenFiles(tmp_path / "t.npy", vocab_size=vocab_size, cache=tmp_path / "cache")


def test_an_archive_is_no_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", ids=np.arange(3))
    (tmp_path / "t.npz").rename(tmp_path / "t.npy")
    with pytest.raises(ValueError, match=r"t.npy is no .npy file: it is an archive"):
        TokenFiles(tmp_path / "t.npy", cache=tmp_path)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_an_end_of_text_that_is_nowhere_is_told_of(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, ids in enumerate([[5, 6, 2], [7, 8, 9, 2]]):
        array = np.array(ids, np.uint16)
        file = tmp_path / f"{number}.{suffix}"
        np.save(file, array) if suffix == "npy" else array.tofile(file)
    options: dict[str, Any] = {"dtype": "uint16" if suffix == "bin" else None, "cache": tmp_path / "cache"}
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        assert TokenFiles(tmp_path, eos_id=0, **options).documents == 2
        (record,) = caplog.records
        assert re.search(
            r"eos_id = 0 does not occur in its 7 tokens, so each of 2 files is one document.*\(the last one is 2\), "
            r"give that as eos_id \(data.eos_id, --eos-id\); .*leave eos_id out",
            record.getMessage(),
        )
    caplog.clear()
    for eos_id in (2, 7, None):  # at the end of each file, in one alone, and no end looked for
        TokenFiles(tmp_path, eos_id=eos_id, **options)
    assert not caplog.records
