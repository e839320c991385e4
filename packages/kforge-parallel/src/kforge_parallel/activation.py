"""Activation recomputation: keep a block's input, run the block again in backward.

The module is not replaced: its ``forward`` is, so that no parameter changes its name and FSDP2's hooks stay outside
of what is run again.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

MODES = ("none", "full")


def recompute_blocks(blocks: list[nn.Module], mode: str) -> None:
    """Make every block keep what ``mode`` says: all (none), or only its input (full). Changes them in place."""
    if mode not in MODES:
        raise ValueError(f"parallel.recompute = {mode!r} is unknown; use one of {', '.join(MODES)}")
    if mode == "full":
        for block in blocks:
            # A method of the block where nothing has taken its forward's place: a deep copy then runs the copy.
            replaced = "forward" in vars(block)
            block.forward = _recomputed(block.forward) if replaced else MethodType(_run_again, block)


def _run_again(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, **kwargs)


def _recomputed(forward):  # type: ignore[no-untyped-def]
    def recomputed(*args, **kwargs):  # type: ignore[no-untyped-def]
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
