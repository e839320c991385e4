"""Two runs of one job with the same bits: what it takes, and what cannot have it.

On one machine torch chooses kernels that sum in a fixed order where it has them, and raises an error that names the
operation where it has none; its compiler then picks kernels by rule and not by time. What torch does not look at:

    cuBLAS   sums in one order under a workspace of fixed size only    CUBLAS_WORKSPACE_CONFIG
    NCCL     rings and trees sum in the order of ranks; a switch that   NCCL_ALGO
             sums (NVLS, CollNet) takes parts as they come

Both are variables of the environment that are read once, when the library starts.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

import torch

from kforge_train.errors import ConfigError

WORKSPACES = (":4096:8", ":16:8")
"""Those under which cuBLAS promises the same bits."""
ORDERED = ("Ring", "Tree")
"""Ways of NCCL that sum in one order."""


def check_deterministic(env: MutableMapping[str, str]) -> None:
    """Raise ConfigError for an environment in which a job cannot be deterministic."""
    workspace = env.get("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise ConfigError(
            f"train.deterministic = true, but CUBLAS_WORKSPACE_CONFIG = {workspace}, under which cuBLAS may sum in "
            f"another order each time; set it to {' or '.join(WORKSPACES)}, unset it, or set deterministic to false"
        )
    ways = env.get("NCCL_ALGO", "")
    # One list for all collectives, or "allreduce:tree,ring;allgather:ring"; "^nvls" is all but that.
    lists = [part.rpartition(":")[2].strip() for part in ways.split(";") if part.strip()]
    for names in lists:
        words = {word.strip().lower() for word in re.split(",", names.removeprefix("^"))}
        unordered = not words & {"nvls"} if names.startswith("^") else words - {way.lower() for way in ORDERED}
        if unordered:
            raise ConfigError(
                f"train.deterministic = true, but NCCL_ALGO = {ways} lets a switch sum gradients in the order in which "
                f"they come; set it to {','.join(ORDERED)}, unset it, or set deterministic to false"
            )


def be_deterministic(env: MutableMapping[str, str]) -> None:
    """Let this process compute the same bits each time. Before the process group exists."""
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
    env.setdefault("NCCL_ALGO", ",".join(ORDERED))
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # no choice by time
