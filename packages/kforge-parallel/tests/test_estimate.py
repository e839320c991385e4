"""Estimates against numbers counted by hand, and against ranks of a model that is not kforge's."""

import functools
from dataclasses import replace

import mixture
import pytest
import torch

from kforge_parallel import ParallelConfig, Work, estimate_layout, parameters_of, weight_bytes
from kforge_parallel.activation_bytes import in_flight
from kforge_testing import run_ranks

SHAPE = {"vocab_size": 1000, "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 192}
BLOCK = 8 * 16 * 64 + 64 * 64 + 3 * 64 * 192 + 2 * 64
ENDS = 1000 * 64
WHOLE = 4 * BLOCK + 2 * ENDS + 64
WORK = Work(row_tokens=128, microbatch_rows=2, microbatches=4)


def told(work=WORK, world=1, shape=SHAPE, rank=None, **options):
    return estimate_layout(shape, ParallelConfig(device="cuda", **options), world, work, rank=rank)


def test_weights_gradients_and_state_are_counted_by_element():
    one = told()
    tensors = 4 * 6 + 3
    assert (one.parameters, one.gradients) == (4 * WHOLE, 4 * WHOLE)
    assert one.moments == 8 * WHOLE + 4 * tensors  # and a counter each
    lean = told(storage="split", work=Work(row_tokens=128, moments="bf16"))
    assert (lean.parameters, lean.gradients, lean.moments) == (2 * WHOLE, 4 * WHOLE, 6 * WHOLE + 4 * tensors)
    assert told(storage="split", world=2).gradients == WHOLE  # FSDP gives them in the dtype of the weights
    assert told(precision="fp64").moments == 16 * WHOLE + 4 * tensors
    assert told(work=Work(row_tokens=128, optimizer="lion", ema=True)).moments == 8 * WHOLE
    assert told(work=Work(row_tokens=128, optimizer="none")).moments == 0


def test_shards_of_all_ranks_are_the_whole():
    sizes = {"vocab_size": 1000, "dim": 60, "n_layers": 3, "n_heads": 4, "ffn_dim": 180, "n_experts": 6}
    for options in ({"dp_shard": 8}, {"dp_shard": 8, "ep": 2}, {"dp_shard": 4, "cp": 2, "ep": 2}):
        of_ranks = [told(shape=sizes, world=8, rank=rank, **options).parameters for rank in range(8)]
        assert sum(of_ranks) == told(shape=sizes).parameters
        assert len({*of_ranks}) > 1  # no size divides by 8
        assert told(shape=sizes, world=8, **options).peak == told(shape=sizes, world=8, rank=0, **options).peak


def test_activations_of_a_compiled_block():
    # x, two norms' outputs and the sum between, all of 64; q, k, v, out; gate and up, their product; fp32 statistics
    token = 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 192) + 2 * 4 + 4 * 4
    assert told(compile=True).activations == 4 * 256 * token
    assert told(compile=True, recompute="full").activations == 4 * 256 * 2 * 64
    assert told(compile=True, recompute="full", recompute_every=2).activations == 2 * 256 * (token + 2 * 64)
    assert told(compile=True, offload_activations=True).activations == 2 * 256 * token
    assert told(compile=True, offload_activations=True).host == 4 * 256 * token


def test_selective_recomputation_lies_between():
    none, some, full = (told(recompute=mode) for mode in ("none", "selective", "full"))
    assert full.activations < some.activations < none.activations
    assert none.recomputed == some.recomputed == 0 < full.recomputed
    # the products of a block, and half of each row for a token to see; four microbatches of 256 tokens
    assert full.recomputed == 4 * 256 * 4 * (2 * (BLOCK - 2 * 64) + 4 * 64 * 129 / 2)
    attention = told(recompute="selective", recompute_keep=("attention",))
    assert attention.recomputed == 4 * 256 * 4 * 2 * (BLOCK - 2 * 64)
    assert full.activations < attention.activations < some.activations


def test_ranks_that_split_rows_or_matrices_share_activations():
    whole = told(compile=True)
    tp = told(compile=True, world=2, tp=2)
    without = told(compile=True, world=2, tp=2, sequence_parallel=False)
    assert whole.activations / 2 < tp.activations < without.activations < whole.activations
    assert told(world=2, cp=2, cp_style="ring").activations < told().activations
    assert tp.logits < whole.logits


