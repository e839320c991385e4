"""What a rank holds of activations, block by block, and for head and loss. Standard library only.

With T tokens of a microbatch on a rank, R of them on the residual stream (T / tp under sequence_parallel), D features,
H and KV heads of d features here, F hidden features here, b bytes of the compute dtype, w = max(b, 4):

    a block keeps          compiled               not compiled
    ---------------------- ---------------------- ------------------------------------------------------------
    two norms              2 R (b D + w)          2 R (2 w D + w): the input and what is scaled, in fp32
    inputs of products     2 T b D                the same
    attention              T b (2 H + 2 KV) d     T b (3 H + 3 KV) d: v keeps the whole product
    norms of heads         T b (H + KV) d         2 T w (H + KV) d
    its log-sum-exp        T w H                  the same
    feed-forward, gated    3 T b F                4 T b F
    experts, a slot        b (2 D + 3 F)          b (2 D + 4 F)            slots: R times experts a token, on average

Not compiled, norms and feed-forward halves that are not kforge's keep what `eager_sizes` counts, and attention of
transformers as much as compiled. Under tensorwise FP8 products keep their inputs in one byte an element. Recomputed
blocks keep their input, and what `recompute_keep` says; the one that runs again has all of it once more. The loss in
chunks of C tokens over V rows of the head keeps w V D for the head's gradient, b C V logits, and 2 T b D for hidden
states and their gradient; all logits at once are T V (b + 3 w).
"""

from __future__ import annotations

from dataclasses import dataclass

from kforge_parallel.config import ParallelConfig
from kforge_parallel.shape import Sizes
from kforge_parallel.stages import SCHEDULES, stages_per_rank
from kforge_parallel.work import COMPUTE_BYTES, Work


@dataclass(frozen=True)
class Kept:
    """What a block holds of one microbatch, in bytes."""

    whole: int
    """Where nothing is recomputed."""
    kept: int
    """As the mode has it."""
    working: int
    """Gradients of its activations, while its backward runs."""


