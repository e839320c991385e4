"""What is compared with one process, as plain data: layouts × models × variants.

A new axis is new rows here: its layouts, and the models and variants that they are run with.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

VOCAB = 64
ROWS, TOKENS = 12, 16  # of a global batch: 4 data ranks with 3 microbatches have a row each
STEPS = 3
SILENT_ROW = 5  # nothing in it is scored
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
LIMIT_S = 240  # of one start of processes; the longest takes a tenth of it on two idle cores

ULYSSES, RING = {"cp_style": "ulysses"}, {"cp_style": "ring"}
LOOP = {"pp_schedule": "interleaved_1f1b"}
ZERO = {"pp_schedule": "interleaved_zero_bubble"}
ZBV = {"pp_schedule": "zbv"}
DUAL = {"pp_schedule": "dualpipev"}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "shard2": {"dp_shard": 2},
    "shard4": {"dp_shard": 4},
    "rep2": {"dp_replicate": 2},
    "rep4": {"dp_replicate": 4},
    "rep2-shard2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "tp2-whole": {"tp": 2, "sequence_parallel": False},
    "tp4": {"tp": 4},  # two key/value heads on four ranks
    "tp4-whole": {"tp": 4, "sequence_parallel": False},
    "shard2-tp2": {"dp_shard": 2, "tp": 2},
    "shard2-tp2-whole": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
    "rep2-tp2": {"dp_replicate": 2, "tp": 2},
    "rep2-tp2-whole": {"dp_replicate": 2, "tp": 2, "sequence_parallel": False},
    "rep2-shard2-tp2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "rep2-shard2-tp2-whole": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "sequence_parallel": False},
    "shard2-ep2": {"dp_shard": 2, "ep": 2},
    "shard4-ep2": {"dp_shard": 4, "ep": 2},
    "shard4-ep4": {"dp_shard": 4, "ep": 4},
    "shard8-ep8": {"dp_shard": 8, "ep": 8},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "shard2-tp2-ep2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "shard2-tp2-ep4": {"dp_shard": 2, "tp": 2, "ep": 4},
    "shard4-tp2-ep2": {"dp_shard": 4, "tp": 2, "ep": 2},  # four ranks share two experts
    "shard4-tp2-ep8": {"dp_shard": 4, "tp": 2, "ep": 8},
    "rep2-shard2-ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "rep2-tp2-ep2": {"dp_replicate": 2, "tp": 2, "ep": 2},
    "rep2-shard2-tp2-ep4": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4},
    "cp2": {"cp": 2},
    "cp2-ulysses": {"cp": 2, **ULYSSES},
    "cp4": {"cp": 4},
    "cp4-ulysses": {"cp": 4, **ULYSSES},  # two key/value heads on four ranks
    "cp2-ring": {"cp": 2, **RING},
    "cp4-ring": {"cp": 4, **RING},
    "shard2-cp2": {"dp_shard": 2, "cp": 2},
    "shard2-cp2-ring": {"dp_shard": 2, "cp": 2, **RING},
    "shard2-cp2-ulysses": {"dp_shard": 2, "cp": 2, **ULYSSES},
    "rep2-cp2": {"dp_replicate": 2, "cp": 2, **RING},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-tp2-ulysses": {"cp": 2, "tp": 2, **ULYSSES},  # one key/value head of each tp rank, on two
    "cp2-tp2-ring": {"cp": 2, "tp": 2, **RING},
    "cp2-tp2-whole": {"cp": 2, "tp": 2, "sequence_parallel": False},
    "rep2-shard2-cp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, **RING},
    "rep2-cp2-tp2": {"dp_replicate": 2, "cp": 2, "tp": 2},
    "shard2-cp2-tp2": {"dp_shard": 2, "cp": 2, "tp": 2},
    "shard2-cp2-tp2-ulysses": {"dp_shard": 2, "cp": 2, "tp": 2, **ULYSSES},
    "shard2-cp2-tp2-ring": {"dp_shard": 2, "cp": 2, "tp": 2, **RING},
    "rep2-shard2-cp2-tp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    "cp2-ep2": {"cp": 2, "ep": 2},
    "cp2-ep2-ulysses": {"cp": 2, "ep": 2, **ULYSSES},
    "shard2-cp2-ep2": {"dp_shard": 2, "cp": 2, "ep": 2},
    "shard2-cp2-ep4": {"dp_shard": 2, "cp": 2, "ep": 4, **RING},
    "rep2-cp2-ep2": {"dp_replicate": 2, "cp": 2, "ep": 2},
    "cp2-tp2-ep4": {"cp": 2, "tp": 2, "ep": 4, **RING},
    "rep2-shard2-cp2-ep2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2},
    "rep2-cp2-tp2-ep4": {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4},
    "shard2-cp2-tp2-ep4": {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, **RING},
    "rep2-shard2-cp2-tp2-ep4": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    "pp2": {"pp": 2},
    "pp2-gpipe": {"pp": 2, "pp_schedule": "gpipe"},
    "pp2-loop": {"pp": 2, **LOOP},
    "pp2-loop4": {"pp": 2, **LOOP, "pp_stages": 4, "pp_split": "cost"},
    "pp2-zero": {"pp": 2, **ZERO},
    "pp2-zero4": {"pp": 2, **ZERO, "pp_stages": 4},
    "pp2-zbv": {"pp": 2, **ZBV},
    "pp2-dual": {"pp": 2, **DUAL},
    "pp3-layers": {"pp": 3, "pp_layers": (1, 3, 1)},
    "pp4": {"pp": 4, "pp_split": "cost"},
    "pp4-zbv": {"pp": 4, **ZBV},
    "rep2-pp2": {"dp_replicate": 2, "pp": 2},
    "rep2-pp2-loop": {"dp_replicate": 2, "pp": 2, **LOOP},
    "shard2-pp2": {"dp_shard": 2, "pp": 2},
    "shard2-pp2-loop": {"dp_shard": 2, "pp": 2, **LOOP},
    "shard2-pp2-zero": {"dp_shard": 2, "pp": 2, **ZERO},
    "shard2-pp2-zero4": {"dp_shard": 2, "pp": 2, **ZERO, "pp_stages": 4},
    "shard2-pp2-zbv": {"dp_shard": 2, "pp": 2, **ZBV},
    "shard2-pp2-dual": {"dp_shard": 2, "pp": 2, **DUAL},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-pp2-loop": {"tp": 2, "pp": 2, **LOOP},
    "tp2-pp2-whole": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "rep2-shard2-pp2": {"dp_replicate": 2, "dp_shard": 2, "pp": 2},
    "rep2-shard2-pp2-loop": {"dp_replicate": 2, "dp_shard": 2, "pp": 2, **LOOP},
    "rep2-tp2-pp2": {"dp_replicate": 2, "tp": 2, "pp": 2},
    "rep2-tp2-pp2-loop": {"dp_replicate": 2, "tp": 2, "pp": 2, **LOOP},
    "shard2-tp2-pp2": {"dp_shard": 2, "tp": 2, "pp": 2},
    "shard2-tp2-pp2-loop": {"dp_shard": 2, "tp": 2, "pp": 2, **LOOP},
    "shard2-tp2-pp2-zero": {"dp_shard": 2, "tp": 2, "pp": 2, **ZERO},
    "shard2-tp2-pp2-zbv": {"dp_shard": 2, "tp": 2, "pp": 2, **ZBV},
    "shard2-tp2-pp2-dual": {"dp_shard": 2, "tp": 2, "pp": 2, **DUAL},
    "rep2-shard2-tp2-pp2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "pp": 2},
    "shard2-ep2-pp2": {"dp_shard": 2, "ep": 2, "pp": 2},
    "shard2-ep2-pp2-loop": {"dp_shard": 2, "ep": 2, "pp": 2, **LOOP},
    "shard2-ep2-pp2-zero": {"dp_shard": 2, "ep": 2, "pp": 2, **ZERO},
    "tp2-ep2-pp2": {"tp": 2, "ep": 2, "pp": 2},
    "tp2-ep2-pp2-loop": {"tp": 2, "ep": 2, "pp": 2, **LOOP},
    "rep2-shard2-ep2-pp2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "pp": 2},
    "rep2-tp2-ep2-pp2": {"dp_replicate": 2, "tp": 2, "ep": 2, "pp": 2},
    "shard2-tp2-ep2-pp2": {"dp_shard": 2, "tp": 2, "ep": 2, "pp": 2},
    "shard2-tp2-ep4-pp2-loop": {"dp_shard": 2, "tp": 2, "ep": 4, "pp": 2, **LOOP},
    "shard2-tp2-ep4-pp2-zbv": {"dp_shard": 2, "tp": 2, "ep": 4, "pp": 2, **ZBV},
    "rep2-shard2-tp2-ep4-pp2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4, "pp": 2},
    "cp2-pp2": {"cp": 2, "pp": 2},
    "cp2-pp2-loop": {"cp": 2, "pp": 2, **LOOP, **ULYSSES},
    "cp2-pp2-zbv": {"cp": 2, "pp": 2, **ZBV, **RING},
    "rep2-cp2-pp2": {"dp_replicate": 2, "cp": 2, "pp": 2},
    "rep2-cp2-pp2-loop": {"dp_replicate": 2, "cp": 2, "pp": 2, **LOOP, **ULYSSES},
    "shard2-cp2-pp2": {"dp_shard": 2, "cp": 2, "pp": 2, **ULYSSES},
    "shard2-cp2-pp2-loop": {"dp_shard": 2, "cp": 2, "pp": 2, **LOOP, **RING},
    "cp2-tp2-pp2": {"cp": 2, "tp": 2, "pp": 2},
    "cp2-tp2-pp2-loop": {"cp": 2, "tp": 2, "pp": 2, **LOOP, **ULYSSES},
    "rep2-shard2-cp2-pp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "pp": 2},
    "rep2-cp2-tp2-pp2": {"dp_replicate": 2, "cp": 2, "tp": 2, "pp": 2},
    "shard2-cp2-tp2-pp2": {"dp_shard": 2, "cp": 2, "tp": 2, "pp": 2},
    "shard2-cp2-tp2-pp2-loop": {"dp_shard": 2, "cp": 2, "tp": 2, "pp": 2, **LOOP, **ULYSSES},
    "rep2-shard2-cp2-tp2-pp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 2},
    "cp2-ep2-pp2": {"cp": 2, "ep": 2, "pp": 2},
    "shard2-cp2-ep4-pp2-loop": {"dp_shard": 2, "cp": 2, "ep": 4, "pp": 2, **LOOP},
    "rep2-cp2-ep2-pp2": {"dp_replicate": 2, "cp": 2, "ep": 2, "pp": 2},
    "cp2-tp2-ep4-pp2": {"cp": 2, "tp": 2, "ep": 4, "pp": 2},
    "rep2-shard2-cp2-ep2-pp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "pp": 2},
    "rep2-cp2-tp2-ep4-pp2": {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 4, "pp": 2},
    "shard2-cp2-tp2-ep4-pp2": {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, "pp": 2},
    "rep2-shard2-cp2-tp2-ep8-pp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 8, "pp": 2},
}
"""Name -> fields of ParallelConfig; axes that are not named are 1."""

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "qk-norm": {"qk_norm": "per_head"},
    "one-kv": {"n_kv_heads": 1, "loss_chunk_tokens": 7},
    "post": {"norm_placement": "post", "qk_norm": "across_heads"},
    "sandwich": {"norm": "layernorm", "norm_placement": "sandwich", "qk_norm": "across_heads", "n_kv_heads": 1},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "plain-mlp": {"mlp": "relu2", "mlp_bias": True, "init": "truncated_normal"},
    "geglu": {"mlp": "geglu_tanh", "embed_scale": 4.0, "tie_embeddings": True},
    "windows": {"window": 5, "window_pattern": "WF", "rope_theta_window": 100.0},
    "soft-caps": {"attn_softcap": 1.5, "logit_softcap": 2.0, "attn_scale": 0.4},
    "sinks": {"sinks": True, "attn_gate": True, "window": 6},
    "latent": {"attention": "mla", "head_dim": 6, "rope_dim": 2, "kv_lora_rank": 8, "n_kv_heads": None},
    "latent-q": {
        "attention": "mla",
        "head_dim": 6,
        "rope_dim": 2,
        "v_head_dim": 3,
        "kv_lora_rank": 8,
        "q_lora_rank": 6,
        "n_kv_heads": None,
        "sinks": True,
        "attn_gate": True,
    },
    "further": {"mtp_depth": 2, "mtp_weight": 0.5},
    "padded": {"vocab_size": VOCAB + 2, "vocab_multiple": 24, "z_loss": 0.1, "label_smoothing": 0.1},
    "all-logits": {"loss": "cross_entropy", "z_loss": 0.1, "label_smoothing": 0.1, "logit_softcap": 2.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 8, "rope_dim": 2, "mup_base_dim": 8},
}
"""Name -> fields of ModelConfig that differ from SHAPE."""

EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"n_experts": 4, "expert_dim": 12, "balance_loss": 0.5, "router_z_loss": 0.2},
    "experts-bias": {
        "n_experts": 8,
        "expert_dim": 12,
        "moe_pattern": "DM",
        "router": "sigmoid",
        "router_groups": 4,
        "router_top_groups": 2,
        "router_scale": 1.5,
        "router_bias": True,
        "router_bias_rate": 0.05,
        "shared_experts": 2,
        "balance_loss": 0.5,
    },
}
"""More of them, with experts."""
MODELS |= EXPERTS

DEEP: dict[str, dict[str, Any]] = {
    "deep": {"n_layers": 5},
    "deep-tied": {"n_layers": 5, "tie_embeddings": True, "qk_norm": "per_head"},
    "deep8-tied": {"n_layers": 8, "tie_embeddings": True},
    "deep-further": {"n_layers": 5, "mtp_depth": 2, "mtp_weight": 0.5},
    "deep-further-tied": {"n_layers": 5, "mtp_depth": 2, "mtp_weight": 0.5, "tie_embeddings": True},
    "deep-experts": {**EXPERTS["experts-bias"], "n_layers": 5, "tie_embeddings": True, "router_z_loss": 0.2},
}
"""And with blocks for several stages, not always as many for each."""
MODELS |= DEEP

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 32,
    "init_std": 0.2,
}


@dataclass(frozen=True)
class Variant:
    """How a model is trained in a layout."""

    packed: bool = True
    """Several documents a row, against one."""
    accumulate: int = 1
    """Microbatches of each data rank in a step."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Further fields of ParallelConfig."""
    precision: str = "fp64"
    rows: int = ROWS
    """Rows of the global batch."""
    microbatch: int | None = None
    """Rows of a microbatch; None: as many as make ``accumulate`` of them."""

    @property
    def reference(self) -> str:
        """What of it one process must be asked for."""
        return f"{'packed' if self.packed else 'plain'}-{self.reference_precision}-{self.rows}"

    @property
    def reference_precision(self) -> str:
        """bf16 is held against what one process computes in float32."""
        return "fp32" if self.precision == "bf16" else self.precision


