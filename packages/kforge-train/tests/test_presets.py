"""The presets that the wheel carries."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources

import pytest

from kforge_model import num_parameters
from kforge_model.presets import preset
from kforge_train.resolve import preset_names, resolve_config


def test_the_presets_are_those_promised() -> None:
    assert {"tiny", "quickstart", "llama3-1b", "llama3-8b", "moe-9b-a3b"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_resolves_and_says_what_it_is(name: str) -> None:
    resolved = resolve_config(name)
    assert f"preset {name}" in resolved.origin.values()
    text = (resources.files("kforge_train") / "presets" / f"{name}.toml").read_text("utf-8")
    assert text.startswith("# ")


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_repeats_nothing_that_holds_below_it(name: str) -> None:
    table = tomllib.loads((resources.files("kforge_train") / "presets" / f"{name}.toml").read_text("utf-8"))
    if "extends" not in table:
        return
    below = resolve_config(table.pop("extends")).config
    for section, values in table.items():
        if section == "model" and "preset" in values:
            below = dataclasses.replace(below, model=preset(values.pop("preset")))
        for key, value in values.items():
            inherited = getattr(getattr(below, section), key)
            inherited = list(inherited) if isinstance(inherited, tuple) else inherited
            assert value != inherited, f"{name}: {section}.{key}"


def test_sizes() -> None:
    def millions(name: str) -> float:
        count = num_parameters(resolve_config(name).config.model)
        assert count is not None
        return count / 1e6

    assert millions("llama3-1b") == pytest.approx(1235.8, abs=0.1)  # Llama 3.2 1B: 1,235,814,400
    assert millions("llama3-8b") == pytest.approx(8030.3, abs=0.1)  # Llama 3 8B: 8,030,261,248
    assert millions("moe-9b-a3b") == pytest.approx(9233.2, abs=0.1)
    assert 1 <= millions("quickstart") <= 2
    assert millions("tiny") < 0.5


@pytest.mark.parametrize("name", ["tiny", "llama3-1b", "llama3-8b", "moe-9b-a3b"])
def test_sizes_of_a_model_that_has_a_preset_stand_there_alone(name: str) -> None:
    assert resolve_config(name).config.model == preset(name)
