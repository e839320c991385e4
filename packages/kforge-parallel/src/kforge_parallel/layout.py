"""Which layouts may be trained, and whether a model fits one: the last word before processes wait for each other.

A class of layouts is the set of axes that are larger than 1. `LAYOUT_CLASSES` says of every class whether it is
accepted; a class is accepted when tests hold its losses and gradients to those of one process.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from itertools import combinations

from kforge_parallel.axes import AXES, count_text, resolve_axes
from kforge_parallel.config import ParallelConfig
from kforge_parallel.stages import check_schedule, split_layers


def _sentence(axes: frozenset[str]) -> str | None:
    if "ep" in axes and not axes & {"dp_shard", "cp", "tp"}:
        return "expert parallelism is laid over dp_shard, cp and tp, and each of them is 1; set parallel.ep to 1"
    return None


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
    "experts_sum",
    "softcap",
    "sinks",
    "mtp_depth",
    "moe_top_k",
    "moe_layers",
    "expert_dim",
    "shared_dim",
    "mlp_matrices",
    "qk_norm",
    "loss_chunk_tokens",
    "norm_wide",
    "norm_narrow",
    "head_norm_wide",
    "head_norm_narrow",
    "mlp_kept",
)
"""What may be said of a model; see `check_layout` for those that are looked at."""

CHUNKS = {"allgather": 2, "ulysses": 1, "ring": 2}
"""parallel.cp_style -> chunks of each row that a rank has. Under a causal mask chunk i of 2n sees i + 1 chunks; the
chunks r and 2n - 1 - r together see 2n + 1, on every rank r of n as much."""

LAYOUT_CLASSES: dict[frozenset[str], str | None] = {
    axes: _sentence(axes) for n in range(len(AXES) + 2) for axes in map(frozenset, combinations((*AXES, "ep"), n))
}
"""Every set of axes larger than 1 -> None (accepted) or the sentence that refuses it."""


def check_layout(
    config: ParallelConfig,
    world_size: int,
    shape: Mapping[str, int | bool] | None = None,
    row_tokens: int | None = None,
    microbatches: int | None = None,
) -> dict[str, int]:
    """Sizes of all axes, as `resolve_axes` gives them, for a layout that can be trained.

    shape: sizes of the model. n_heads, n_kv_heads, ffn_dim, vocab_size, n_layers, n_experts, and softcap, sinks and
        mtp_depth, which are 0 or false where the model has none, are checked where they are there; experts_sum says
        that tp cuts experts by that word of the plan. dim, head_dim, max_seq_len, tie_embeddings, parameters,
        block_parameters and what estimates ask for (`ModelShape`) may be there too. Any other key is refused: a
        misspelt one would leave its size unchecked. None: the model is not looked at.
    row_tokens: tokens of a row, checked where ranks hold parts of rows.
    microbatches: of each data rank in a step, checked where the schedule of a pipeline asks for a number.

    Nothing is contacted. Raises ValueError with the numbers, the options and what to change.
    """
    check_sizes(shape or {})
    try:
        axes = resolve_axes(config, world_size)
    except ValueError:
        # No use in telling how many processes would fit what no number of them can train.
        refused = LAYOUT_CLASSES[frozenset(name for name in (*AXES, "ep") if getattr(config, name) > 1)]
        if refused is not None:
            raise ValueError(refused) from None
        raise
    if config.compress != "none" and axes["dp_replicate"] == 1:
        raise ValueError(
            f"parallel.compress = {config.compress} is for what replicas send one another, and parallel.dp_replicate "
            f"is 1 of {count_text(world_size)}; start more, or set compress to none"
        )
    if shape is not None:
        _check_shape(axes, shape)
        if axes["pp"] > 1 and "n_layers" in shape:
            split_layers(config, axes["pp"], shape["n_layers"])
        sent = shape.get("n_experts") and not shape.get("experts_sum")
        if sent and axes["tp"] > 1 and not config.sequence_parallel:
            raise ValueError(
                f"parallel.sequence_parallel = false cannot be with parallel.tp = {axes['tp']} and experts "
                f"(model.n_experts = {shape['n_experts']}): every tensor-parallel rank would send the whole row to "
                "them; set sequence_parallel to true, or tp to 1"
            )
    if shape is not None and axes["cp"] > 1:
        _check_attention(axes, config.cp_style, shape)
    if row_tokens is not None:
        check_row(row_tokens, axes["cp"], config.cp_style, axes["tp"] if config.sequence_parallel else 1)
    check_schedule(config, axes["pp"], microbatches)
    for name in ("async_tp", "cpu_offload"):
        if getattr(config, name) and not _on_cuda(config):
            raise ValueError(f"parallel.{name} = true works on CUDA only, and this runs on the CPU; set it to false")
    if config.fp8 != "none" and config.precision != "bf16" and _on_cuda(config):
        raise ValueError(not_in_fp8(config))
    if config.async_tp:
        raise ValueError(
            "parallel.async_tp = true is not available in this version: it has not been proven on several GPUs; set it "
            "to false"
        )
    return axes


def check_keys(shape: Iterable[str]) -> None:
    """Raise ValueError for a size that no shape has, with the near ones."""
    for key in shape:
        if key not in _SHAPE_KEYS:
            near = difflib.get_close_matches(str(key), _SHAPE_KEYS, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"use some of {', '.join(_SHAPE_KEYS)}"
            raise ValueError(f"shape has an unknown key {key!r}; {hint}")


_FLAGS = ("tie_embeddings", "experts_sum", "softcap", "sinks", "qk_norm")
"""What a model has or has not: true or false, or a number that is 0 where it has not."""
_AT_LEAST_1 = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_seq_len")


def check_sizes(shape: Mapping[str, int | bool]) -> None:
    """Raise ValueError for an unknown key, and for what is no size: true, a fraction, text, NaN, a number too small."""
    check_keys(shape)
    for key, value in shape.items():
        if key in _FLAGS and isinstance(value, (int, float)) and 0 <= value < math.inf:
            continue
        least = 1 if key in _AT_LEAST_1 else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "true or false" if key in _FLAGS else f"a whole number of at least {least}"
            raise ValueError(f"shape.{key} = {value!r} must be {kind}")


def not_in_fp8(config: ParallelConfig) -> str:
    """Why products in 8 bits cannot be with another precision than bf16, on a GPU."""
    return (
        f"parallel.fp8 = {config.fp8} gives bf16 on a GPU, but parallel.precision = {config.precision}; set it to "
        "bf16, or fp8 to none"
    )


def check_row(tokens: int, cp: int, style: str, tp: int = 1) -> None:
    """Raise ValueError, which names a length that would do, for rows of ``tokens`` that cannot be cut over ``cp`` ranks
    and each part of them over ``tp``."""
    if tokens % (cp * CHUNKS[style] if cp > 1 else 1) == 0 and tokens // cp % tp == 0:
        return
    over = f"parallel.cp = {cp}" if cp > 1 else ""
    if cp > 1 and CHUNKS[style] > 1:
        over += f", of which each rank has {CHUNKS[style]} chunks as parallel.cp_style = {style} asks"
    if tp > 1:
        over += f"{', and each part over ' if over else ''}parallel.tp = {tp}, as parallel.sequence_parallel asks"
    multiple = math.lcm(cp * CHUNKS[style] if cp > 1 else 1, cp * tp)
    raise ValueError(
        f"data.row_tokens = {tokens} cannot be split over {over}; use row_tokens = "
        f"{_next_multiple(tokens, multiple)}, a multiple of {multiple}"
        + (", or set parallel.sequence_parallel to false" if tp > 1 else "")
    )


def hindrance(style: str, *, softcap: bool, sinks: bool) -> str | None:
    """Why a style cannot compute an attention with these; None: it can. Ulysses runs the model's own."""
    has = [name for name, there in (("soft-cap", softcap), ("sinks", sinks)) if there]
    if style == "ulysses" or not has:
        return None
    return f"parallel.cp_style = {style} computes attention itself, without {_list(has)}; set cp_style to ulysses"


