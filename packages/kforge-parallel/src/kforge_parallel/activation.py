"""Activation recomputation: keep a part of what a block computes, and run the block again in backward for the rest.

The module is not replaced: its ``forward`` is, so that no parameter changes its name and FSDP2's hooks stay outside
of what is run again. Random numbers are drawn again as they were. Which experts a token goes to is kept (`Kept`): a sum
in another order could decide it otherwise, and then the gradient would be that of no forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from kforge_parallel._torch import times_written
from kforge_parallel.expert import has_experts
from kforge_parallel.kept import Kept, Operations

MODES = ("none", "full", "selective")

KINDS = {
    "products": (
        *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"),
        "aten._scaled_grouped_mm",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        *("aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention_forward"),
        *("torch_attn._varlen_attn", "flex_attention"),
    ),
    "transfers": (
        *("_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor"),
        *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
        "_c10d_functional.wait_tensor",
    ),
    "routing": ("aten.topk", "aten.sort"),
}
"""Word -> operations as torch names them. Transfers outside of a compiled graph are kept by `keep`."""

KEEP = ("products", "attention", "transfers", "routing")
"""What a selective recomputation keeps unless it is told otherwise."""


def recompute_blocks(
    blocks: list[nn.Module],
    mode: str,
    *,
    again: Sequence[bool] | None = None,
    keep: Sequence[str] = KEEP,
    compiled: Sequence[nn.Module] = (),
    in_parts: Sequence[nn.Module] = (),
) -> None:
    """Make blocks keep what ``mode`` says, in place: all (none), only their input (full), or their input and the
    outputs of the operations in ``keep`` (selective).

    again: for each block whether it is run again; the others keep all. None: all are.
    keep: words of `KINDS`, or operations such as "aten.mm".
    compiled: the blocks that will each be compiled as one graph. in_parts: those that are compiled already, as several
    graphs; as nothing is seen inside of these, such a block with experts decides anew, by the same kernels.

    Raises ValueError for unknown words. In forward, a block that is run again and has changed one of its buffers is a
    ValueError: the buffer would be changed twice.
    """
    if mode not in MODES:
        raise ValueError(f"parallel.recompute = {mode!r} is unknown; use one of {', '.join(MODES)}")
    if mode == "none":
        return
    operations = operations_of(keep) if mode == "selective" else frozenset()
    routing = operations_of(("routing",))
    kinds = ("routes", "operations", *keep)

    def in_graph(call: Callable[..., Any], _: nn.Module, args: Any, kwargs: Any) -> Any:
        return checkpoint(call, *args, use_reentrant=False, **options, **kwargs)

    def run_again(call: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        before = {name: times_written(buffer) for name, buffer in block.named_buffers()}
        seen = operations | routing if id(block) in deciding else operations
        out = checkpoint(call, *args, use_reentrant=False, context_fn=partial(_contexts, seen, kinds), **kwargs)
        for name, buffer in block.named_buffers():
            if times_written(buffer) != before.get(name):
                raise ValueError(
                    f"{type(block).__name__}.forward changes its buffer {name}, and parallel.recompute = {mode} would "
                    "change it twice; change it outside of forward, or set recompute to none"
                )
        return out

    options: dict[str, Any] = {"context_fn": partial(_graph_contexts, operations)} if operations else {}
    deciding = {id(b) for b in blocks if has_experts(b) and not any(b is one for one in in_parts)}
    for block in blocks if again is None else [one for one, chosen in zip(blocks, again, strict=True) if chosen]:
        wrap(block, in_graph if any(block is one for one in compiled) else run_again)


def wrap(block: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(call, block, args, kwargs)`` take the place of the block's forward, which ``call`` is.

    Where nothing has taken the forward's place but this, it stays a method: a deep copy then runs the copy.
    """
    forward = block.forward
    if isinstance(forward, MethodType):
        inner = forward.__func__
        block.forward = MethodType(lambda self, *args, **kw: around(partial(inner, self), self, args, kw), block)
    else:
        block.forward = lambda *args, **kw: around(forward, block, args, kw)


def operations_of(keep: Sequence[str]) -> frozenset[Any]:
    """The operations that words and names stand for. Raises ValueError for one that torch does not have."""
    found = set()
    for word in keep:
        for name in KINDS.get(word, (word,)):
            library, _, operation = name.rpartition(".")
            known: set[Any] = set()
            packet = getattr(getattr(torch.ops, library or "higher_order"), operation, None)
            if packet is not None:
                every = [getattr(packet, kind) for kind in packet.overloads()] if library else [packet]
                known = {one for one in every if not library or not one._schema.is_mutable}
                found |= known
            if not known and word not in KINDS:
                raise ValueError(
                    f"parallel.recompute_keep has {word!r}, which is neither one of {', '.join(KINDS)} nor an "
                    "operation of torch that changes nothing in place, such as aten.mm"
                )
    return frozenset(found)


def _graph_contexts(operations: frozenset[Any]) -> Any:
    return create_selective_checkpoint_contexts(list(operations))


def _contexts(operations: frozenset[Any], kinds: tuple[str, ...]) -> tuple[_Both, _Both]:
    """Around the forward, and around the one that is run again."""
    kept = Kept(*kinds)
    modes = [Operations(operations)] if operations else []
    return _Both(kept.recording(), *modes), _Both(kept.replaying(), *modes)


class _Both:
    """Contexts entered together, any number of times one after the other."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