def block_kept(s: Sizes, mixed: bool, config: ParallelConfig, axes: dict[str, int], work: Work, mode: str) -> Kept:
    """What one block holds of one microbatch under a mode of recomputation."""
    b = COMPUTE_BYTES[config.precision]
    w = max(4, b)
    tp, cp, ep = axes["tp"], axes["cp"], axes["ep"]
    lean = config.compile
    t = work.microbatch_rows * work.row_tokens // cp
    r = t // tp if config.sequence_parallel else t
    d, dh = s.dim, s.head_dim
    h, kv = s.heads // tp, max(1, s.kv_heads // tp)
    norms = 2 * r * (b * d + w) if lean else 2 * r * (2 * w * d + w)
    if s.eager and not lean:
        norms = r * d * (s.eager[0] * w + s.eager[1] * b) + 2 * r * w
    e = 1 if config.fp8 == "tensorwise" else b  # an element of what a product keeps of its input
    # Experts get the sequence shard; a gathered input is the product's own.
    inputs = d * (e * t + (b * r if mixed else e * t))
    if cp == 1:
        attention = t * b * ((2 * h + 2 * kv) if lean or s.eager else (3 * h + 3 * kv)) * dh
    elif config.cp_style == "allgather":
        attention = t * b * (3 * h if config.device != "cpu" else 2 * h) * dh + t * cp * b * 2 * kv * dh
    elif config.cp_style == "ulysses":
        repeated = kv if kv % cp == 0 else max(kv, cp)
        attention = t * b * (3 * h + 2 * repeated) * dh
    else:
        attention = t * b * (3 * h + 2 * kv) * dh
    if e != b:
        attention += t * e * h * dh  # the output, in bits beside what attention keeps of it
    if s.qk_norm:
        attention += t * (b if lean else s.eager_heads[0] * w + s.eager_heads[1] * b) * (h + kv) * dh
    lse = t * w * h
    gated = s.matrices == 3
    wide = (3 if lean else 4) if gated else 2
    up = 2 if gated else 1
    slots = r * s.top_k
    if mixed:
        routing = r * (w * s.experts + w + 2 * w * s.top_k) + 24 * slots + (16 * slots if ep > 1 else 0)
        mlp = slots * b * (2 * d + wide * s.expert_ffn) + routing + r * b * wide * s.shared_ffn
        grads = slots * b * (d + 3 * s.expert_ffn)
    else:
        kept_wide = wide if lean or s.eager_mlp is None else s.eager_mlp
        mlp = t * (b * (kept_wide - 1) + e) * (s.ffn // tp)
        grads = t * b * (up + 1) * (s.ffn // tp)
    whole = norms + inputs + attention + lse + mlp
    working = grads + 2 * t * b * d
    if mode == "none":
        return Kept(whole, whole, working)
    kept = r * b * d
    if mixed:  # the choice of experts: sorted scores, and not compiled their places too
        kept += slots * 24 + r * (w if lean else w + 8) * s.experts
    if mode == "selective":
        keep = config.recompute_keep
        if "products" in keep:
            kept += t * b * ((h + 2 * kv) * dh + d)
            kept += slots * b * (up * s.expert_ffn + d) if mixed else t * b * (up * (s.ffn // tp) + d)
            kept += r * b * (up * s.shared_ffn + d) if mixed and s.shared_ffn else 0
        if "attention" in keep:
            kept += t * b * h * dh + lse
        if "transfers" in keep:
            kept += b * d * (t * (1 if mixed else 2) + 2 * r) if tp > 1 else 0
            kept += 2 * slots * b * d if mixed and ep > 1 else 0
            kept += t * cp * b * 2 * kv * dh if cp > 1 and config.cp_style == "allgather" else 0
    return Kept(whole, min(kept, whole), working)


def in_flight(config: ParallelConfig, pp: int, pp_rank: int, microbatches: int) -> float:
    """How many microbatches' activations a pipeline rank holds at most, each counted for all its stages.

    gpipe: all. 1f1b: pp - rank. Interleaved with v stages a rank: (2 (pp - rank - 1) + (v - 1) pp + 1) / v (Narayanan
    et al. 2021). zbv and dualpipev: pp and pp + 1 (Qi et al. 2024; DeepSeek-V3, table 2).
    """
    kind, word, v = SCHEDULES[config.pp_schedule], config.pp_schedule, stages_per_rank(config)
    if pp == 1:
        return 1.0
    if word == "gpipe":
        held = float(microbatches)
    elif word == "1f1b":
        held = float(pp - pp_rank)
    elif kind.v:
        held = float(pp + (1 if word == "dualpipev" else 0))
    else:
        held = (2 * (pp - pp_rank - 1) + (v - 1) * pp + 1) / v
    return min(held, float(microbatches))


def head_bytes(s: Sizes, config: ParallelConfig, axes: dict[str, int], work: Work) -> tuple[int, int]:
    """What head and loss hold in forward, and at the beginning of backward."""
    b = COMPUTE_BYTES[config.precision]
    tokens = work.microbatch_rows * work.row_tokens // axes["cp"] * (1 + s.mtp)
    residual = tokens // (axes["tp"] if config.sequence_parallel else 1)
    hidden = tokens * b * s.dim + 2 * residual * max(4, b) * s.dim  # the last norm's, which is not compiled
    forward, backward = loss_bytes(tokens, s.dim, s.vocab // axes["tp"], s.chunk, b)
    return hidden + forward, hidden + backward


def loss_bytes(tokens: int, dim: int, rows: int, chunk: int, b: int) -> tuple[int, int]:
    """What `linear_cross_entropy` holds of kforge-model beside its inputs, in forward and in backward: gradients of the
    head's weight [rows, dim], wide and then rounded, and again times that of the loss; of the hidden states; logits.
    chunk 0: all logits, the same and their logarithms wide, and in backward their gradient."""
    of_hidden, w = tokens * b * dim, max(4, b)
    if not chunk:
        return tokens * rows * (b + 2 * w), tokens * rows * (b + 3 * w) + of_hidden
    forward = w * rows * dim + b * min(chunk, tokens) * rows + of_hidden
    return forward, 2 * (b * rows * dim + of_hidden)
