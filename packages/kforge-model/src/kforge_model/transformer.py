"""The decoder: embedding, blocks, final norm, head and loss; whole, or one stage of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from kforge_model.block import Block
from kforge_model.cache import KVCache
from kforge_model.config import ModelConfig
from kforge_model.flops import model_shape
from kforge_model.head_loss import HeadLoss
from kforge_model.init import fill_, init_normal_
from kforge_model.norm import RMSNorm
from kforge_model.rope import Rotary
from kforge_model.rows import Rows


class Transformer(nn.Module):
    """A Llama-style decoder.

    Submodules: ``embed``, ``layers`` (a ModuleDict keyed by the global index of a block, "0" onwards), ``norm``,
    ``head``. A stage lacks some of them and keeps the names of the rest.

    Built inside ``with torch.device("meta")`` it holds no storage: shard it, call ``to_empty(device=...)``, then
    ``init_weights(seed)``. Built on a real device it is initialised with seed 0 at once, so that no parameter is ever
    undefined. The default generators are not touched.
    """

    plan: ClassVar[dict[str, str]] = {
        "embed": "vocab_embedding",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.wq": "colwise",
        "layers.*.attn.wk": "colwise_kv",
        "layers.*.attn.wv": "colwise_kv",
        "layers.*.attn.wo": "rowwise",
        "layers.*.mlp_norm": "sequence",
        "layers.*.mlp": "gather",
        "layers.*.mlp.w_gate": "colwise",
        "layers.*.mlp.w_up": "colwise",
        "layers.*.mlp.w_down": "rowwise",
        "norm": "sequence",
        "head": "vocab_loss",
    }
    """How tensor parallelism may split it: module name, ``*`` for a block's index, -> word. What an option adds is in
    the plan of the object."""

    block_list: ClassVar[str] = "layers"
    """Name of the container of the blocks."""

    def __init__(
        self, config: ModelConfig, *, first: bool = True, layers: Iterable[int] | None = None, last: bool = True
    ) -> None:
        """The whole model, or the stage that has these ``layers`` (global indices; None: all), the embedding if
        ``first``, and the final norm and head if ``last``."""
        super().__init__()
        indices = list(range(config.n_layers) if layers is None else layers)
        if sorted(set(indices)) != indices or not set(indices) <= set(range(config.n_layers)):
            raise ValueError(f"layers = {indices} must rise within 0 .. {config.n_layers - 1}")
        self.config = config
        if config.qk_norm:
            heads = {"layers.*.attn.q_norm": "replicate", "layers.*.attn.k_norm": "replicate"}
            vars(self)["plan"] = {**type(self).plan, **heads}
        device = torch.get_default_device()
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.dim) if first else None
            self.layers = nn.ModuleDict({str(index): Block(config) for index in indices})
            self.norm = RMSNorm(config.dim, config.norm_eps) if last else None
            self.head = HeadLoss(config.dim, config.vocab_size, config.loss_chunk_tokens) if last else None
        self.tie()
        self.register_state_dict_post_hook(_drop_tied_head)
        self.register_load_state_dict_pre_hook(_restore_tied_head)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(0)

    @property
    def tied(self) -> bool:
        """Whether this object holds both an embedding and a head, and they are to share one weight."""
        return self.config.tie_embeddings and self.embed is not None and self.head is not None

    @property
    def shape(self) -> dict[str, int | bool]:
        """Its sizes, as plain data (`model_shape`)."""
        return model_shape(self.config)

    def tie(self) -> None:
        """Make the head's weight the embedding's, where they are to be one. Changes nothing when they are."""
        if self.tied:
            assert self.embed is not None and self.head is not None
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty, to and the like replace a shared parameter once per owner, which unties it without a word.
        super()._apply(fn, recurse)
        self.tie()
        return self

    def fsdp_units(self) -> list[list[str]]:
        """Groups of submodules that make one FSDP unit each, beside the blocks. Both ends of a tie are in one."""
        ends = [name for name in ("norm", "head") if getattr(self, name) is not None]
        if self.tied:
            return [["embed", *ends]]
        return [unit for unit in ([] if self.embed is None else ["embed"], ends) if unit]

    def stage(self, first: bool, layers: Iterable[int], last: bool) -> Transformer:
        """One pipeline stage: the same class, sharing this model's submodules, under the same global names.

        ``first`` takes the embedding, ``last`` the final norm and the head. A tied model whose ends fall on different
        stages keeps a copy at each: the head's is initialised under the embedding's name, so both start alike.
        """
        with torch.device("meta"):
            part = type(self)(self.config, first=first, layers=layers, last=last)
        for name in ("embed", "norm", "head"):
            if getattr(part, name) is not None:
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not in this stage, so no part of it can have it")
                setattr(part, name, getattr(self, name))
        for key in part.layers:
            if key not in self.layers:
                raise ValueError(f"layer {key} is not in this stage, which has {list(self.layers)}")
            part.layers[key] = self.layers[key]
        if self.tied and not part.tied and part.head is not None and part.embed is None:
            part.head = HeadLoss(self.config.dim, self.config.vocab_size, self.config.loss_chunk_tokens)
            part.head.weight = nn.Parameter(self.head.weight.detach().clone())  # type: ignore[union-attr]
        return part

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter in place, plain tensors and DTensor shards alike, as a function of (seed, its name).

        Norms are 1; the embedding and all matrices normal with ``init_std``, but wo and w_down with
        ``init_std / sqrt(2 n_layers)``, so that the residual stream's variance does not grow with depth (GPT-2). Ties
        the head to the embedding first. Raises ValueError on meta, and for a parameter or buffer it does not know:
        nothing is left as it lay in memory.
        """
        self.tie()
        unknown = [name for name, _ in self.named_buffers()]
        for name, parameter in self.named_parameters():
            if self._std_of(name) is None:
                unknown.append(name)
            else:
                self.init_value_(name, parameter, seed)
        if unknown:
            raise ValueError(
                f"no rule says how to initialise {', '.join(unknown)}; add one to Transformer.init_weights"
            )

    @torch.no_grad()
    def init_value_(self, name: str, tensor: Tensor, seed: int = 0) -> Tensor:
        """Fill ``tensor``, laid out like the parameter called ``name`` but perhaps of another dtype, as `init_weights`
        fills the parameter; returns it. For storage that holds more of a weight than its parameter does."""
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; call to_empty(device=...) first")
        std = self._std_of(name)
        if std is None:
            raise ValueError(f"no rule says how to initialise {name}; add one to Transformer.init_weights")
        if std == 0:
            return fill_(tensor, 1.0)
        return init_normal_(tensor, seed, self._init_name(name), std)

    def _std_of(self, name: str) -> float | None:
        """Standard deviation of a parameter's initial values; 0 for a norm, which is all 1; None: there is no rule."""
        owner = name.split(".")[-2]
        std = self.config.init_std
        if owner in ("attn_norm", "q_norm", "k_norm", "mlp_norm", "norm"):
            return 0.0
        if owner in ("wo", "w_down"):
            return std / math.sqrt(2 * self.config.n_layers)
        return std if owner in ("embed", "head", "wq", "wk", "wv", "w_gate", "w_up") else None

    def _init_name(self, name: str) -> str:
        """Under which name a parameter's numbers are drawn: a tied head's under the embedding's, on every stage."""
        return "embed.weight" if self.config.tie_embeddings and name == "head.weight" else name

    def forward(
        self,
        x: Tensor,
        rows: Rows | None = None,
        labels: Tensor | None = None,
        scale: Tensor | float | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """x: token ids [B,S] int64 on the first stage, hidden states [B,S,D] after it.

        rows: positions and documents (``Rows`` or any object with its attributes); None: plain rows.
        labels [B,S] int64, already shifted, -100 where not scored, with scale: returns (Σ scale * nll, nll [B,S]), as
        ``linear_cross_entropy`` does. Without labels: logits [B,S,V]. A stage that is not the last returns [B,S,D].
        cache: x follows the tokens in it, which are plain rows, and only the last token's logits [B,1,V] come back.

        Computes in the dtype of the weights; norms, rotations and log-sum-exp in float32 or wider. Never waits for
        the device.
        """
        batch, seq = x.shape[:2]
        before = 0 if cache is None else cache.length
        if before + seq > self.config.max_seq_len:
            raise ValueError(f"{before + seq} tokens exceed max_seq_len = {self.config.max_seq_len}")
        if rows is None:
            rows = Rows.plain(batch, seq, x.device, first_position=before)
        elif cache is not None:
            raise ValueError("rows and cache exclude one another: cached rows are plain, their positions follow")
        if tuple(rows.position_ids.shape) != (batch, seq):
            raise ValueError(f"rows of {tuple(rows.position_ids.shape)} tokens do not fit an input of {(batch, seq)}")

        h = x if self.embed is None else self.embed(x)
        rotary = Rotary.at(rows.position_ids, self.config.head_size, self.config.rope_theta, h.dtype)
        rows = self._prepared(rows, h.dtype)
        for name, block in self.layers.items():
            h = block(h, rotary, rows, None if cache is None else cache.layer(name))
        if self.head is None or self.norm is None:
            return h
        if cache is not None:
            h = h[:, -1:]
        return self.head(self.norm(h), labels, scale)

    def _prepared(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """The rows with what the core would otherwise make anew in every layer. All blocks have one kind of core."""
        for block in self.layers.values():
            prepare = getattr(cast(Block, block).attn.core, "prepare", None)
            return rows if prepare is None else cast(Rows, prepare(rows, dtype))
        return rows


def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A tied weight is saved once, under the embedding's name."""
    assert isinstance(module, Transformer)
    if module.tied:
        state.pop(prefix + "head.weight", None)


def _restore_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, Transformer)
    if module.tied and prefix + "embed.weight" in state:
        state.setdefault(prefix + "head.weight", state[prefix + "embed.weight"])
