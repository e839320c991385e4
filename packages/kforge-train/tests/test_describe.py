"""Docstrings of fields, as `kforge train --help` shows them."""

from __future__ import annotations

from kforge_optim.config import OptimConfig
from kforge_train import JobConfig
from kforge_train.describe import describe_config, field_docs
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
