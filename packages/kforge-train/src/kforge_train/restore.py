"""A finished or stopped run, opened again: its config and its weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from kforge_ckpt import Checkpointer
from kforge_parallel import Mesh
from kforge_train.build import build_model, checkpoint_dir
from kforge_train.config import JobConfig
from kforge_train.resolve import ConfigError, load_config


def load_run(run_dir: Path) -> JobConfig:
    """The config that a run saved. Raises ConfigError when the folder is no run."""
    path = Path(run_dir) / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it has no config.toml. Runs are made by kforge train")
    return load_config(path)


def restore_weights(config: JobConfig, mesh: Mesh, step: int | None = None) -> tuple[nn.Module, int]:
    """The run's model on ``mesh`` with the weights of ``step`` (None: the newest), and that step."""
    model = build_model(config, mesh)
    at = Checkpointer(checkpoint_dir(config)).restore({"model": model}, step=step)
    if at is None:
        raise ConfigError(f"{checkpoint_dir(config)} holds no committed checkpoint yet")
    return model, at