def _check_attention(axes: dict[str, int], style: str, shape: Mapping[str, int | bool]) -> None:
    """Raise ValueError for attention that cannot be computed over cp ranks."""
    cp, tp = axes["cp"], axes["tp"]
    why = hindrance(style, softcap=bool(shape.get("softcap")), sinks=bool(shape.get("sinks")))
    if why is not None:
        said = _list([name for key, name in (("softcap", "attn_softcap"), ("sinks", "sinks")) if shape.get(key)])
        raise ValueError(f"model.{said} cannot be with parallel.cp = {cp}: {why}")
    if shape.get("mtp_depth"):
        raise ValueError(
            f"model.mtp_depth = {shape['mtp_depth']} cannot be with parallel.cp = {cp}: what follows a rank's last "
            "tokens lies on another rank; set mtp_depth to 0, or cp to 1"
        )
    heads, kv = shape.get("n_heads"), shape.get("n_kv_heads")
    if style != "ulysses" or heads is None:
        return
    if heads % (tp * cp):
        raise ValueError(
            f"model.n_heads = {heads} cannot be split over parallel.cp = {cp}{f' × tp = {tp}' if tp > 1 else ''}, as "
            "parallel.cp_style = ulysses asks; set cp_style to allgather, or cp to a divisor of "
            f"{heads // tp}"
        )
    here = 0 if kv is None else max(1, kv // tp)
    if here % cp and cp % here:
        raise ValueError(
            f"model.n_kv_heads = {kv} ({here} on a rank) can be neither split nor repeated evenly over "
            f"parallel.cp = {cp}, as parallel.cp_style = ulysses asks; set cp_style to allgather, or cp to a divisor "
            f"or a multiple of {here}"
        )


def _check_shape(axes: dict[str, int], shape: Mapping[str, int | bool]) -> None:
    tp, ep = axes["tp"], axes["ep"]
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
    experts = shape.get("n_experts")
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
