"""Small models of Hugging Face's families, from their configs. Other processes import it."""

import torch

VOCAB, DIM = 32, 16

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
HEAD = {"head_dim": 8}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": HEAD,
    "Gemma": HEAD,
    "Gemma2": {**HEAD, "sliding_window": 4},
    "Gemma3": {**HEAD, "sliding_window": 4, "tie_word_embeddings": True},
    "Phi": {},
    "Phi3": {"pad_token_id": 3},
    "Olmo": {},
    "Olmo2": {},
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "Cohere": {},
    "Cohere2": {"sliding_window": 4},
    "Glm": HEAD,
    "Glm4": HEAD,
    "GPTNeoX": {},
    "Starcoder2": {},
    "SmolLM3": {},
    "Qwen3Moe": {**HEAD, **MOE, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {**MLA, "topk_method": "greedy"},
    "DeepseekV3": MLA,
}
"""Family -> what its config has beside `SIZES`."""

CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


def build(family, **options):
    """The model with the values that its class gives it, in float64."""
    import transformers

    config_class, model_class = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    options = {**SIZES, **FAMILIES[family], **options}
    attention = "eager" if family == "Gemma2" else "sdpa"  # eager: softmax in float32
    config = getattr(transformers, config_class)(**options, attn_implementation=attention)
    config._experts_implementation = "eager"  # the others do not take float64
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).double()


CASTS = {"Gemma", "Gemma2", "Gemma3", "Cohere", "Cohere2", "DeepseekV2", "DeepseekV3"}
"""Families whose code goes through float32 where a last bit can decide how a value is rounded."""

IDS = torch.randint(1, VOCAB, (4, 8), generator=torch.Generator().manual_seed(1))


def summed_loss(model, ids):
    """Sum over the predicted tokens, in float64: transformers' own loss is in float32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def step(model, ids, loss=summed_loss):
    """Loss of the ids, gradients and weights, whole, after a step of AdamW."""
    from kforge_parallel.fsdp import full

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    total = loss(model, ids)
    total.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return total.detach().clone(), gradients, {name: full(p) for name, p in model.named_parameters()}
