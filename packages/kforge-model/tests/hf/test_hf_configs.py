"""Configs of Hugging Face: against transformers' own classes, files as they lie on the hub, and every error."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoConfig

from kforge_model import ModelConfig
from kforge_model.hf import FAMILIES, config_from_hf, config_to_hf, family_of
from kforge_model.hf.families import FREE, IGNORED, MUST_BE
from kforge_model.hf.kinds import KEYS
from kforge_model.presets import preset

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}

OURS: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 32,
    "ffn_dim": 48,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 12,
    "max_seq_len": 128,
    "norm_eps": 1e-4,
    "init_std": 0.03,
    "rope_theta": 5000.0,
}
_GEMMA: dict[str, Any] = {**OURS, "embed_scale": math.sqrt(32), "mlp": "geglu_tanh", "tie_embeddings": True}
_EXPERTS: dict[str, Any] = {"n_experts": 8, "moe_top_k": 3, "expert_dim": 24}
_LATENTS: dict[str, Any] = {"attention": "mla", "n_kv_heads": None, "rope_dim": 6, "v_head_dim": 5, "kv_lora_rank": 9}
_SANDWICH: dict[str, Any] = {**_GEMMA, "norm_placement": "sandwich", "attn_scale": 20**-0.5, "window": 7}

CONFIGS: dict[str, ModelConfig] = {
    "llama": ModelConfig(**OURS, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": ModelConfig(**OURS, window=7),
    "qwen2": ModelConfig(**OURS, qkv_bias=True),
    "qwen3": ModelConfig(**OURS, qk_norm="per_head", window=7, window_pattern="FWW"),
    "olmo2": ModelConfig(**OURS, qk_norm="across_heads", norm_placement="post"),
    "gemma": ModelConfig(**_GEMMA),
    "gemma2": ModelConfig(**_SANDWICH, window_pattern="WF", attn_softcap=2.0, logit_softcap=3.0),
    "gemma3_text": ModelConfig(**_SANDWICH, window_pattern="WWF", qk_norm="per_head", rope_theta_window=100.0),
    "mixtral": ModelConfig(**{**OURS, "ffn_dim": None}, **_EXPERTS, window=7),
    "qwen3_moe": ModelConfig(**OURS, **_EXPERTS, qk_norm="per_head", router_norm=False, moe_pattern="MDD", window=7),
    "deepseek_v3": ModelConfig(
        **{**OURS, **_LATENTS, "norm_eps": 1e-6},
        **_EXPERTS,
        q_lora_rank=11,
        shared_experts=2,
        moe_pattern="DMMM",
        router="sigmoid",
        router_bias=True,
        router_scale=1.5,
        router_groups=4,
        router_top_groups=3,
    ),
}
"""One config for each family that uses what it has; all numbers are said, none left to a default."""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(family: str) -> None:
    heads = {"num_key_value_heads": 4} if FAMILIES[family].latent else {"num_key_value_heads": 2, "head_dim": 8}
    full = AutoConfig.for_model(family, **SIZES, **heads).to_dict()
    if FAMILIES[family].further_layers:  # of which its own files say 1 and have none
        assert full.pop("num_nextn_predict_layers") == 1
    assert config_from_hf({"model_type": family, **SIZES, **heads}) == config_from_hf(full)


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_to_theirs_to_ours(family: str) -> None:
    config = CONFIGS[family]
    written = config_to_hf(config)
    assert written["model_type"] == family, "the family is found from the config"
    assert config_from_hf(written) == config
    assert config_from_hf(json.loads(json.dumps(written))) == config
    read = AutoConfig.for_model(**written)
    assert type(read).__name__ == FAMILIES[family].architecture.replace("ForCausalLM", "Config").replace(
        "Gemma3Config", "Gemma3TextConfig"
    )
    assert config_from_hf(read.to_dict()) == config
    assert config_from_hf(read.to_diff_dict()) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_theirs_to_ours_to_theirs(family: str) -> None:
    theirs = AutoConfig.for_model(**config_to_hf(CONFIGS[family])).to_dict()
    again = AutoConfig.for_model(**config_to_hf(config_from_hf(theirs))).to_dict()
    assert again == theirs


_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
}
_READ: dict[str, dict[str, Any]] = {
    "linear": {"rope_factor": 4.0},
    "llama3": {"rope_factor": 8.0, "rope_low": 1.5, "rope_high": 3.0, "rope_original_len": 32},
    "yarn": {"rope_factor": 4.0, "rope_low": 1.0, "rope_high": 16.0, "rope_original_len": 32},
}


@pytest.mark.parametrize("kind", _SCALINGS)
def test_rope_scaling_is_read_from_the_old_keys_and_the_new(kind: str) -> None:
    base = {"model_type": "llama", **SIZES}
    scaling = _SCALINGS[kind]
    by_type = {"type": kind, **{key: value for key, value in scaling.items() if key != "rope_type"}}
    forms = [
        {"rope_theta": 1e6, "rope_scaling": scaling},
        {"rope_theta": 1e6, "rope_scaling": by_type},
        {"rope_parameters": {"rope_theta": 1e6, **scaling}},
        {"rope_theta": 1e6, "rope_parameters": scaling},
        {"rope_theta": 1e6, "rope_scaling": scaling, "rope_parameters": {"rope_theta": 1e6, **scaling}},
    ]
    wanted = config_from_hf(base | {"rope_theta": 1e6})
    wanted = dataclasses.replace(wanted, rope_scaling=kind, **_READ[kind])  # type: ignore[arg-type]
    for form in forms:
        assert config_from_hf({**base, **form}) == wanted, form
    assert config_from_hf(config_to_hf(wanted)) == wanted


def test_yarn_factors_and_its_original_length() -> None:
    base = {"model_type": "llama", **SIZES, "max_position_embeddings": 640}

    def read(**more: Any) -> ModelConfig:
        return config_from_hf({**base, "rope_scaling": {"type": "yarn", "factor": 8.0, **more}})

    assert read().rope_attn_factor is None
    assert read().rope_original_len == 640, "transformers takes max_position_embeddings"
    assert read().rope_high == 32
    assert read(attention_factor=1.25).rope_attn_factor == 1.25
    expected = (0.1 * 0.7 * math.log(8) + 1) / (0.1 * 0.5 * math.log(8) + 1)
    assert read(mscale=0.7, mscale_all_dim=0.5).rope_attn_factor == pytest.approx(expected, rel=1e-12)
    assert read(mscale=0.7).rope_attn_factor is None, "one alone is not read by transformers"


def test_ntk_is_written_as_the_base_that_it_is() -> None:
    config = dataclasses.replace(CONFIGS["mistral"], rope_scaling="ntk", rope_factor=4.0)
    written = config_to_hf(config)
    assert written["rope_scaling"] is None
    assert written["rope_theta"] == pytest.approx(5000 * 4 ** (12 / 10))


def test_gemma3_has_rotary_parameters_for_each_kind_of_layer() -> None:
    written = config_to_hf(dataclasses.replace(CONFIGS["gemma3_text"], rope_scaling="linear", rope_factor=8.0))
    full = {"rope_theta": 5000.0, "rope_type": "linear", "factor": 8.0}
    assert written["rope_parameters"] == {
        "full_attention": full,
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    }
    assert written["rope_local_base_freq"] == 100.0
    alike = dataclasses.replace(CONFIGS["gemma3_text"], rope_theta_window=None, rope_scaling="linear", rope_factor=8.0)
    assert config_to_hf(alike)["rope_parameters"] == {"full_attention": full, "sliding_attention": full}
    assert config_from_hf(config_to_hf(alike)) == alike


def test_windows_as_older_files_say_them() -> None:
    def read(family: str, layers: int, **more: Any) -> tuple[int | None, str]:
        config = config_from_hf({**SIZES, "model_type": family, "head_dim": 8, "num_hidden_layers": layers, **more})
        return config.window, config.window_pattern

    heads = {"num_key_value_heads": 2}
    assert read("mistral", 2, sliding_window=None, **heads) == (None, "W")
    assert read("mistral", 2, **heads) == (4096, "W")
    assert read("qwen2", 4, **heads) == (None, "W")
    assert read("qwen2", 4, use_sliding_window=True, sliding_window=9, max_window_layers=3, **heads) == (9, "FFFW")
    assert read("qwen3", 4, use_sliding_window=True, sliding_window=9, max_window_layers=0, **heads) == (9, "W")
    assert read("qwen3", 4, use_sliding_window=True, max_window_layers=4, **heads) == (None, "W")
    assert read("qwen3_moe", 4, use_sliding_window=True, sliding_window=9, **heads) == (9, "W")
    assert read("qwen3_moe", 4, sliding_window=9, max_window_layers=3, **heads) == (None, "W")
    assert read("gemma2", 5) == (4096, "WF")
    assert read("gemma3_text", 26, sliding_window=512) == (512, "WWWWWF")
    assert read("gemma3_text", 6, sliding_window_pattern=3) == (4096, "WWF")
    assert read("gemma3_text", 5) == (4096, "W")
    assert read("gemma2", 2, layer_types=["full_attention", "full_attention"]) == (None, "W")


LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
# Without quantization_config: the published weights are in float8, and to be read they have to be brought to bfloat16.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("name", "hf"),
    [
        ("mixtral-8x7b", MIXTRAL_8X7B),
        ("qwen3-30b-a3b", QWEN3_30B_A3B),
        ("qwen3-235b-a22b", QWEN3_235B_A22B),
        ("deepseek-v3", DEEPSEEK_V3),
    ],
)
def test_presets_are_files_of_the_hub(name: str, hf: dict[str, Any]) -> None:
    ours = dataclasses.replace(preset(name), mtp_depth=hf.get("num_nextn_predict_layers", 0))
    assert config_to_hf(ours) == config_to_hf(config_from_hf(hf))
    assert config_to_hf(preset(name))["model_type"] == hf["model_type"]


def test_latent_attention_under_yarn() -> None:
    """As transformers: m² / sqrt(head_dim) on the scores, and the ratio of two such m on what is rotated."""
    base = {**DEEPSEEK_V3, "rope_scaling": None}

    def read(**more: Any) -> ModelConfig:
        return config_from_hf({**base, "rope_scaling": {"type": "yarn", "factor": 40.0, **more}})

    def mscale(power: float) -> float:
        return 0.1 * power * math.log(40) + 1

    assert config_from_hf(base).attn_scale is None
    assert read().attn_scale is None and read().rope_attn_factor is None
    assert read(mscale=0.7).attn_scale is None
    both = read(mscale=0.7, mscale_all_dim=0.4)
    assert both.attn_scale == pytest.approx(mscale(0.4) ** 2 / math.sqrt(192), rel=1e-12)
    assert both.rope_attn_factor == pytest.approx(mscale(0.7) / mscale(0.4), rel=1e-12)
    one = read(mscale_all_dim=0.4)
    assert one.attn_scale == both.attn_scale and one.rope_attn_factor is None
    own = read(mscale=0.7, mscale_all_dim=0.4, attention_factor=1.5)
    assert own.rope_attn_factor == 1.5
    cancelled = read(mscale_all_dim=0.4, attention_factor=1 / mscale(0.4))  # mscale is 0 then, which nobody reads
    assert cancelled.rope_attn_factor == 1 / mscale(0.4)
    for config in (read(), both, read(mscale=1.0, mscale_all_dim=1.0), read(attention_factor=1.5), cancelled):
        assert config_from_hf(config_to_hf(config)) == config
    for config in (one, own):
        again = config_from_hf(config_to_hf(config))
        factors = [mscale(1) if x.rope_attn_factor is None else x.rope_attn_factor for x in (again, config)]
        assert factors[0] == pytest.approx(factors[1], rel=1e-11)
        assert again.attn_scale == config.attn_scale
    with pytest.raises(ValueError, match=r"deepseek_v3 cannot say attn_scale = 0\.5 .*but under yarn"):
        config_to_hf(dataclasses.replace(config_from_hf(base), attn_scale=0.5), "deepseek_v3")


def test_which_layers_have_experts() -> None:
    sizes = {**SIZES, "num_key_value_heads": 4, "num_experts_per_tok": 2}

    def pattern(family: str, layers: int, **more: Any) -> str:
        config = config_from_hf({"model_type": family, **sizes, "num_hidden_layers": layers, **more})
        assert config_from_hf(config_to_hf(config, family)).moe_pattern == config.moe_pattern
        return config.moe_pattern

    assert pattern("mixtral", 4) == "M"
    assert pattern("qwen3_moe", 4) == "M"
    assert pattern("qwen3_moe", 6, decoder_sparse_step=3) == "DDM"
    assert pattern("qwen3_moe", 5, mlp_only_layers=[1, 2]) == "MDDM"
    assert pattern("qwen3_moe", 4, mlp_only_layers=[3], decoder_sparse_step=2) == "DMD"
    assert pattern("deepseek_v3", 5) == "DDDMM"
    assert pattern("deepseek_v3", 5, first_k_dense_replace=0) == "M"
    with pytest.raises(ValueError, match="experts to none of the 2 layers"):
        pattern("deepseek_v3", 2)
    for family in ("mixtral", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"{family} cannot say moe_pattern = 'MD'"):
            config_to_hf(dataclasses.replace(CONFIGS[family], moe_pattern="MD"), family)


def test_other_names_of_keys() -> None:
    for family, names in {
        "mixtral": ("num_experts", "num_local_experts"),
        "qwen3_moe": ("num_experts", "num_local_experts"),
        "deepseek_v3": ("n_routed_experts", "num_local_experts"),
    }.items():
        hf = {"model_type": family, **SIZES, "num_key_value_heads": 4}
        assert [config_from_hf({**hf, name: 32}).n_experts for name in names] == [32, 32]
        assert config_from_hf({**hf, names[0]: 32, names[1]: 32}).n_experts == 32
        with pytest.raises(ValueError, match=r"num_local_experts = .* say different things"):
            config_from_hf({**hf, names[0]: 32, names[1]: 64})


def test_files_of_the_hub() -> None:
    assert config_from_hf(LLAMA_3_1) == ModelConfig(
        vocab_size=128256,
        dim=4096,
        n_layers=32,
        max_seq_len=131072,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=14336,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_len=8192,
    )
    gemma: dict[str, Any] = {"max_seq_len": 32768, "n_heads": 4, "n_kv_heads": 1, "head_dim": 256, "norm_eps": 1e-6}
    gemma |= {"mlp": "geglu_tanh", "tie_embeddings": True}
    assert config_from_hf(GEMMA_3_1B) == ModelConfig(
        **gemma,
        vocab_size=262144,
        dim=1152,
        n_layers=26,
        qk_norm="per_head",
        window=512,
        window_pattern="WWWWWF",
        rope_theta=1e6,
        rope_theta_window=1e4,
        norm_placement="sandwich",
        ffn_dim=6912,
        embed_scale=math.sqrt(1152),
    )
    gemma |= {"max_seq_len": 8192, "n_heads": 8}
    assert config_from_hf(GEMMA_2B) == ModelConfig(
        **gemma, vocab_size=256000, dim=2048, n_layers=18, ffn_dim=16384, embed_scale=math.sqrt(2048)
    )


# A value of each field other than that of every config above; where one field alone cannot change, with what it needs.
OTHER: dict[str, dict[str, Any]] = {
    "kind": {"kind": "mine"},
    "options": {"options": {"mine": 1}},
    "vocab_size": {"vocab_size": 62},
    "vocab_multiple": {"vocab_multiple": 64},
    "dim": {"dim": 64},
    "n_layers": {"n_layers": 5},
    "max_seq_len": {"max_seq_len": 256},
    "attention": {"attention": "mla", "kv_lora_rank": 8, "rope_dim": 4, "n_kv_heads": None, "qk_norm": "none"}
    | {"qkv_bias": False},
    "v_head_dim": {"v_head_dim": 7},
    "kv_lora_rank": {"kv_lora_rank": 13},
    "q_lora_rank": {"q_lora_rank": 13},
    "n_heads": {"n_heads": 8},
    "n_kv_heads": {"n_kv_heads": 1},
    "head_dim": {"head_dim": 16},
    "qk_norm": {"qk_norm": "none"},
    "qkv_bias": {"qkv_bias": True},
    "out_bias": {"out_bias": True},
    "attn_gate": {"attn_gate": True},
    "attn_scale": {"attn_scale": 0.4321},
    "attn_softcap": {"attn_softcap": 7.0},
    "sinks": {"sinks": True},
    "window": {"window": 9},
    "window_pattern": {"window": 7, "window_pattern": "FFW"},
    "attention_core": {"attention_core": "masked"},
    "rope_theta": {"rope_theta": 77.0},
    "rope_theta_window": {"window": 7, "rope_theta_window": 99.0},
    "rope_dim": {"rope_dim": 4},
    "rope_scaling": {"rope_scaling": "linear"},
    "rope_factor": {"rope_scaling": "linear", "rope_factor": 3.0},
    "rope_original_len": {"rope_scaling": "yarn", "rope_original_len": 33},
    "rope_low": {"rope_scaling": "yarn", "rope_original_len": 32, "rope_low": 2.0},
    "rope_high": {"rope_scaling": "yarn", "rope_original_len": 32, "rope_high": 5.0},
    "rope_attn_factor": {"rope_scaling": "yarn", "rope_original_len": 32, "rope_attn_factor": 1.5},
    "norm": {"norm": "layernorm"},
    "norm_eps": {"norm_eps": 1e-3},
    "norm_placement": {"norm_placement": "pre"},
    "mlp": {"mlp": "relu2"},
    "ffn_dim": {"ffn_dim": 64},
    "mlp_bias": {"mlp_bias": True},
    "n_experts": {"n_experts": 12, "mlp_bias": False},
    "moe_pattern": {"moe_pattern": "DDMM"},
    "moe_top_k": {"moe_top_k": 4},
    "expert_dim": {"expert_dim": 16},
    "shared_experts": {"shared_experts": 3},
    "router": {"router": "mine"},
    "router_norm": {"router_norm": False},
    "router_scale": {"router_scale": 2.5},
    "router_groups": {"router_groups": 2, "router_top_groups": 1},
    "router_top_groups": {"router_groups": 4, "router_top_groups": 2},
    "router_bias": {"router_bias": True},
    "router_bias_rate": {"router_bias_rate": 0.01},
    "router_bias_schedule": {"router_bias_schedule": "cosine"},
    "router_bias_warmup_steps": {"router_bias_schedule": "warmup", "router_bias_warmup_steps": 3},
    "balance_loss": {"balance_loss": 0.1},
    "balance_over": {"balance_loss": 0.1, "balance_over": "batch"},
    "router_z_loss": {"router_z_loss": 0.1},
    "expert_capacity": {"expert_capacity": 2.0},
    "tie_embeddings": {"tie_embeddings": True},
    "embed_scale": {"embed_scale": 2.0},
    "logit_softcap": {"logit_softcap": 7.0},
    "mtp_depth": {"mtp_depth": 1},
    "mtp_weight": {"mtp_weight": 0.5},
    "loss": {"loss": "cross_entropy"},
    "loss_chunk_tokens": {"loss_chunk_tokens": 7},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.1},
    "init": {"init": "truncated_normal"},
    "init_std": {"init_std": 0.07},
    "mup_base_dim": {"mup_base_dim": 16},
}
_ALTERNATIVE: dict[str, dict[str, Any]] = {
    "attention": {"attention": "gqa", "rope_dim": None, "v_head_dim": None, "kv_lora_rank": None, "q_lora_rank": None},
    "router_norm": {"router_norm": True},
    "router_bias": {"router_bias": False},
    "qk_norm": {"qk_norm": "per_head"},
    "norm_placement": {"norm_placement": "sandwich"},
    "qkv_bias": {"qkv_bias": False},
    "out_bias": {"out_bias": False},
    "mlp_bias": {"mlp_bias": False},
    "tie_embeddings": {"tie_embeddings": False},
}
# Dense layers are the first ones of the model, whatever the number of layers.
_OF_FAMILY = {
    ("deepseek_v3", "n_layers"): {"n_layers": 5, "moe_pattern": "DMMMM"},
    ("deepseek_v3", "mtp_depth"): {"mtp_depth": 2, "moe_pattern": "DMMMMM"},
    ("deepseek_v3", "mtp_weight"): {"mtp_depth": 2, "moe_pattern": "DMMMMM", "mtp_weight": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_is_lost_without_a_word(family: str) -> None:
    config = CONFIGS[family]
    written = config_to_hf(config, family)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == set(OTHER)
    for field in sorted(fields - FAMILIES[family].unread):
        change = _OF_FAMILY.get((family, field), OTHER[field])
        if getattr(config, field) == change[field]:
            change = _ALTERNATIVE[field]
        try:
            changed = dataclasses.replace(config, **change)
        except ValueError as error:  # there is no such model
            assert any(name in str(error) for name in change), (field, str(error))
            continue
        base = written
        if len(change) > 1 and field != "attention":  # the same without the field in question, where that is a config
            without = {name: value for name, value in change.items() if name != field}
            try:
                base = config_to_hf(dataclasses.replace(config, **without), family)
            except ValueError:
                base = written if field in FREE else {}
        try:
            other = config_to_hf(changed, family)
        except ValueError as error:
            assert field not in FREE
            assert any(name in str(error) for name in change), (field, str(error))
            continue
        assert (other == base) == (field in FREE), f"{field} of {family} is neither written nor refused"
        if field not in FREE:
            assert config_from_hf(other) == changed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_has_one_place_in_a_family(family: str) -> None:
    entry = FAMILIES[family]
    places = [{key.ours for key in entry.keys}, set(entry.fixed), FREE, entry.computed, entry.unread]
    assert {field.name for field in dataclasses.fields(ModelConfig)} == set().union(*places)
    assert sum(len(place) for place in places) == len(set().union(*places))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "rope_scaling"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "rope_parameters"]),
        ({"rope_scaling": {"type": "yarn"}}, ["yarn", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1]}}, ["short_factor", "linear"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, ["truncate"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": None}}, ["truncate = None"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor = 0.25"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, ["rope_theta", "different"]),
        ({"hidden_act": "xielu"}, ["hidden_act = 'xielu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "bring them to bfloat16 first"]),
        ({"sliding_window": 128}, ["sliding_window = 128"]),
        ({"a_new_trick": True}, ["a_new_trick = True", "not known"]),
        ({"model_type": "mamba"}, ["mamba", "llama", "qwen3"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
    ],
)
def test_what_we_would_compute_otherwise_is_an_error(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        config_from_hf({"model_type": "llama", **SIZES, **change})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 2"]),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, ["sliding_window"]),
        ("mistral", {"layer_types": ["full_attention"] * 2}, ["layer_types"]),
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise = 0.1"]),
        ("mixtral", {"output_router_logits": True}, ["output_router_logits = True"]),
        ("mixtral", {"num_local_experts": 0}, ["num_local_experts = 0"]),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 1}, ["max_window_layers = 1"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, ["rms_norm_eps = 1e-05", "latents 1e-06"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "rope_interleave": False}, ["rope_interleave = False"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "scoring_func": "softmax"}, ["scoring_func = 'softmax'"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "topk_method": "greedy"}, ["topk_method = 'greedy'"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "n_shared_experts": 0}, ["n_shared_experts = 0"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "attention_bias": True}, ["attention_bias = True"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "n_group": None}, ["n_group = None"]),
        ("deepseek_v3", {"head_dim": None}, ["num_key_value_heads = 2", "it is 4"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "head_dim": 192}, ["head_dim = 192", "it is 64"]),
        ("deepseek_v3", {"num_key_value_heads": 4, "qk_head_dim": 64}, ["qk_head_dim = 64", "it is 192"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention = True"]),
        ("gemma", {"hidden_activation": "relu"}, ["hidden_activation = 'relu'"]),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, ["type", "say rope_type"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0"]),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_theta"]),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            ["sliding_attention", "linear"],
        ),
    ],
)
def test_errors_of_single_families(family: str, change: dict[str, Any], words: list[str]) -> None:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8}
    if FAMILIES[family].latent:
        sizes |= {"num_hidden_layers": 4, "head_dim": 64}
    with pytest.raises(ValueError) as error:
        config_from_hf({"model_type": family, **sizes, **change})
    for word in words:
        assert word in str(error.value)


ODD = (None, 0, -1, 2.5, math.nan, math.inf, "3", "x", True, False, [], [1], [[]], {}, {"a": 1}, [None])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_another_kind_is_an_error_that_names_the_key(family: str) -> None:
    """Whatever a key that is read says: a config, or a ValueError, and it is the key's where the kind is wrong."""
    heads = {"num_key_value_heads": 4} if FAMILIES[family].latent else {"num_key_value_heads": 2, "head_dim": 8}
    base = {"model_type": family, **SIZES, **heads}
    of_rope = {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0, "beta_fast": 32.0}
    by_layer = FAMILIES[family].rope_by_layer

    def read(key: str, value: Any) -> ModelConfig:
        if key not in of_rope:
            return config_from_hf({**base, key: value})
        parameters = {**of_rope, key: value}
        return config_from_hf({**base, "rope_parameters": {"full_attention": parameters} if by_layer else parameters})

    read("factor", 2.0)
    unread = {*IGNORED, *FAMILIES[family].ignored, *MUST_BE, *FAMILIES[family].must_be} - {
        "model_type",
        "architectures",
    }
    for key in (
        frozenset().union(*KEYS.values()) - unread | {key.theirs for key in FAMILIES[family].keys} | set(of_rope)
    ):
        for value in ODD:
            try:
                assert isinstance(read(key, value), ModelConfig)
            except ValueError as error:
                names = (key, FAMILIES[family].aliases.get(key, key), "model.")
                assert any(name in str(error) for name in names), (key, value, str(error))
        with pytest.raises(ValueError, match=rf"\b{key} = .* (must be|is not known)"):
            read(key, object())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_size_is_an_error(family: str) -> None:
    for size in ("hidden_size", "num_hidden_layers", "intermediate_size"):
        hf = {"model_type": family, **{key: value for key, value in SIZES.items() if key != size}}
        with pytest.raises(ValueError, match=f"{size} is missing"):
            config_from_hf(hf)


