"""Layers, origins and errors of `resolve_config`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_model import PRESETS, ModelConfig
from kforge_model.presets import preset_values
from kforge_train import JobConfig
from kforge_train.errors import ConfigError, config_errors
from kforge_train.resolve import load_config, preset_names, resolve_config
from kforge_train.schema import leaves
from kforge_train.toml import to_toml

PATHS = [leaf.path for leaf in leaves(JobConfig)]


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def test_defaults_alone() -> None:
    resolved = resolve_config()
    assert resolved.config == JobConfig()
    assert set(resolved.origin) == {leaf.path for leaf in leaves(JobConfig)}
    assert set(resolved.origin.values()) == {"default"}


def test_each_layer_covers_the_one_below(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", 'extends = "tiny"\n[optim]\nlr = 0.1\neps = 1e-6\n[train]\nsteps = 7\n')
    top = write(tmp_path, "sub/top.toml", 'extends = "../base.toml"\n[optim]\nlr = 0.2\n')
    resolved = resolve_config(top, [("train.steps", "9")])
    assert (resolved.config.optim.lr, resolved.config.optim.eps, resolved.config.train.steps) == (0.2, 1e-6, 9)
    assert resolved.config.model.dim == resolve_config("tiny").config.model.dim
    assert resolved.origin["optim.lr"] == f"file {top}"
    assert Path(resolved.origin["optim.eps"].removeprefix("file ")).resolve() == base
    assert resolved.origin["train.steps"] == "command line"
    assert resolved.origin["data.row_tokens"] == "preset tiny"
    assert resolved.origin["model.dim"] == "model preset tiny"
    assert resolved.origin["data.seed"] == "default"


def test_the_command_line_mends_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "job.toml", '[model]\ndim = 65\n[optim]\nlr = "fast"\n')
    with pytest.raises(ConfigError):
        resolve_config(path)
    config = resolve_config(path, [("model.dim", "64"), ("optim.lr", "1e-3")]).config
    assert (config.model.dim, config.optim.lr) == (64, 1e-3)


def test_the_last_override_of_a_key_holds() -> None:
    assert resolve_config(None, [("train.steps", "5"), ("train.steps", "6")]).config.train.steps == 6


def test_all_faults_at_once_with_where_they_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, "job.toml", '[optim]\nlrr = 1.0\nlr = "3e-4"\n[model]\nn_kv_heads = 3\n[modle]\ndim = 3\n')
    with pytest.raises(ConfigError) as caught:
        resolve_config(path, [("train.stepss", "3"), ("train.steps", "many")])
    lines = str(caught.value).splitlines()
    assert f"optim.lrr (file {path}): no such key; did you mean optim.lr?" in lines
    assert f'optim.lr = "3e-4" (file {path}): must be a number' in lines
    assert "train.stepss (command line): no such key; did you mean train.steps?" in lines
    assert 'train.steps = "many" (command line): must be a whole number' in lines
    assert any(line.startswith(f"modle (file {path}): no such key") for line in lines)
    combination = next(line for line in lines if line.startswith("model.n_kv_heads = 3 does not divide n_heads = 4"))
    assert combination.endswith(f"(model.n_kv_heads: file {path})")
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("lr", "optim.lr"),
        ("optim.lrr", "optim.lr"),
        ("learning.steps", "train.steps"),
        ("model.n_kv_head", "model.n_kv_heads"),
        ("data.warmup_steps", "optim.warmup_steps"),
        ("seed", "data.seed or train.seed"),
    ],
)
def test_unknown_keys_name_the_near_ones(path: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"no such key; did you mean {near}"):
        resolve_config(None, {path: 1})


def test_a_section_is_no_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim \(command line\): is a section; its keys are optim.name, "):
        resolve_config(None, {"optim": "muon"})
    with pytest.raises(ConfigError, match=r'optim = "muon" .*is a section; write \[optim\]'):
        resolve_config(write(tmp_path, "job.toml", 'optim = "muon"\n'))


def test_a_circle_of_files_is_told(tmp_path: Path) -> None:
    one = write(tmp_path, "one.toml", 'extends = "two.toml"\n')
    write(tmp_path, "two.toml", 'extends = "one.toml"\n')
    with pytest.raises(ConfigError, match=r"extends itself .*one\.toml -> .*two\.toml -> .*one\.toml"):
        resolve_config(one)


def test_a_folder_in_the_place_of_a_file_says_which_file_is_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))} is a folder; name a preset or a TOML file$"):
        resolve_config(tmp_path)
    write(tmp_path, "config.toml", "")
    with pytest.raises(ConfigError, match=re.escape(f"is the folder of a run; its job is {tmp_path / 'config.toml'}")):
        resolve_config(tmp_path)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a preset; did you mean tiny"):
        resolve_config("tinny")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML: "):
        resolve_config(write(tmp_path, "bad.toml", "steps ="))
    with pytest.raises(ConfigError, match="extends = 3 must be the name"):
        resolve_config(write(tmp_path, "three.toml", "extends = 3"))
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_config(tmp_path / "latin.toml")


@pytest.mark.parametrize("name", [None, *preset_names()])
def test_saved_configs_reload_equal(name: str | None, tmp_path: Path) -> None:
    config = resolve_config(name).config
    assert load_config(write(tmp_path, "config.toml", to_toml(config))) == config


@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    steps=st.integers(1, 2**62),
    rows=st.none() | st.integers(1, 10**6),
    signals=st.lists(st.text("ABC\"'\\,[]", min_size=1)),
)
def test_any_value_survives_saving(
    text: str, lr: float, steps: int, rows: int | None, signals: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = {
        "data.tokenizer": text,
        "optim.lr": lr,
        "train.steps": steps,
        "data.microbatch_rows": rows,
    }
    config = resolve_config(None, values).config
    assert config.data.tokenizer == text
    assert load_config(write(tmp_path_factory.mktemp("saved"), "config.toml", to_toml(config))) == config


def test_none_over_a_presets_value(tmp_path: Path) -> None:
    assert resolve_config("llama3-1b").config.data.microbatch_rows == 2
    assert resolve_config("llama3-1b", {"data.microbatch_rows": "none"}).config.data.microbatch_rows is None
    path = write(tmp_path, "job.toml", 'extends = "llama3-1b"\n[data]\nmicrobatch_rows = "none"\n')
    assert resolve_config(path).config.data.microbatch_rows is None


def test_a_model_preset_is_a_whole_model(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", "[model]\ntie_embeddings = true\nz_loss = 1e-4\n[optim]\nlr = 0.1\n")
    text = f'extends = "{base.name}"\n[model]\nmax_seq_len = 5000\npreset = "qwen3-8b"\nvocab_size = 151000\n'
    top = write(tmp_path, "top.toml", text)
    resolved = resolve_config(top)
    changed = {"max_seq_len": 5000, "vocab_size": 151000}
    assert resolved.config.model == ModelConfig(**{**PRESETS["qwen3-8b"], **changed})  # neither tied nor with a z-loss
    assert resolved.config.optim.lr == 0.1
    origins = {name: resolved.origin[f"model.{name}"] for name in ("dim", "vocab_size", "z_loss")}
    assert origins == {"dim": "model preset qwen3-8b", "vocab_size": f"file {top}", "z_loss": "default"}

    # On the command line too it lies below the other keys, wherever it stands; the last one holds.
    given = [("model.n_layers", "3"), ("model.preset", "tiny"), ("model.preset", "depth-4"), ("data.row_tokens", "64")]
    resolved = resolve_config(top, given)
    assert resolved.config.model == ModelConfig(**{**preset_values("depth-4"), "n_layers": 3})
    assert resolved.origin["model.n_layers"] == "command line"
    assert resolved.origin["model.dim"] == "model preset depth-4"


def test_a_model_preset_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, "job.toml", '[model]\npreset = "quen3-8b"\n')
    with pytest.raises(ConfigError, match=r'model.preset = "quen3-8b" \(file .*\): no model .*did you mean qwen3-8b'):
        resolve_config(path)
    with pytest.raises(ConfigError, match=r"model.preset = 3 .* must be the name of a model preset"):
        resolve_config(write(tmp_path, "three.toml", "[model]\npreset = 3\n"))
    with pytest.raises(ConfigError, match=r"model.presets .*: no such key; did you mean model.preset"):
        resolve_config(None, {"model.presets": "tiny"})
    with pytest.raises(ConfigError, match=r"optim.preset .*: no such key; did you mean model.preset"):
        resolve_config(None, {"optim.preset": "tiny"})
    assert resolve_config(path, {"model.preset": "tiny"}).config.model == ModelConfig(**PRESETS["tiny"])


@settings(deadline=None)
@given(
    options=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.recursive(
            st.booleans()
            | st.integers(-(2**62), 2**62)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"])),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab .\"'\n"), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_options_survive_saving(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = resolve_config(None, {"model.options": options}).config
    assert config.model.options == options
    assert resolve_config(None, {"model.options": json.dumps(options)}).config == config
    folder = tmp_path_factory.mktemp("saved")
    assert load_config(write(folder, "config.toml", to_toml(config))) == config
    assert load_config(write(folder, "told.toml", to_toml(config, dict.fromkeys(PATHS, "x")))) == config


def test_options_in_a_file_of_their_own_section(tmp_path: Path) -> None:
    path = write(tmp_path, "job.toml", '[model]\nmlp = "mine"\n[model.options]\nslope = 0.5\nsizes = [1, 2]\n')
    resolved = resolve_config(path)
    assert resolved.config.model.options == {"slope": 0.5, "sizes": [1, 2]}
    assert resolved.origin["model.options"] == f"file {path}"
    with pytest.raises(ConfigError, match=r"model.options.slope .*did you mean model.options"):
        resolve_config(path, {"model.options.slope": "0.25"})
    with pytest.raises(ConfigError, match=r"model.options = .*must be of numbers, text"):
        resolve_config(write(tmp_path, "date.toml", "[model.options]\nday = 2024-01-01\n"))


def test_errors_of_building_become_config_errors() -> None:
    with pytest.raises(ConfigError, match="too small"), config_errors():
        raise ValueError("too small")
    with pytest.raises(KeyError), config_errors():
        raise KeyError("a fault of ours keeps its traceback")
