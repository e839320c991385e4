"""Before the first step, all ranks say what they are about to run; one that differs is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from kforge_train.errors import ConfigError


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def on_first_rank(act: Callable[[], None]) -> None:
    """Let rank 0 do something that may be refused; its ConfigError is raised on every rank."""
    first, told = True, [""]
    if dist.is_initialized() and dist.get_world_size() > 1:
        first = dist.get_rank() == 0
    if first:
        try:
            act()
        except ConfigError as error:
            told = [str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if told[0]:
        raise ConfigError(told[0])


def check_agreement(facts: dict[str, Any]) -> None:
    """Compare ``facts`` over all ranks. Raises RuntimeError, on every rank alike, that names fact and ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: digest(value) for name, value in facts.items()})
    for name in facts:
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]]
        if odd:
            raise RuntimeError(
                f"ranks {odd} have another {name} than rank 0 ({everyone[odd[0]][name]} and {everyone[0][name]}); "
                "start every process with the same command, environment and files"
            )
