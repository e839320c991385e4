"""Names of datasets, their texts by number and by shard, and errors that say what to mend."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kforge_data import DatasetStream, DatasetTexts, ReadCounts, open_tokens, read_documents
from kforge_data.hugging_face import DatasetName, open_shards, parse_dataset

TEXTS = [f"document {i}" for i in range(95)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The texts as three files of JSON lines, as parquet of ten row groups, and as `save_to_disk` writes them."""
    import datasets

    (tmp_path / "lines").mkdir()
    for number in range(3):
        part = TEXTS[number * 95 // 3 : (number + 1) * 95 // 3]
        (tmp_path / "lines" / f"{number}.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in part))
    data = datasets.Dataset.from_dict({"body": TEXTS})
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "groups.parquet", row_group_size=10)
    data.save_to_disk(tmp_path / "saved")
    return tmp_path


def test_a_name_and_what_stands_behind_it() -> None:
    place = parse_dataset("datasets://a/b?split=test&subset=en&field=body&revision=v1&stream=1")
    assert place == DatasetName("a/b", "test", "en", "body", "v1", True)
    assert parse_dataset(str(place)) == place
    assert parse_dataset("datasets://a?max_bad_lines=7").max_bad_lines == 7
    assert str(parse_dataset("datasets://a?max_bad_lines=7")) == "datasets://a?split=train&max_bad_lines=7"
    assert parse_dataset("datasets://a") == DatasetName("a", "train", None, "", None, False)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("datasets://", "names no dataset"),
        ("datasets://a?splt=b", "has no key 'splt'; it has split, subset, field, revision, stream, max_bad_lines"),
        ("datasets://a?stream=yes", "stream = 'yes' must be 0"),
        ("datasets://a?split=", "split is empty"),
        ("datasets://a?max_bad_lines=-1", "max_bad_lines = '-1' must be a number of at least 0"),
    ],
)
def test_names_that_cannot_be(place: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_dataset(place)


@pytest.mark.parametrize(
    ("name", "kind", "shards"),
    [("lines", DatasetStream, 3), ("groups.parquet", DatasetStream, 10), ("saved", DatasetTexts, 95)],
)
def test_shards_have_every_text_once_and_begin_anywhere(name: str, kind: type, shards: int, folder: Path) -> None:
    data = open_shards(f"datasets://{folder}/{name}", field="body")
    assert type(data) is kind and data.shards == shards
    parts = [list(data.texts(shard)) for shard in range(shards)]
    assert list(itertools.chain(*parts)) == TEXTS
    for shard in (0, shards - 1):
        for first in (1, 7, len(parts[shard]), len(parts[shard]) + 1):
            assert list(data.texts(shard, first)) == parts[shard][first:]
    again = open_shards(f"datasets://{folder}/{name}?field=body")
    assert again.fingerprint == data.fingerprint


def test_a_changed_dataset_has_another_fingerprint(folder: Path) -> None:
    before = open_shards(f"datasets://{folder}/lines", field="body").fingerprint
    with open(folder / "lines" / "2.jsonl", "a") as file:
        file.write(json.dumps({"body": "more"}) + "\n")
    assert open_shards(f"datasets://{folder}/lines", field="body").fingerprint != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lines?field=text", "has no column 'text'; it has body"),
        ("lines?split=tset", "cannot be opened: Unknown split .tset"),
        ("saved?subset=en", "a folder of save_to_disk has no subset"),
        ("nothing/there", "cannot be opened: Couldn't (reach|find)"),
    ],
)
def test_datasets_that_cannot_be_opened(name: str, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        DatasetTexts(f"datasets://{folder}/{name}" if name != "nothing/there" else f"datasets://{name}")


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"n": 1}\n')
    for kind in (DatasetTexts, DatasetStream):
        data: Any = kind(f"datasets://{tmp_path}/n.jsonl?field=n")
        with pytest.raises(ValueError, match="column 'n' holds a int, not text"):
            list(data.texts(0))


MIXED: list[Any] = ["a", 5, "b c", 2.5, None, True, {"x": 1}, ["q"], "", "five"]
BAD = {1: "int", 3: "float", 5: "bool", 6: "dict", 7: "list"}


@pytest.mark.parametrize("kind", ["texts", "stream", "lines"])
def test_text_and_numbers_in_one_field_are_bad_lines_however_they_are_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The library keeps such a field as JSON, and a stream gave that out as text, in quotes."""
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in MIXED))

    def read(most: int) -> tuple[list[str], int]:
        if kind == "lines":
            counts = ReadCounts()
            return list(read_documents([file], max_bad_lines=most, counts=counts)), counts.bad_lines
        place = f"datasets://{file}?max_bad_lines={most}"
        data = DatasetTexts(place) if kind == "texts" else DatasetStream(place)
        texts = [text for shard in range(data.shards) for text in data.texts(shard)]
        assert len(texts) == len(MIXED)  # numbers of documents stay
        assert [text for shard in range(data.shards) for text in data.texts(shard)] == texts  # told of once
        return [text for text in texts if text], len(data._skipping.found)

    assert read(len(BAD)) == (["a", "b c", "five"], len(BAD))
    assert len(caplog.records) == len(BAD)
    for record, name in zip(caplog.records, BAD.values(), strict=True):
        assert str(file) in record.getMessage() and f"a {name}, not text" in record.getMessage()
    with pytest.raises(ValueError, match=r"mixed.jsonl.* a list, not text; up to max_bad_lines = 4 \(.*\) are skipped"):
        read(len(BAD) - 1)


def test_a_dataset_that_is_tokenized_skips_as_many_as_its_name_says(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in MIXED))
    with pytest.raises(ValueError, match=r"mixed.jsonl.*:8: column 'text' holds a list, not text; .* = 4"):
        open_tokens(f"datasets://{file}?max_bad_lines=4", tokenizer=tokenizer, cache=tmp_path / "cache")
    tokens = open_tokens(f"datasets://{file}?max_bad_lines=5", tokenizer=tokenizer, cache=tmp_path / "cache")
    texts = [tokenizer.decode(tokens.document(i)[:-1].tolist()) for i in range(tokens.documents)]
    assert texts == ["a", "b c", "five"]


def test_a_stream_is_no_set_of_tokens(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="is read while training, and is wanted here as a set of tokens"):
        open_tokens(f"datasets://{folder}/lines?stream=1&field=body", tokenizer=tokenizer)


def test_an_empty_split_is_named_and_hides_no_other(tmp_path: Path) -> None:
    import datasets

    full = datasets.Dataset.from_dict({"text": ["a", "b"]})
    empty = datasets.Dataset.from_dict({"text": []}, features=full.features)
    datasets.DatasetDict(train=full, test=empty).save_to_disk(tmp_path / "both")
    assert list(DatasetTexts(f"datasets://{tmp_path}/both").read()) == ["a", "b"]
    with pytest.raises(ValueError, match=r"split=test: the split 'test' holds no documents"):
        DatasetTexts(f"datasets://{tmp_path}/both?split=test")
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, test"):
        DatasetTexts(f"datasets://{tmp_path}/both?split=dev")


@pytest.mark.parametrize("kind", [DatasetTexts, DatasetStream])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.jsonl", b""),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9]),
    ],
)
def test_damaged_files_are_an_error_by_name(kind: Any, name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.split=train cannot be (opened|read): "):
        data = kind(f"datasets://{tmp_path}/{name}")
        list(itertools.chain(*(data.texts(shard) for shard in range(data.shards))))