FULL = {"recompute": "full"}
VARIANTS: dict[str, Variant] = {
    "packed": Variant(),
    "packed-3": Variant(accumulate=3),
    "packed-full": Variant(parallel=FULL),
    "packed-3-full": Variant(accumulate=3, parallel=FULL),
    "plain": Variant(packed=False),
    "plain-3": Variant(packed=False, accumulate=3),
    "plain-full": Variant(packed=False, parallel=FULL),
    "plain-3-full": Variant(packed=False, accumulate=3, parallel=FULL),
    "fp32": Variant(precision="fp32"),
    "compiled": Variant(parallel={"compile": True}),
    "packed-6": Variant(accumulate=6),
    "fp32-3": Variant(accumulate=3, precision="fp32"),
    "compiled-3": Variant(accumulate=3, parallel={"compile": True}),
    "uneven": Variant(microbatch=5),  # the last microbatch of a step has fewer rows
    "compiled-3-full": Variant(accumulate=3, parallel={"compile": True, **FULL}),
    "kept": Variant(accumulate=3, parallel={"reshard_after_forward": False, "prefetch": 1}),
    "each": Variant(accumulate=3, parallel={"accumulate": "sharded"}),
    "selective-3": Variant(accumulate=3, parallel={"recompute": "selective"}),
    "every-offloaded-3": Variant(accumulate=3, parallel=FULL | {"recompute_every": 2, "offload_activations": True}),
    "offloaded-3": Variant(accumulate=3, parallel={"offload_activations": True}),
    "compiled-selective": Variant(parallel={"compile": True, "recompute": "selective"}),
    "compiled-offloaded": Variant(parallel={"compile": True, "offload_activations": True}),
    "wide-3-full": Variant(accumulate=3, parallel=FULL, rows=2 * ROWS),  # for 8 data ranks
}
EXACT = tuple(name for name in VARIANTS if name.startswith(("packed", "plain")))
HALF = ("packed", "packed-3-full", "plain-3", "plain-full")  # every pair of choices
SOME = ("packed-3-full", "plain")
KEPT = ("selective-3", "offloaded-3", "every-offloaded-3")
"""Ways of keeping activations beside a whole recomputation."""

