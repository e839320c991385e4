"""`CausalLM`: a Hugging Face language model that is called with packed rows, a scale and the state of a pipeline.

transformers gives attention to whoever has registered a function for it, without a change in the model: here to a core
(`context`), a child without parameters of each attention, so that documents of a row do not see one another and context
parallelism can put its own in its place. Names of parameters are those of the Hugging Face model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kforge_parallel.columns import document_ids, seen
from kforge_parallel.eager import eager_sizes
from kforge_parallel.expert import find_called

STAGES = ("llama", "qwen3", "qwen3_moe")
"""Model types that can be cut into stages: their model does nothing to hidden states before the first block."""


class CausalLM(nn.Module):
    """A model of transformers, such as ``LlamaForCausalLM(config)``, called as a job's model is:

        model(ids [B,S], rows, labels [B,S], scale) -> (Σ scale · nll, nll [B,S] without a gradient)

    and without labels -> logits [B,S,V]. rows: position_ids [B,S], and doc_ids or cu_seqlens where a row has several
    documents; None: one document a row. labels are shifted already, -100 where not scored. The loss is in float32 or
    wider; losses beside it, such as that of the balance of experts, are not added.

    Raises ValueError for what is no such model (a module of another kind, a model without a head over the vocabulary,
    an encoder, blocks without attention or with one that does not go by transformers' registry), and for attention that
    is more than a softmax over what a window shows (soft-caps, sinks), or that drops values.
    """

    hf: Any
    """The model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        if lack := _lack(model):
            raise ValueError(
                "CausalLM takes a language model of transformers, such as LlamaForCausalLM(config), and "
                f"{type(model).__name__} {lack}"
            )
        if getattr(model.config, "output_router_logits", False):
            raise ValueError(
                "config.output_router_logits = true asks for a loss of the balance of experts, which CausalLM does not "
                "add; set it to false"
            )
        for module in model.modules():
            if _attends(module):
                _check_softmax(module)
        vars(self)["hf"] = model  # not a child: its children are this one's, so that names are theirs
        for name, child in model.named_children():
            self.add_module(name, child)
        widths = model.config.hidden_size, getattr(model.config, "intermediate_size", 0)
        self.eager = eager_sizes(self._base.layers, *widths)
        """What blocks keep where they are not compiled, counted while they are whole."""
        _register()
        model.config._attn_implementation = "kforge"
        for module in model.modules():
            if _attends(module):
                module.core = Core(module)

    # ------------------------------------------------------------------------------------------ what it says of itself

    @property
    def config(self) -> Any:
        """transformers' own."""
        return self.hf.config

    @property
    def tp_plan(self) -> dict[str, str]:
        """In Hugging Face's words."""
        plan: dict[str, str] = self.hf.tp_plan
        return plan

    @property
    def block_list(self) -> str:
        """Name of the list of blocks."""
        return f"{self.hf.base_model_prefix}.layers"

    @property
    def shape(self) -> dict[str, int | bool]:
        """Sizes, as `check_layout` takes them."""
        config = self.config
        experts = [*find_called(self.hf).values()]
        widths = [getattr(module, "intermediate_dim", None) for module in experts]
        sizes = {
            "vocab_size": config.vocab_size,
            "dim": config.hidden_size,
            "n_layers": config.num_hidden_layers,
            "n_heads": config.num_attention_heads,
            "n_kv_heads": getattr(config, "num_key_value_heads", None),
            "head_dim": getattr(config, "head_dim", None),
            "ffn_dim": getattr(config, "intermediate_size", None),
            "max_seq_len": config.max_position_embeddings,
            "tie_embeddings": config.tie_word_embeddings,
            "n_experts": experts[0].num_experts if experts else None,
            "experts_sum": True if experts else None,
            "moe_top_k": config.num_experts_per_tok if experts else None,
            "moe_layers": len(experts) if experts else None,
            "expert_dim": widths[0] if experts else None,
            "qk_norm": any(name.endswith("q_norm") for name, _ in self.named_modules()),
            "loss_chunk_tokens": 0,  # all logits at once
            **self.eager,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    # ------------------------------------------------------------------------------------------ what it computes

    def forward(
        self,
        x: Tensor,
        rows: Any = None,
        labels: Tensor | None = None,
        scale: Tensor | float | None = None,
        ids: Tensor | None = None,
    ) -> Any:
        """x: ids [B,S], or hidden states [B,S,D] of the stage before. Hidden states where this is no last stage. ids:
        those of the row in a later stage, which has no use for them."""
        base = self._base
        if rows is None:
            rows = Plain(torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]))
        for core in {core.window: core for core in self._cores()}.values():
            rows = core.prepare(rows, next(base.parameters()).dtype if x.dtype == torch.int64 else x.dtype)
        first = x.ndim == 2
        given = {"position_ids": rows.position_ids, "rows": rows, "use_cache": False}
        given["input_ids" if first else "inputs_embeds"] = x
        if self.hf.get_output_embeddings() is None:
            y: Tensor = base(**given).last_hidden_state
            return y
        logits: Tensor = self.hf(**given).logits
        if labels is None:
            return logits
        if scale is None:
            raise ValueError("labels need a scale: 1 / scored tokens of the whole global batch")
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        nll = nll.view(labels.shape)
        return (torch.where(labels == -100, 0, nll) * scale).sum(), nll.detach()

    @property
    def _base(self) -> Any:
        return getattr(self.hf, self.hf.base_model_prefix)

    def _cores(self) -> Iterator[Any]:
        for module in self.modules():
            if _attends(module):
                yield module.core

    # ------------------------------------------------------------------------------------------ stages

    def stage(self, first: bool, layers: Iterable[int], last: bool) -> CausalLM:
        """The part with these blocks, for a pipeline: names as in the whole, modules shared with it."""
        kind = self.config.model_type
        if kind not in STAGES:
            raise ValueError(
                f"a Hugging Face model of type {kind!r} cannot be cut into stages (those of {', '.join(STAGES)} can); "
                "set parallel.pp to 1"
            )
        if self.config.tie_word_embeddings:
            raise ValueError(
                "config.tie_word_embeddings = true: embedding and head of a Hugging Face model would lie on two "
                "stages; set it to false, or parallel.pp to 1"
            )
        hf, base = _shallow(self.hf), _shallow(self._base)
        hf._modules[hf.base_model_prefix] = base
        held: Any = self._base.layers
        base._modules["layers"] = Blocks({str(i): held[str(i) if isinstance(held, Blocks) else i] for i in layers})
        if not first:
            base._modules["embed_tokens"] = None
        if not last:
            base._modules["norm"] = nn.Identity()
            hf._modules["lm_head"] = None
        part = CausalLM.__new__(CausalLM)
        nn.Module.__init__(part)
        vars(part).update(hf=hf, eager=self.eager)
        for name, child in hf._modules.items():
            part.add_module(name, child)
        return part


