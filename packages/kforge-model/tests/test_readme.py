"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parent.parent / "README.md"


def test_example() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["text"].shape == (2, 24)
    assert torch.isfinite(names["loss"]) and all(p.grad is not None for p in names["model"].parameters())
    assert not names["nll"][0, 39]
