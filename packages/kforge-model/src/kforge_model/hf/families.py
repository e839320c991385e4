"""What Hugging Face's families are called, made of and unable to say: data, read by `configs` and `weights`.

Checked against transformers 5.24; files written by 4.x are read too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class Name(NamedTuple):
    """A module, or a whole name of a state dict, at both ends; ``*`` stands for an index, and indices keep order."""

    ours: str
    theirs: str
    change: str = "same"
    """A key of `weights.CHANGES`: what becomes of the weight. Biases never change."""


class Key(NamedTuple):
    """A key of config.json that says what a field of `ModelConfig` says."""

    ours: str
    theirs: str
    change: str = "same"
    """A key of `configs.CHANGES`: how one value becomes the other."""


class Experts(NamedTuple):
    """What a file calls the module of router and experts in a layer, and the matrices of one expert; in transformers'
    modules it is mlp, and the experts are joined (`experts`)."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of Hugging Face."""

    architecture: str
    """Class of the causal language model, as in config.json's architectures."""
    names: tuple[Name, ...]
    """Every part that a model of the family may have."""
    keys: tuple[Key, ...]
    """What config.json says. Two fields may share a key: then they must agree."""
    fixed: Mapping[str, Any]
    """Fields of ModelConfig that the family cannot choose, and what they are in it."""
    defaults: Mapping[str, Any]
    """What transformers takes for keys that config.json leaves out. A key that is not here must be there."""
    window: Literal["none", "all", "switch_all", "switch", "types"] = "none"
    """Which layers may have a window: none; all, by sliding_window alone or if use_sliding_window (switch_all); those
    that layer_types says, where older files have the layers from max_window_layers on, if use_sliding_window (switch),
    or a pattern (types)."""
    window_pattern: int = 0
    """window = types, without layer_types: every so many layers, one is full; older files may say another number."""
    rope_by_layer: bool = False
    """Windowed layers have a base of their own, and rope_parameters is one dict for each kind of layer."""
    scaled_embedding: bool = False
    """The embedding's output is multiplied by sqrt(dim)."""
    whole_heads: bool = False
    """transformers refuses a dim that is no multiple of n_heads, even where head_dim is given."""
    experts: Experts | None = None
    """Layers may have experts; what they are called."""
    dense_layers: Literal["none", "first", "step"] = "none"
    """Which layers of a family with experts are dense: none; the first_k_dense_replace first ones; those that
    decoder_sparse_step and mlp_only_layers say."""
    latent: bool = False
    """Attention is multi-head latent attention (`latents`)."""
    further_layers: bool = False
    """Files may have layers past the last one, which predict further tokens (`kforge_model.mtp`): layer n_layers + k is
    mtp.<k>, and has copies of embedding and head beside what is its own."""
    unread: frozenset[str] = frozenset()
    """Fields of ModelConfig that no layer of the family reads."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys -> the name in ``keys``."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that `config_to_hf` writes: what the family is, where readers ask for it."""
    must_be: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Further keys that change the numbers, and the values that do not."""
    ignored: frozenset[str] = frozenset()
    """Further keys that change nothing, beside IGNORED."""

    @property
    def computed(self) -> frozenset[str]:
        """Fields that are translated by rules of their own, not by ``keys``."""
        pattern = {"moe_pattern"} if self.experts else set()
        return COMPUTED | pattern | (LATENT if self.latent else set())


def words(*lines: str) -> frozenset[str]:
    """The words of some lines."""
    return frozenset(" ".join(lines).split())


IGNORED = words(
    # what the file is
    "model_type architectures transformers_version _name_or_path name_or_path _commit_hash torch_dtype dtype",
    # tokens with a meaning, and text generation
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix",
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k",
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size",
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id",
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens",
    "begin_suppress_tokens use_cache cache_implementation",
    # what transformers returns, and how it computes it
    "output_hidden_states output_attentions return_dict torchscript use_bfloat16 tf_legacy_loss",
    "chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_internal",
    "_attn_implementation_autoset is_decoder tie_last_hidden_states pretraining_tp",
    # tasks that a language model is not for
    "finetuning_task task_specific_params problem_type id2label label2id num_labels",
)
"""Keys of any config.json that change no logit and no gradient."""

MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "partial_rotary_factor": (1, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}
"""Keys of any config.json that change the numbers, and the values that do not."""

REMEDIES: Mapping[str, str] = {
    "quantization_config": "its weights are no plain numbers: bring them to bfloat16 first, and take it out",
}
"""Some of those keys -> what to do."""

BUFFERS = r"(?:.*\.)?(?:rotary_emb(?:_local)?\.\w*inv_freq|embed_tokens\.embed_scale)"
"""Names of buffers that old files hold beside the weights: they are made anew from the config."""

FREE = frozenset(
    [
        "options",
        "vocab_multiple",
        "attention_core",
        "loss",
        "loss_chunk_tokens",
        "label_smoothing",
        "z_loss",
        "mtp_weight",
        "init",
        "router_bias_rate",
        "router_bias_schedule",
        "router_bias_warmup_steps",
        "balance_loss",
        "balance_over",
        "router_z_loss",
        "expert_capacity",
    ]
)
"""Fields of ModelConfig that say how it is trained or computed, not what it is: no config.json has them."""

COMPUTED = frozenset(
    [
        "window",
        "window_pattern",
        "rope_theta",
        "rope_theta_window",
        "rope_dim",
        "rope_scaling",
        "rope_factor",
        "rope_original_len",
        "rope_low",
        "rope_high",
        "rope_attn_factor",
        "embed_scale",
    ]
)
"""Fields of ModelConfig that `configs` and `rope` translate by rules of their own."""

LATENT = frozenset(["head_dim", "rope_dim", "n_kv_heads", "attn_scale"])
"""Those that are translated so under latent attention only."""

_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("dim", "hidden_size"),
    Key("ffn_dim", "intermediate_size"),
    Key("n_layers", "num_hidden_layers"),
    Key("n_heads", "num_attention_heads"),
    Key("n_kv_heads", "num_key_value_heads"),
    Key("head_dim", "head_dim"),
    Key("max_seq_len", "max_position_embeddings"),
    Key("norm_eps", "rms_norm_eps", "number"),
    Key("init_std", "initializer_range", "number"),
    Key("tie_embeddings", "tie_word_embeddings"),
)
_HIDDEN_ACT = Key("mlp", "hidden_act", "activation")
_ATTENTION_BIAS = (Key("qkv_bias", "attention_bias"), Key("out_bias", "attention_bias"))
_GEMMA_KEYS = (*_KEYS, *_ATTENTION_BIAS)
_SOFTCAP = Key("logit_softcap", "final_logit_softcapping", "zero_is_none")
_QUERY_SCALE = Key("attn_scale", "query_pre_attn_scalar", "inverse_square")

_FIXED: Mapping[str, Any] = {
    "kind": "transformer",
    "attention": "gqa",
    "v_head_dim": None,
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_norm": "none",
    "attn_gate": False,
    "attn_softcap": 0.0,
    "sinks": False,
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "mlp_bias": False,
    "logit_softcap": 0.0,
    "mtp_depth": 0,
    "mup_base_dim": None,
    "attn_scale": None,
    "n_experts": 0,
    "moe_pattern": "M",
    "moe_top_k": 2,
    "expert_dim": None,
    "shared_experts": 0,
    "router": "softmax",
    "router_norm": True,
    "router_scale": 1.0,
    "router_groups": 1,
    "router_top_groups": 1,
    "router_bias": False,
}


def _fixed(keys: tuple[Key, ...], *computed: str, **changes: Any) -> dict[str, Any]:
    """What a family with these keys cannot choose: all of _FIXED that no key says nor a rule of its own, with the
    family's own values."""
    said = {*computed, *(key.ours for key in keys)}
    return {name: value for name, value in {**_FIXED, **changes}.items() if name not in said}


