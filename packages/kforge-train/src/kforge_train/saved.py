"""What a run leaves in its folder, and how it is opened again: the config and the weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import nn

from kforge_ckpt import Checkpointer
from kforge_parallel import Mesh
from kforge_train.build import build_model, checkpoint_dir
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError
from kforge_train.resolve import load_config, to_toml


def save_config(config: JobConfig) -> None:
    """Write ``config.toml`` into the run's folder, whole or not at all, with absolute paths: a run is looked at from
    other places than it was started from."""
    data = config.data
    config = replace(
        config,
        data=replace(
            data,
            train=_absolute(data.train),
            heldout=_absolute(data.heldout),
            tokenizer=_absolute(data.tokenizer),
        ),
        ckpt=replace(config.ckpt, dir=_absolute(config.ckpt.dir)),
        train=replace(config.train, run_dir=_absolute(config.train.run_dir)),
    )
    path = Path(config.train.run_dir) / "config.toml"
    path.with_suffix(".partial").write_text(to_toml(config))
    os.replace(path.with_suffix(".partial"), path)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def load_run(run_dir: Path) -> JobConfig:
    """The config that a run saved, wherever its folder is now. Raises ConfigError when the folder is no run."""
    path = Path(run_dir) / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it has no config.toml. Runs are made by kforge train")
    config = load_config(path)
    return replace(config, train=replace(config.train, run_dir=str(run_dir)))


def restore_weights(config: JobConfig, mesh: Mesh, step: int | None = None) -> tuple[nn.Module, int]:
    """The run's model on ``mesh`` with the weights of ``step`` (None: the newest), and that step."""
    model = build_model(config, mesh)
    at = Checkpointer(checkpoint_dir(config)).restore({"model": model}, step=step)
    if at is None:
        raise ConfigError(f"{checkpoint_dir(config)} holds no committed checkpoint yet")
    return model, at
