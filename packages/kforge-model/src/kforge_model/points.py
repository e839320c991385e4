"""What a model computes inside: outputs of its modules, and what its attention looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from kforge_model.block import Block
from kforge_model.core import attention_mask, attention_weights_of
from kforge_model.modes import run_for_hooks
from kforge_model.rows import Rows
from kforge_model.transformer import Transformer


def find_points(model: nn.Module, points: str | Iterable[str]) -> list[str]:
    """Names of the model's modules that any of the patterns matches, in the model's order.

    A pattern is a module's name in which each part between dots may have ``*``, ``?`` and ``[…]`` in it; ``*`` does not
    reach over a dot. Raises ValueError for a pattern that matches nothing, and names near ones.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for point in [points] if isinstance(points, str) else points:
        hits = {name for name in names if _matches(name, point)}
        if not hits:
            raise ValueError(f"no module of the model is called {point!r}; {_near(point, names)}")
        found |= hits
    return [name for name in names if name in found]


@contextmanager
def capture(model: nn.Module, points: str | Iterable[str], *, offload: bool = False) -> Iterator[dict[str, list[Any]]]:
    """Keep what the modules at ``points`` (patterns of `find_points`) return while inside.

        with capture(model, ["layers.*.mlp", "layers.0.attn"], offload=True) as seen:
            model(ids)
        seen["layers.0.mlp"][0]  # [B,S,D]: one entry a call of the module

    Tensors are detached, inside tuples, lists and dicts too, and not copied: what is changed in place later is changed
    here too. With ``offload`` they are copied to pinned memory of the CPU without waiting, of a DTensor this rank's
    part; their values are there once the ``with`` has ended, which waits for the device once. Compiled parts of the
    model run uncompiled inside, as compiled code calls no hooks.

    Raises ValueError for a pattern that matches nothing.
    """
    names = find_points(model, points)
    modules = dict(model.named_modules())
    seen: dict[str, list[Any]] = {name: [] for name in names}
    devices: set[torch.device] = set()

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            seen[name].append(_kept(output, offload, devices))

        return keep

    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for device in devices:
            torch.accelerator.synchronize(device)


@contextmanager
def watching_attention(
    model: Transformer, watch: Callable[[int, Tensor, Tensor, Rows, Tensor | None], None]
) -> Iterator[None]:
    """Inside, ``watch(layer, q [B,H,S,Dh], k [B,KV,S,Dh], rows, sinks)`` is called with what each block's core gets."""

    def hook(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            q, k, _, rows = args[:4]
            watch(layer, q, k, rows, kwargs.get("sinks"))

        return look

    handles = [
        cast(Block, block).attn.core.register_forward_pre_hook(hook(int(name)), with_kwargs=True)
        for name, block in model.layers.items()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def attention_weights(
    model: Transformer, ids: Tensor, rows: Rows | None = None, layers: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """What each token takes of each other: layer -> [B,H,S,S], query by key, in float32 or wider.

    ids and rows as of the model, packed rows too; layers: None for all. Computed by the formula from the queries and
    keys that the cores get, with scale, soft-cap, window, documents and sinks: the weights of a query sum to 1, with
    sinks to less. Memory: B H S² elements a layer. Runs in eval mode without gradients; under tensor parallelism the
    heads are this rank's; under context parallelism ids and rows are whole on every rank, and each computes all.

    Raises ValueError for a layer that the model (or stage) does not have.
    """
    wanted = [int(name) for name in model.layers] if layers is None else list(layers)
    for layer in wanted:
        block_of(model, layer)
    found: dict[int, Tensor] = {}

    def watch(layer: int, q: Tensor, k: Tensor, given: Rows, sinks: Tensor | None) -> None:
        if layer not in wanted:
            return
        mask = attention_mask(given, q.dtype, model.config.window_of(layer))
        scale, softcap = model.config.score_scale, model.config.attn_softcap
        found[layer] = attention_weights_of(q, k, mask, scale=scale, softcap=softcap, sinks=sinks)

    with watching_attention(model, watch):
        run_for_hooks(model, ids, rows)
    return {layer: found[layer] for layer in wanted}


def block_of(model: Transformer, layer: int) -> Block:
    """The block of that number. Raises ValueError when the model or stage has none."""
    if str(layer) not in model.layers:
        raise ValueError(f"there is no layer {layer} here; there are {', '.join(model.layers)}")
    return cast(Block, model.layers[str(layer)])


def _matches(name: str, pattern: str) -> bool:
    ours, theirs = name.split("."), pattern.split(".")
    return len(ours) == len(theirs) and all(map(fnmatchcase, ours, theirs))


def _near(point: str, names: Sequence[str]) -> str:
    patterns = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    near = get_close_matches(point, sorted({*names, *patterns}), n=3, cutoff=0.5)
    return f"near it are {', '.join(near)}" if near else f"its parts are {', '.join(n for n in names if '.' not in n)}"


def _kept(value: Any, offload: bool, devices: set[torch.device]) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        if not offload:
            return value
        value = value.to_local() if hasattr(value, "to_local") else value
        if value.device.type == "cpu":
            return value
        devices.add(value.device)
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    if isinstance(value, (tuple, list)):
        kept = [_kept(item, offload, devices) for item in value]
        return type(value)(*kept) if hasattr(value, "_fields") else type(value)(kept)  # the first: a NamedTuple
    if isinstance(value, dict):
        return {key: _kept(item, offload, devices) for key, item in value.items()}
    return value
