"""The README's examples run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kforge_model import MLPS

README = Path(__file__).parent.parent / "README.md"


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MLPS, "_parts", {**MLPS._parts})
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    for code in blocks:
        exec(compile(code, str(README), "exec"), names)
    assert len(blocks) == 4
    assert [len(text) for text in names["texts"]] == [24, 13]
    assert torch.isfinite(names["loss"]) and all(p.grad is not None for p in names["model"].parameters())
    assert not names["nll"][0, 39]
    assert names["own"](names["ids"]).shape == (2, 128, 4096)
    assert (tmp_path / "states.safetensors").exists()
    assert torch.equal(names["again"](names["ids"]), names["model"](names["ids"]))
