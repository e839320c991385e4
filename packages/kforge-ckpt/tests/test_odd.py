"""States of odd kinds, through every mode of saving, and the cases of the field that no other file names."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stateful import Box
from torch import nn

from kforge_ckpt import Checkpointer, UnsupportedStateError, tools
from kforge_ckpt.safetensors import DTYPES

MODES: list[dict[str, Any]] = [{}, {"mode": "async"}, {"mode": "async", "writer": "process"}]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())


def odd_tensors() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 255, (4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    tensors = {f"as {name}": (raw > 99) if kind is torch.bool else raw.view(kind) for name, kind in DTYPES.items()}
    base = torch.arange(24.0).view(4, 6)
    shared = torch.arange(10.0)
    return tensors | {
        "0-dim": torch.tensor(math.nan),
        "empty": torch.empty(0),
        "empty rows": torch.empty(3, 0, 2, dtype=torch.int8),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "tied": shared,
        "tied again": shared,
        "conjugated": torch.complex(base, base + 1).conj(),
        "a/b/../c": torch.ones(1),
        "a.b..c.": torch.full((1,), 2.0),
        "größe 🙂 \n\t\"'\\": torch.full((1,), 3.0),
        "x" * 5000: torch.full((1,), 4.0),
        "": torch.full((1,), 5.0),
    }


@pytest.mark.parametrize("options", MODES, ids=["sync", "thread", "process"])
def test_odd_tensors_come_back_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = odd_tensors()
    ckpt = Checkpointer(tmp_path, **options)
    ckpt.save(1, {"box": Box(**tensors)})
    ckpt.close()
    box = Box(
        **{name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )
    assert Checkpointer(tmp_path).restore({"box": box}, verify="full") == 1
    assert box.values.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert box.values[name].shape == tensor.shape and bits(box.values[name]) == bits(tensor), name
    saved = tools.open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        assert bits(tools.read_tensor(saved, f"box.{name}")) == bits(tensor), name
    assert list(tools.differences(saved, saved)) == []


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    net = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    net[1].weight = net[0].weight
    before = net[0].weight.detach().clone()
    Checkpointer(tmp_path).save(1, {"net": net})
    nn.init.zeros_(net[0].weight)
    Checkpointer(tmp_path).restore({"net": net})
    assert net[0].weight is net[1].weight and net[0].weight.equal(before)


VALUES: dict[str, Any] = {
    "int": 2**80,
    "negative": -0.0,
    "numbers": [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1],
    "bools": (True, False, None, ()),
    "nested": [[], [[{}]], {"a": [(1, (2, [3]))]}],
    "keys": {1: "int", 2.5: "float", (1, "a"): "tuple", None: "none", "$tensor": "text", "": "empty"},
    "$float": "no number",
    "text": "\0 \ud83d 🙂 \n $",
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("options", MODES, ids=["sync", "thread", "process"])
def test_odd_values_come_back_as_they_were(tmp_path: Path, options: dict[str, Any]) -> None:
    numpy = {"f": np.float32(0.5), "i": np.int64(7), "b": np.bool_(True), "nan": np.float64("nan")}
    ckpt = Checkpointer(tmp_path, **options)
    ckpt.save(1, {"box": Box(**VALUES, numpy=numpy)}, meta={"nan": math.nan, "k": {1: (2,)}})
    ckpt.close()
    box = Box()
    Checkpointer(tmp_path).restore({"box": box})
    nan = box.values["numpy"].pop("nan")
    assert math.isnan(nan) and box.values.pop("numpy") == {"f": 0.5, "i": 7, "b": True}
    assert box.values == VALUES and math.copysign(1, box.values["negative"]) == -1
    assert [type(key) for key in box.values["keys"]] == [type(key) for key in VALUES["keys"]]
    meta = ckpt.meta(1)
    assert math.isnan(meta["nan"]) and meta["k"] == {1: (2,)}


@pytest.mark.parametrize("options", MODES, ids=["sync", "thread", "process"])
@pytest.mark.parametrize(
    "value",
    [np.ones(2), {1, 2}, object(), 1j, torch.zeros(2, dtype=torch.complex128), torch.zeros(2, device="meta"), range(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_form_is_refused_by_path_and_leaves_nothing(tmp_path: Path, value: Any, options: Any) -> None:
    ckpt = Checkpointer(tmp_path, **options)
    with pytest.raises(UnsupportedStateError, match=r"box\.deep\.0\.it "):
        ckpt.save(1, {"box": Box(deep=[{"it": value}])})
    ckpt.close()
    assert ckpt.steps() == [] and not list(tmp_path.glob("step_*"))


def test_many_small_tensors_take_time_in_proportion(tmp_path: Path) -> None:
    """Nothing on the way is quadratic in their number: ten times as many take less than thirty times as long."""
    took = []
    for count in (400, 4000):
        root = tmp_path / str(count)
        tensors = {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(count)}
        start = time.process_time()
        Checkpointer(root).save(1, {"m": Box(**tensors)})
        saved = tools.open_checkpoint(root)
        assert all(tools.read_tensor(saved, f"m.layers.{i}.w")[0] == i for i in range(count))
        back = Box(**{name: torch.zeros(2) for name in tensors})
        Checkpointer(root).restore({"m": back})
        assert all(back.values[f"layers.{i}.w"][1] == i for i in range(count))
        took.append(time.process_time() - start)
    assert took[1] < 30 * took[0], took