_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
}
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = {**_DEFAULTS, "tie_word_embeddings": True, "max_position_embeddings": 8192, "head_dim": 256}
_GEMMA2_DEFAULTS = {
    **{key: value for key, value in _GEMMA_DEFAULTS.items() if key != "hidden_act"},
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3_DEFAULTS = {
    **_GEMMA2_DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}

# transformers 5 pools its balance loss over layers and rows, and only where it is asked to return the router's scores.
_EXPERT_MUST_BE: Mapping[str, tuple[Any, ...]] = {"output_router_logits": (False, None)}
_MIXTRAL_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1_000_000.0,
}
_QWEN3_MOE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}
_DEEPSEEK_V3_DEFAULTS = {
    **{key: value for key, value in _DEFAULTS.items() if key != "head_dim"},
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    # transformers takes 1, and leaves it out of the files that it saves, which have no such layer.
    "num_nextn_predict_layers": 0,
}

_ENDS = (Name("embed", "model.embed_tokens", "vocabulary"), Name("head", "lm_head", "vocabulary"))
_MATRICES = (
    *_ENDS,
    Name("layers.*.attn.wq", "model.layers.*.self_attn.q_proj"),
    Name("layers.*.attn.wk", "model.layers.*.self_attn.k_proj"),
    Name("layers.*.attn.wv", "model.layers.*.self_attn.v_proj"),
    Name("layers.*.attn.wo", "model.layers.*.self_attn.o_proj"),
    Name("layers.*.mlp.w_gate", "model.layers.*.mlp.gate_proj"),
    Name("layers.*.mlp.w_up", "model.layers.*.mlp.up_proj"),
    Name("layers.*.mlp.w_down", "model.layers.*.mlp.down_proj"),
)