OPTIONS = tuple(name for name in list(MODELS)[4:] if name not in EXPERTS and name not in DEEP)
"""What a dense model can be beside Llama's shape: each under shards, under tensor parallelism, and under both."""

OF_EXPERTS = ("packed-3", "packed-3-full", "plain")

STYLES = ("", "-ulysses", "-ring")
"""Of context parallelism, as layouts are called: allgather and the others."""
PLAIN_CORES = tuple(name for name in OPTIONS if name not in ("soft-caps", "sinks", "latent-q", "further"))
"""What allgather and ring compute by themselves; the others have soft-caps or sinks, which ulysses leaves to the model,
or further tokens, which are refused."""

IN_STAGES = ("packed-3", "packed-3-full", "plain-3")
PAIRS = ("rep2-pp2", "shard2-pp2", "tp2-pp2")
TRIPLES = ("rep2-shard2-pp2", "rep2-tp2-pp2", "shard2-tp2-pp2")
SPLIT = ("packed-6", "packed-3", "plain-3")
"""For schedules that split the backward: no recomputation."""

# Every class of layouts has one that goes through all pairs of choices or all choices; the others of a class differ
# in size, or in what lies between the products. The longest come first, so that processes side by side end together.
STAGES: list[tuple[str, str, tuple[str, ...]]] = [
    ("rep2-shard2-cp2-tp2-pp2", "deep-tied", ("packed-3-full",)),
    ("rep2-shard2-cp2-tp2-ep8-pp2", "deep-experts", ("packed-3-full",)),
    *((axes + "cp2-tp2-pp2", "deep-tied", ("packed-3-full",)) for axes in ("rep2-", "shard2-")),
    *((axes + "cp2-tp2-ep4-pp2", "deep-experts", ("packed-3-full",)) for axes in ("rep2-", "shard2-")),
    ("rep2-shard2-cp2-pp2", "deep", ("packed-3-full",)),
    ("rep2-shard2-cp2-ep2-pp2", "deep-experts", ("packed-3-full",)),
    ("shard2-cp2-tp2-pp2-loop", "deep-tied", ("packed-3", "plain-3")),
    *((layout, "deep-experts", ("packed-3", "plain-3")) for layout in ("cp2-tp2-ep4-pp2", "rep2-cp2-ep2-pp2")),
    *((layout, "deep-experts", IN_STAGES) for layout in ("shard2-cp2-ep4-pp2-loop", "cp2-ep2-pp2")),
    *((axes + "cp2-pp2" + how, "deep-tied", IN_STAGES) for how in ("", "-loop") for axes in ("rep2-", "shard2-", "")),
    *(("cp2-tp2-pp2" + how, "deep-tied", IN_STAGES) for how in ("", "-loop")),
    ("cp2-pp2-zbv", "deep-tied", SPLIT),
    ("rep2-shard2-tp2-pp2", "deep-tied", ("packed-3-full",)),
    ("rep2-shard2-tp2-ep4-pp2", "deep-experts", ("packed-3-full",)),
    *((layout, "deep-experts", IN_STAGES) for layout in ("shard2-tp2-ep2-pp2", "shard2-tp2-ep4-pp2-loop")),
    *((layout, "deep-experts", ("packed-3-full",)) for layout in ("rep2-shard2-ep2-pp2", "rep2-tp2-ep2-pp2")),
    *(("shard2-tp2-pp2-" + how, "deep-tied", SPLIT) for how in ("zero", "zbv")),
    ("shard2-tp2-pp2-dual", "deep-tied", ("packed-6",)),
    *(("shard2-tp2-pp2-" + how, "deep-experts", ("packed-6",)) for how in ("zero", "zbv", "dual")),
    ("shard2-tp2-ep4-pp2-zbv", "deep-experts", ("packed-3", "plain-3")),
    *((axes + how, "deep-tied", IN_STAGES) for how in ("", "-loop") for axes in TRIPLES),
    *((axes + how, "deep-experts", IN_STAGES) for how in ("", "-loop") for axes in ("shard2-ep2-pp2", "tp2-ep2-pp2")),
    ("shard2-ep2-pp2-zero", "deep-experts", ("packed-3",)),
    *((axes + how, "deep-tied", IN_STAGES) for how in ("", "-loop") for axes in PAIRS),
    *((axes + how, "deep", ("packed-3-full",)) for how in ("", "-loop") for axes in PAIRS),
    ("tp2-pp2-whole", "deep-tied", ("packed-3-full", "plain-3")),
    *(("shard2-pp2-" + how, "deep-tied", SPLIT) for how in ("zero", "zbv")),
    ("shard2-pp2-dual", "deep-tied", ("packed-6",)),
    *(("shard2-pp2-" + how, "deep-experts", ("packed-6",)) for how in ("zero", "zbv", "dual")),
    ("shard2-pp2-zero4", "deep8-tied", ("packed-3",)),
    ("shard2-pp2", "deep-tied", ("kept", "uneven", "compiled-3")),
    *(("shard2-pp2", model, ("packed-3",)) for model in ("deep-further", "deep-further-tied", "deep-experts")),
    *(("pp4" + how, "deep8-tied", ("packed-6",)) for how in ("", "-zbv")),
    ("shard2-pp2", "deep-tied", KEPT),
    ("pp2-zbv", "deep-tied", ("offloaded-3",)),
    ("pp3-layers", "deep-tied", ("packed-3", "uneven")),
    ("pp2", "deep-tied", (*IN_STAGES, "uneven", "compiled-3")),
    ("pp2-gpipe", "deep-tied", ("packed", "packed-3-full", "plain-3", "uneven")),
    ("pp2-loop", "deep-tied", (*IN_STAGES, "packed", "packed-6", "uneven", "compiled-3")),
    ("pp2-zero", "deep-tied", (*SPLIT, "packed", "uneven", "compiled-3")),
    ("pp2-zbv", "deep-tied", (*SPLIT, "packed", "uneven", "compiled-3")),
    ("pp2-dual", "deep-tied", ("packed-6",)),
    *((layout, "deep8-tied", ("packed-3",)) for layout in ("pp2-loop4", "pp2-zero4")),
    *(("pp2-" + how, "deep", ("packed-3",)) for how in ("loop", "zero", "zbv")),
    *(("pp2-" + how, "deep-further-tied", ("packed-6",)) for how in ("zero", "zbv", "dual")),
    *(("pp2-" + how, model, ("packed-3",)) for how in ("zero", "zbv") for model in ("deep-experts",)),
    *((layout, model, ("packed-3",)) for layout in ("pp2", "pp2-loop") for model in (*DEEP,) if model != "deep8-tied"),
    *((layout, "untied", ("fp32-3",)) for layout in ("pp2", "shard2-pp2")),
    *(("pp2", model, ("packed-3-full",)) for model in (*OPTIONS, *EXPERTS)),
]
"""Those of a pipeline."""

