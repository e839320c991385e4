"""What a run leaves in its folder, and how it is opened again: the config and the weights."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from kforge_ckpt import Checkpointer, Fit
from kforge_optim.groups import clean_name
from kforge_parallel import Mesh, ParallelConfig, check_layout
from kforge_train.build import build_model, checkpoint_dir
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError, config_errors
from kforge_train.resolve import load_config, to_toml

_log = logging.getLogger("kforge")


def save_config(config: JobConfig) -> None:
    """Write ``config.toml`` into the run's folder, whole or not at all, with absolute paths: a run is looked at from
    other places than it was started from."""
    data = config.data
    config = replace(
        config,
        data=replace(
            data,
            train=_absolute(data.train),
            mixture=tuple({**table, "path": _absolute(table["path"])} for table in data.mixture),
            heldout=_absolute(data.heldout),
            cache=_absolute(data.cache),
            tokenizer=_absolute(data.tokenizer),
        ),
        ckpt=replace(config.ckpt, dir=_absolute(config.ckpt.dir), init_from=_absolute(config.ckpt.init_from)),
        train=replace(config.train, run_dir=_absolute(config.train.run_dir)),
    )
    path = Path(config.train.run_dir) / "config.toml"
    path.with_suffix(".partial").write_text(to_toml(config))
    os.replace(path.with_suffix(".partial"), path)


_FREE = {
    *("max_seq_len", "attention_core", "init", "init_std"),
    *("loss", "loss_chunk_tokens", "label_smoothing", "z_loss", "mtp_weight"),
    *("balance_loss", "balance_over", "router_z_loss", "expert_capacity"),
    *("router_bias_rate", "router_bias_schedule", "router_bias_warmup_steps"),
}
"""Fields of the model that may change at a resume: the weights are the same model's with any of them."""


_KEPT = {"parallel.storage": "weights", "optim.moments": "moments"}
"""Fields that say how a checkpoint's tensors are stored, and of what."""


def check_same_job(saved: Any, config: JobConfig, step: int) -> None:
    """Refuse to go on with another model than the checkpoint's, also where all shapes agree; log other changes.

    ``saved`` is the job that the checkpoint was made by, as plain data, or None where none was noted.
    """
    changes = sorted(_changes(saved, json.loads(json.dumps(asdict(config))))) if saved else []
    refused = [text for path, text in changes if path.startswith("model.") and path.split(".")[1] not in _FREE]
    if refused:
        raise ConfigError(
            f"the run at step {step} has another model: {'; '.join(refused)}. Give it the model it has, or start "
            "another run with --train.run_dir"
        )
    start = config.optim.decay_from
    if start is not None and start < step and any(path == "optim.decay_from" for path, _ in changes):
        raise ConfigError(
            f"optim.decay_from = {start}, but the run is at step {step} already and has not come down since: its rate "
            f"would jump. Cool it down from here, --optim.decay_from {step}, or go on from an earlier checkpoint"
        )
    for path, text in changes:
        if path in _KEPT:
            section, name = path.split(".")
            raise ConfigError(
                f"the run at step {step} keeps its {_KEPT[path]} in another way: {text}. Go on with what it has, "
                f"--{path} {saved[section][name]}, or start another run with --train.run_dir"
            )
        if not path.startswith("train.run_dir"):
            _log.info("changed since step %d: %s", step, text)


def state_changes(saved: Any, config: JobConfig) -> list[str]:
    """What is set otherwise than in the job ``saved``, as `check_same_job` takes it, and may decide which tensors there
    are beside the model's: lines of "optim.name was adamw, now lion"."""
    changes = sorted(_changes(saved, json.loads(json.dumps(asdict(config))))) if saved else []
    return [text for path, text in changes if path.startswith("optim.") or path == "parallel.precision"]


def _changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for section, fields in now.items():
        for name, value in fields.items():
            before = saved.get(section, {}).get(name, value)
            before = list(before) if isinstance(before, tuple) else before
            if before != value:
                yield f"{section}.{name}", f"{section}.{name} was {before}, now {value}"


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path and "://" not in path and not path.startswith("tiktoken:") else path


def load_run(run_dir: Path) -> JobConfig:
    """The config that a run saved, wherever its folder is now. Raises ConfigError when the folder is no run."""
    path = Path(run_dir) / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is no run: it has no config.toml. Runs are made by kforge train")
    config = load_config(path)
    return replace(config, train=replace(config.train, run_dir=str(run_dir)))


def fit_layout(config: ParallelConfig, world_size: int) -> ParallelConfig:
    """The layout of a run where ``world_size`` processes can take it, else shards over all of them: weights and losses
    do not depend on it."""
    try:
        check_layout(config, world_size)
    except ValueError:
        return replace(config, dp_shard=-1, dp_replicate=1, tp=1, cp=1, pp=1, ep=1, compress="none", compress_rank=4)
    return config


def restore_weights(config: JobConfig, mesh: Mesh, step: int | None = None) -> tuple[nn.Module, int]:
    """The run's model on ``mesh`` with the weights of ``step`` (None: the newest), and that step."""
    model = build_model(config, mesh)
    return model, fill_model(config, model, step)


def fill_model(config: JobConfig, model: nn.Module, step: int | None = None) -> int:
    """Fill a model with the weights that a run evaluates, those of ``step`` (None: the newest), and return that step:
    the moving average of the weights, where the run keeps one. Dtypes may differ. Raises ConfigError where there is no
    checkpoint."""
    with config_errors():
        source = Checkpointer(checkpoint_dir(config), remote=config.ckpt.remote)
        at = source.restore({"model": model}, step=step, fit=Fit(cast=True))
        if at is None:
            raise ConfigError(f"{source.dir} holds no committed checkpoint yet")
        if config.optim.ema_decay:
            source.restore({"ema": _Average(model)}, step=at, fit=Fit(exclude=(r"^ema\.moves$",), cast=True))
    return at


class _Average:
    """A model's parameters as those of a moving average, to be filled in place."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {clean_name(name): parameter.detach() for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is left to do."""
