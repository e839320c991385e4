"""What an estimate must know of a model, as plain data: its sizes (`ModelShape`), and its parameters one by one.

Sizes alone describe a decoder in kforge's form, of grouped-query attention and gated or plain feed-forward halves, and
`decoder_parameters` lists what it has. Of any other model `parameters_of` reads the list off a module, which may be on
meta. Nothing here knows a rank; torch is imported where a module is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kforge_parallel.layout import check_sizes

if TYPE_CHECKING:
    from torch import nn

ModelShape = Mapping[str, int | bool]
"""Sizes of a model by name; `check_layout` says which names there are. An estimate wants vocab_size, dim, n_layers and
n_heads. What else there is has a default: n_kv_heads (n_heads), head_dim (dim / n_heads), ffn_dim (8/3 of dim, up to a
multiple of 64), mlp_matrices (3, gated; 2: plain), qk_norm (false; true: of each head), tie_embeddings (false),
n_experts (0), moe_top_k (2), moe_layers (all; fewer: the last ones), expert_dim (ffn_dim), shared_dim (hidden width of
the shared experts together: 0), loss_chunk_tokens (2048; 0: all logits at once), mtp_depth (0). Of other code
than kforge's, what its modules keep where they are not compiled, as `eager_sizes` counts it: norm_wide and norm_narrow,
head_norm_wide and head_norm_narrow, mlp_kept."""


WANTED = ("vocab_size", "dim", "n_layers", "n_heads")
"""Sizes without which nothing can be estimated."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model."""

    name: str
    """In the model; of several names the first."""
    shape: tuple[int, ...]
    """Of the whole."""
    word: str | None
    """How tensor parallelism cuts it (`plan`); None: nobody has said."""
    unit: str
    """FSDP unit: parameters of one unit are gathered together."""
    layer: int | None
    """Block that it is in; None: it is before the first or after the last."""
    first: bool = False
    """Whether the first stage of a pipeline has it."""
    last: bool = False
    """Whether the last stage has it; with ``first``, each has a copy."""
    expert: bool = False
    """Whether its first dimension are the experts of a mixture, which ep deals out."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, with what is left out filled in."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    experts: int
    top_k: int
    moe_layers: int
    expert_ffn: int
    shared_ffn: int
    matrices: int
    qk_norm: bool
    chunk: int
    mtp: int
    eager: tuple[int, int] | None = None
    """Elements that the norms of a block keep of a feature, not compiled: in fp32, and in the compute dtype. None: as
    kforge's."""
    eager_heads: tuple[int, int] = (2, 0)
    """The same of the norms of queries and keys."""
    eager_mlp: int | None = None
    """Elements that the feed-forward half keeps of each of its features, not compiled. None: as kforge's."""

    def mixed(self, layer: int) -> bool:
        """Whether a block has experts."""
        return self.experts > 0 and layer >= self.layers - self.moe_layers


