from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kforge_ckpt import DamagedCheckpointError, UnsupportedStateError
from kforge_ckpt.safetensors import DTYPES, Spec, TensorFile, file_order, write_tensors

# Those that the oldest allowed version of the library reads.
COMMON = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern of the dtype, NaNs with their payloads included; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    size = (math.prod(shape) * dtype.itemsize,)
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    specs = file_order(Spec(key, t.dtype, tuple(t.shape)) for key, t in tensors.items())
    record = write_tensors(path, specs, (tensors[spec.key] for spec in specs))
    assert record.size == path.stat().st_size


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=6), st.integers(0, 2**31))
def test_round_trip_is_bitwise(tmp_path_factory: pytest.TempPathFactory, kinds: list, seed: int) -> None:
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    tensors = {f"t.{i}[0:{i}]": random_tensor(*kind, seed + i) for i, kind in enumerate(kinds)}
    write(path, tensors)
    with TensorFile(path) as file:
        back = dict(file.tensors())
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (back[key].dtype, back[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(back[key]) == bits(tensor)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(COMMON), shapes), min_size=1, max_size=6), st.integers(0, 2**31))
def test_the_library_and_this_module_read_each_other(
    tmp_path_factory: pytest.TempPathFactory, kinds: list, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("st")
    tensors = {f"ü.{i}": random_tensor(*kind, seed + i) for i, kind in enumerate(kinds)}
    write(folder / "ours.safetensors", tensors)
    save_file(tensors, folder / "theirs.safetensors")
    theirs = load_file(folder / "ours.safetensors")
    with TensorFile(folder / "theirs.safetensors") as file:
        ours = dict(file.tensors())
    for key, tensor in tensors.items():
        assert bits(theirs[key]) == bits(ours[key]) == bits(tensor)
        assert theirs[key].dtype == ours[key].dtype == tensor.dtype
        assert theirs[key].shape == ours[key].shape == tensor.shape


def test_rows_reads_a_range(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(5, 4, 3)
    write(tmp_path / "a.safetensors", {"pad": torch.zeros(7, dtype=torch.int64), "w": whole})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.rows("w", 1, 3).equal(whole[1:4])
        assert file.rows("w", 5, 0).shape == (0, 4, 3)
        with pytest.raises(ValueError, match="does not hold what was asked"):
            file.rows("w", 4, 2)


def test_strided_conjugate_and_shared_tensors_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    complex_ = torch.complex(base, base + 1).conj()
    tensors = {"t": base.t(), "every": base[:, ::2], "same": base, "view": base.view(-1), "conj": complex_}
    write(tmp_path / "a.safetensors", tensors)
    with TensorFile(tmp_path / "a.safetensors") as file:
        for key, tensor in file.tensors():
            assert tensor.equal(tensors[key].resolve_conj())


def test_a_dtype_that_the_format_has_not_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match=r"phase has dtype torch\.complex128"):
        write(tmp_path / "a.safetensors", {"phase": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(UnsupportedStateError, match="'w'"):
        write_tensors(tmp_path / "b.safetensors", [Spec("w", torch.int8, (1,))] * 2, [])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_never_gives_anything_but_its_own_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    write(path, {"w": torch.arange(4.0), "n": torch.tensor(3)})
    content = bytearray(path.read_bytes())
    what = data.draw(st.sampled_from(["cut", "longer", "byte", "noise"]))
    if what == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif what == "longer":
        content += b"x"
    elif what == "byte":
        place = data.draw(st.integers(0, len(content) - 41))  # 40 bytes of data at the end: any bits are right there
        content[place] = data.draw(st.integers(0, 255))
    else:
        content = bytearray(data.draw(st.binary(max_size=64)))
    path.write_bytes(content)
    try:
        with TensorFile(path) as file:
            dict(file.tensors())
    except DamagedCheckpointError as error:
        assert str(path) in str(error)
    else:
        assert what == "byte"  # a changed key or a changed dtype of the same width


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w": 3}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "PICKLE", "shape": [], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors"):
        TensorFile(path)
