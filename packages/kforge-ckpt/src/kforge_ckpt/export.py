"""Tensors as a folder of safetensors files with an index, as Hugging Face's libraries lay them out.

Written and read one tensor at a time: the memory is that of the largest one. Imported neither here nor there is any
library but torch's tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from kforge_ckpt.errors import CheckpointError, DamagedCheckpointError
from kforge_ckpt.safetensors import DTYPES, Spec, TensorFiles, file_order, write_tensors

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_folder(
    folder: Path,
    specs: list[Spec],
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> int:
    """Write the tensors ``specs`` into ``folder``, each read by its key when its turn comes; returns their bytes.

    dtype: what floating-point tensors are converted to. Files hold up to ``max_file_bytes`` of tensors, or one larger
    tensor. One file is called ``model.safetensors``; several are numbered, and an index names them. Raises
    CheckpointError for a folder that holds safetensors files already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if taken := sorted(path.name for path in folder.glob("*.safetensors*")):
        raise CheckpointError(f"{folder} holds {taken[0]} already; choose another folder, or empty it")
    if dtype is not None:
        specs = [Spec(s.key, dtype if s.dtype.is_floating_point else s.dtype, s.shape) for s in specs]
    groups: list[list[Spec]] = []
    room = 0
    for spec in specs:
        if not groups or spec.nbytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= spec.nbytes
    names = (
        [ONE]
        if len(groups) < 2
        else [f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
    )
    for name, group in zip(names, groups or [[]], strict=True):
        ordered = file_order(group)
        staged = folder / f".{name}.partial"
        try:
            write_tensors(staged, ordered, (read(spec.key).to(spec.dtype) for spec in ordered))
            os.replace(staged, folder / name)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
    total = sum(spec.nbytes for spec in specs)
    if len(groups) > 1:
        places = {spec.key: name for name, group in zip(names, groups, strict=True) for spec in group}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    return total


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """The tensors of such a folder by name, each read when it is asked for; ``specs`` has their dtypes and shapes.

    Raises DamagedCheckpointError, with the file, for one that the index names and that is not there or lacks a tensor,
    and CheckpointError for a folder without safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._places: dict[str, str] = {}
        index = self.folder / INDEX
        if index.is_file():
            try:
                self._places = {str(k): str(v) for k, v in json.loads(index.read_text("utf-8"))["weight_map"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
            names = sorted(set(self._places.values()))
        else:
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{folder} holds no safetensors file")
        self.specs: dict[str, Spec] = {}
        self._files = TensorFiles(self.folder)
        for name in names:
            if Path(name).name != name:
                raise DamagedCheckpointError(f"{index} names {name!r}, which is no file of its folder")
            for key, entry in self._files[name].entries.items():
                if key in self.specs:
                    raise DamagedCheckpointError(f"{key} is in {name} and in {self._places[key]}")
                if index.is_file() and self._places.get(key) != name:
                    continue
                self.specs[key] = Spec(key, entry.dtype, entry.shape)
                self._places[key] = name
        if lost := sorted(self._places.keys() - self.specs.keys()):
            raise DamagedCheckpointError(f"{self.folder / self._places[lost[0]]} does not hold {lost[0]}")

    def __getitem__(self, key: str) -> torch.Tensor:
        shape = self.specs[key].shape
        return self._files[self._places[key]].rows(key, 0, shape[0] if shape else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def dtype_of(text: str) -> torch.dtype:
    """A floating-point dtype by its name in torch or in the format: bfloat16, BF16. Raises CheckpointError else."""
    found = DTYPES.get(text.upper()) or getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(f"{text!r} is no floating-point dtype; say float32, bfloat16 or float16")
    return found
