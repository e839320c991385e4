"""The format: what is written is read back as documents, stream and rows; a wrong file is refused."""

from __future__ import annotations

import copy
import json
import operator
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_data import Loader, PackedDocuments, ShardWriter, TokenShards, verify_shards

Make = Callable[..., TokenShards]
DOCUMENTS = st.lists(st.lists(st.integers(0, 99_999), max_size=12), max_size=20)


@settings(deadline=None, max_examples=30)
@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 30), batches=st.booleans())
def test_what_is_written_is_read(documents: list[list[int]], shard_tokens: int, batches: bool) -> None:
    filled = [document for document in documents if document]
    flat = [token for document in filled for token in document]
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder) / "s", vocab_size=100_000, shard_tokens=shard_tokens) as writer:
            if batches:
                lengths = [len(document) for document in documents]
                writer.add_batch(np.array(flat, np.int64), lengths, [3 * n for n in lengths])
            else:
                for document in documents:
                    writer.add(document, text_bytes=3 * len(document))
        shards = TokenShards(Path(folder) / "s")
        assert shards.tokens == len(flat) and shards.documents == len(filled)
        assert shards.text_bytes == 3 * len(flat)
        assert shards.index.skipped_documents == len(documents) - len(filled)
        assert [shards.document(i).tolist() for i in range(shards.documents)] == filled
        assert shards.read(0, shards.tokens).tolist() == flat
        for shard in shards.index.shards:  # full, but for a document that is longer by itself
            assert shard.tokens <= shard_tokens or shard.documents == 1
        assert verify_shards(Path(folder) / "s") == []
        del shards


