"""torch.compile block by block: equal blocks share one compiled graph, and start-up stays short.

Only ``forward`` is compiled, so FSDP2's hooks stay outside of the graph and no parameter changes its name.

Sizes are constants of a graph, which makes the fastest kernels, until one of them is another: rows of another length,
a last batch with fewer of them. Then one more graph is made in which that size, and it alone, is a number (torch's
automatic dynamic shapes), and it serves all further values of it. A graph for training and one for evaluation are two,
and so is one for a single row. What one length has been trained with keeps its constants while only evaluations have
others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from kforge_parallel._torch import allow_graphs, constant_numbers

GRAPHS = 64
"""How many graphs one function may have: of layers with windows of several widths, and of a ring under ``tp``, whose
attention is a graph in every layer. torch's own limit is 8; beyond it code runs uncompiled, and only a log says so."""


def compile_blocks(blocks: list[nn.Module], backend: str = "inductor", *, constants: bool = False) -> None:
    """Compile every block's forward in place.

    constants: numbers of Python stay constants of a graph, and sizes of tensors alone become numbers of it.
        Wanted where a block may hold some that differ from block to block, as lists of experts do: torch 2.13 takes
        ``n in numbers`` for False, whatever they are, where these are numbers of the graph.
    """
    if blocks:
        allow_graphs(GRAPHS)
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend)
        block.forward = partial(_with_constants, compiled) if constants else compiled


def _with_constants(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with constant_numbers():
        return compiled(*args, **kwargs)
