import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_parallel import LAYOUT_CLASSES, ParallelConfig, check_layout
from kforge_parallel.layout import CHUNKS, check_row

SHAPE = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 96, "vocab_size": 320, "n_layers": 4, "dim": 30}


def test_every_set_of_axes_is_accepted_or_refused_in_words():
    axes = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}
    assert set(LAYOUT_CLASSES) == {frozenset(s) for n in range(7) for s in itertools.combinations(axes, n)}
    for layout, sentence in LAYOUT_CLASSES.items():
        nowhere = "ep" in layout and not layout & {"dp_shard", "cp", "tp"}  # it lies over others
        assert (sentence is None) == (not nowhere)
        assert sentence is None or "parallel.ep" in sentence


@pytest.mark.parametrize("layout", ["".join(some) for n in range(6) for some in itertools.combinations("rsctp", n)])
def test_every_set_of_axes_but_ep_is_accepted(layout):
    sizes = {"dp_replicate": "r", "dp_shard": "s", "cp": "c", "tp": "t", "pp": "p"}
    sizes = {axis: 2 if letter in layout else 1 for axis, letter in sizes.items()}
    axes = check_layout(ParallelConfig(**sizes), 2 ** len(layout), SHAPE, 64)
    assert axes == {"pp": 1, "ep": 1, **sizes}


@pytest.mark.parametrize(
    ("axes", "world"),
    [
        ({"dp_shard": 4, "ep": 2}, 4),
        ({"dp_shard": 8, "ep": 8}, 8),
        ({"tp": 2, "ep": 2, "dp_shard": 1}, 2),
        ({"dp_replicate": 2, "tp": 2, "ep": 2, "dp_shard": 1}, 4),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4}, 8),
        ({"dp_shard": 1, "cp": 2, "ep": 2}, 2),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 8}, 8),
    ],
    ids=str,
)
def test_experts_are_laid_over_any_of_the_others(axes, world):
    got = check_layout(ParallelConfig(**axes), world, {**SHAPE, "n_experts": 8}, 64)
    assert got == {"pp": 1, "dp_replicate": 1, "cp": 1, "tp": 1, **axes}


@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}], ids=str)
def test_experts_are_laid_over_nothing_else(axes):
    with pytest.raises(
        ValueError, match=r"laid over dp_shard, cp and tp, and each of them is 1; set parallel\.ep to 1"
    ):
        check_layout(ParallelConfig(dp_shard=1, ep=2, **axes), 2 if axes else 1)


def test_ranks_that_hold_the_same_tokens_cannot_send_them_to_experts():
    said = refusal(2, {**SHAPE, "n_experts": 4}, tp=2, sequence_parallel=False)
    assert "parallel.sequence_parallel = false" in said and "model.n_experts = 4" in said
    assert check_layout(ParallelConfig(sequence_parallel=False), 2, {**SHAPE, "n_experts": 4})["tp"] == 1


def test_a_pipeline_is_looked_at_with_its_blocks_and_microbatches():
    config = ParallelConfig(pp=2, pp_schedule="zbv")
    assert check_layout(config, 4, SHAPE, 64, microbatches=2)["pp"] == 2
    assert "4 stages of parallel.pp = 2 × 2 a rank" in refusal(4, {**SHAPE, "n_layers": 3}, pp=2, pp_schedule="zbv")
    assert "add up to model.n_layers = 4" in refusal(4, SHAPE, pp=2, pp_layers=(2, 3))
    with pytest.raises(ValueError, match="at least as many microbatches as its 2 stages, and a step has 1"):
        check_layout(ParallelConfig(pp=2), 4, SHAPE, 64, microbatches=1)


def test_the_number_of_processes_must_fit():
    with pytest.raises(ValueError, match="1 process cannot be divided"):
        check_layout(ParallelConfig(tp=2), 1)


def test_too_few_processes_are_told_the_command_that_starts_enough():
    command = "with torchrun --nproc-per-node 4 or srun --ntasks 4"
    assert f"start a multiple of 4 {command}, or make an axis smaller" in refusal(2, None, tp=4)
    assert f"1 is running; start 4 {command}, or set" in refusal(1, None, tp=2, dp_shard=2)
    assert "torchrun" not in refusal(6, None, tp=2, dp_shard=2) + refusal(6, None, tp=4)  # those run already


def test_a_misspelt_size_is_refused_not_passed_over():
    assert "unknown key 'n_head'; did you mean n_heads or n_kv_heads?" in refusal(2, {"n_head": 3}, tp=2)
    said = refusal(2, {**SHAPE, "colour": 3}, tp=2)
    assert "unknown key 'colour'; use some of vocab_size, dim, n_layers," in said
    assert "n_experts" in said


