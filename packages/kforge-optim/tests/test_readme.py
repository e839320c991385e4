"""The README: its examples run one after the other, its tables of TOML are configs, its numbers are those measured."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from kforge_optim import GroupRule, OptimConfig

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parents[2] / "benchmarks" / "results"
TEXT = README.read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, *others = blocks("python")
    exec(compile(first, "README.md", "exec"), names)
    assert names["loss"].item() < 2.0  # from ln 64 = 4.16
    assert names["saved"]["schedule_step"] == 100
    for example in others:
        exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    (table,) = [block for block in blocks("text") if "parameters  names" in block]
    assert printed.splitlines() == table.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {"rate.png"}
    assert names["norms"].keys() == {"matrices", "embeddings", "norms_and_biases"}
    assert len(others) >= 10
    step_of_its_own(names)


def step_of_its_own(names: dict[str, Any]) -> None:
    """The optimizer that the page adds, on split weights: two steps, of which one is refused."""
    optimizer, model = names["sign"], names["halves"]
    for gate in (0.0, 1.0):
        before = {name: optimizer.full_weight(name).clone() for name, _ in model.named_parameters()}
        rates = {name: optimizer.rates()[group.name] for group in optimizer.groups for name in group.parameters}
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).to(torch.bfloat16)
        expected = {
            name: gate * rates[name].lr * (parameter.grad.sign() + rates[name].weight_decay * before[name])
            for name, parameter in model.named_parameters()
        }
        optimizer.step(gate=torch.tensor(gate))
        for name, weight in before.items():
            torch.testing.assert_close(optimizer.full_weight(name), weight - expected[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block", blocks("toml"))
def test_its_tables_are_configs(block: str) -> None:
    fields = tomllib.loads(block)["optim"]
    rules = tuple(GroupRule(**rule) for rule in fields.pop("groups", ()))
    config = OptimConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
    assert rules or config != OptimConfig()


def test_its_numbers_are_those_measured() -> None:
    rows = {row["row"]: row for row in json.loads((RESULTS / "optim_cuda.json").read_text())["rows"]}
    table = re.findall(r"^\| ([^|`]+) \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
    assert len(table) == 12
    for name, size, time in table:
        assert float(size) == round(rows[f"{name}: bytes a parameter"]["value"], 2), name
        assert float(time) == round(rows[name]["value"] / rows[name]["reference"], 2), name
    assert round(rows["adamw, split, bf16 moments, 8B / copy rate"]["value"], 2) == 0.74
    muon = {row["row"]: row for row in json.loads((RESULTS / "muon_cuda.json").read_text())["rows"]}
    assert round(muon["muon: step / adamw's"]["value"], 2) == 1.04
