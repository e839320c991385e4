"""Plans of torch.distributed.checkpoint written and read, without the rest of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kforge_ckpt import DamagedCheckpointError
from kforge_ckpt.safetensors import DTYPES, write_tensors
from kforge_ckpt.storage import TensorReader, local_plan, read_index, united_layout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> dict[str, Any]:
    layout = united_layout([(local_plan(tensors, first=True), files)], rank=0)
    names = ["tensors-00000.safetensors", *(f"tensors-00000-{part}.safetensors" for part in range(1, files))]
    assert [file.name for file in layout.files] == names[: len(tensors)]
    for file in layout.files:
        write_tensors(folder / file.name, file.specs, file.pieces(tensors))
    return layout.index


def load(folder: Path, index: dict[str, Any], tensors: dict[str, torch.Tensor], threads: int = 1) -> None:
    files = {path.name for path in folder.glob("*.safetensors")}
    stored = read_index(json.dumps(index).encode(), folder / "tensors.json", files)
    reader = TensorReader(folder, stored, threads)
    reader.check(tensors)
    dcp.load(dict(tensors), storage_reader=reader, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text("ab.0", min_size=1, max_size=6),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=3), st.booleans()),
        max_size=5,
    ),
    st.integers(0, 2**31),
    st.integers(1, 3),
)
def test_every_dtype_and_shape_round_trips_bitwise(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, Any], seed: int, files: int
) -> None:
    folder = tmp_path_factory.mktemp("dcp")
    torch.manual_seed(seed)
    tensors, targets = {}, {}
    for name, (dtype, shape, turned) in kinds.items():
        count = int(torch.tensor(shape).prod()) * dtype.itemsize
        raw = torch.randint(2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        tensor = raw.view(dtype).reshape(shape)
        tensors[name] = tensor.transpose(0, -1) if turned and shape else tensor
        target = torch.zeros(shape, dtype=dtype)
        targets[name] = target.transpose(0, -1) if turned and shape else target
    load(folder, save(folder, tensors, files), targets, threads=files)
    for name, tensor in tensors.items():
        assert bits(targets[name]) == bits(tensor)


def test_files_of_a_rank_have_about_the_same_size(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.zeros(size) for i, size in enumerate([700, 600, 500, 400, 300, 200, 100, 1])}
    save(tmp_path, tensors, files=3)
    data = [sum(t.nbytes for _, t in sorted(load_file(path).items())) for path in sorted(tmp_path.iterdir())]
    assert sum(data) == 4 * 2801 and max(data) <= 4 * 1000  # of 933 at best


def test_parameters_that_need_gradients_are_filled_in_place(tmp_path: Path) -> None:
    index = save(tmp_path, {"w": torch.arange(3.0)})
    w = torch.nn.Parameter(torch.zeros(3))
    load(tmp_path, index, {"w": w})
    assert w.equal(torch.arange(3.0)) and w.requires_grad


def test_a_file_that_does_not_hold_what_the_index_says_is_named(tmp_path: Path) -> None:
    index = save(tmp_path, {"w": torch.arange(3.0)})
    for change in ({"key": "v"}, {"file": "tensors-00000.safetensors", "key": "w[0:3]"}):
        chunk = {**index["w"]["chunks"][0], **change}
        with pytest.raises(DamagedCheckpointError, match=r"tensors-00000\.safetensors does not hold"):
            load(tmp_path, {"w": {**index["w"], "chunks": [chunk]}}, {"w": torch.zeros(3)})
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000\.safetensors does not hold w"):
        load(tmp_path, {"w": {**index["w"], "dtype": "I32"}}, {"w": torch.zeros(3, dtype=torch.int32)})


KEYS = st.sampled_from(["w", "dtype", "shape", "chunks", "offset", "file", "key"])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_an_index_of_anything_else_is_refused(value: Any) -> None:
    try:
        read_index(json.dumps(value).encode(), Path("tensors.json"), {"f"})
    except DamagedCheckpointError as error:
        assert "tensors.json" in str(error)
    else:
        assert value == {}
