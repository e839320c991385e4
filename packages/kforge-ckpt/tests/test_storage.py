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

from kforge_ckpt import DamagedCheckpointError
from kforge_ckpt.safetensors import DTYPES, write_tensors
from kforge_ckpt.storage import TensorReader, local_plan, read_index, united_layout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    layout = united_layout([local_plan(tensors, first=True)], rank=0)
    assert layout.file == ("tensors-00000.safetensors" if tensors else None)
    if layout.file is not None:
        write_tensors(folder / layout.file, layout.specs, layout.pieces(tensors))
    return layout.index


def load(folder: Path, index: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    stored = read_index(json.dumps(index).encode(), folder / "tensors.json", {"tensors-00000.safetensors"})
    reader = TensorReader(folder, stored)
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
)
def test_every_dtype_and_shape_round_trips_bitwise(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, Any], seed: int
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
    load(folder, save(folder, tensors), targets)
    for name, tensor in tensors.items():
        assert bits(targets[name]) == bits(tensor)


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
