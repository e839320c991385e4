"""Docstrings of fields, as `kforge train --help` shows them."""

from __future__ import annotations

import pytest

from kforge_optim.config import OptimConfig
from kforge_train import JobConfig
from kforge_train.describe import describe_config, field_docs, list_fields
from kforge_train.errors import ConfigError
from kforge_train.schema import field_kinds, leaves


def test_every_field_has_a_docstring() -> None:
    for section, cls in field_kinds(JobConfig).items():
        docs = field_docs(cls)
        assert set(docs) == {leaf.path for leaf in leaves(cls)}, section
        assert all(len(text) > 10 for text in docs.values()), section


def test_it_is_the_text_below_the_field() -> None:
    assert field_docs(OptimConfig)["lr"] == "Peak learning rate."


def test_help_shows_flag_type_default_and_text() -> None:
    text = describe_config()
    assert "  --optim.lr float  (default: 0.0003)\n      Peak learning rate.\n" in text
    assert "  --optim.betas float,float|none  (default: none)\n" in text
    assert "  --model.options JSON  (default: {})\n" in text
    assert "  --model.preset NAME\n      The model to start from" in text and "qwen3-4b" in text
    assert "  --data.microbatch_rows int|none  (default: none)\n" in text
    for leaf in leaves(JobConfig):
        assert f"--{leaf.path} " in text


def test_help_of_a_section_or_field() -> None:
    optim = describe_config(["optim"])
    assert optim in describe_config() and optim.startswith("optim: ")
    assert "--optim.lr " in optim and "--model." not in optim and "--data." not in optim
    one = describe_config(["optim.lr"]).splitlines()
    assert one[1:] == ["  --optim.lr float  (default: 0.0003)", "      Peak learning rate."]
    both = describe_config(["train.steps", "model.preset"])
    assert [line.split()[0] for line in both.splitlines() if "  --" in line[:4]] == ["--model.preset", "--train.steps"]
    with pytest.raises(ConfigError, match=r"--help optimizer: no section or field .* optim, .* optim.lr, or all"):
        describe_config(["optim", "optimizer"])


def test_the_list_has_every_field_once() -> None:
    blocks = dict(block.split(": ", 1) for block in list_fields().split("\n\n"))
    for section, cls in field_kinds(JobConfig).items():
        names = " ".join(blocks[section].splitlines()[1:]).replace(",", " ").split()
        assert names == ["preset"] * (section == "model") + [leaf.path for leaf in leaves(cls)]
