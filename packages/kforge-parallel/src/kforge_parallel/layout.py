"""Which layouts may be trained, and whether a model fits one: the last word before processes wait for each other.

A class of layouts is the set of axes that are larger than 1. `LAYOUT_CLASSES` says of every class whether it is
accepted; a class is accepted when tests hold its losses and gradients to those of one process.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import combinations

from kforge_parallel.axes import AXES, product_text, resolve_axes
from kforge_parallel.config import ParallelConfig

_NOT_YET = {"pp": "pipeline", "cp": "context"}


def _sentence(axes: frozenset[str]) -> str | None:
    missing = [axis for axis in _NOT_YET if axis in axes]
    if "ep" in axes and not axes & {"dp_shard", "cp", "tp"}:
        return "expert parallelism is laid over dp_shard, cp and tp, and each of them is 1; set parallel.ep to 1"
    if not missing:
        return None
    kinds, keys = _list([_NOT_YET[axis] for axis in missing]), _list([f"parallel.{axis}" for axis in missing])
    return f"{kinds} parallelism is not available in this version; set {keys} to 1"


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


_SHAPE_KEYS = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_dim",
    "max_seq_len",
    "tie_embeddings",
    "parameters",
    "block_parameters",
    "n_experts",
)
"""What may be said of a model; see `check_layout` for those that are looked at."""

LAYOUT_CLASSES: dict[frozenset[str], str | None] = {
    axes: _sentence(axes) for n in range(len(AXES) + 2) for axes in map(frozenset, combinations((*AXES, "ep"), n))
}
"""Every set of axes larger than 1 -> None (accepted) or the sentence that refuses it."""


def check_layout(
    config: ParallelConfig,
    world_size: int,
    shape: Mapping[str, int | bool] | None = None,
    row_tokens: int | None = None,
) -> dict[str, int]:
    """Sizes of all axes, as `resolve_axes` gives them, for a layout that can be trained.

    shape: sizes of the model. n_heads, n_kv_heads, ffn_dim, vocab_size, n_layers and n_experts are checked where they
        are there; dim, head_dim, max_seq_len, tie_embeddings, parameters and block_parameters may be there too. Any
        other key is refused: a misspelt one would leave its size unchecked. None: the model is not looked at.
    row_tokens: tokens of a row, checked where ranks of a tensor-parallel group hold parts of rows.

    Nothing is contacted. Raises ValueError with the numbers, the options and what to change.
    """
    for key in shape or ():
        if key not in _SHAPE_KEYS:
            near = difflib.get_close_matches(str(key), _SHAPE_KEYS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"use some of {', '.join(_SHAPE_KEYS)}"
            raise ValueError(f"shape has an unknown key {key!r}; {hint}")
    try:
        axes = resolve_axes(config, world_size)
    except ValueError:
        # No use in telling how many processes would fit what no number of them can train.
        refused = LAYOUT_CLASSES[frozenset(name for name in (*AXES, "ep") if getattr(config, name) > 1)]
        if refused is not None:
            raise ValueError(refused) from None
        raise
    if shape is not None:
        _check_shape(axes, shape)
        if shape.get("n_experts") and axes["tp"] > 1 and not config.sequence_parallel:
            raise ValueError(
                f"parallel.sequence_parallel = false cannot be with parallel.tp = {axes['tp']} and experts "
                f"(model.n_experts = {shape['n_experts']}): every tensor-parallel rank would send the whole row to "
                "them; set sequence_parallel to true, or tp to 1"
            )
    if row_tokens is not None and config.sequence_parallel and row_tokens % axes["tp"]:
        raise ValueError(
            f"data.row_tokens = {row_tokens} cannot be split over parallel.tp = {axes['tp']}, as "
            f"parallel.sequence_parallel asks; use row_tokens = {_next_multiple(row_tokens, axes['tp'])}, or set "
            "parallel.sequence_parallel to false"
        )
    refused = LAYOUT_CLASSES[frozenset(name for name, size in axes.items() if size > 1)]
    if refused is not None:
        raise ValueError(f"{refused} (the layout is {product_text(axes)})")
    for name in ("async_tp", "cpu_offload"):
        if getattr(config, name) and not _on_cuda(config):
            raise ValueError(f"parallel.{name} = true works on CUDA only, and this runs on the CPU; set it to false")
    if config.async_tp:
        raise ValueError(
            "parallel.async_tp = true is not available in this version: it has not been proven on several GPUs; set it "
            "to false"
        )
    return axes


def _check_shape(axes: dict[str, int], shape: Mapping[str, int | bool]) -> None:
    tp, pp, ep = axes["tp"], axes["pp"], axes["ep"]
    heads, kv, ffn, vocab = (shape.get(key) for key in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"))
    if heads is not None and heads % tp:
        raise ValueError(
            f"model.n_heads = {heads} cannot be split over parallel.tp = {tp}; set tp to a divisor of {heads} "
            f"({_divisors(heads)}), or n_heads to a multiple of {tp}"
        )
    if kv is not None and kv % tp and tp % kv:
        raise ValueError(
            f"model.n_kv_heads = {kv} can be neither split nor repeated evenly over parallel.tp = {tp}; set tp to a "
            f"divisor ({_divisors(kv)}) or a multiple of {kv}, or n_kv_heads to a divisor or a multiple of {tp}"
        )
    if ffn is not None and ffn % tp:
        raise ValueError(
            f"model.ffn_dim = {ffn} cannot be split over parallel.tp = {tp}; use ffn_dim = {_next_multiple(ffn, tp)}, "
            f"or set tp to a divisor of {ffn}"
        )
    if vocab is not None and vocab % tp:
        raise ValueError(
            f"model.vocab_size = {vocab} cannot be split over parallel.tp = {tp}; use vocab_size = "
            f"{_next_multiple(vocab, tp)} (ids that no token has cost little), or set tp to a divisor of {vocab}"
        )
    layers, experts = shape.get("n_layers"), shape.get("n_experts")
    if layers is not None and layers < pp:
        raise ValueError(
            f"model.n_layers = {layers} is fewer than parallel.pp = {pp}: a stage would have no block; "
            f"set pp to at most {layers}"
        )
    if experts is not None and experts % ep:
        raise ValueError(
            f"model.n_experts = {experts} cannot be split over parallel.ep = {ep}; set ep to a divisor of {experts} "
            f"({_divisors(experts)})"
        )
    if experts is None and ep > 1:
        raise ValueError(f"parallel.ep = {ep}, but the model has no experts; set parallel.ep to 1")


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)


def _on_cuda(config: ParallelConfig) -> bool:
    if config.device != "auto":
        return config.device == "cuda"
    import torch

    return torch.cuda.is_available()