def _norms(change: str = "same", **blocks: str) -> tuple[Name, ...]:
    """The final norm, and norms of a block by our name."""
    parts = (Name(f"layers.*.{ours}", f"model.layers.*.{theirs}", change) for ours, theirs in blocks.items())
    return (Name("norm", "model.norm", change), *parts)


def _qk_norms(change: str = "same") -> tuple[Name, ...]:
    return tuple(Name(f"layers.*.attn.{x}_norm", f"model.layers.*.self_attn.{x}_norm", change) for x in "qk")


_EXPERTS = (
    Name("layers.*.moe.router", "model.layers.*.mlp.gate"),
    Name("layers.*.moe.experts.w_gate_up", "model.layers.*.mlp.experts.gate_up_proj", "gate_up"),
    Name("layers.*.moe.experts.w_down", "model.layers.*.mlp.experts.down_proj"),
)
_SHARED_EXPERTS = tuple(
    Name(f"layers.*.moe.shared.w_{part}", f"model.layers.*.mlp.shared_experts.{part}_proj")
    for part in ("gate", "up", "down")
)
_LATENT_ATTENTION = (
    Name("layers.*.attn.wq", "model.layers.*.self_attn.q_proj", "rotated_heads"),
    Name("layers.*.attn.wq_a", "model.layers.*.self_attn.q_a_proj"),
    Name("layers.*.attn.q_a_norm", "model.layers.*.self_attn.q_a_layernorm"),
    Name("layers.*.attn.wq_b", "model.layers.*.self_attn.q_b_proj", "rotated_heads"),
    Name("layers.*.attn.wkv_a", "model.layers.*.self_attn.kv_a_proj_with_mqa", "rotated_key"),
    Name("layers.*.attn.kv_a_norm", "model.layers.*.self_attn.kv_a_layernorm"),
    Name("layers.*.attn.wkv_b", "model.layers.*.self_attn.kv_b_proj"),
    Name("layers.*.attn.wo", "model.layers.*.self_attn.o_proj"),
)


def _further(names: tuple[Name, ...]) -> tuple[Name, ...]:
    """Those names, and the ones of layers that predict further tokens: a block's, and what brings it hidden states and
    embeddings. eh_proj takes the embedding first, and `mtp` the hidden states, as the report does."""
    blocks = (
        Name(name.ours.replace("layers.*", "mtp.*.block"), name.theirs, name.change)
        for name in names
        if "*" in name.ours
    )
    own = {"hidden_norm": "hnorm", "embed_norm": "enorm", "norm": "shared_head.norm"}
    norms = (Name(f"mtp.*.{ours}", f"model.layers.*.{theirs}") for ours, theirs in own.items())
    return (*names, *blocks, *norms, Name("mtp.*.proj", "model.layers.*.eh_proj", "halves_swapped"))


_PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_SANDWICH = {"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST}

_LLAMA_KEYS = (*_KEYS, _HIDDEN_ACT, *_ATTENTION_BIAS, Key("mlp_bias", "mlp_bias"))
_QWEN3_KEYS = (*_KEYS, _HIDDEN_ACT, *_ATTENTION_BIAS)
_MIXTRAL_KEYS = (
    *(key for key in _KEYS if key.ours != "ffn_dim"),
    _HIDDEN_ACT,
    Key("expert_dim", "intermediate_size"),
    Key("n_experts", "num_local_experts", "at_least_one"),
    Key("moe_top_k", "num_experts_per_tok", "at_least_one"),
)
_QWEN3_MOE_KEYS = (
    *_QWEN3_KEYS,
    Key("expert_dim", "moe_intermediate_size"),
    Key("n_experts", "num_experts", "at_least_one"),
    Key("moe_top_k", "num_experts_per_tok", "at_least_one"),
    Key("router_norm", "norm_topk_prob"),
)
_DEEPSEEK_V3_KEYS = (
    *(key for key in _KEYS if key.ours not in ("n_kv_heads", "head_dim", "norm_eps")),
    _HIDDEN_ACT,
    Key("norm_eps", "rms_norm_eps", "millionth"),
    Key("kv_lora_rank", "kv_lora_rank"),
    Key("q_lora_rank", "q_lora_rank"),
    Key("v_head_dim", "v_head_dim"),
    Key("expert_dim", "moe_intermediate_size"),
    Key("n_experts", "n_routed_experts", "at_least_one"),
    Key("shared_experts", "n_shared_experts", "at_least_one"),
    Key("moe_top_k", "num_experts_per_tok", "at_least_one"),
    Key("router_norm", "norm_topk_prob"),
    Key("router_scale", "routed_scaling_factor", "number"),
    Key("router_groups", "n_group", "at_least_one"),
    Key("router_top_groups", "topk_group", "at_least_one"),
    Key("mtp_depth", "num_nextn_predict_layers"),
)
_GEMMA1_KEYS = (*_GEMMA_KEYS, Key("mlp", "hidden_act", "gemma_activation"))
_HIDDEN_ACTIVATION = Key("mlp", "hidden_activation", "activation")
_GEMMA3_KEYS = (*_GEMMA_KEYS, _HIDDEN_ACTIVATION, _QUERY_SCALE, _SOFTCAP)
_GEMMA2_KEYS = (*_GEMMA3_KEYS, Key("attn_softcap", "attn_logit_softcapping", "zero_is_none"))
_NO_WINDOW: Mapping[str, tuple[Any, ...]] = {"sliding_window": (None,)}
_NO_BIAS: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False, None)}
_NO_MLP_BIAS: Mapping[str, tuple[Any, ...]] = {"mlp_bias": (False, None)}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        names=(*_MATRICES, *_norms(**_PRE)),
        keys=_LLAMA_KEYS,
        fixed=_fixed(_LLAMA_KEYS),
        defaults=_DEFAULTS,
        whole_heads=True,
        must_be=_NO_WINDOW,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        names=(*_MATRICES, *_norms(**_PRE)),
        keys=(*_KEYS, _HIDDEN_ACT),
        fixed=_fixed(_KEYS, qkv_bias=False, out_bias=False),
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
        window="all",
        must_be={**_NO_BIAS, **_NO_MLP_BIAS},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        names=(*_MATRICES, *_norms(**_PRE)),
        keys=(*_KEYS, _HIDDEN_ACT),
        fixed=_fixed(_KEYS, qkv_bias=True, out_bias=False),
        defaults=_QWEN_DEFAULTS,
        window="switch",
        must_be=_NO_MLP_BIAS,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        names=(*_MATRICES, *_norms(**_PRE), *_qk_norms()),
        keys=_QWEN3_KEYS,
        fixed=_fixed(_QWEN3_KEYS, qk_norm="per_head"),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        window="switch",
        must_be=_NO_MLP_BIAS,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        names=(*_MATRICES, *_norms(**_POST), *_qk_norms()),
        keys=_QWEN3_KEYS,
        fixed=_fixed(_QWEN3_KEYS, qk_norm="across_heads", norm_placement="post"),
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5},
        must_be={**_NO_WINDOW, **_NO_MLP_BIAS},
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        names=(*_MATRICES, *_norms("one_more", **_PRE)),
        keys=_GEMMA1_KEYS,
        fixed=_fixed(_GEMMA1_KEYS),
        defaults={**_GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
        scaled_embedding=True,
        must_be={**_NO_WINDOW, **_NO_MLP_BIAS, "hidden_activation": (None, "gelu_pytorch_tanh")},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        names=(*_MATRICES, *_norms("one_more", **_SANDWICH)),
        keys=_GEMMA2_KEYS,
        fixed=_fixed(_GEMMA2_KEYS, norm_placement="sandwich"),
        defaults=_GEMMA2_DEFAULTS,
        window="types",
        window_pattern=2,
        scaled_embedding=True,
        whole_heads=True,
        must_be=_NO_MLP_BIAS,
        ignored=frozenset({"hidden_act"}),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        names=(*_MATRICES, *_norms("one_more", **_SANDWICH), *_qk_norms("one_more")),
        keys=_GEMMA3_KEYS,
        fixed=_fixed(_GEMMA3_KEYS, norm_placement="sandwich", qk_norm="per_head"),
        defaults=_GEMMA3_DEFAULTS,
        window="types",
        window_pattern=6,
        rope_by_layer=True,
        scaled_embedding=True,
        whole_heads=True,
        # transformers 5.24 reads Gemma 3's attn_logit_softcapping and then does not apply it.
        must_be={**_NO_MLP_BIAS, "attn_logit_softcapping": (None,)},
        ignored=frozenset({"hidden_act"}),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        names=(*(name for name in _MATRICES if ".mlp." not in name.ours), *_EXPERTS, *_norms(**_PRE)),
        keys=_MIXTRAL_KEYS,
        fixed=_fixed(_MIXTRAL_KEYS, "moe_pattern", qkv_bias=False, out_bias=False),
        defaults=_MIXTRAL_DEFAULTS,
        window="all",
        experts=Experts("block_sparse_moe", "w1", "w3", "w2"),
        unread=frozenset({"ffn_dim"}),
        aliases={"num_experts": "num_local_experts"},
        must_be={**_EXPERT_MUST_BE, **_NO_BIAS, "router_jitter_noise": (0, None)},
        ignored=frozenset({"router_aux_loss_coef"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        names=(*_MATRICES, *_EXPERTS, *_norms(**_PRE), *_qk_norms()),
        keys=_QWEN3_MOE_KEYS,
        fixed=_fixed(_QWEN3_MOE_KEYS, "moe_pattern", qk_norm="per_head"),
        defaults=_QWEN3_MOE_DEFAULTS,
        window="switch_all",
        experts=Experts("mlp", "gate_proj", "up_proj", "down_proj"),
        dense_layers="step",
        aliases={"num_local_experts": "num_experts"},
        must_be={**_EXPERT_MUST_BE, **_NO_MLP_BIAS},
        ignored=frozenset({"router_aux_loss_coef"}),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        names=_further(
            (
                *(name for name in _MATRICES if ".attn." not in name.ours),
                *_LATENT_ATTENTION,
                *_EXPERTS,
                Name("layers.*.moe.router.bias", "model.layers.*.mlp.gate.e_score_correction_bias"),
                *_SHARED_EXPERTS,
                *_norms(**_PRE),
            )
        ),
        keys=_DEEPSEEK_V3_KEYS,
        fixed=_fixed(
            _DEEPSEEK_V3_KEYS,
            "moe_pattern",
            "attn_scale",
            attention="mla",
            qkv_bias=False,
            out_bias=False,
            router="sigmoid",
            router_bias=True,
        ),
        defaults=_DEEPSEEK_V3_DEFAULTS,
        experts=Experts("mlp", "gate_proj", "up_proj", "down_proj"),
        dense_layers="first",
        latent=True,
        further_layers=True,
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        written={
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        must_be={
            **_EXPERT_MUST_BE,
            **_NO_WINDOW,
            **_NO_BIAS,
            **_NO_MLP_BIAS,
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        # The balance loss is no part of what is computed.
        ignored=frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "auto_map"}),
    ),
}
"""By model_type, in the order in which `config_to_hf` tries them."""


def embed_scale_of(family: Family, dim: int) -> float:
    """Factor on the embedding's output of a model of this family and width."""
    return math.sqrt(dim) if family.scaled_embedding else 1.0
