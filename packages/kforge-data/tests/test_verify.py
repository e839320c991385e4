"""Each kind of damage is found and named; a whole set gives an empty list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np
import pytest

from kforge_data import TokenShards, verify_shards

Make = Callable[..., TokenShards]


@pytest.fixture
def shards(make_shards: Make) -> TokenShards:
    return make_shards([[5, 6, 0], [7, 0], [8, 9, 0]], vocab_size=10, eos_id=0, shard_tokens=5)


def reseal(shards: TokenShards, kind: str) -> None:
    """Make the recorded checksum fit the changed file, so that only the content is wrong."""
    index = json.loads((shards.path / "index.json").read_text())
    name = index["shards"][0]["name"]
    index["shards"][0][f"sha256_{kind}"] = hashlib.sha256((shards.path / f"{name}.{kind}").read_bytes()).hexdigest()
    (shards.path / "index.json").write_text(json.dumps(index))


def change(shards: TokenShards, kind: str, at: int, value: int) -> None:
    file = shards.path / f"0-00000.{kind}"
    array = np.fromfile(file, "<u2" if kind == "bin" else "<i8")
    array[at] = value
    array.tofile(file)


def test_a_whole_set(shards: TokenShards) -> None:
    assert len(shards.index.shards) == 2
    assert verify_shards(shards.path) == []


@pytest.mark.parametrize("kind", ["bin", "docs"])
def test_a_flipped_bit(shards: TokenShards, kind: str) -> None:
    file = shards.path / f"1-00000.{kind}".replace("1-", "0-")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    assert any(f"0-00000.{kind}: sha256" in fault for fault in verify_shards(shards.path))


def test_an_id_outside_of_the_vocabulary(shards: TokenShards) -> None:
    change(shards, "bin", 0, 10)
    reseal(shards, "bin")
    (fault,) = verify_shards(shards.path)
    assert "id 10 is outside of a vocabulary of 10" in fault


def test_boundaries_out_of_order(shards: TokenShards) -> None:
    change(shards, "docs", 1, 9)
    reseal(shards, "docs")
    (fault,) = verify_shards(shards.path)
    assert "boundaries do not run from 0 to 5" in fault


def test_a_document_without_its_end(shards: TokenShards) -> None:
    change(shards, "bin", 4, 3)
    reseal(shards, "bin")
    (fault,) = verify_shards(shards.path)
    assert "1 documents end without id 0, number 1" in fault
