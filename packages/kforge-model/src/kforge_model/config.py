"""What the model is: sizes and choices, as plain data. Standard library only."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kforge_model.checks import check_kinds, check_model

GATED_MLPS = ("swiglu", "geglu", "geglu_tanh")
"""Values of mlp whose feed-forward half has a gate beside its hidden features."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of blocks of attention and feed-forward; without choices, Llama's.

    Names that are text (`kind`, `norm`, `mlp`, `router`, `attention_core`, `loss`) are looked up in registries, to
    which a package can add its own.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: str = "transformer"
    """Which model: transformer, or one that a package adds (entry point `kforge.models`)."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of parts that are not kforge's own, by name; a part says which it takes. The config keeps a copy of its
    own. In TOML: [model.options]."""

    vocab_size: int = 4096
    """Tokens of the vocabulary: logits of a position. At least the tokenizer's size."""
    vocab_multiple: int = 1
    """Embedding and head have vocab_size rows, rounded up to a multiple of this. No token has the rows above; they get
    no probability and no gradient. For tensor parallelism and fast products: 128."""
    dim: int = 256
    """Width of the residual stream, in features."""
    n_layers: int = 4
    """Number of blocks."""
    max_seq_len: int = 4096
    """Longest row and longest generated text, in tokens. RoPE is computed where needed, so this costs nothing."""

    attention: Literal["gqa", "mla"] = "gqa"
    """gqa: queries in groups that share a key/value head, from all heads (n_kv_heads = n_heads) to one. mla: keys and
    values of all heads made from one small latent a token (DeepSeek-V2)."""
    n_heads: int = 4
    """Query heads of a block."""
    n_kv_heads: int | None = None
    """Key and value heads of a block under gqa; must divide n_heads. None: as many as n_heads."""
    head_dim: int | None = None
    """Width of a query or key head, in features; under mla rotated and unrotated part together. None: dim / n_heads."""
    v_head_dim: int | None = None
    """Width of one value head under mla, in features. None: head_dim - rope_dim."""
    kv_lora_rank: int | None = None
    """Width of the latent that mla keeps of each token, in features."""
    q_lora_rank: int | None = None
    """Width of mla's latent of the queries, in features. None: queries are made from the residual stream."""
    qk_norm: Literal["none", "per_head", "across_heads"] = "none"
    """Normalise queries and keys before RoPE, which bounds the scores: each head by itself (Qwen3), or all heads of a
    token together (OLMo 2)."""
    qkv_bias: bool = False
    """Biases on queries, keys and values."""
    out_bias: bool = False
    """A bias on attention's output."""
    attn_gate: bool = False
    """Multiply what each head has gathered by sigmoid(gate x), feature by feature, before the output projection."""
    attn_scale: float | None = None
    """Factor on the scores. None: 1 / sqrt(head_dim)."""
    attn_softcap: float = 0.0
    """Bound the scores to ± this by cap · tanh(score / cap), as Gemma 2 does. 0: no bound."""
    sinks: bool = False
    """A learned score a head that takes part in the softmax and gathers nothing (gpt-oss): a head may look nowhere."""
    window: int | None = None
    """A windowed layer's token sees itself and the window - 1 tokens before it. None: no layer has a window."""
    window_pattern: str = "W"
    """Which layers have the window: one letter a layer, W with it and F (full) without, repeated over the layers."""
    attention_core: str = "auto"
    """What computes attention: auto (the fastest that can), sdpa, varlen (CUDA, bf16 or fp16), flex (CUDA), masked
    (anywhere), or one that a package adds (entry point `kforge.attention_cores`)."""

    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_theta_window: float | None = None
    """Base in windowed layers, which then have no rope_scaling (Gemma 3). None: all layers are alike."""
    rope_dim: int | None = None
    """Features of a head that are rotated: the first ones, under mla the last. None: all under gqa; mla wants a
    number."""
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    """How the frequencies are stretched for longer rows than the model was first trained on."""
    rope_factor: float = 1.0
    """How many times longer, for rope_scaling."""
    rope_original_len: int | None = None
    """Tokens of the rows it was first trained on; wanted by yarn and llama3."""
    rope_low: float = 1.0
    """llama3: frequencies that turn fewer times than this over the original length are divided by rope_factor. yarn
    (beta_slow): so are those."""
    rope_high: float = 4.0
    """llama3: frequencies that turn more often than this over the original length stay. yarn (beta_fast, there usually
    32): so do those."""
    rope_attn_factor: float | None = None
    """yarn: factor on rotated queries and on rotated keys. None: 0.1 ln(rope_factor) + 1."""

    norm: str = "rmsnorm"
    """Every norm of the model: rmsnorm, layernorm, or one that a package adds (entry point `kforge.norms`)."""
    norm_eps: float = 1e-5
    """Added to the mean square, or to the variance, inside every norm."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms of a block: before attention and feed-forward (pre), on what they add to the residual stream (post, as
    OLMo 2), or both (sandwich, as Gemma 2)."""
    mlp: str = "swiglu"
    """The feed-forward half: gated swiglu, geglu, geglu_tanh; plain gelu, gelu_tanh, relu, relu2 (ReLU squared); or one
    that a package adds (entry point `kforge.mlps`)."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward half, in features. None: 8/3 of dim, rounded up to a multiple of 64."""
    mlp_bias: bool = False
    """Biases in the feed-forward half."""

    n_experts: int = 0
    """Experts of a layer that has them: feed-forward halves of which each token goes through moe_top_k. 0: the model is
    dense, and no field of this group may be set."""
    moe_pattern: str = "M"
    """Which layers have experts: one letter a layer, M with them and D (dense) without, repeated over the layers, those
    of mtp_depth included."""
    moe_top_k: int = 2
    """Experts that a token goes to."""
    expert_dim: int | None = None
    """Hidden width of one expert, in features. None: that of a dense layer (ffn_dim)."""
    shared_experts: int = 0
    """Experts that every token goes through beside the chosen ones. N of them are one feed-forward half of N times the
    hidden width of an expert: the same function."""
    router: str = "softmax"
    """What scores the experts of a token: softmax over all of them, sigmoid of each (DeepSeek-V3), or one that a
    package adds (entry point `kforge.routers`)."""
    router_norm: bool = True
    """Divide the weights of a token's experts by their sum. With moe_top_k = 1 every weight is then 1, and the loss
    teaches the router nothing."""
    router_scale: float = 1.0
    """Factor on the weights, after router_norm (DeepSeek's routed_scaling_factor)."""
    router_groups: int = 1
    """Groups of equal size in which the experts lie, in order. A token goes to experts of its best router_top_groups
    only. A group's score is that of its best expert (softmax, DeepSeek-V2), or of its best two (sigmoid,
    DeepSeek-V3)."""
    router_top_groups: int = 1
    """Groups that a token's experts are chosen from."""
    router_bias: bool = False
    """A number an expert that is added to its score when experts are chosen, and not when they are weighed. It has no
    gradient: `Transformer.update_balance` moves it against the load (Wang et al. 2024, arXiv:2408.15664)."""
    router_bias_rate: float = 1e-3
    """How far router_bias moves in one optimizer step."""
    router_bias_schedule: Literal["constant", "cosine", "warmup"] = "constant"
    """The rate over the steps: constant; cosine, from the whole rate down to 0 at the last step; warmup, which rises
    evenly over router_bias_warmup_steps and stays."""
    router_bias_warmup_steps: int = 0
    """Steps over which router_bias_schedule = "warmup" rises."""
    balance_loss: float = 0.0
    """Weight of the loss that grows as the load of the experts becomes uneven (DeepSeek-V3, equations 17 to 20). It is
    in the gradients and not in the loss that is returned."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Whose load balance_loss evens out: that of each row by itself, or that of all rows of a rank's microbatch
    together, which then depends on how the batch is spread and cut."""
    router_z_loss: float = 0.0
    """Weight of the mean of logsumexp(logits)² of each router over tokens (Zoph et al. 2022, arXiv:2202.08906, equation
    5). In the gradients only, as balance_loss."""
    expert_capacity: float | None = None
    """In training an expert takes at most ceil(this · tokens · moe_top_k / n_experts) of the tokens that one rank has
    in one microbatch; those of the lowest weight are dropped, so the result depends on how the batch is spread and cut.
    Evaluation and generation drop none. None: no token is ever dropped."""

    tie_embeddings: bool = False
    """Use the embedding's weight as the head's."""
    embed_scale: float = 1.0
    """Factor on the embedding's output; sqrt(dim) in Gemma."""
    logit_softcap: float = 0.0
    """Bound the logits to ± this by cap · tanh(logit / cap). 0: no bound."""
    mtp_depth: int = 0
    """Further tokens that are predicted in training, each by a block of its own that shares embedding and head
    (DeepSeek-V3). 0: the next token only."""
    mtp_weight: float = 0.3
    """Weight of the mean loss of the further tokens beside the loss of the next one; only with mtp_depth."""

    loss: str = "linear_cross_entropy"
    """linear_cross_entropy (head and loss in one, a part of the tokens at a time), cross_entropy (from all logits), or
    one that a package adds (entry point `kforge.losses`)."""
    loss_chunk_tokens: int = 2048
    """Tokens whose logits exist at one time in linear_cross_entropy. Smaller: less memory; the loss is the same."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the mean of logsumexp(logits)² over scored tokens, added to the loss (PaLM: 1e-4)."""

    init: Literal["normal", "truncated_normal"] = "normal"
    """Distribution of the initial weights; truncated_normal has none beyond three standard deviations."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections of a block get this over sqrt(2 n_layers)."""
    mup_base_dim: int | None = None
    """Width at which init_std and the learning rate were chosen, in features (μP). Hidden matrices then start with
    init_std · sqrt(mup_base_dim / dim), and logits are multiplied by mup_base_dim / dim; scale their learning rate with
    `Transformer.lr_scales`. None: no scaling with width."""

    def __post_init__(self) -> None:
        check_kinds(self)
        object.__setattr__(self, "options", copy.deepcopy(dict(self.options)))
        check_model(self)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one query or key head, with the default resolved."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Width of one value head, with the default resolved."""
        if self.attention == "gqa":
            return self.head_size
        return self.head_size - self.rope_size if self.v_head_dim is None else self.v_head_dim

    @property
    def rope_size(self) -> int:
        """Rotated features of a head, with the default resolved."""
        return self.head_size if self.rope_dim is None else self.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor on the scores, with the default resolved."""
        return self.head_size**-0.5 if self.attn_scale is None else self.attn_scale

    @property
    def ffn_size(self) -> int:
        """Hidden width of the feed-forward half, with the default resolved."""
        return -(-(8 * self.dim // 3) // 64) * 64 if self.ffn_dim is None else self.ffn_dim

    @property
    def expert_size(self) -> int:
        """Hidden width of one expert, with the default resolved."""
        return self.ffn_size if self.expert_dim is None else self.expert_dim

    @property
    def shared_size(self) -> int:
        """Hidden width of the shared experts together; 0 without."""
        return self.shared_experts * self.expert_size

    @property
    def layout_exact(self) -> bool:
        """Whether training has the same numbers however the tokens of a batch are spread over ranks and microbatches.
        Not so where tokens are dropped (expert_capacity) or a microbatch's load is evened out (balance_over =
        "batch")."""
        return self.expert_capacity is None and self.balance_over == "sequence"

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def gated_mlp(self) -> bool:
        """Whether the feed-forward half is one of kforge's with a gate beside its hidden features."""
        return self.mlp in GATED_MLPS

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of its feed-forward half."""
        return self.n_experts > 0 and self.moe_pattern[layer % len(self.moe_pattern)] == "M"

    def window_of(self, layer: int) -> int | None:
        """The window of a layer, in tokens; None: it sees all before it."""
        letter = self.window_pattern[layer % len(self.window_pattern)]
        return self.window if letter == "W" else None
