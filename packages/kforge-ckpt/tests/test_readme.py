"""The README's example runs, twice: the second run goes on from the first. Public names only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import kforge_ckpt
from kforge_ckpt import Checkpointer

README = Path(__file__).parents[1] / "README.md"


def test_the_example_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    runs: list[dict[str, object]] = [{}, {}]
    for run in runs:
        exec(example, run)
    assert [run["first_step"] for run in runs] == [0, 10]
    ckpt = Checkpointer("run/checkpoints")
    assert ckpt.steps() == [10, 20] and ckpt.meta(20) == {"tokens": 80}
    head = nn.Linear(8, 2)
    ckpt.restore({"model": head})
    model = runs[1]["model"]
    assert isinstance(model, nn.Linear) and head.weight.equal(model.weight)
    assert torch.equal(head.bias, model.bias)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in kforge_ckpt.__all__:
        value = getattr(kforge_ckpt, name)
        assert name == "__version__" or value.__doc__
    assert set(dir(kforge_ckpt)) == set(kforge_ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kforge_ckpt.Nothing  # noqa: B018
