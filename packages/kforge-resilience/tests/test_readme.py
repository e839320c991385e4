"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path


def test_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["status"] == 75 and names["last_step"] == 5