def slow_row(flat: list[int], begins: set[int], row: int, length: int) -> tuple[list[int], int, list[int]]:
    """A row by the definition: tokens with look-ahead, valid count, columns 1..length at which documents start."""
    cut = flat[row * length : (row + 1) * length + 1]
    starts = [column for column in range(1, length + 1) if row * length + column in begins]
    return cut + [0] * (length + 1 - len(cut)), len(cut), starts


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=25),
    shard_tokens=st.integers(1, 40),
    length=st.integers(1, 17),
    data=st.data(),
)
def test_rows_are_pieces_of_the_stream(
    documents: list[list[int]], shard_tokens: int, length: int, data: st.DataObject
) -> None:
    flat = [token for document in documents for token in document]
    begins = set(np.cumsum([0] + [len(document) for document in documents])[:-1].tolist())
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(Path(folder) / "s", vocab_size=100, shard_tokens=shard_tokens) as writer:
            for document in documents:
                writer.add(document)
        shards = TokenShards(Path(folder) / "s")
        count = shards.row_count(length)
        assert count == -(-len(flat) // length)
        rows = data.draw(st.lists(st.integers(0, count - 1), max_size=8))
        block = shards.read_rows(np.array(rows, np.int64), length)
        expected = [slow_row(flat, begins, row, length) for row in rows]
        assert block.tokens.tolist() == [tokens for tokens, _, _ in expected]
        assert block.valid.tolist() == [valid for _, valid, _ in expected]
        marks = [(i, column) for i, (_, _, starts) in enumerate(expected) for column in starts]
        assert list(zip(block.start_rows.tolist(), block.start_columns.tolist(), strict=True)) == marks
        # The bound on documents is the real maximum over all rows.
        most = 0
        for row in range(count):
            _, valid, starts = slow_row(flat, begins, row, length)
            most = max(most, 1 + sum(column < length for column in starts) + (valid < length))
        assert shards.max_documents(length) == most
        del shards, block


# C06: 16-bit token files corrupt ids of large vocabularies.


def test_c06_large_ids_come_back(make_shards: Make) -> None:
    shards = make_shards([[65535, 65536, 70000, 127999]], vocab_size=128_000)
    assert shards.dtype == np.uint32 and shards.index.dtype == "uint32"
    assert shards.read(0, 4).tolist() == [65535, 65536, 70000, 127999]


def test_c06_forced_16_bit_is_refused_before_any_file(tmp_path: Path) -> None:
    for size in (128_000, 65_537):
        with pytest.raises(ValueError, match=f"vocabulary of {size} needs ids up to {size - 1}, which uint16 cannot"):
            ShardWriter(tmp_path / "s", vocab_size=size, dtype="uint16")
    assert list(tmp_path.iterdir()) == []


def test_c06_the_border(make_shards: Make) -> None:
    assert make_shards([[65535]], name="a", vocab_size=65_536).dtype == np.uint16
    assert make_shards([[65536]], name="b", vocab_size=65_537).dtype == np.uint32
    assert make_shards([[7]], name="c", vocab_size=100, dtype="uint32").dtype == np.uint32


def test_c06_a_wrong_recorded_type_is_an_error(make_shards: Make) -> None:
    shards = make_shards([[1, 2, 3, 4]], vocab_size=100)
    index = json.loads((shards.path / "index.json").read_text())
    index["dtype"] = "uint32"
    (shards.path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"has 8 bytes; 4 entries of uint32.* are 16"):
        TokenShards(shards.path)


def test_an_even_count_of_16_bit_ids_is_not_taken_for_32_bit(make_shards: Make) -> None:
    assert make_shards([[1, 2, 3, 4]], vocab_size=100).read(0, 4).tolist() == [1, 2, 3, 4]


# Reading.


def test_opening_what_is_not_a_set(tmp_path: Path, make_shards: Make) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        TokenShards(tmp_path / "nothing")
    make_shards([[1]], name="train")
    with pytest.raises(ValueError, match=r"no index.json.*it has train inside"):
        TokenShards(tmp_path)
    shards = make_shards([[1, 2]], name="s")
    index = json.loads((shards.path / "index.json").read_text())
    for change, message in [
        ({"format": "other"}, "not an index"),
        ({"version": 99}, "version 99"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"vocab_size": 10**6}, "uint16 cannot hold"),
        ({"tokens": 3}, "counts 3 tokens, its shards 2"),
        ({"shards": [{**index["shards"][0], "name": "../x"}]}, "impossible name"),
        ({"shards": [{**index["shards"][0], "documents": 3}]}, "3 documents of 2 tokens"),
        ({"surprise": 1}, "damaged"),
    ]:
        (shards.path / "index.json").write_text(json.dumps({**index, **change}))
        with pytest.raises(ValueError, match=message):
            TokenShards(shards.path)
    (shards.path / "index.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        TokenShards(shards.path)


def test_whatever_is_damaged_in_an_index_is_an_error_or_another_fingerprint(make_shards: Make) -> None:
    """Each entry in turn missing, or of another value: refused by name, or not the same set for a resume."""
    shards = make_shards([[1, 2, 0], [3, 0], [4, 0]], vocab_size=10, eos_id=0, bos_id=1, shard_tokens=4)
    file = shards.path / "index.json"
    whole = json.loads(file.read_text())
    bad = (None, True, -1, 1, 2.0, 10**30, "x", "", [], {}, [1], "uint32", "0-00001")
    refused = opened = 0
    for place in [(), ("shards", 0), ("shards", 1)]:
        table = reduce(operator.getitem, place, whole)
        for key, before in table.items():
            for value in ("(gone)", *bad):
                changed = copy.deepcopy(whole)
                reduce(operator.getitem, place, changed)[key] = value
                if value == "(gone)":
                    del reduce(operator.getitem, place, changed)[key]
                file.write_text(json.dumps(changed))
                if type(value) is type(before) and value == before:
                    continue
                try:
                    found = TokenShards(shards.path)
                except ValueError as error:
                    assert str(shards.path) in str(error), (place, key, value)
                    refused += 1
                    continue
                opened += 1
                harmless = key in ("meta", "skipped_documents")
                assert harmless or found.fingerprint != shards.fingerprint, (place, key, value)
                assert found.read(0, found.tokens).tolist() == [1, 2, 0, 3, 0, 4, 0], (place, key, value)
    assert refused > 250 and opened < 60
    for start in range(0, len(text := json.dumps(whole)), 7):  # cut anywhere
        file.write_text(text[:start])
        with pytest.raises(ValueError, match=r"index.json is"):
            TokenShards(shards.path)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        TokenShards(shards.path)


@pytest.mark.parametrize("value", [-1, 0, 2, 10**12])
@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_boundaries_that_are_damaged_are_an_error_before_the_first_row(
    make_shards: Make, tmp_path: Path, at: int, value: int
) -> None:
    shards = make_shards([[1, 2, 0], [3, 0], [4, 0]], eos_id=0)
    places = np.fromfile(shards.path / "0-00000.docs", "<i8")
    if places[at] == value:
        value = 3
    places[at] = value
    places.tofile(shards.path / "0-00000.docs")
    wrong = r"where documents begin in its file number 0 does not run from 0 to 7"
    for source in (TokenShards(shards.path), PackedDocuments(TokenShards(shards.path), cache=tmp_path / "cache")):
        if at == 1 and value == 2:  # a boundary that may be: `verify` alone can tell
            assert verify_shards(shards.path)
            continue
        with pytest.raises(ValueError, match=wrong):
            Loader(source, row_tokens=4, global_rows=1)


def test_an_index_of_other_bytes_is_an_error_by_name(make_shards: Make) -> None:
    path = make_shards([[1]]).path
    (path / "index.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        TokenShards(path)


def test_a_missing_or_cut_file_is_an_error_by_name(make_shards: Make) -> None:
    shards = make_shards([[1, 2, 3]])
    with open(shards.path / "0-00000.bin", "r+b") as file:
        file.truncate(4)
    with pytest.raises(ValueError, match=r"0-00000.bin has 4 bytes; 3 entries"):
        TokenShards(shards.path)
    os.unlink(shards.path / "0-00000.bin")
    with pytest.raises(ValueError, match=r"0-00000.bin is listed"):
        TokenShards(shards.path)


def test_reading_outside_is_an_error(make_shards: Make) -> None:
    shards = make_shards([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"tokens 1\.\.4"):
        shards.read(1, 4)
    with pytest.raises(ValueError, match="document 1 does not exist"):
        shards.document(1)
    with pytest.raises(ValueError, match=r"row 0\.\.2 asked for; there are 2"):
        shards.read_rows(np.array([0, 2]), 2)
    with pytest.raises(ValueError, match="row_tokens = 0"):
        shards.row_count(0)
    assert shards.read(2, 2).tolist() == []


def test_fingerprint_is_of_the_content(make_shards: Make) -> None:
    one = make_shards([[1, 2], [3]], name="a")
    assert one.fingerprint == make_shards([[1, 2], [3]], name="b").fingerprint
    others = [
        make_shards([[1, 2, 3]], name="c"),  # other boundaries
        make_shards([[1, 2], [4]], name="d"),
        make_shards([[1, 2], [3]], name="e", tokenizer="sha256:x"),
        make_shards([[1, 2], [3]], name="f", dtype="uint32"),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_it_travels_by_pickle(make_shards: Make) -> None:
    shards = make_shards([[1, 2], [3]])
    again = pickle.loads(pickle.dumps(shards))
    assert again.fingerprint == shards.fingerprint and again.read(0, 3).tolist() == [1, 2, 3]


def test_bits_per_byte(make_shards: Make) -> None:
    shards = make_shards([[1, 2, 3, 4]])  # two bytes a token
    assert shards.bits_per_byte(np.log(2.0)) == pytest.approx(0.5, rel=1e-12)
    with pytest.raises(ValueError, match="does not know its bytes"):
        make_shards([], name="none").bits_per_byte(1.0)


def test_opening_maps_and_does_not_read(tmp_path: Path) -> None:
    """A set of 2**33 tokens in sparse files opens without touching them."""
    with ShardWriter(tmp_path / "s", vocab_size=100) as writer:
        writer.add([1])
    tokens = 1 << 33
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    index["shards"][0].update(tokens=tokens)
    index["tokens"] = tokens
    (tmp_path / "s" / "index.json").write_text(json.dumps(index))
    os.truncate(tmp_path / "s" / "0-00000.bin", 2 * tokens)
    np.array([0, tokens], "<i8").tofile(tmp_path / "s" / "0-00000.docs")
    before = _resident()
    shards = TokenShards(tmp_path / "s")
    assert shards.row_count(4096) == tokens // 4096
    block = shards.read_rows(np.array([tokens // 4096 - 1]), 4096)
    assert block.valid.tolist() == [4096] and block.start_rows.size == 0
    assert shards.max_documents(4096) == 1
    assert _resident() - before < 64 << 20


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