TABLE: list[tuple[str, str, tuple[str, ...]]] = [
    ("rep2-shard2-cp2-tp2-ep4", "experts-bias", ("packed-3-full",)),
    ("rep2-shard2-cp2-tp2", "untied", SOME),
    *((layout, "experts", OF_EXPERTS) for layout in ("shard2-cp2-tp2-ep4", "rep2-cp2-tp2-ep4", "rep2-shard2-cp2-ep2")),
    *((layout, "untied", SOME) for layout in ("shard2-cp2-tp2", "shard2-cp2-tp2-ulysses")),
    ("shard2-cp2-tp2-ring", "untied", HALF),
    *((layout, "untied", SOME) for layout in ("rep2-cp2-tp2", "rep2-shard2-cp2")),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("cp2-tp2-ep4", "shard2-cp2-ep2")),
    *((layout, "experts-bias", OF_EXPERTS) for layout in ("shard2-cp2-ep4", "rep2-cp2-ep2")),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("cp2-ep2", "cp2-ep2-ulysses", "cp2")),
    *((f"{axes}{style}", "untied", HALF) for axes in ("shard2-cp2", "cp2-tp2", "cp4") for style in STYLES),
    ("rep2-cp2", "untied", HALF),
    *((f"cp2{style}", "untied", (*EXACT, "fp32", "compiled-3-full")) for style in STYLES),
    ("cp2-tp2-ulysses", "untied", ("compiled",)),
    ("cp2-tp2-whole", "untied", SOME),
    *((layout, "tied", (*SOME, "kept", "each")) for layout in ("shard2-cp2-ring", "cp2-tp2", "cp2-ulysses")),
    *(("cp2", model, ("packed-3-full",)) for model in ("qk-norm", *PLAIN_CORES)),
    *(("cp2-ring", model, ("plain",)) for model in ("qk-norm", *PLAIN_CORES)),
    *(("cp2-ulysses", model, ("packed-3-full",)) for model in OPTIONS if model != "further"),
    *(("cp2-ring", model, ("packed",)) for model in ("windows", "latent", "one-kv")),
    *((f"{axes}{style}", "one-kv", ("packed-3-full",)) for axes in ("cp4", "cp2-tp2") for style in STYLES),
    *((f"{axes}{style}", "windows", ("packed-3-full",)) for axes in ("cp4", "cp2-tp2") for style in STYLES),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("shard4-tp2-ep2", "rep2-shard2-tp2-ep4")),
    ("shard4-tp2-ep8", "experts-bias", OF_EXPERTS),
    ("shard8-ep8", "experts-bias", ("wide-3-full",)),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("shard2-tp2-ep4", "shard2-tp2-ep2")),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("rep2-shard2-ep2", "rep2-tp2-ep2")),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("shard4-ep4", "shard4-ep2", "shard2-tp2")),
    *((layout, model, (*OF_EXPERTS, "kept", "each")) for model in EXPERTS for layout in ("shard2-ep2", "tp2-ep2")),
    *((layout, model, OF_EXPERTS) for model in EXPERTS for layout in ("shard2", "rep2", "tp2", "one")),
    *((layout, "experts-bias", ("compiled",)) for layout in ("tp2-ep2", "shard2")),
    *((layout, "untied", (*HALF, "fp32")) for layout in ("rep2-shard2-tp2", "rep2-shard2", "rep2-tp2", "tp2-whole")),
    *((layout, "untied", (*EXACT, "fp32")) for layout in ("shard2-tp2", "shard2", "rep2", "tp2", "one")),
    ("tp2", "untied", ("compiled",)),
    *((layout, "untied", SOME) for layout in ("rep2-shard2-tp2-whole", "shard4", "rep4", "tp4", "tp4-whole")),
    *((layout, "untied", SOME) for layout in ("shard2-tp2-whole", "rep2-tp2-whole")),
    *((layout, "tied", SOME) for layout in ("rep2-shard2-tp2", "rep2-tp2", "rep2", "tp2-whole", "one")),
    *((layout, "tied", (*SOME, "kept", "each")) for layout in ("shard2-tp2", "rep2-shard2", "shard2", "tp2")),
    ("rep2-shard2-tp2", "qk-norm", ("packed-3-full",)),
    *((layout, "qk-norm", SOME) for layout in ("shard2-tp2", "tp2", "tp2-whole")),
    *((layout, "one-kv", SOME) for layout in ("tp4", "shard2-tp2", "tp2", "tp2-whole")),
    *((layout, model, ("packed-3-full",)) for model in OPTIONS for layout in ("shard2-tp2", "shard2")),
    *((layout, model, ("plain",)) for model in OPTIONS for layout in ("tp2", "tp2-whole")),
    *(("tp4", model, ("packed",)) for model in ("sandwich", "biases", "sinks", "post")),
    *((layout, "untied", KEPT) for layout in ("cp2", "cp2-ring", "cp2-ulysses", "tp2", "shard2")),
    *((layout, "experts-bias", KEPT) for layout in ("shard2-ep2", "tp2-ep2")),
    *((layout, "untied", ("compiled-selective", "compiled-offloaded")) for layout in ("tp2", "cp2", "one")),
    *STAGES,
    *(("tp2", model, ("compiled",)) for model in ("latent-q", "windows", "sinks", "soft-caps")),
]
"""(layout, model, variants): each line is one start of processes, which run its variants one after the other."""