def sizes_of(shape: ModelShape) -> Sizes:
    """Raises ValueError that names a size which is missing or below 1, or does not go with the others."""
    for key in WANTED:
        if key not in shape:
            raise ValueError(f"shape has no {key}; an estimate wants vocab_size, dim, n_layers and n_heads")
    check_sizes(shape)
    dim, layers, heads = shape["dim"], shape["n_layers"], shape["n_heads"]
    ffn = shape.get("ffn_dim") or -(-(8 * dim // 3) // 64) * 64
    experts = shape.get("n_experts", 0)
    sizes = Sizes(
        vocab=shape["vocab_size"],
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=shape.get("n_kv_heads") or heads,
        head_dim=shape.get("head_dim") or dim // heads,
        ffn=ffn,
        tied=bool(shape.get("tie_embeddings", False)),
        experts=experts,
        top_k=shape.get("moe_top_k", 2) if experts else 0,
        moe_layers=shape.get("moe_layers", layers) if experts else 0,
        expert_ffn=shape.get("expert_dim") or ffn,
        shared_ffn=shape.get("shared_dim", 0),
        matrices=shape.get("mlp_matrices", 3),
        qk_norm=bool(shape.get("qk_norm", False)),
        chunk=shape.get("loss_chunk_tokens", 2048),
        mtp=shape.get("mtp_depth", 0),
        eager=(shape["norm_wide"], shape.get("norm_narrow", 0)) if "norm_wide" in shape else None,
        eager_heads=(shape.get("head_norm_wide", 2), shape.get("head_norm_narrow", 0)),
        eager_mlp=shape.get("mlp_kept"),
    )
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"shape.n_heads = {sizes.heads} must be a multiple of shape.n_kv_heads = {sizes.kv_heads}")
    if "head_dim" not in shape and dim % heads:
        raise ValueError(f"shape.dim = {dim} must be a multiple of shape.n_heads = {heads}, or head_dim be given")
    if experts and not 0 < sizes.top_k <= experts:
        raise ValueError(
            f"shape.moe_top_k = {sizes.top_k} must be from 1 to shape.n_experts = {experts}: a token goes to so many"
        )
    if sizes.moe_layers > layers:
        raise ValueError(f"shape.moe_layers = {sizes.moe_layers} must be at most shape.n_layers = {layers}")
    if sizes.matrices not in (2, 3):
        raise ValueError(f"shape.mlp_matrices = {sizes.matrices} must be 3 (gated) or 2 (plain)")
    return sizes


def decoder_parameters(shape: ModelShape) -> list[Parameter]:
    """The parameters of kforge's decoder of these sizes: RMS norms, no biases, one weight for queries, keys and values.

    Raises ValueError where they do not add up to the shape's own ``parameters``: the model is another one, and
    `parameters_of` lists those of any.
    """
    s = sizes_of(shape)
    found = [*_ends(s)]
    for layer in range(s.layers):
        found += _block(s, f"layers.{layer}", layer, s.mixed(layer))
    for depth in range(s.mtp):
        found += _further(s, depth)
    total = sum(parameter.count for parameter in found)
    if shape.get("parameters", total) != total:
        raise ValueError(
            f"these sizes make a model of {total:,} parameters, and the shape says {shape['parameters']:,}: it has "
            "parts that sizes do not tell of; give the estimate parameters=parameters_of(model) of a model on meta"
        )
    return found


def _ends(s: Sizes) -> Iterator[Parameter]:
    unit = "ends" if s.tied else "embed"
    yield Parameter(
        "embed.weight", (s.vocab, s.dim), "vocab_embedding", unit, None, first=True, last=s.tied or s.mtp > 0
    )
    yield Parameter("norm.weight", (s.dim,), "sequence", "ends", None, last=True)
    if not s.tied:
        yield Parameter("head.weight", (s.vocab, s.dim), "vocab_loss", "ends", None, last=True)


def _block(s: Sizes, name: str, layer: int | None, mixed: bool, unit: str | None = None) -> Iterator[Parameter]:
    def one(leaf: str, shape: tuple[int, ...], word: str, expert: bool = False) -> Parameter:
        return Parameter(f"{name}.{leaf}", shape, word, unit or name, layer, last=layer is None, expert=expert)

    gate = (2,) if s.matrices == 3 else ()
    up = "w_gate_up" if gate else "w_up"
    yield one("attn_norm.weight", (s.dim,), "sequence")
    yield one("attn.wqkv.weight", (s.kv_heads, s.heads // s.kv_heads + 2, s.head_dim, s.dim), "colwise_qkv")
    for leaf in ("q_norm", "k_norm") if s.qk_norm else ():
        yield one(f"attn.{leaf}.weight", (s.head_dim,), "replicate")
    yield one("attn.wo.weight", (s.dim, s.heads * s.head_dim), "rowwise")
    yield one("mlp_norm.weight", (s.dim,), "sequence")
    if not mixed:
        yield one(f"mlp.{up}.weight", (*gate, s.ffn, s.dim), "packed_colwise" if gate else "colwise")
        yield one("mlp.w_down.weight", (s.dim, s.ffn), "rowwise")
        return
    yield one("moe.router.weight", (s.experts, s.dim), "sequence")
    yield one(f"moe.experts.{up}", (s.experts, *gate, s.expert_ffn, s.dim), "experts", True)
    yield one("moe.experts.w_down", (s.experts, s.dim, s.expert_ffn), "experts", True)
    if s.shared_ffn:
        yield one(f"moe.shared.{up}.weight", (*gate, s.shared_ffn, s.dim), "sequence")
        yield one("moe.shared.w_down.weight", (s.dim, s.shared_ffn), "sequence")


def _further(s: Sizes, depth: int) -> Iterator[Parameter]:
    """A further token's block, with what is around it."""
    unit = f"mtp.{depth}"
    for leaf, shape in (
        ("hidden_norm", (s.dim,)),
        ("embed_norm", (s.dim,)),
        ("proj", (s.dim, 2 * s.dim)),
        ("norm", (s.dim,)),
    ):
        yield Parameter(f"{unit}.{leaf}.weight", shape, "sequence", unit, None, last=True)
    yield from _block(s, f"{unit}.block", None, s.experts > 0 and s.moe_layers > 0, unit)


def parameters_of(
    model: nn.Module, *, blocks: str | None = None, plan: Mapping[str, str] | None = None
) -> list[Parameter]:
    """The parameters of a model, which may be on meta, as `parallelize` would spread them.

    blocks, plan: as of `parallelize`. A model without a plan gets no words, and cannot be estimated under tp.
    Raises ValueError as `parallelize` does for either.
    """
    from kforge_parallel.expert import find_called, find_mixtures
    from kforge_parallel.fsdp import find_blocks, find_units
    from kforge_parallel.hugging_face import tensor_plan
    from kforge_parallel.plan import resolve_plan

    plan = getattr(model, "plan", None) if plan is None else plan
    if plan is None and getattr(model, "tp_plan", None):
        plan = tensor_plan(model)
    words: Mapping[str, str] = {} if plan is None else resolve_plan(model, plan).parameters
    block_list = find_blocks(model, blocks)
    mixtures = [getattr(mixture, "experts") for mixture in find_mixtures(model).values()]  # noqa: B009
    dealt = {p for experts in (*mixtures, *find_called(model).values()) for p in experts.parameters()}
    layer_of = {module: i for i, block in enumerate(block_list) for module in block.modules()}
    unit_of = {m: f"unit {i}" for i, group in enumerate(find_units(model)) for top in group for m in top.modules()}
    first, last = _ends_of(model, len(block_list))
    found = []
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        layer = layer_of.get(owner)
        found.append(
            Parameter(
                name,
                tuple(parameter.shape),
                words.get(name),
                unit_of.get(owner, "root") if layer is None else f"block {layer}",
                layer,
                first=layer is None and name in first,
                last=layer is None and name in last,
                expert=parameter in dealt,
            )
        )
    return found


def _ends_of(model: Any, blocks: int) -> tuple[set[str], set[str]]:
    """Names of what the first and the last stage of a pipeline have; of a model that cannot be cut, all on both."""
    every = {name for name, _ in model.named_parameters()}
    if not hasattr(model, "stage") or blocks < 2:
        return every, every
    try:
        stages = model.stage(True, [0], False), model.stage(False, [blocks - 1], True)
    except ValueError:  # of a class that has stages, one that cannot be cut
        return every, every
    first, last = ({name for name, _ in stage.named_parameters()} for stage in stages)
    return first, last
