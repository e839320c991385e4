"""The README's example runs, twice: the second run goes on from the first. Public names only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import kforge_ckpt
from kforge_ckpt import Checkpointer

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, *_ = EXAMPLES
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


def test_the_example_takes_ten_lines_beside_the_training() -> None:
    training = ("import torch", "model", "optimizer", "for ", "    ")
    lines = [line for line in EXAMPLES[0].splitlines() if line and not line.startswith(training)]
    assert len(lines) <= 10 and any(line.startswith("ckpt.save") for line in lines)


def test_the_example_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    weights = {"weight": torch.randn(2, 8).half(), "bias": torch.randn(2).half()}
    save_file(weights, tmp_path / "weights" / "model.safetensors")
    run: dict[str, Any] = {}
    exec(EXAMPLES[1], run)
    assert run["model"].weight.equal(weights["weight"].float()) and run["model"].bias.equal(weights["bias"].float())
    assert run["told"] == ["model.weight: F32 from F16", "model.bias: F32 from F16"]


def test_the_example_in_an_object_store(s3: Any) -> None:
    example = EXAMPLES[2].replace("my-bucket", s3.bucket)
    run: dict[str, Any] = {}
    exec(example, run)
    assert run["ckpt"].steps() == [1000]
    assert {key.split("/")[2].split("-")[0] for key in s3.names()} == {"latest", "step_00001000"}


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in kforge_ckpt.__all__:
        value = getattr(kforge_ckpt, name)
        assert name == "__version__" or value.__doc__
    assert set(dir(kforge_ckpt)) == set(kforge_ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kforge_ckpt.Nothing  # noqa: B018
