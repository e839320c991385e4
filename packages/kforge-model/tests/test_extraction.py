"""A data set's activations in one file are those of its batches, one behind the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kforge_model import ModelConfig, Rows, Transformer
from kforge_model.extraction import extract
from kforge_model.points import capture

POINTS = ["layers.*.mlp", "norm"]


@pytest.fixture
def model() -> Transformer:
    return Transformer(ModelConfig(vocab_size=37, dim=32, n_layers=2, n_heads=4))


def read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    from safetensors.torch import load_file

    return dict(load_file(path))


def right_of(model: Transformer, batches: list[Any], reduce: Any) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        ids, rows = (batch, None) if isinstance(batch, Tensor) else batch
        with capture(model, POINTS) as seen, torch.no_grad():
            model(ids, rows)
        for name, calls in seen.items():
            parts.setdefault(name, []).append(reduce(calls[0]))
    return {name: torch.cat(some) for name, some in parts.items()}


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_formats(model: Transformer, tmp_path: Path, ending: str, dtype: torch.dtype) -> None:
    model.to(dtype).train()
    batches: list[Any] = [torch.randint(37, (2, 7)), (torch.randint(37, (3, 5)), Rows.packed([[2, 3], [5], [4, 1]]))]
    path = tmp_path / f"all{ending}"
    shapes = extract(model, iter(batches), POINTS, path)
    assert shapes == dict.fromkeys(("layers.0.mlp", "layers.1.mlp", "norm"), (29, 32))
    got, right = read(path), right_of(model, batches, lambda x: x.flatten(0, 1))
    assert got.keys() == right.keys() and [p.name for p in tmp_path.iterdir()] == [path.name]
    widened = ending == ".npz" and dtype == torch.bfloat16
    for name, value in right.items():
        assert got[name].dtype == (torch.float32 if widened else dtype)
        assert torch.equal(got[name], value.to(got[name].dtype))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("reduce", "by"),
    [
        ("mean", lambda x: x.mean(1)),
        ("last", lambda x: x[:, -1]),
        (lambda x: x.norm(dim=-1)[:, :3], lambda x: x.norm(dim=-1)[:, :3]),
    ],
)
def test_reductions(model: Transformer, tmp_path: Path, reduce: Any, by: Any) -> None:
    batches = [torch.randint(37, (2, 7)), torch.randint(37, (1, 4))]
    extract(model, batches, POINTS, tmp_path / "x.npz", reduce=reduce)
    right = right_of(model, batches, by)
    for name, value in read(tmp_path / "x.npz").items():
        assert (value - right[name]).abs().max() < 1e-6


def test_logits_and_mixed_dtypes(model: Transformer, tmp_path: Path) -> None:
    ids = torch.randint(37, (2, 7))
    extract(model, [ids], "head", tmp_path / "x.safetensors", reduce=lambda z: z.argmax(-1))
    assert torch.equal(read(tmp_path / "x.safetensors")["head"], model(ids).argmax(-1))


def test_user_errors_leave_no_file(model: Transformer, tmp_path: Path) -> None:
    ids = torch.randint(37, (2, 7))
    with pytest.raises(ValueError, match=r"x\.pt must end in"):
        extract(model, [ids], "norm", tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no module"):
        extract(model, [ids], "nrm", tmp_path / "x.npz")
    with pytest.raises(ValueError, match="reduce = 'sum'"):
        extract(model, [ids], "norm", tmp_path / "x.npz", reduce="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2, 5, 32\), and before it gave .* \('N', 7, 32\)"):
        extract(model, [ids, ids[:, :5]], "norm", tmp_path / "x.npz", reduce=lambda x: x)
    with pytest.raises(ValueError, match="single number"):
        extract(model, [ids], "norm", tmp_path / "x.npz", reduce=torch.sum)
    with pytest.raises(ValueError, match="called 0 times"):
        extract(model, [ids], "layers", tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"no batches, and nothing was written to x\.npz"):
        extract(model, [], "norm", tmp_path / "x.npz")
    assert list(tmp_path.iterdir()) == []
