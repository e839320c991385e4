"""Weights of Hugging Face: the tiny model of each family beside ours, logits and every gradient, both ways."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kforge_model import ModelConfig, Transformer
from kforge_model.hf import FAMILIES, HfTensors, config_from_hf, config_to_hf, from_hf, to_hf

TOLERANCE = 1e-5
VOCAB = 61
SEQ = 40  # longer than every window, and than the original length of every scaling

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "pad_token_id": None,
}
# Base and lengths at which yarn's ramp begins and ends within the six pairs of a head.
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 100.0}
_RAMP = {"original_max_position_embeddings": 32, "beta_fast": 2.0, "beta_slow": 0.3}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}

_QWEN3_MOE = {"num_experts": 6, "moe_intermediate_size": 20, "num_experts_per_tok": 3}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}

THEIRS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama tied": {"tie_word_embeddings": True, "head_dim": None, "num_key_value_heads": 4},
    "llama gelu": {"hidden_act": "gelu"},
    "llama llama3": {"rope_parameters": _LLAMA3},
    "llama linear": {"rope_parameters": _LINEAR},
    "llama yarn": {"rope_parameters": _YARN},
    "llama yarn factor": {"rope_parameters": {**_YARN, **_RAMP, "attention_factor": 1.2}},
    "llama yarn mscale": {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "mistral": {"sliding_window": 7},
    "mistral full": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {},
    "qwen3 windows": {"use_sliding_window": True, "sliding_window": 7, "layer_types": _LAYERS, "attention_bias": True},
    "olmo2": {},
    "olmo2 biases": {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 8},
    "gemma": {},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.7}
    | {"final_logit_softcapping": 0.9},
    "gemma2 no caps": {"sliding_window": 7, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {"sliding_window": 7, "layer_types": _LAYERS, "query_pre_attn_scalar": 20},
    "gemma3_text scaled": {
        "sliding_window": 7,
        "layer_types": _LAYERS,
        "rope_parameters": {
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
        "final_logit_softcapping": 0.9,
    },
    "mixtral": {"num_local_experts": 6, "sliding_window": 7},
    "qwen3_moe": {**_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3_moe dense layers": {**_QWEN3_MOE, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 7}
    | {"attention_bias": True, "tie_word_embeddings": True},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3 plain": {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    | {"norm_topk_prob": False, "n_shared_experts": 1},
    "deepseek_v3 yarn": {**_DEEPSEEK, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "deepseek_v3 yarn one": {**_DEEPSEEK, "rope_parameters": {**_YARN, **_RAMP, "mscale_all_dim": 0.4}},
}
"""Family, perhaps with a variant -> what is said of the tiny Hugging Face model beside its sizes."""

_OURS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_multiple": 32,
    "dim": 32,
    "ffn_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 12,
    "max_seq_len": 64,
    "norm_eps": 1e-4,
    "loss_chunk_tokens": 16,
}
_GEMMA: dict[str, Any] = {**_OURS, "mlp": "geglu_tanh", "embed_scale": math.sqrt(32), "norm_placement": "sandwich"}
_GEMMA |= {"window": 7, "attn_scale": 20**-0.5}
_YARN_RAMP: dict[str, Any] = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_theta": 100.0, "rope_original_len": 32}
_YARN_RAMP |= {"rope_high": 2.0, "rope_low": 0.3}
_EXPERTS: dict[str, Any] = {"n_experts": 8, "moe_top_k": 3, "expert_dim": 20}
_DEEPSEEK_V3: dict[str, Any] = {
    **{name: value for name, value in _OURS.items() if name != "n_kv_heads"},
    **_EXPERTS,
    "norm_eps": 1e-6,
    "attention": "mla",
    "rope_dim": 6,
    "v_head_dim": 7,
    "kv_lora_rank": 16,
    "moe_pattern": "DMM",
    "shared_experts": 1,
    "router": "sigmoid",
    "router_bias": True,
    "router_scale": 1.5,
    "router_groups": 4,
    "router_top_groups": 2,
}

OURS: dict[str, ModelConfig] = {
    "llama": ModelConfig(**_OURS, qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama ntk": ModelConfig(**_OURS, rope_scaling="ntk", rope_factor=4.0),
    "llama llama3": ModelConfig(**_OURS, rope_scaling="llama3", rope_factor=8.0, rope_original_len=16),
    "llama yarn": ModelConfig(**_OURS, **_YARN_RAMP),
    "llama yarn factor": ModelConfig(**_OURS, **_YARN_RAMP, rope_attn_factor=1.2),
    "llama linear": ModelConfig(**_OURS, rope_scaling="linear", rope_factor=8.0, tie_embeddings=True),
    "mistral": ModelConfig(**_OURS, window=7, mlp="geglu"),
    "qwen2": ModelConfig(**_OURS, qkv_bias=True, window=7, window_pattern="FW"),
    "qwen3": ModelConfig(**_OURS, qk_norm="per_head", window=7, window_pattern="WWF"),
    "olmo2": ModelConfig(**_OURS, qk_norm="across_heads", norm_placement="post"),
    "gemma": ModelConfig(**_OURS, mlp="geglu_tanh", embed_scale=math.sqrt(32), tie_embeddings=True),
    "gemma2": ModelConfig(**_GEMMA, window_pattern="WF", attn_softcap=0.7, logit_softcap=0.9, tie_embeddings=True),
    "gemma3_text": ModelConfig(
        **_GEMMA,
        window_pattern="WWF",
        qk_norm="per_head",
        rope_theta_window=100.0,
        rope_scaling="linear",
        rope_factor=8.0,
    ),
    "mixtral": ModelConfig(**_OURS, **_EXPERTS, window=7, mlp="geglu"),
    "qwen3_moe": ModelConfig(**_OURS, **_EXPERTS, qk_norm="per_head", router_norm=False, moe_pattern="DM"),
    "deepseek_v3": ModelConfig(**_DEEPSEEK_V3, q_lora_rank=20),
    "deepseek_v3 yarn": ModelConfig(**_DEEPSEEK_V3, **_YARN_RAMP, rope_attn_factor=1.2, attn_scale=0.35),
}
"""Family, perhaps with a variant -> our model."""


def randomise(model: nn.Module) -> None:
    """Weights of a size at which every part is seen in the logits: norms off 1, biases off 0, the router's too.

    With 0.2 and a yarn factor of 1.7 the softmaxes are so sharp that transformers' float32 rotary tables alone move
    gradients by 1.6e-5 of their maximum.
    """
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and name.endswith("weight"):
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim == 1 else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith(("router.bias", "e_score_correction_bias")):
                buffer.copy_(0.1 * torch.randn_like(buffer))


def their_model(config: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()


def load_theirs(model: Any, state: dict[str, Tensor], tied: bool) -> None:
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert report.missing_keys == (["lm_head.weight"] if tied else [])


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item()


def ids_and_labels() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1], ids[:, 1:]


def differences(ours: Transformer, theirs: Any, config: ModelConfig, family: str) -> dict[str, float]:
    """Largest difference, relative to the largest value, of the logits and of the gradient of each weight."""
    ids, labels = ids_and_labels()
    logits = theirs(ids).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    result = {"logits": relative(ours(ids), logits)}
    loss, _ = ours(ids, labels=labels, scale=1.0)
    loss.backward()
    gradients = {name: weight.grad.double() for name, weight in ours.named_parameters() if weight.grad is not None}
    biases = {name: buffer for name, buffer in ours.state_dict().items() if name.endswith("router.bias")}
    mapped = to_hf({**gradients, **biases}, config, family, joined_experts=True)
    for name, weight in theirs.named_parameters():
        shift = (
            1.0 if "norm" in name and family.startswith("gemma") else 0.0
        )  # the change is 1 + w: its gradient is w's
        result[name] = relative(mapped.pop(name) + shift, weight.grad.double())
    assert len(mapped) == len(biases)
    return result


@pytest.mark.parametrize("case", THEIRS)
def test_theirs_in_ours(case: str) -> None:
    family = case.split()[0]
    theirs = their_model({"model_type": family, **_SIZES, **THEIRS[case]})
    randomise(theirs)
    config = dataclasses.replace(config_from_hf(theirs.config.to_dict()), vocab_multiple=32, loss_chunk_tokens=16)
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    loaded = from_hf(state, config)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in state.items()), "input is untouched"
    assert loaded["embed.weight"].shape[0] == 64
    assert not loaded["embed.weight"][VOCAB:].any()
    ours = Transformer(config)
    ours.load_state_dict(loaded)
    found = differences(ours, theirs, config, family)
    assert max(found.values()) <= TOLERANCE, found
    back = to_hf(ours.state_dict(), config, family, joined_experts=True)
    assert set(back) == set(state) - ({"lm_head.weight"} if config.tie_embeddings else set())
    for name, tensor in back.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=2e-7 if "norm" in name else 0)


@pytest.mark.parametrize("case", OURS)
def test_ours_in_theirs(case: str) -> None:
    family, config = case.split()[0], OURS[case]
    ours = Transformer(config)
    randomise(ours)
    theirs = their_model(config_to_hf(config))
    assert theirs.config.model_type == family
    assert type(theirs).__name__ == FAMILIES[family].architecture
    load_theirs(theirs, to_hf(ours.state_dict(), config, joined_experts=True), config.tie_embeddings)
    found = differences(ours, theirs, config, family)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama llama3", {"rope_theta": 9e3, "rope_factor": 7.0, "rope_low": 1.2, "rope_high": 3.5}),
        ("llama llama3", {"rope_original_len": 20}),
        ("llama yarn", {"rope_theta": 50.0, "rope_factor": 3.0, "rope_low": 0.1, "rope_high": 4.0}),
        ("llama yarn", {"rope_original_len": 64, "rope_attn_factor": 1.2}),
        ("llama linear", {"rope_theta": 9e3, "rope_factor": 7.0, "norm_eps": 2e-4}),
        ("mistral", {"window": 8, "mlp": "geglu_tanh"}),
        ("qwen3", {"window": 8, "window_pattern": "WFF"}),
        ("gemma2", {"window": 8, "attn_softcap": 0.75, "logit_softcap": 0.95, "attn_scale": 0.2, "embed_scale": 5.0}),
        ("gemma3_text", {"window": 8, "rope_theta": 9e3, "rope_theta_window": 200.0, "rope_factor": 7.0}),
        ("mixtral", {"window": 8, "moe_top_k": 2, "router_norm": False}),
        ("qwen3_moe", {"moe_top_k": 2, "router_norm": True, "router_scale": 1.1}),
        ("deepseek_v3", {"moe_top_k": 2, "router_norm": False, "router_scale": 1.4, "router_top_groups": 3}),
        ("deepseek_v3 yarn", {"rope_attn_factor": 1.1, "attn_scale": 0.3, "rope_theta": 50.0}),
    ],
)
def test_the_comparisons_would_see_another_number(case: str, changes: dict[str, Any]) -> None:
    """A case in which an option does nothing compares nothing: every change moves the logits far above TOLERANCE."""
    ours = Transformer(OURS[case])
    randomise(ours)
    ids, _ = ids_and_labels()
    for field, value in changes.items():
        other = Transformer(dataclasses.replace(OURS[case], **{field: value}))
        other.load_state_dict(ours.state_dict())
        with torch.no_grad():
            assert relative(other(ids), ours(ids)) > 10 * TOLERANCE, field


def test_the_comparisons_would_see_another_router_bias() -> None:
    ours, other = Transformer(OURS["deepseek_v3"]), Transformer(OURS["deepseek_v3"])
    randomise(ours)
    biases = {name: torch.zeros(8) for name in ours.state_dict() if name.endswith("router.bias")}
    other.load_state_dict({**ours.state_dict(), **biases})
    ids, _ = ids_and_labels()
    with torch.no_grad():
        assert len(biases) == 2 and relative(other(ids), ours(ids)) > 10 * TOLERANCE


def test_exported_model_reports_our_loss_and_predicts_the_next_token() -> None:
    """Case "labels shifted twice": trained on 0, 1, …, 9, 0, 1, … with labels[i] = ids[i + 1]."""
    config = ModelConfig(vocab_size=10, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, max_seq_len=64, ffn_dim=64)
    ours = Transformer(config)
    text = (torch.arange(33) % 10)[None]
    ids, labels = text[:, :-1], text[:, 1:]
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(40):
        loss, _ = ours(ids, labels=labels, scale=1 / labels.numel())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    theirs = their_model(config_to_hf(config))
    load_theirs(theirs, to_hf(ours.state_dict(), config), tied=False)
    with torch.no_grad():
        other = (torch.arange(2, 31) * 3 % 10)[None]  # a text it does not know, so that the loss is not near 0
        for said in (text, other):
            _, nll = ours(said[:, :-1], labels=said[:, 1:], scale=1.0)
            assert abs(float(theirs(said, labels=said).loss) - float(nll.mean())) <= 1e-4
        prompt = torch.tensor([[3, 4, 5]])
        assert int(ours(prompt)[0, -1].argmax()) == 6
        assert int(theirs(prompt).logits[0, -1].argmax()) == 6


@pytest.mark.parametrize(
    "case", ["llama linear", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v3 yarn"]
)
def test_files_are_read_by_either_side(case: str, tmp_path: Path) -> None:
    config = OURS[case]
    ours = Transformer(config)
    randomise(ours)
    ids, _ = ids_and_labels()
    first, second = tmp_path / "ours", tmp_path / "theirs"
    first.mkdir()
    (first / "config.json").write_text(json.dumps(config_to_hf(config)))
    state = {name: tensor.contiguous() for name, tensor in to_hf(ours.state_dict(), config).items()}
    save_file(state, first / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(first, attn_implementation="eager")
    theirs.save_pretrained(second)
    read = dataclasses.replace(config_from_hf(json.loads((second / "config.json").read_text())), vocab_multiple=32)
    again = Transformer(read)
    again.load_state_dict(from_hf(load_file(second / "model.safetensors"), read))
    with torch.no_grad():
        assert relative(theirs(ids).logits, ours(ids)) <= TOLERANCE
        assert relative(again(ids), ours(ids)) <= TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_have_the_names_of_files_and_those_of_modules(family: str, tmp_path: Path) -> None:
    config = OURS[family]
    state = Transformer(config).state_dict()
    state = {name: torch.randn(tensor.shape) for name, tensor in state.items()}
    state["embed.weight"][VOCAB:], state["head.weight"][VOCAB:] = 0, 0
    joined, apart = to_hf(state, config, joined_experts=True), to_hf(state, config)
    theirs = their_model(config_to_hf(config))
    assert set(joined) == set(theirs.state_dict())
    load_theirs(theirs, joined, tied=False)
    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(apart) == set(saved)
    for name, tensor in saved.items():
        assert torch.equal(apart[name], tensor), name
    for form in (joined, apart):
        again = from_hf(form, config)
        assert set(again) == set(state)
        for name, tensor in state.items():
            assert torch.equal(again[name], tensor), name
    view = from_hf(joined, config)["layers.1.moe.experts.w_gate_up"]
    assert view.data_ptr() == joined["model.layers.1.mlp.experts.gate_up_proj"].data_ptr()


def test_experts_that_are_missing_or_not_known_are_errors() -> None:
    config = OURS["mixtral"]
    state = to_hf(Transformer(config).state_dict(), config)
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.block_sparse_moe\.experts\.5\.w3\.weight"):
        from_hf({key: tensor for key, tensor in state.items() if key != name.format(5)}, config)
    with pytest.raises(ValueError, match=r"not known: model\.layers\.1\.block_sparse_moe\.experts\.8\.w3\.weight"):
        from_hf({**state, name.format(8): state[name.format(0)]}, config)
    with pytest.raises(ValueError, match=r"block_sparse_moe.experts.2.w3.weight is \[20, 16\], .* wants \[20, 32\]"):
        from_hf({**state, name.format(2): torch.ones(20, 16)}, config)
    none = {key: tensor for key, tensor in state.items() if "layers.1.block_sparse_moe.experts" not in key}
    with pytest.raises(
        ValueError, match=r"missing: .*layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight, .* and 16 more"
    ):
        from_hf(none, config)
    joined = to_hf(Transformer(config).state_dict(), config, joined_experts=True)
    with pytest.raises(ValueError, match=r"down_proj is \[4, 32, 20\], and the config wants \[8, 32, 20\]"):
        from_hf({**joined, "model.layers.0.mlp.experts.down_proj": torch.ones(4, 32, 20)}, config)


FURTHER = dataclasses.replace(OURS["deepseek_v3"], vocab_multiple=1, moe_pattern="DMMMM", mtp_depth=2)


@pytest.fixture
def further() -> tuple[Transformer, dict[str, Tensor]]:
    """Ours, with two further tokens, and its file."""
    ours = Transformer(FURTHER)
    randomise(ours)
    return ours, {name: tensor.contiguous() for name, tensor in to_hf(ours.state_dict(), FURTHER).items()}


def test_further_tokens_are_those_of_transformers(
    further: tuple[Transformer, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its MtpModel, read from our file: loss and gradients are those of both models and the report's equation 25."""
    ours, state = further
    written = config_to_hf(FURTHER)
    assert written["num_nextn_predict_layers"] == 2
    assert dataclasses.replace(config_from_hf(written), loss_chunk_tokens=16) == FURTHER
    (tmp_path / "config.json").write_text(json.dumps(written))
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    main = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    monkeypatch.setattr(main, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*", r"model\.layers\.4.*"])
    more = MtpModel.from_pretrained(main)

    ids, labels = ids_and_labels()
    cache = MtpCache(config=main.config.get_mtp_config())
    hidden = main.model(ids).last_hidden_state
    loss = F.cross_entropy(main.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    for k in (1, 2):
        places = torch.arange(k, SEQ + k).expand(2, -1)
        hidden = more.forward_layer(k - 1, hidden, places, cache, input_ids=F.pad(ids[:, k:], (0, k)))
        seen = main.lm_head(hidden)[:, :-k].flatten(0, 1)
        loss = loss + 0.3 / 2 * F.cross_entropy(seen, labels[:, k:].flatten(), reduction="sum")
    loss.backward()
    right = {name: weight.grad for name, weight in main.named_parameters()}
    for name, weight in more.layers.named_parameters():
        k, name = name.split(".", 1)
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        right[f"model.layers.{3 + int(k)}.{name}"] = weight.grad

    got, _ = ours.train()(ids, labels=labels, scale=1.0)
    got.backward()
    assert got.item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    biases = {name: buffer for name, buffer in ours.state_dict().items() if name.endswith("router.bias")}
    mapped = to_hf({**gradients, **biases}, FURTHER, joined_experts=True)
    for name, gradient in right.items():
        assert relative(mapped[name], gradient) <= TOLERANCE, name
    ends = ("e_score_correction_bias", "3.embed_tokens.weight", "3.shared_head.head.weight")
    ends += ("4.embed_tokens.weight", "4.shared_head.head.weight")
    assert all(name.endswith(ends) for name in mapped.keys() - right.keys())


def test_layers_of_further_tokens_are_read_as_far_as_the_config_has_them(
    further: tuple[Transformer, dict[str, Tensor]],
) -> None:
    ours, state = further
    ends = ["embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"]
    attention = [f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "o")]
    parts = [*ends, *norms, *attention, "self_attn.kv_a_proj_with_mqa", "mlp.gate"]
    parts += [f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")]
    parts += [f"mlp.experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "up", "down")]
    names = {f"model.layers.3.{part}.weight" for part in parts}  # those of layer 61 of the published files
    names.add("model.layers.3.mlp.gate.e_score_correction_bias")
    assert {name for name in state if name.startswith("model.layers.3.")} == names
    for form in (state, to_hf(ours.state_dict(), FURTHER, joined_experts=True)):
        again = from_hf(form, FURTHER)
        assert all(torch.equal(again[name], tensor) for name, tensor in ours.state_dict().items())
        assert again.keys() == ours.state_dict().keys()
    for depth in (1, 0):
        fewer = dataclasses.replace(FURTHER, mtp_depth=depth)
        assert from_hf(state, fewer).keys() == Transformer(fewer).state_dict().keys()
    without = {
        name: tensor
        for name, tensor in state.items()
        if not name.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))
    }
    assert from_hf(without, FURTHER).keys() == again.keys()


def test_layers_of_further_tokens_that_are_not_those_of_the_config_are_errors(
    further: tuple[Transformer, dict[str, Tensor]],
) -> None:
    _, state = further
    plain = {name: tensor for name, tensor in state.items() if not re.match(r"model\.layers\.[34]\.", name)}
    with pytest.raises(
        ValueError, match=r"mtp_depth = 2, and the state dict has no layer .*layers\.3\.eh_proj.*mtp_depth=0"
    ):
        from_hf(plain, FURTHER)
    assert from_hf(plain, dataclasses.replace(FURTHER, mtp_depth=0))
    gone = "model.layers.4.hnorm.weight"
    with pytest.raises(ValueError, match=f"missing: {gone}"):
        from_hf({name: tensor for name, tensor in state.items() if name != gone}, FURTHER)
    with pytest.raises(ValueError, match=r"not known: model\.layers\.5\.enorm\.weight"):
        from_hf({**state, "model.layers.5.enorm.weight": torch.ones(32)}, FURTHER)  # nothing says what it is
    with pytest.raises(ValueError, match=r"not known: model\.layers\.2\.eh_proj\.weight"):
        from_hf({**state, "model.layers.2.eh_proj.weight": torch.ones(32, 64)}, FURTHER)
    with pytest.raises(ValueError, match=r"eh_proj\.weight is \[32, 32\], and the config wants \[32, 64\]"):
        from_hf({**state, "model.layers.3.eh_proj.weight": torch.ones(32, 32)}, FURTHER)
    for copy, of in (("embed_tokens", r"model\.embed_tokens"), ("shared_head.head", "lm_head")):
        other = {**state, f"model.layers.4.{copy}.weight": torch.ones(VOCAB, 32)}
        with pytest.raises(ValueError, match=rf"layers\.4\.{copy}\.weight is not {of}\.weight, and .* mtp_depth"):
            from_hf(other, FURTHER)


def _llama() -> tuple[ModelConfig, dict[str, Tensor]]:
    config = dataclasses.replace(OURS["llama"], vocab_multiple=1)
    return config, to_hf(Transformer(config).state_dict(), config)


def test_dtype_is_kept_and_one_is_added_in_float32() -> None:
    config = OURS["gemma2"]
    state = {name: tensor.bfloat16() for name, tensor in to_hf(Transformer(config).state_dict(), config).items()}
    norm = "model.layers.0.input_layernorm.weight"
    state[norm] = torch.linspace(-0.1, 0.1, 32).bfloat16()
    loaded = from_hf(state, config)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert torch.equal(loaded["layers.0.attn_norm.weight"], (1 + state[norm].float()).bfloat16())
    wide = from_hf({name: tensor.double() for name, tensor in state.items()}, config)
    assert torch.equal(wide["layers.0.attn_norm.weight"], 1 + state[norm].double())


def test_what_need_not_be_copied_is_a_view() -> None:
    config, state = _llama()
    loaded = from_hf(state, config)
    down = "model.layers.0.mlp.down_proj.weight"
    assert loaded["layers.0.mlp.w_down.weight"].data_ptr() == state[down].data_ptr()
    assert loaded["embed.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_names_that_are_missing_or_not_known_are_errors() -> None:
    config, state = _llama()
    gone = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=f"missing: {gone}"):
        from_hf({name: tensor for name, tensor in state.items() if name != gone}, config)
    with pytest.raises(ValueError, match=r"not known: model\.layers\.0\.self_attn\.q_norm\.weight"):
        from_hf({**state, "model.layers.0.self_attn.q_norm.weight": torch.ones(12)}, config)
    with pytest.raises(ValueError, match=r"not known: model\.layers\.3\.mlp\.up_proj\.weight"):
        from_hf({**state, "model.layers.3.mlp.up_proj.weight": torch.ones(48, 32)}, config)
    ours = Transformer(config).state_dict()
    with pytest.raises(ValueError, match="not known: extra"):
        to_hf({**ours, "extra": torch.ones(1)}, config)
    ours.pop("layers.0.attn.wqkv.bias")
    with pytest.raises(ValueError, match=r"missing: layers\.0\.attn\.wqkv\.bias"):
        to_hf(ours, config)


def test_buffers_of_old_files_are_let_by() -> None:
    config, state = _llama()
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq"]
    old += ["model.rotary_emb.original_inv_freq", "model.rotary_emb_local.inv_freq", "model.embed_tokens.embed_scale"]
    old += ["model.rotary_emb.sliding_attention_inv_freq"]
    assert set(from_hf({**state, **dict.fromkeys(old, torch.ones(6))}, config)) == set(from_hf(state, config))


def test_other_shapes_are_errors() -> None:
    config, state = _llama()
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[64, 32\], and the config wants \[61, 32\]"):
        from_hf({**state, "model.embed_tokens.weight": torch.ones(64, 32)}, config)
    with pytest.raises(ValueError, match=r"q_proj.weight is \[32, 32\], and the config wants \[48, 32\]"):
        from_hf({**state, "model.layers.0.self_attn.q_proj.weight": torch.ones(32, 32)}, config)
    ours = Transformer(config).state_dict()
    with pytest.raises(ValueError, match=r"wqkv.weight is \[1, 8, 12, 32\], and the config wants \[2, 4, 12, 32\]"):
        to_hf({**ours, "layers.0.attn.wqkv.weight": torch.ones(1, 8, 12, 32)}, config)


def test_a_tied_head_is_dropped_or_refused() -> None:
    config = OURS["gemma"]
    state = to_hf(Transformer(config).state_dict(), config)
    assert "lm_head.weight" not in state
    with_head = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    assert set(from_hf(with_head, config)) == set(from_hf(state, config))
    with_head["lm_head.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        from_hf(with_head, config)


def test_parts_without_a_name_and_families_without_one() -> None:
    config = dataclasses.replace(OURS["llama"], sinks=True)
    state = Transformer(config).state_dict()
    with pytest.raises(ValueError, match="sinks = True"):
        to_hf(state, config)
    with pytest.raises(ValueError, match=r"llama has no name for layers\.0\.attn\.sinks"):
        to_hf(state, config, "llama")
    with pytest.raises(ValueError, match="unknown Hugging Face family 'nope'"):
        from_hf({}, OURS["llama"], "nope")


class Counted(dict[str, Tensor]):
    """A state dict that counts how often each tensor is asked for."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.asked: Counter[str] = Counter()

    def __getitem__(self, key: str) -> Tensor:
        self.asked[key] += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("case", ["llama", "gemma2", "mixtral", "qwen3_moe", "further"])
@pytest.mark.parametrize("joined", [False, True])
def test_one_tensor_at_a_time_is_as_all_at_once_and_reads_each_once(case: str, joined: bool) -> None:
    config = FURTHER if case == "further" else OURS[case]
    ours = Transformer(config)
    randomise(ours)
    with torch.no_grad():
        for tensor in (ours.state_dict()["embed.weight"], ours.state_dict().get("head.weight", torch.empty(0))):
            tensor[VOCAB:] = 0
    tensors = HfTensors(config, joined_experts=joined)
    whole = to_hf(ours.state_dict(), config, joined_experts=joined)
    written = {
        key: made for name in tensors.parts for key, made in tensors.to_hf(name, ours.state_dict()[name]).items()
    }
    assert list(written) == list(whole) and all(torch.equal(written[key], whole[key]) for key in whole)
    shapes = {key: shape for parts in tensors.parts.values() for key, shape in parts.items()}
    assert shapes == {key: tensor.shape for key, tensor in whole.items()}
    state = Counted(whole)
    tensors.check(state)
    for name, tensor in ours.state_dict().items():
        before = +state.asked
        torch.testing.assert_close(tensors.from_hf(name, state), tensor, rtol=0, atol=2e-7)
        assert (state.asked - before).keys() == tensors.parts[name].keys()  # and no other tensor is in memory
    assert set(state.asked.values()) == {1} and state.asked.keys() == whole.keys()


def test_experts_of_several_dtypes_are_joined_in_the_widest() -> None:
    config = OURS["mixtral"]
    state = to_hf(Transformer(config).state_dict(), config)
    narrow = {name: tensor.bfloat16() if ".experts.0." in name else tensor for name, tensor in state.items()}
    loaded, other = from_hf(narrow, config), from_hf(state, config)
    for leaf in ("w_gate_up", "w_down"):
        one, two = (found[f"layers.1.moe.experts.{leaf}"] for found in (loaded, other))
        assert one.dtype == torch.float32 and torch.equal(one[1:], two[1:])
        assert torch.equal(one[0], two[0].bfloat16().float())