def test_what_is_gathered_and_summed():
    freed, kept = told(world=2), told(world=2, reshard_after_forward=False)
    assert kept.gathered == 2 * WHOLE
    assert freed.gathered == 2 * (ENDS + 64) + 2 * 2 * BLOCK
    assert told(world=2, prefetch=3).gathered == 2 * (ENDS + 64) + 4 * 2 * BLOCK
    assert freed.sums == 4 * WHOLE + 6 * (ENDS + 64)
    assert told(world=2, accumulate="sharded").sums == 2 * WHOLE + 6 * (ENDS + 64)
    eight = told(world=2, fp8="tensorwise", reshard_after_forward=False)
    assert kept.gathered - eight.gathered == 4 * (BLOCK - 2 * 64)
    uneven = told(world=5, fp8="tensorwise", reshard_after_forward=False)
    assert uneven.gathered == kept.gathered  # parts of unequal size travel in bf16
    alone = [told(storage="split", fp8=mode).gathered for mode in ("none", "tensorwise", "rowwise")]
    assert alone == [0, 4 * (BLOCK - 2 * 64), 8 * (BLOCK - 2 * 64)]
    stages = {"world": 4, "pp": 2, "dp_shard": 2, "reshard_after_forward": False}
    assert told(**stages, fp8="tensorwise").gathered < told(**stages).gathered
    assert told(**stages, fp8="tensorwise", pp_schedule="zbv").gathered == told(**stages, pp_schedule="zbv").gathered


def test_bytes_sent():
    freed, kept = told(world=4), told(world=4, reshard_after_forward=False)
    ends, blocks = 2 * ENDS + 64, 4 * BLOCK
    assert kept.sent["dp_shard"] == int((2 * 4 + 4) * WHOLE * 3 / 4)  # a gather a microbatch, one reduction in fp32
    assert freed.sent["dp_shard"] == int((2 * 4 * (ends + 2 * blocks) + 4 * WHOLE) * 3 / 4)
    copies = told(world=4, dp_replicate=2, dp_shard=2)
    assert copies.sent["dp_replicate"] == 2 * 4 * WHOLE // 2 // 2
    pair = {"world": 2, "dp_replicate": 2, "dp_shard": 1}
    sent = {how: told(**pair, compress=how).sent["dp_replicate"] for how in ("none", "bf16", "int8", "powersgd")}
    assert sent["none"] == 4 * WHOLE and sent["bf16"] == pytest.approx(sent["none"] / 2, rel=0.01)
    assert sent["int8"] == pytest.approx(sent["none"] * 260 / 1024, rel=0.01) and sent["powersgd"] < sent["int8"]
    left_over = told(**pair, compress="powersgd").sums - told(**pair).sums
    assert 0.98 * 8 * WHOLE < left_over < 1.05 * 8 * WHOLE
    # of a microbatch's hidden states each rank sends half: around two halves of 4 blocks, 4 times each, and the ends
    half = 256 * 2 * 64 // 2
    norms = 4 * 2 * 4 * (4 * 2 * 64 + 64) // 2  # of which each rank sums the gradients in fp32
    assert told(world=2, tp=2).sent["tp"] == 4 * half * (4 * 2 * 4 + 2 * 2) + norms
    assert told(world=2, tp=2, recompute="full").sent["tp"] == 4 * half * (6 * 2 * 4 + 2 * 2) + norms
    shared = told(world=4, tp=4).sent["tp"] - 4 * 256 * 2 * 64 * 3 / 4 * (4 * 2 * 4 + 2 * 2) - norms * 1.5
    assert shared == 4 * 2 * 4 * 4 * (8 * 16 * 64) * 3 / 4  # two key/value heads on four ranks: whole weights
    assert told(world=2, pp=2, rank=1).sent["pp"] == 4 * 256 * 2 * 64
    mixed = told(shape={**SHAPE, "n_experts": 4}, world=2, ep=2)
    assert mixed.sent["ep"] == 4 * 4 * 4 * (256 * 2) * 2 * 64 // 2  # two choices, there and back, forward and backward
    assert told(world=2, cp=2).sent["cp"] > 0 == told().sent["cp"]


def test_microbatches_under_way():
    def held(word, **more):
        return [in_flight(ParallelConfig(pp_schedule=word, **more), 4, rank, 8) for rank in range(4)]

    assert held("gpipe") == [8, 8, 8, 8]
    assert held("1f1b") == [4, 3, 2, 1]
    assert held("interleaved_1f1b") == [5.5, 4.5, 3.5, 2.5]
    assert held("zbv") == [4, 4, 4, 4]
    assert in_flight(ParallelConfig(), 1, 0, 8) == 1


def test_stages_have_their_own_part():
    first, last = (told(world=4, pp=4, dp_shard=1, rank=rank) for rank in (0, 3))
    assert first.parameters == 4 * (BLOCK + ENDS) and last.parameters == 4 * (BLOCK + ENDS + 64)
    assert first.activations == 4 * last.activations and first.logits == 0 < last.logits
    assert told(world=4, pp=4, dp_shard=1).peak == max(told(world=4, pp=4, dp_shard=1, rank=r).peak for r in range(4))


