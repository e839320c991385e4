"""A run's first weights, where they are those of another run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kforge_ckpt import Checkpointer, CkptConfig, Fit, load_tensors
from kforge_model import ModelConfig
from kforge_optim import Optimizer
from kforge_train.errors import ConfigError
from kforge_train.hf import HfFolder, is_folder

_log = logging.getLogger("kforge")


def start_from(config: CkptConfig, model: nn.Module, optimizer: Optimizer, shape: ModelConfig) -> int | None:
    """Fill the model, whose config is ``shape``, from `ckpt.init_from`, and nothing else: moments, data and steps start
    anew. Returns the step of the checkpoint; None: a folder of Hugging Face has none. Raises ConfigError where there
    is no checkpoint, and CheckpointError for one that does not fit."""
    fit = Fit(config.init_exclude, tuple(config.init_rename.items()), partial=config.init_partial, cast=True)
    weights = Weights(model, optimizer)
    step = None
    source = find_start(config)
    if source is None:
        folder = HfFolder(Path(config.init_from), like=shape)
        for line in load_tensors({"model": weights}, {"model": folder}, fit):
            _log.info("%s", line)
        _log.info("weights from %s", config.init_from)
    else:
        step = source.restore({"model": weights}, config.init_step, fit=fit)
        _log.info("weights from step %d of %s", step, source.dir)
    weights.hand_over()
    return step


def find_start(config: CkptConfig) -> Checkpointer | None:
    """The checkpoints that `ckpt.init_from` names; None: it is a folder of Hugging Face. Raises ConfigError where there
    is no checkpoint, or none of `ckpt.init_step`."""
    place, step = config.init_from, config.init_step
    if is_folder(place):
        if step is not None:
            raise ConfigError(f"ckpt.init_step = {step}, but {place} is a folder of Hugging Face; drop it")
        return None
    source = source_of(place)
    steps = source.steps()
    if not steps:
        raise ConfigError(f"ckpt.init_from = {place}: {source.dir} holds no committed checkpoint")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"ckpt.init_step = {step}: {source.dir} holds no checkpoint of it; there are {there}")
    return source


def source_of(place: str) -> Checkpointer:
    """The checkpoints of a run, or of a folder of them; here or at a URL."""
    if "://" in place:
        source = Checkpointer(place)
        return source if source.steps() else Checkpointer(f"{place.rstrip('/')}/checkpoints")
    folder = Path(place)
    return Checkpointer(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)


class Weights:
    """The tensors of a model at full precision: under split storage, float32 in the place of the halves."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.tensors: dict[str, Tensor] = model.state_dict()
        self.joined: dict[str, Tensor] = {}
        if optimizer.storage == "split":
            self.joined = {name: optimizer.full_weight(name) for group in optimizer.groups for name in group.parameters}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors | self.joined

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Tensors are filled in place."""

    def hand_over(self) -> None:
        """Give the halves what the float32 tensors hold now."""
        for name, tensor in self.joined.items():
            self.optimizer.set_full_weight(name, tensor)