MOST = {4: 2, 8: 1}
"""Processes -> variants of a line that a short run takes, the first ones; 3 where it does not say."""
LARGE = ("shard2-cp2-tp2-pp2",)
"""Layouts of more than 8 processes that a short run takes."""


def short(table: list[tuple[str, str, tuple[str, ...]]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The part of a table that is run unless all of it is asked for: minutes on two cores."""
    lines = [line for line in table if world_of(line[0]) <= 8 or line[0] in LARGE]
    return [(layout, model, variants[: MOST.get(world_of(layout), 3)]) for layout, model, variants in lines]


def axes_of(layout: str) -> dict[str, int]:
    """The sizes of a layout's axes, those of 1 left out."""
    return {name: size for name, size in LAYOUTS[layout].items() if name in AXES and size > 1}


def world_of(layout: str) -> int:
    """How many processes a layout takes. The axis ep lies over others."""
    world = 1
    for name, size in axes_of(layout).items():
        world *= 1 if name == "ep" else size
    return world


def class_of(layout: str) -> str:
    """The axes above 1, in words: what `LAYOUT_CLASSES` accepts or refuses."""
    return " × ".join(sorted(axes_of(layout))) or "one process"


def counts() -> dict[str, int]:
    """Class of layouts -> number of cases in the table."""
    found: dict[str, int] = {}
    for layout, _, variants in TABLE:
        found[class_of(layout)] = found.get(class_of(layout), 0) + len(variants)
    return found


CHOSEN = TABLE if os.environ.get("KFORGE_PARITY") == "full" else short(TABLE)
"""What is run: all of it in `nox -s parity_full`."""