def refusal(world, shape, row_tokens=None, **axes):
    with pytest.raises(ValueError) as info:
        check_layout(ParallelConfig(**axes), world, shape, row_tokens)
    return str(info.value)


def test_c19_sizes_that_tp_does_not_divide_are_refused_when_the_config_is_read():
    # heads 8 and kv heads 2 over tp 4: each kv head is held by two ranks
    assert check_layout(ParallelConfig(tp=4), 4, {**SHAPE, "n_kv_heads": 2}, 64)["tp"] == 4
    cases = [
        ({"n_heads": 6, "n_kv_heads": 6}, 4, None, ["model.n_heads = 6", "parallel.tp = 4", "1, 2, 3, 6"]),
        ({"n_kv_heads": 3, "n_heads": 6}, 2, None, ["model.n_kv_heads = 3", "parallel.tp = 2"]),
        ({"ffn_dim": 98}, 4, None, ["model.ffn_dim = 98", "parallel.tp = 4", "ffn_dim = 100"]),
        ({"vocab_size": 50257}, 2, None, ["model.vocab_size = 50257", "parallel.tp = 2", "vocab_size = 50258"]),
        ({}, 4, 66, ["data.row_tokens = 66", "parallel.tp = 4", "parallel.sequence_parallel", "row_tokens = 68"]),
    ]
    for change, tp, rows, words in cases:
        said = refusal(tp, {**SHAPE, **change}, rows, tp=tp)
        assert all(word in said for word in words), said
    # the width of the model is not split
    assert check_layout(ParallelConfig(tp=4), 4, {**SHAPE, "dim": 30}, 64)["tp"] == 4
    # rows stay whole without sequence parallelism
    assert check_layout(ParallelConfig(tp=4, sequence_parallel=False), 4, SHAPE, 66)["tp"] == 4


def test_c19_experts_and_layers_that_do_not_go_round_are_refused():
    said = refusal(4, {**SHAPE, "n_experts": 6}, ep=4)
    assert "model.n_experts = 6" in said
    assert "parallel.ep = 4" in said
    said = refusal(8, {**SHAPE, "n_layers": 4}, pp=8)
    assert "model.n_layers = 4" in said
    assert "parallel.pp = 8" in said
    assert "no experts" in refusal(2, SHAPE, ep=2)


@pytest.mark.parametrize("option", ["async_tp", "cpu_offload"])
def test_what_only_cuda_can_do_is_refused_on_the_cpu(option):
    with pytest.raises(ValueError, match=rf"parallel\.{option} = true works on CUDA only"):
        check_layout(ParallelConfig(device="cpu", tp=2, **{option: True}), 2)
    if option == "cpu_offload":
        assert check_layout(ParallelConfig(device="cuda", tp=2, cpu_offload=True), 2)["tp"] == 2


def test_products_in_8_bits_give_bf16_on_a_gpu():
    for precision in ("fp16", "tf32", "fp32", "fp64"):
        fp8 = {"fp8": "rowwise", "precision": precision}
        with pytest.raises(ValueError, match=f"rowwise gives bf16 on a GPU, but parallel.precision = {precision}"):
            check_layout(ParallelConfig(device="cuda", **fp8), 1)
        assert check_layout(ParallelConfig(device="cpu", **fp8), 1)
    assert check_layout(ParallelConfig(device="cuda", fp8="rowwise"), 1)


def test_what_is_no_size_is_refused():
    for wrong in (True, 8.0, -8, 0, "8", None, float("nan")):
        with pytest.raises(ValueError, match=r"shape\.n_heads = .* must be a whole number of at least 1"):
            check_layout(ParallelConfig(), 1, {"n_heads": wrong})
    with pytest.raises(ValueError, match=r"shape\.sinks = 'no' must be true or false"):
        check_layout(ParallelConfig(), 1, {"sinks": "no"})


sizes = st.integers(1, 24)


@settings(deadline=None)
@given(tp=st.integers(1, 8), heads=sizes, kv=sizes, ffn=sizes, vocab=sizes, rows=sizes)
def test_what_is_accepted_splits_evenly_and_what_is_refused_does_not(tp, heads, kv, ffn, vocab, rows):
    shape = {"n_heads": heads, "n_kv_heads": kv, "ffn_dim": ffn, "vocab_size": vocab}
    even = all(size % tp == 0 for size in (heads, ffn, vocab, rows)) and (kv % tp == 0 or tp % kv == 0)
    try:
        check_layout(ParallelConfig(tp=tp, dp_shard=1), tp, shape, rows)
    except ValueError as error:
        assert not even
        assert f"parallel.tp = {tp}" in str(error)
    else:
        assert even


