"""The decoder: embedding, blocks, final norm, head and loss; whole, or one stage of it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from kforge_model.block import Block
from kforge_model.cache import KVCache
from kforge_model.config import ModelConfig
from kforge_model.flops import model_shape
from kforge_model.head_loss import HeadLoss
from kforge_model.init import fill_, init_normal_
from kforge_model.inputs import check_indices
from kforge_model.linear import StackedLinear
from kforge_model.moe.balance import Reduce, bias_rate, bias_step, ratios
from kforge_model.moe.experts import known_mlp
from kforge_model.moe.layer import MoE
from kforge_model.mtp import NextToken, later_labels, later_tokens
from kforge_model.norm import build_norm
from kforge_model.registry import ATTENTION_CORES, LOSSES, MLPS, MODELS, NORMS, ROUTERS
from kforge_model.rope import Rotary, rope_frequencies
from kforge_model.rows import Rows

TRUNCATED_AT = 3.0
"""Standard deviations beyond which init = "truncated_normal" has no value."""


@MODELS.register("transformer")
class Transformer(nn.Module):
    """A decoder as `ModelConfig` describes it.

    Submodules: ``embed``, ``layers`` (a ModuleDict keyed by the global index of a block, "0" onwards), ``norm``,
    ``head``, and ``mtp`` where further tokens are predicted. A stage lacks some of them and keeps the names of the
    rest.

    Built inside ``with torch.device("meta")`` it holds no storage: shard it, call ``to_empty(device=...)``, then
    ``init_weights(seed)``. Built on a real device it is initialised with seed 0 at once, so that no parameter is ever
    undefined. The default generators are not touched.
    """

    plan: Mapping[str, str] = {"embed": "vocab_embedding", "norm": "sequence", "head": "vocab_loss"}
    """How tensor parallelism may split it: module or parameter name, ``*`` for a block's index, -> word. Of an object:
    with the plans of all its parts."""

    init: ClassVar[Mapping[str, str]] = {"embed.weight": "embedding", "head.weight": "embedding"}
    """Parameter name -> a word of `init_weights`. Each part has such a table for its own parameters."""

    block_list: ClassVar[str] = "layers"
    """Name of the container of the blocks."""

    def __init__(
        self, config: ModelConfig, *, first: bool = True, layers: Iterable[int] | None = None, last: bool = True
    ) -> None:
        """The whole model, or the stage that has these ``layers`` (global indices; None: all), the embedding if
        ``first``, and the final norm, the head and the further tokens if ``last``. A last stage that is not the first
        has a copy of the embedding where its head is tied to it or further tokens are embedded there."""
        super().__init__()
        indices = list(range(config.n_layers) if layers is None else layers)
        if sorted(set(indices)) != indices or not set(indices) <= set(range(config.n_layers)):
            raise ValueError(f"layers = {indices} must rise within 0 .. {config.n_layers - 1}")
        self.config = config
        self.first = first
        """Whether ids come in, and not the hidden states of the stage before."""
        self._frequencies: dict[tuple[int | None, torch.device], tuple[Tensor, float]] = {}
        device = torch.get_default_device()
        with torch.device("meta"):
            embeds = first or (last and (config.tie_embeddings or config.mtp_depth > 0))
            self.embed = nn.Embedding(config.vocab_rows, config.dim) if embeds else None
            self.layers = nn.ModuleDict({str(index): Block(config, index) for index in indices})
            self.norm = build_norm(config, config.dim) if last else None
            self.head = _head(config) if last else None
            self.mtp = nn.ModuleDict(
                {str(k): NextToken(config, config.n_layers + k) for k in range(config.mtp_depth if last else 0)}
            )
        self.plan = _whole_plan(self)
        self.tie()
        self.register_state_dict_post_hook(_drop_tied_head)
        self.register_load_state_dict_pre_hook(_restore_tied_head)
        self.register_load_state_dict_post_hook(_tie_again)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(0)

    @property
    def tied(self) -> bool:
        """Whether this object holds both an embedding and a head, and they are to share one weight."""
        return self.config.tie_embeddings and self.embed is not None and self.head is not None

    @property
    def whole_backward(self) -> bool:
        """Whether its backward cannot be computed in two halves, inputs and then weights, as some pipelines do. With
        further tokens it cannot: the gradient of the embedding comes through weights of other blocks, and torch would
        run these twice."""
        return len(self.mtp) > 0

    @property
    def shape(self) -> dict[str, int | bool]:
        """Its sizes, as plain data (`model_shape`)."""
        return model_shape(self.config)

    @property
    def fused_weights(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Weights that hold several matrices: parameter name -> (dimension, sizes along it). The parameter is split so,
        and each part, all its dimensions but the last flattened, is one matrix [out, in]. Those of experts are not
        here: each is a batch of matrices, its last two dimensions, over the dimensions before them."""
        found = {}
        for name, module in self.named_modules():
            if isinstance(module, StackedLinear):
                parts = module.weight.shape[-3]
                attention = module.weight.ndim == 4
                found[f"{name}.weight"] = (1, (parts - 2, 1, 1)) if attention else (0, (1,) * parts)
        return found

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
        further = [[f"mtp.{k}"] for k in self.mtp]
        if self.tied:
            return [*further, ["embed", *ends]]
        return [unit for unit in ([] if self.embed is None else ["embed"], *further, ends) if unit]

    def stage(self, first: bool, layers: Iterable[int], last: bool) -> Transformer:
        """One pipeline stage: the same class, sharing this model's submodules, under the same global names.

        ``first`` takes the embedding, ``last`` the final norm and the head. Where both ends need the embedding's weight
        (a tied head, further tokens) and are not in one part, the last has a copy of it, under the same name: values
        start alike, and whoever trains the stages sums the gradients of the two. Raises ValueError for a part that is
        not in this one.
        """
        with torch.device("meta"):
            part = type(self)(self.config, first=first, layers=layers, last=last)
        copied = part.embed is not None and self.first and not first
        for name in ("embed", "norm", "head"):
            own = getattr(self, name)
            if getattr(part, name) is None:
                continue
            if own is None or (name == "embed" and first and not self.first):
                raise ValueError(f"{name} is not in this stage, so no part of it can have it")
            if name == "norm" or not copied or (name == "head" and not part.tied):
                setattr(part, name, own)
        for key in part.layers:
            if key not in self.layers:
                raise ValueError(f"layer {key} is not in this stage, which has {list(self.layers)}")
            part.layers[key] = self.layers[key]
        for key in part.mtp:
            part.mtp[key] = self.mtp[key]
        if copied:
            assert part.embed is not None and self.embed is not None
            part.embed.weight = nn.Parameter(self.embed.weight.detach().clone())
            part.tie()
        return part

    def stage_costs(self) -> tuple[list[float], float]:
        """What a token costs in each block, and after the last one (head, further tokens): parameters that it meets,
        as most FLOPs are 6 a parameter; attention's own products, which depend on the rows, are not in it."""
        config = self.config
        unmet = 1 - config.moe_top_k / max(1, config.n_experts)  # of the experts
        costs = []
        for block in self._blocks():
            experts = () if block.moe is None else block.moe.experts.parameters()
            costs.append(sum(p.numel() for p in block.parameters()) - unmet * sum(p.numel() for p in experts))
        layers = len(self.layers)
        return costs[:layers], sum(costs[layers:]) + (1 + config.mtp_depth) * config.vocab_rows * config.dim

    # ---------------------------------------------------------------------------------------- initial values

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter and buffer in place, plain tensors and DTensor shards alike, as a function of (seed, its
        name).

        Each part says by a word how its parameters start: ``ones``, ``zeros``, or normal around 0 (cut off at three
        deviations under init = "truncated_normal") with a deviation of

            embedding   init_std
            matrix      init_std · m
            residual    init_std · m / sqrt(2 n_layers): the residual stream's variance does not grow with depth (GPT-2)

        where m is 1, or sqrt(mup_base_dim / dim). Ties the head to the embedding first. Raises ValueError on meta, and
        for a parameter or buffer that no part speaks of: nothing is left as it lay in memory.
        """
        self.tie()
        every = dict([*self.named_buffers(), *self.named_parameters()])
        unknown = [name for name in every if self._rule_of(name) is None]
        if unknown:
            raise ValueError(
                f"nothing says how {', '.join(unknown)} should start; give the module that owns it an attribute "
                "init = {'weight': 'matrix', …} with a word of Transformer.init_weights"
            )
        for name, tensor in every.items():
            self.init_value_(name, tensor, seed)
        for moe in self._mixtures():
            moe.tally.clear()

    @torch.no_grad()
    def init_value_(self, name: str, tensor: Tensor, seed: int = 0) -> Tensor:
        """Fill ``tensor``, laid out like the parameter called ``name`` but perhaps of another dtype, as `init_weights`
        fills the parameter; returns it. For storage that holds more of a weight than its parameter does."""
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; call to_empty(device=...) first")
        rule = self._rule_of(name)
        if rule not in ("ones", "zeros", "embedding", "matrix", "residual"):
            raise ValueError(f"{name} is to start as {rule!r}; known are ones, zeros, embedding, matrix, residual")
        if rule in ("ones", "zeros"):
            return fill_(tensor, float(rule == "ones"))
        config = self.config
        std = config.init_std
        if rule != "embedding" and config.mup_base_dim is not None:
            std *= math.sqrt(config.mup_base_dim / config.dim)
        if rule == "residual":
            std /= math.sqrt(2 * config.n_layers)
        return init_normal_(tensor, seed, name, std, TRUNCATED_AT if config.init == "truncated_normal" else None)

    def _rule_of(self, name: str) -> str | None:
        """How a parameter starts, by the table of the part that it is in; None: no table speaks of it."""
        module: nn.Module = self
        rule, parts = None, name.split(".")
        for depth in range(len(parts)):
            rule = (getattr(module, "init", None) or {}).get(".".join(parts[depth:]), rule)
            module = getattr(module, parts[depth])
        return rule

    def lr_scales(self) -> dict[str, float]:
        """Parameter name -> factor on Adam's learning rate under μP (Yang et al. 2022, arXiv:2203.03466, table 8):
        mup_base_dim / dim for hidden matrices, 1 for the rest; all 1 where mup_base_dim is not set."""
        base = self.config.mup_base_dim
        factor = 1.0 if base is None else base / self.config.dim
        hidden = ("matrix", "residual")
        return {name: factor if self._rule_of(name) in hidden else 1.0 for name, _ in self.named_parameters()}

    # ---------------------------------------------------------------------------------------- load of the experts

    @torch.no_grad()
    def update_balance(
        self, reduce: Reduce | None = None, *, gate: Tensor | None = None, step: int = 0, steps: int = 1
    ) -> dict[str, Tensor]:
        """Move each router's bias against the load that was counted since the last call, and begin to count anew.

            bias_e += gate · rate(step) · sign(mean load - load_e)          (DeepSeek-V3, section 2.1.2)

        Call it once after every optimizer step, on every rank. reduce(tensor) sums in place over all ranks that see
        other tokens, and is called once; None: there are none. gate: 0 on the device where the optimizer skipped its
        step, so that no bias moves, else 1. step and steps: which optimizer step, from 0, of how many, for
        router_bias_schedule. Returns `balance_stats` of what was counted. Never waits for the device.
        """
        layers = self._mixed_layers()
        if not layers:
            return {}
        totals, biases = self._counted(layers, reduce)
        if biases is not None:
            moves = bias_step(totals[:, : self.config.n_experts]) * bias_rate(self.config, step, steps)
            if gate is not None:
                moves = moves * gate
            biases = biases + moves.to(biases)
            for moe in self._mixtures():
                moe.router.bias.add_(moves[layers.index(moe.layer)])  # type: ignore[union-attr, operator]
        for moe in self._mixtures():
            moe.tally.clear()
        return self._stats(layers, totals, biases)

    @torch.no_grad()
    def balance_stats(self, reduce: Reduce | None = None) -> dict[str, Tensor]:
        """What was counted in training since the last `update_balance`: 0-dim tensors on the device. {} without
        experts.

        For layer i, those of mtp_depth after the others: "moe/<i>/load_max" and "load_min", greatest and least load of
        an expert over the mean one; "entropy" of the router's distribution in nats, a mean over tokens; "dropped",
        share of slots; and with router_bias "bias_range", greatest less least. "moe/balance_loss" is the mean over
        layers and tokens of Σ f P, 1 where all is even. reduce: as of `update_balance`, called once.
        """
        layers = self._mixed_layers()
        return self._stats(layers, *self._counted(layers, reduce)) if layers else {}

    def _stats(self, layers: list[int], totals: Tensor, biases: Tensor | None) -> dict[str, Tensor]:
        """`balance_stats` from the sums of all ranks, and the routers' biases."""
        found = dict(ratios(totals, self.config.moe_top_k))
        stats = {"moe/balance_loss": found.pop("balance_loss").mean()}
        for index, layer in enumerate(layers):
            stats |= {f"moe/{layer}/{name}": values[index] for name, values in found.items()}
            if biases is not None:
                stats[f"moe/{layer}/bias_range"] = biases[index].amax() - biases[index].amin()
        return stats

    def _mixed_layers(self) -> list[int]:
        """The layers with experts of the whole model, of which this may be a stage."""
        config = self.config
        return [layer for layer in range(config.n_layers + config.mtp_depth) if config.has_experts(layer)]

    def _counted(self, layers: list[int], reduce: Reduce | None) -> tuple[Tensor, Tensor | None]:
        """The sums of all ranks over ``layers``, [L,E+3] float64, and the biases [L,E] of their routers, where they
        have some. A stage adds what it has, and learns the rest from the others."""
        experts, biased = self.config.n_experts, self.config.router_bias
        # Each layer's counts, biases and a 1: ranks that hold a layer hold its bias alike, so their mean is it.
        rows = {}
        for moe in self._mixtures():
            counts = moe.counted()
            bias = cast(Tensor, moe.router.bias).to(counts) if biased else counts.new_zeros(experts)
            rows[moe.layer] = torch.cat([counts, bias, counts.new_ones(1)])
        # Where tokens were counted; weights that are offloaded are elsewhere.
        device = next(iter(rows.values()), next(self.parameters())).device
        nothing = torch.zeros(2 * experts + 4, dtype=torch.float64, device=device)
        table = torch.stack([rows.get(layer, nothing) for layer in layers])
        if reduce is not None:
            reduce(table)
        counts, biases, held = table.split((experts + 3, experts, 1), dim=1)
        return counts, biases / held.clamp(min=1) if biased else None

    # ---------------------------------------------------------------------------------------- forward

    def forward(
        self,
        x: Tensor,
        rows: Rows | None = None,
        labels: Tensor | None = None,
        scale: Tensor | float | None = None,
        cache: KVCache | None = None,
        ids: Tensor | None = None,
    ) -> Any:
        """x: token ids [B,S] int64 (or int32) on the first stage, hidden states [B,S,D] after it.

        rows: positions and documents (``Rows`` or any object with its attributes); None: plain rows.
        labels [B,S] int64, already shifted, -100 where not scored, with scale: returns (Σ scale * nll, nll [B,S]), as
        ``linear_cross_entropy`` does; in training mode the first has the loss of further tokens (mtp_depth) added,
        while nll stays that of the next one, and its gradients have those of the experts' losses in them
        (`moe.balance`). Without labels: logits [B,S,V]. A stage that is not the last returns [B,S,D].
        cache: x follows the tokens in it, which are plain rows, and only the last token's logits [B,1,V] come back.
        ids [B,S]: the token ids, for a last stage that trains on further tokens and gets hidden states as x.

        Computes in the dtype of the weights; norms, rotations and log-sum-exp in float32 or wider. Never waits for
        the device. Raises ValueError for what does not fit; for ids and labels that are no tokens on the CPU only,
        where they can be read. After an error the cache is as it was.
        """
        self._check(x, rows, labels, scale, cache)
        before = 0 if cache is None else cache.length
        try:
            return self._run(x, rows, labels, scale, cache, x if self.first else ids)
        except BaseException:
            if cache is not None:
                cache.length = before  # the same call again finds the cache as this one did
            raise

    def _check(
        self,
        x: Tensor,
        rows: Rows | None,
        labels: Tensor | None,
        scale: Tensor | float | None,
        cache: KVCache | None,
    ) -> None:
        """Raise ValueError for arguments of `forward` that do not fit the model or one another."""
        config = self.config
        if self.first:
            if x.ndim != 2:
                raise ValueError(f"ids of shape {tuple(x.shape)} must be [rows, tokens]; one row is ids[None]")
            check_indices("ids", x, config.vocab_size)
        elif x.ndim != 3 or x.shape[2] != config.dim or not x.is_floating_point():
            raise ValueError(
                f"this stage takes hidden states [rows, tokens, {config.dim}] of the stage before, not {x.dtype} of "
                f"shape {tuple(x.shape)}"
            )
        shape = tuple(x.shape[:2])
        tokens = shape[1] + (0 if cache is None else cache.length)
        if tokens > config.max_seq_len:
            raise ValueError(f"{tokens} tokens exceed max_seq_len = {config.max_seq_len}")
        if cache is not None:
            if rows is not None:
                raise ValueError("rows and cache exclude one another: cached rows are plain, their positions follow")
            if labels is not None:
                raise ValueError("labels and cache exclude one another: a cache gives the last token's logits only")
            if cache.config != config:
                raise ValueError("the cache was made for another config; make it with KVCache(model.config, …)")
        for name, given in (("rows", None if rows is None else rows.position_ids), ("labels", labels)):
            if given is not None and not self._fits(tuple(given.shape), shape):
                raise ValueError(f"{name} of shape {tuple(given.shape)} do not fit an input of {shape}")
        if labels is None and scale is not None:
            raise ValueError(f"scale = {scale} weighs a loss, and there are no labels; give them, or leave scale out")

    def _fits(self, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether something with an entry for each token goes with an input [B,S] (and more). Hidden states of a stage
        before may be a part of each row, under tensor parallelism."""
        if self.first or given == shape:
            return given == shape
        return len(given) == 2 and given[0] == shape[0] and given[1] % max(1, shape[1]) == 0

    def _run(
        self,
        x: Tensor,
        rows: Rows | None,
        labels: Tensor | None,
        scale: Tensor | float | None,
        cache: KVCache | None,
        ids: Tensor | None,
    ) -> Any:
        """`forward`, once its arguments are known to fit. ids [B,S], where they are known."""
        batch, seq = x.shape[:2]
        if rows is None and cache is None:
            rows = Rows.plain(batch, seq, x.device)
        further = len(self.mtp) if labels is not None and self.training else 0

        embedded: list[Tensor] = []
        h = x
        if self.first or further:
            assert self.embed is not None
            if ids is None:
                raise ValueError("this stage embeds further tokens (mtp_depth); pass the token ids, [rows, tokens]")
            # All look-ups at once: under FSDP and tensor parallelism the embedding's weight and results travel once.
            found = self.embed(later_tokens(ids, further) if further else ids)
            if self.config.embed_scale != 1:
                found = found * self.config.embed_scale
            if further:
                found, *embedded = found.chunk(1 + further)
            h = found if self.first else x
        if cache is not None:
            rows = cache.begin(batch, seq, x.device, h.dtype)
        assert rows is not None
        rotary = {window: self._rotary(rows, window, h.dtype) for window in self._windows()}
        if cache is None:
            rows = self._prepared(rows, h.dtype)
            if self.config.n_experts and labels is not None and scale is not None:
                rows = _with_scale(rows, scale, h)
        for name, block in cast(Iterable[tuple[str, Block]], self.layers.items()):
            kept = None if cache is None else cache.layer(name)
            h = block(h, rotary[block.attn.window], rows, kept)
        if self.head is None or self.norm is None:
            return h
        if not further:
            return self.head(self.norm(h if cache is None else h[:, -1:]), labels, scale)
        return self._further_loss(h, embedded, rotary, rows, labels, scale)

    def _further_loss(
        self,
        h: Tensor,
        embedded: Iterable[Tensor],
        rotary: Mapping[int | None, Rotary],
        rows: Rows,
        labels: Tensor | None,
        scale: Tensor | float | None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of the next token and, weighted, of those after it; all through the head at once."""
        assert self.norm is not None and self.head is not None and labels is not None
        if scale is None:
            raise ValueError("labels need a scale: 1 / scored tokens of the whole global batch")
        if isinstance(scale, Tensor) and scale.ndim:
            raise ValueError(
                f"a scale of shape {tuple(scale.shape)} weighs tokens by themselves, and mtp_depth = "
                f"{self.config.mtp_depth} trains on each token more than once; pass one scale, or set mtp_depth to 0"
            )
        states, depth = [self.norm(h)], self.config.mtp_depth
        for module, later in zip(cast(Iterable[NextToken], self.mtp.values()), embedded, strict=True):
            states.append(module(states[-1], later, rotary[module.block.attn.window], rows))
        wide = torch.promote_types(h.dtype, torch.float32)
        weights = torch.ones((1 + depth) * labels.shape[0], 1, dtype=wide, device=labels.device)
        weights[labels.shape[0] :] = self.config.mtp_weight / depth
        every = later_labels(labels, rows, depth)
        loss, nll = self.head(torch.cat(states), every, (weights * scale).expand(every.shape))
        return loss, nll[: labels.shape[0]]

    def _blocks(self) -> Iterator[Block]:
        yield from cast(Iterator[Block], self.layers.values())
        for module in self.mtp.values():
            yield cast(NextToken, module).block

    def _mixtures(self) -> list[MoE]:
        return [block.moe for block in self._blocks() if block.moe is not None]

    def _windows(self) -> dict[int | None, Block]:
        """Each window that a block has (None: it sees all), with one of those blocks."""
        return {block.attn.window: block for block in self._blocks()}

    def _rotary(self, rows: Rows, window: int | None, dtype: torch.dtype) -> Rotary:
        """The rotations of the blocks with that window. Frequencies are kept where they were needed once: no copy to
        the device in a steady step."""
        key = (window, rows.position_ids.device)
        if key not in self._frequencies:
            frequency, factor = rope_frequencies(self.config, window)
            self._frequencies[key] = (frequency.to(rows.position_ids.device), factor)
        frequency, factor = self._frequencies[key]
        return Rotary.at(rows.position_ids, frequency, dtype, factor)

    def _prepared(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """The rows with what the cores would otherwise make anew in every layer."""
        for block in self._windows().values():
            prepare = getattr(block.attn.core, "prepare", None)
            if prepare is not None:
                rows = cast(Rows, prepare(rows, dtype))
        return rows


def check_parts(config: ModelConfig) -> None:
    """Raise ValueError for a name that no registry has, and for `config.options` that no part takes. A part that is not
    kforge's own says which it takes by an attribute ``options``: names, or a mapping from names to defaults."""
    parts = [MODELS.get(config.kind)]
    if config.kind == "transformer":
        parts += [NORMS.get(config.norm), MLPS.get(config.mlp)]
        if config.n_experts:
            known_mlp(config.mlp)
            parts.append(ROUTERS.get(config.router))
        parts += [ATTENTION_CORES.get(config.attention_core), LOSSES.get(config.loss)]
    known = sorted({name for part in parts for name in getattr(part, "options", ())})
    if unknown := sorted(set(config.options) - set(known)):
        raise ValueError(
            f"model.options has {', '.join(unknown)}, which no part of this model takes; "
            f"{'it takes ' + ', '.join(known) if known else 'its parts take no options'}"
        )


def build_model(config: ModelConfig) -> nn.Module:
    """The model that ``config.kind`` names: `Transformer`, or one that a package adds (entry point `kforge.models`).

    Raises ValueError as `check_parts` does.
    """
    check_parts(config)
    model: nn.Module = MODELS.get(config.kind)(config)
    return model


def _head(config: ModelConfig) -> HeadLoss:
    return HeadLoss(
        config.dim,
        config.vocab_size,
        config.loss_chunk_tokens,
        rows=config.vocab_rows,
        loss=config.loss,
        softcap=config.logit_softcap,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        logit_scale=1.0 if config.mup_base_dim is None else config.mup_base_dim / config.dim,
        options=config.options,
    )


def _with_scale(rows: Rows, scale: Tensor | float, like: Tensor) -> Rows:
    """The rows, whatever they are, with what a token weighs in the loss."""
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    scale = scale.masked_fill(scale.isinf(), 0)  # 1 / 0: nothing is scored, so nothing weighs
    rows = copy.copy(rows)
    object.__setattr__(rows, "scale", scale)  # a dataclass may be frozen; this one is a copy
    return rows


def _whole_plan(model: nn.Module) -> dict[str, str]:
    """The plans of a model and all its parts, under names from the root; ``*`` stands for the index of a block."""
    whole: dict[str, str] = {}
    for owner, module in model.named_modules():
        for leaf, word in (getattr(module, "plan", None) or {}).items():
            name = re.sub(r"^(layers|mtp)\.\d+", r"\1.*", f"{owner}.{leaf}".strip("."))
            if whole.setdefault(name, word) != word:
                raise ValueError(f"the plans of two blocks give {name} two words, {whole[name]} and {word}")
    return whole


def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A tied weight is saved once, under the embedding's name."""
    assert isinstance(module, Transformer)
    if module.tied:
        state.pop(prefix + "head.weight", None)


def _restore_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, Transformer)
    if module.tied and prefix + "embed.weight" in state:
        state.setdefault(prefix + "head.weight", state[prefix + "embed.weight"])


def _tie_again(module: nn.Module, _: Any) -> None:
    """load_state_dict(assign=True) makes a parameter of its own for each name."""
    assert isinstance(module, Transformer)
    module.tie()
