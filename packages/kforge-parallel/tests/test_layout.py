import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_parallel import LAYOUT_CLASSES, ParallelConfig, check_layout

SHAPE = {"n_heads": 8, "n_kv_heads": 4, "ffn_dim": 96, "vocab_size": 320, "n_layers": 4, "dim": 30}


def test_every_set_of_axes_is_accepted_or_refused_in_words():
    axes = {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}
    assert set(LAYOUT_CLASSES) == {frozenset(s) for n in range(7) for s in itertools.combinations(axes, n)}
    for layout, sentence in LAYOUT_CLASSES.items():
        missing = layout & {"pp", "cp"}
        if "ep" in layout and not layout & {"dp_shard", "cp", "tp"}:
            missing = {"ep"}  # lies over others
        assert (sentence is None) == (not missing)
        assert all(f"parallel.{axis}" in sentence for axis in missing)


@pytest.mark.parametrize("layout", ["", "r", "s", "t", "rs", "rt", "st", "rst"])
def test_every_pair_and_the_triple_of_replicas_shards_and_tp_is_accepted(layout):
    sizes = {"dp_replicate": "r", "dp_shard": "s", "tp": "t"}
    sizes = {axis: 2 if letter in layout else 1 for axis, letter in sizes.items()}
    axes = check_layout(ParallelConfig(**sizes), 2 ** len(layout), SHAPE, 64)
    assert axes == {"pp": 1, "cp": 1, "ep": 1, **sizes}


@pytest.mark.parametrize(
    ("axes", "world"),
    [
        ({"dp_shard": 4, "ep": 2}, 4),
        ({"dp_shard": 8, "ep": 8}, 8),
        ({"tp": 2, "ep": 2, "dp_shard": 1}, 2),
        ({"dp_replicate": 2, "tp": 2, "ep": 2, "dp_shard": 1}, 4),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4}, 8),
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


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_what_is_to_come_is_refused_with_what_to_set(axis):
    with pytest.raises(ValueError, match=rf"not available in this version; set parallel\.{axis} to 1.*{axis} 2"):
        check_layout(ParallelConfig(**{axis: 2}), 4, SHAPE)


def test_what_is_to_come_is_refused_before_the_number_of_processes_is_looked_at():
    with pytest.raises(ValueError, match=r"context parallelism is not available in this version"):
        check_layout(ParallelConfig(cp=2), 1)
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
