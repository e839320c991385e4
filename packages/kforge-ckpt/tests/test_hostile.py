"""No pickle is ever read: each file of a checkpoint in turn is replaced by one that would touch a file."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, RngState
from kforge_ckpt.files import checksum, checksum_text


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


class Extra:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 3, "mine": PerRank({"t": torch.arange(3)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["n"] == 3


def states(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return {"model": net, "optim": optimizer, "rng": RngState(), "extra": Extra()}


def reseal(folder: Path, name: str) -> None:
    """What an author of bad files would do: make the manifest and the marker fit the planted file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"size": len(data), "checksum": checksum_text(checksum(data))}
    sealed = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(sealed)
    (folder / "COMMITTED").write_text(json.dumps({"format": 1, "step": 1, "manifest": checksum_text(checksum(sealed))}))


FILES = [
    "COMMITTED",
    "manifest.json",
    "meta.json",
    "rank-00000.json",
    "rank-00000.safetensors",
    "state.json",
    "tensors-00000.safetensors",
    "tensors.json",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["planted", "of the same size", "resealed"])
def test_a_planted_pickle_is_refused_by_name_and_never_runs(tmp_path: Path, name: str, how: str) -> None:
    ckpt = Checkpointer(tmp_path / "ckpt")
    ckpt.save(1, states(0))
    folder = tmp_path / "ckpt" / "step_00000001"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    touched = tmp_path / "touched"
    evil = pickle.dumps(Touch(touched))
    size = (folder / name).stat().st_size
    (folder / name).write_bytes(evil + b"\0" * (size - len(evil)) if how == "of the same size" else evil)
    if how == "resealed" and name not in ("COMMITTED", "manifest.json"):
        reseal(folder, name)
    for verify in ("fast", "full"):
        fresh = states(1)
        before = [tensor.clone() for tensor in fresh["model"].state_dict().values()]
        with pytest.raises(CheckpointError) as error:
            ckpt.restore(fresh, verify=verify)  # type: ignore[arg-type]
        assert name in str(error.value)
        assert all(a.equal(b) for a, b in zip(before, fresh["model"].state_dict().values(), strict=True))
    if name in ("COMMITTED", "manifest.json", "meta.json"):
        with pytest.raises(CheckpointError, match=name):
            ckpt.meta(1)
    assert not touched.exists()
    pickle.loads(evil)  # the planted bytes do work
    assert touched.exists()


def test_a_pickle_as_latest_or_beside_the_files_is_not_looked_at(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "ckpt")
    ckpt.save(1, states(0))
    touched = tmp_path / "touched"
    for path in ("latest", "step_00000001/.metadata", "step_00000001/__0_0.distcp", "step_00000002"):
        (tmp_path / "ckpt" / path).write_bytes(pickle.dumps(Touch(touched)))
    assert ckpt.restore(states(1)) == 1 and ckpt.latest() == 1
    assert not touched.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", {"model": 3, "optim": {}, "rng": {}, "extra": {}}),
        ("state.json", {}),
        *(
            ("state.json:extra", node)
            for node in (
                {"$pickle": "x"},
                {"$float": []},
                {"$bytes": "?"},
                {"$tuple": 3},
                {"$dict": [1]},
                {"$dict": [[[], 1]]},
                {"$tensor": ["x"]},
                {"$tensor": "x"},
                {"$per_rank": 3},
            )
        ),
        ("tensors.json", {"model.weight": {"dtype": "F32", "shape": [2, 3], "chunks": "x"}}),
        ("tensors.json", {"model.weight": {"dtype": "F32", "shape": [-2], "chunks": []}}),
        ("tensors.json", {"model.weight": {"dtype": "F32", "shape": [2, 3], "chunks": []}}),
        ("tensors.json", {}),
        (
            "tensors.json",
            {
                "model.weight": {
                    "dtype": "F32",
                    "shape": [2, 3],
                    "chunks": [{"offset": [0, 0], "shape": [2, 3], "file": "../../x", "key": "w"}],
                }
            },
        ),
        ("meta.json", {"world_size": 0}),
        ("meta.json", {"world_size": "1"}),
        ("rank-00000.json", {"rng.streams": {"$tuple": 3}, "extra.mine": 1}),
        ("rank-00000.json", {"rng.streams": {"$tensor": "other"}, "extra.mine": 1}),
    ],
)
def test_json_that_is_not_ours_is_refused_by_name(tmp_path: Path, name: str, content: Any) -> None:
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, states(0))
    folder = tmp_path / "step_00000001"
    name, _, entry = name.partition(":")
    if entry:  # all is right but one value
        content = {**json.loads((folder / name).read_text()), entry: {"n": content}}
    (folder / name).write_text(json.dumps(content))
    reseal(folder, name)
    with pytest.raises(CheckpointError, match="step_00000001") as error:
        ckpt.restore(states(1))
    if entry or name != "state.json":
        assert name in str(error.value) or "tensors.json" in str(error.value) or "rank-00000" in str(error.value)


def test_c28_random_streams_resume_without_unsafe_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1), np.random.randn(), torch.randn(3)  # odd numbers of draws: half a pair is kept back
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, {"rng": RngState()})
    expected = random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.randn(5).tolist()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    ckpt.restore({"rng": RngState()})
    assert (random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.randn(5).tolist()) == expected
