"""A config is a value: equal ones are one key of a dict, and nobody else's dict is in it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from kforge_model import ModelConfig

SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2}


def test_equal_configs_are_one_key() -> None:
    options = {"power": 3, "of": {"a": [1, 2]}}
    one, same = ModelConfig(**SIZES, options=options), ModelConfig(**SIZES, options=dict(options))
    other, third = ModelConfig(**SIZES, options={"power": 4}), dataclasses.replace(one, n_layers=3)
    assert {one: 1, other: 2, third: 3}[same] == 1
    assert len({one, same, other, third}) == 3
    assert pickle.loads(pickle.dumps(one)) == one and hash(pickle.loads(pickle.dumps(one))) == hash(one)


def test_options_are_its_own() -> None:
    options: dict[str, Any] = {"power": 3, "of": {"a": [1, 2]}}
    config = ModelConfig(**SIZES, options=options)
    again = dataclasses.replace(config, n_layers=3)
    options["power"] = 4
    options["of"]["a"].append(3)
    assert config.options == again.options == {"power": 3, "of": {"a": [1, 2]}}
    assert dataclasses.asdict(config)["options"] == config.options
    assert again.options is not config.options


def test_only_matrices_that_kforge_made_are_gated() -> None:
    gated = {mlp: ModelConfig(**SIZES, mlp=mlp).gated_mlp for mlp in ("swiglu", "geglu", "geglu_tanh", "gelu", "relu2")}
    assert gated == {"swiglu": True, "geglu": True, "geglu_tanh": True, "gelu": False, "relu2": False}
    assert not ModelConfig(**SIZES, mlp="swiglu_own").gated_mlp