def test_what_no_family_can_say_is_named() -> None:
    with pytest.raises(ValueError, match=r"no Hugging Face family .* has sinks = True; the nearest"):
        config_to_hf(dataclasses.replace(CONFIGS["llama"], sinks=True))
    with pytest.raises(ValueError, match="llama cannot say sinks = True"):
        config_to_hf(dataclasses.replace(CONFIGS["llama"], sinks=True), "llama")
    both = dataclasses.replace(CONFIGS["olmo2"], logit_softcap=5.0)  # OLMo 2's norms, Gemma's soft-cap
    with pytest.raises(ValueError, match=r"no one Hugging Face family .*logit_softcap = 5.0"):
        config_to_hf(both)
    with pytest.raises(ValueError, match="qkv_bias = True"):
        config_to_hf(dataclasses.replace(CONFIGS["qwen3"], qkv_bias=True, out_bias=False), "qwen3")
    biased = dataclasses.replace(CONFIGS["mixtral"], router_bias=True)  # Mixtral's router with DeepSeek-V3's bias
    with pytest.raises(ValueError, match=r"no one .*; the nearest, mixtral, cannot say router_bias = True"):
        config_to_hf(biased)
    with pytest.raises(ValueError, match=r"deepseek_v3 cannot say .*router = 'softmax' \(it has 'sigmoid'\)"):
        config_to_hf(dataclasses.replace(CONFIGS["deepseek_v3"], router="softmax"), "deepseek_v3")
    with pytest.raises(ValueError, match=r"mixtral cannot say .*n_experts = 0"):
        config_to_hf(CONFIGS["llama"], "mixtral")
    with pytest.raises(ValueError, match="unknown Hugging Face family 'nope'"):
        config_to_hf(CONFIGS["llama"], "nope")


def test_family_of() -> None:
    assert family_of({"architectures": ["MistralForCausalLM"]}) == "mistral"
    assert family_of({"model_type": "gemma2", "architectures": None}) == "gemma2"
    with pytest.raises(ValueError, match="known Hugging Face families are"):
        family_of({})


def test_configs_need_no_torch() -> None:
    code = (
        "import sys; from kforge_model import hf; hf.config_from_hf; before = 'torch' in sys.modules; hf.to_hf; "
        "print(before, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True"]
