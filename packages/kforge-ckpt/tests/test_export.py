"""Folders of safetensors files, against the format's own library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kforge_ckpt import CheckpointError, DamagedCheckpointError
from kforge_ckpt.export import SafetensorsFolder, dtype_of, write_folder
from kforge_ckpt.safetensors import Spec

TENSORS = {
    "embed": torch.arange(60.0).view(20, 3),
    "layers.0.w": torch.arange(30.0).view(3, 10) / 7,
    "ids": torch.arange(5),
    "scale": torch.tensor(1.5),
}
SPECS = [Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def test_one_file(tmp_path: Path) -> None:
    assert write_folder(tmp_path, SPECS, TENSORS.__getitem__) == 240 + 120 + 40 + 4
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys() and all(read[name].equal(tensor) for name, tensor in TENSORS.items())


def test_several_files_with_an_index_and_another_dtype(tmp_path: Path) -> None:
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return TENSORS[name]

    total = write_folder(tmp_path, SPECS, read, dtype=torch.bfloat16, max_file_bytes=130)
    assert sorted(asked) == sorted(TENSORS)  # each is touched once
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == 120 + 60 + 40 + 2
    assert index["weight_map"] == {
        "embed": "model-00001-of-00002.safetensors",
        "layers.0.w": "model-00002-of-00002.safetensors",
        "ids": "model-00002-of-00002.safetensors",
        "scale": "model-00002-of-00002.safetensors",
    }
    for name, file in index["weight_map"].items():
        tensor = load_file(tmp_path / file)[name]
        expected = TENSORS[name]
        assert tensor.equal(expected.bfloat16() if expected.is_floating_point() else expected)
    folder = SafetensorsFolder(tmp_path)
    assert sorted(folder) == sorted(TENSORS) and len(folder) == 4
    assert folder["embed"].equal(TENSORS["embed"].bfloat16()) and folder["scale"].shape == ()
    with pytest.raises(CheckpointError, match=r"holds model-00001-of-00002\.safetensors already"):
        write_folder(tmp_path, SPECS, read)


def test_what_another_library_wrote_is_read(tmp_path: Path) -> None:
    save_file({"a": TENSORS["embed"]}, tmp_path / "x.safetensors")
    save_file({"b": TENSORS["ids"]}, tmp_path / "y.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert folder["a"].equal(TENSORS["embed"]) and folder["b"].equal(TENSORS["ids"])


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        SafetensorsFolder(tmp_path)
    write_folder(tmp_path, SPECS, TENSORS.__getitem__, max_file_bytes=130)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for weight_map, words in (
        ({**content["weight_map"], "more": "model-00001-of-00003.safetensors"}, "does not hold more"),
        ({**content["weight_map"], "more": "../evil.safetensors"}, "no file of its folder"),
        ({**content["weight_map"], "more": "gone.safetensors"}, r"gone\.safetensors cannot be read"),
        ([], "is not an index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DamagedCheckpointError, match=words):
            SafetensorsFolder(tmp_path)
    index.unlink()
    save_file({"embed": torch.zeros(1)}, tmp_path / "z.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"embed is in z\.safetensors and in model-00001"):
        SafetensorsFolder(tmp_path)


def test_an_export_that_fails_can_be_done_again(tmp_path: Path) -> None:
    def broken(name: str) -> torch.Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path, SPECS, broken)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path, SPECS, TENSORS.__getitem__)
    assert SafetensorsFolder(tmp_path)["embed"].equal(TENSORS["embed"])


def test_dtypes_by_name() -> None:
    assert dtype_of("bfloat16") is dtype_of("BF16") is torch.bfloat16
    for text in ("int8", "I64", "Tensor", "x"):
        with pytest.raises(CheckpointError, match="is no floating-point dtype"):
            dtype_of(text)