def test_offload_leaves_the_device():
    away = told(cpu_offload=True)
    assert away.host == 16 * WHOLE + 4 * 27 and away.peak < told().peak - 12 * WHOLE


def test_refusals():
    with pytest.raises(ValueError, match="microbatches = 0 must be a whole number of at least 1"):
        Work(row_tokens=8, microbatches=0)
    with pytest.raises(ValueError, match="optimizer = 'sgd': of its state nothing is known; use one of adamw"):
        Work(row_tokens=8, optimizer="sgd")
    with pytest.raises(ValueError, match="unknown key 'n_haeds'"):
        told(shape={**SHAPE, "n_haeds": 4})
    bare = parameters_of(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"nothing says how it cuts 0\.weight"):
        estimate_layout(SHAPE, ParallelConfig(tp=2), 2, WORK, parameters=bare)


def test_the_table_says_what_the_most_is_needed_for():
    table = str(told(world=8, tp=2))
    assert table.startswith("rank 0 of dp_shard 4 × tp 2: ")
    assert "at most, at the " in table and "activations" in table and "sent in a step: dp_shard" in table


def bytes_of(rank, world, options):
    from kforge_parallel import launch, parallelize
    from kforge_parallel._torch import local_tensor

    mesh = launch(ParallelConfig(precision="fp32", device="cpu", **options))
    model = parallelize(mixture.four, mesh, init=mixture.fill, gradients="sum")
    mixture.loss(model, mixture.BATCH, 1.0).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = [t for kinds in optimizer.state.values() for t in kinds.values()]
    return [
        sum(local_tensor(t).nbytes for t in ts)
        for ts in ([*model.parameters()], [p.grad for p in model.parameters()], state)
    ]


@pytest.mark.parametrize(
    "options", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 4}, {"tp": 2, "dp_shard": 2, "ep": 2}]
)
def test_a_model_of_another_kind_is_counted_exactly(options):
    assert miscounted(tuple(options.items())) == set()


@functools.cache
def there(options):
    """`bytes_of` of every rank."""
    return run_ranks(bytes_of, 4, dict(options), init=False)


def miscounted(options):
    """The parts that an estimate has wrong by a byte or more, on any rank."""
    with torch.device("meta"):
        listed = parameters_of(mixture.four())
    shape = {"vocab_size": 12, "dim": 6, "n_layers": 2, "n_heads": 2, "n_experts": 4}
    config, wrong = ParallelConfig(precision="fp32", **dict(options)), set()
    for rank, found in enumerate(there(options)):
        e = estimate_layout(shape, config, 4, Work(row_tokens=8), rank=rank, parameters=listed)
        told = {"parameters": e.parameters, "gradients": e.gradients, "moments": e.moments}
        wrong |= {part for part, size in zip(told, found, strict=True) if told[part] != size}
    return wrong


def forget(monkeypatch, **less):
    """Let what a rank holds lack some bytes."""
    whole = weight_bytes._hold
    monkeypatch.setattr(
        weight_bytes,
        "_hold",
        lambda *args: replace(held := whole(*args), **{part: getattr(held, part) - n for part, n in less.items()}),
    )


def shards_rounded_down(monkeypatch):
    def even(shape, shards):
        shape[0] -= shape[0] % shards
        return 0

    monkeypatch.setattr(weight_bytes, "shard_dim", even)


EXPERTS_ON_FOUR = (("tp", 2), ("dp_shard", 2), ("ep", 2))
PLANTED = {
    "the gradient of a norm": (lambda m: forget(m, gradients=4 * mixture.DIM // 2), {"gradients"}),
    "one number of a moment": (lambda m: forget(m, state=4), {"moments"}),
    "rows that are left over": (shards_rounded_down, {"parameters", "gradients", "moments"}),
    "which expert is here": (
        lambda m: m.setattr(weight_bytes, "expert_shard", lambda axes: 4),
        {"parameters", "gradients", "moments"},
    ),
    "where a weight is cut": (
        lambda m: m.setattr(weight_bytes, "CUT_ALONG", {**weight_bytes.CUT_ALONG, "rowwise": None}),
        {"parameters", "gradients", "moments"},
    ),
}


@pytest.mark.parametrize("forgotten", PLANTED)
def test_what_is_forgotten_is_found(monkeypatch, forgotten):
    plant, parts = PLANTED[forgotten]
    plant(monkeypatch)
    assert miscounted((("dp_shard", 4),) if "left over" in forgotten else EXPERTS_ON_FOUR) == parts


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank = {rank} is none of 2 processes; use 0 to 1"):
        told(world=2, rank=rank)