def test_what_is_not_proven_on_several_gpus_is_refused_there_too():
    with pytest.raises(ValueError, match=r"parallel\.async_tp = true is not available in this version"):
        check_layout(ParallelConfig(device="cuda", tp=2, async_tp=True), 2)


# ------------------------------------------------------------------------------------------ context parallelism


@pytest.mark.parametrize(
    ("axes", "tokens", "use"),
    [
        ({"cp": 4}, 60, "row_tokens = 64, a multiple of 8"),
        ({"cp": 4, "cp_style": "ulysses"}, 62, "row_tokens = 64, a multiple of 4"),
        ({"cp": 2, "tp": 2}, 66, "row_tokens = 68, a multiple of 4"),
        ({"cp": 2, "tp": 3}, 64, "row_tokens = 72, a multiple of 12"),
        ({"cp": 2, "tp": 3, "cp_style": "ulysses"}, 64, "row_tokens = 66, a multiple of 6"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_cut_are_told_a_length_that_can(axes, tokens, use):
    config = ParallelConfig(dp_shard=1, **axes)
    world = axes["cp"] * axes.get("tp", 1)
    with pytest.raises(ValueError) as error:
        check_layout(config, world, None, tokens)
    assert f"data.row_tokens = {tokens} cannot be split over parallel.cp = {axes['cp']}" in str(error.value)
    assert use in str(error.value)
    assert check_layout(config, world, None, int(use.split()[2].rstrip(",")))
    assert ("sequence_parallel to false" in str(error.value)) == ("tp" in axes)


def test_each_part_of_a_row_is_cut_over_tp_only_where_it_is_asked_for():
    assert check_layout(ParallelConfig(dp_shard=1, cp=2, tp=3, sequence_parallel=False), 6, None, 64)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from(list(CHUNKS)), st.integers(1, 200))
def test_the_length_that_is_told_is_the_next_that_can_be_cut(cp, tp, style, tokens):
    def fits(tokens):
        try:
            check_row(tokens, cp, style, tp)
        except ValueError as error:
            return int(str(error).split("use row_tokens = ")[1].split(",")[0])
        return tokens

    chunks = cp * CHUNKS[style] if cp > 1 else 1
    found = fits(tokens)
    assert fits(found) == found >= tokens
    right = [n for n in range(tokens, found + 1) if n % chunks == 0 and n % (cp * tp) == 0]
    assert right == [found]


def test_what_a_style_cannot_do_is_refused_with_what_to_set():
    every = {"cp": 2}
    said = refusal(2, {**SHAPE, "softcap": True, "sinks": False}, **every)
    assert "model.attn_softcap cannot be with parallel.cp = 2" in said
    assert "cp_style = allgather computes attention itself, without soft-cap; set cp_style to ulysses" in said
    said = refusal(2, {**SHAPE, "softcap": True, "sinks": True}, **every)
    assert "model.attn_softcap and sinks cannot be" in said and "without soft-cap and sinks" in said
    assert check_layout(ParallelConfig(cp=2, cp_style="ulysses"), 2, {**SHAPE, "sinks": True, "mtp_depth": 0})
    assert check_layout(ParallelConfig(), 2, {**SHAPE, "sinks": True, "mtp_depth": 1})
    for style in CHUNKS:
        said = refusal(2, {**SHAPE, "mtp_depth": 1}, cp=2, cp_style=style)
        assert "model.mtp_depth = 1 cannot be with parallel.cp = 2" in said and "set mtp_depth to 0" in said


def test_heads_that_ulysses_cannot_deal_out_are_refused():
    ulysses = {"cp_style": "ulysses"}
    said = refusal(3, SHAPE, cp=3, **ulysses)
    assert "model.n_heads = 8 cannot be split over parallel.cp = 3, as parallel.cp_style = ulysses asks" in said
    said = refusal(8, {**SHAPE, "n_heads": 12}, cp=4, tp=2, **ulysses)
    assert "n_heads = 12 cannot be split over parallel.cp = 4 × tp = 2" in said and "a divisor of 6" in said
    said = refusal(4, {**SHAPE, "n_heads": 12, "n_kv_heads": 6}, cp=4, **ulysses)
    assert "model.n_kv_heads = 6 (6 on a rank) can be neither split nor repeated" in said
    assert check_layout(ParallelConfig(cp=4, tp=2, **ulysses), 8, {**SHAPE, "n_kv_heads": 1})
    assert check_layout(ParallelConfig(cp=3), 3, {**SHAPE, "n_kv_heads": 1})
