"""What the README shows is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kforge_train.cli import main
from kforge_train.config import JobConfig
from kforge_train.resolve import preset_names, resolve_config
from kforge_train.schema import field_kinds

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for word, text in fenced if word == language]


def test_python_runs() -> None:
    [code] = blocks("python")
    scope: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["job"] == resolve_config("tiny", {"optim.lr": 1e-3, "train.steps": 5}).config


def test_the_file_is_one(tmp_path: Path) -> None:
    [text] = blocks("toml")
    (tmp_path / "job.toml").write_text(text, "utf-8")
    assert resolve_config(tmp_path / "job.toml").config.optim.lr == 2e-4


def test_the_error_shown_is_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = [block for block in blocks("") if "kforge: error" in block]
    command, *lines = shown.splitlines()
    assert main(command.split()[2:]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(real.startswith(line.partition("…")[0]) for real, line in zip(told, lines, strict=True))


def test_tables_are_whole() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE)
    assert set(rows) == {*field_kinds(JobConfig), *preset_names()}