def _attends(module: Any) -> bool:
    """Whether a module of transformers is the attention of a block of a decoder."""
    return hasattr(module, "layer_idx") and hasattr(module, "is_causal")


def _check_softmax(attention: Any) -> None:
    """Raise ValueError for attention that `Core` does not compute, as far as it can be seen before a call."""
    kind = type(attention).__name__
    if cap := getattr(attention, "attn_logit_softcapping", None):
        raise ValueError(
            f"the attention of {kind} bounds its scores by softcap {cap}, which CausalLM does not compute; set "
            "config.attn_logit_softcapping to None, which is another model"
        )
    if getattr(attention, "sinks", None) is not None:
        raise ValueError(f"the attention of {kind} has sinks, which CausalLM does not compute")
    if drops := getattr(attention, "attention_dropout", 0):
        raise ValueError(
            f"the attention of {kind} drops values with probability {drops}, which CausalLM does not; set "
            "config.attention_dropout to 0.0"
        )


def _lack(model: Any) -> str:
    """What a model lacks to be called with packed rows; "" for nothing."""
    if isinstance(model, CausalLM):
        return "is one already"
    is_module = isinstance(model, nn.Module)
    if not is_module or not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        return "is none: it has no `config` and no `base_model_prefix`; any other module goes to `parallelize` as it is"
    base = getattr(model, model.base_model_prefix, None)
    if base is None or model.get_output_embeddings() is None:
        return "has no head over the vocabulary; take the class of its family that ends in ForCausalLM"
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        return f"has no list of blocks {model.base_model_prefix}.layers, as decoders of Llama's form have"
    blocks: list[nn.Module] = list(base.layers)
    attention = sum(any(_attends(m) and m.is_causal for m in block.modules()) for block in blocks)
    if attention < len(blocks) or not model._supports_attention_backend:
        found = attention if model._supports_attention_backend else 0
        return (
            f"has {len(blocks)} blocks, of which {found} have causal attention that goes by transformers' "
            "AttentionInterface: in the others, documents of a row would see one another"
        )
    return ""


class Blocks(nn.ModuleDict):
    """Some blocks by their number among all, for a model that goes over them all in order."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values()) if isinstance(key, slice) else super().__getitem__(key)


def _shallow(module: Any) -> Any:
    """A copy with the same children, parameters and buffers, in registers of its own."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(twin)[name] = dict(vars(module)[name])
    return twin


# ------------------------------------------------------------------------------------------ attention


class Plain:
    """Rows of one document each."""

    def __init__(self, position_ids: Tensor) -> None:
        self.position_ids = position_ids


class Core(nn.Module):
    """Causal attention inside documents and a window, for whole rows."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        config = attention.config
        kinds = getattr(config, "layer_types", None)
        windowed = kinds is None or kinds[attention.layer_idx] == "sliding_attention"
        window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None) if windowed else None)
        self.scale: float = attention.scaling
        self.window: int | None = window

    def prepare(self, rows: Any, dtype: torch.dtype) -> Any:
        """The rows with the mask that every layer of this window would make anew."""
        batch, tokens = rows.position_ids.shape
        docs = document_ids(rows, batch, tokens)
        if docs is None and (self.window is None or self.window >= tokens):
            return rows
        rows = copy.copy(rows)
        columns = torch.arange(tokens, device=rows.position_ids.device)
        mask = torch.zeros((), dtype=dtype, device=columns.device).masked_fill(
            ~seen(columns, columns, docs, self.window), float("-inf")
        )
        object.__setattr__(rows, "masks", {**getattr(rows, "masks", {}), self.window: mask[:, None]})
        return rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Any) -> Tensor:
        """q [B,H,S,Dh], k [B,KV,S,Dh], v [B,KV,S,Dv], after RoPE -> [B,H,S,Dv]."""
        mask = getattr(rows, "masks", {}).get(self.window)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls where ``_attn_implementation`` is "kforge"."""
    core = module.core
    if softcap or s_aux is not None or dropout or scaling != core.scale or sliding_window not in (None, core.window):
        raise ValueError(
            f"the attention of {type(module).__name__} has softcap {softcap}, sinks {s_aux is not None}, dropout "
            f"{dropout}, scaling {scaling} (its core: {core.scale}) and window {sliding_window} (its core: "
            f"{core.window}); CausalLM computes softmax attention without the first three, with those of the core"
        )
    return core(query, key, value, rows).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows say who sees whom."""


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "CausalLM is for models of transformers: pip install 'kforge-parallel[transformers]'"
        ) from error
    AttentionInterface.register("kforge", _attend)
    AttentionMaskInterface.register("kforge", _no_mask)
