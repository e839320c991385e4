"""The way of keeping activations that recompute = auto takes, against all others."""

from itertools import product

import pytest
import toy

from kforge_parallel import ParallelConfig, Work, choose_recompute, estimate_layout
from kforge_parallel.choice import memory_of
from kforge_testing import run_ranks

LLAMA = {"vocab_size": 128_256, "n_kv_heads": 8}
SHAPES = {
    "350m": {"vocab_size": 50_304, "dim": 1024, "n_layers": 24, "n_heads": 16, "ffn_dim": 2816, "tie_embeddings": True},
    "1b": {**LLAMA, "dim": 2048, "n_layers": 16, "n_heads": 32, "ffn_dim": 8192, "tie_embeddings": True},
    "8b": {**LLAMA, "dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 14_336},
    "wide": {**LLAMA, "dim": 8192, "n_layers": 6, "n_heads": 64, "ffn_dim": 28_672},
    "plain": {"vocab_size": 32_000, "dim": 1536, "n_layers": 30, "n_heads": 12, "ffn_dim": 6144, "mlp_matrices": 2},
    "experts": {**LLAMA, "dim": 1024, "n_layers": 12, "n_heads": 16, "ffn_dim": 3584, "n_experts": 8},
}
WORLD = {"8b": 8}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.05])
@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_and_nothing_that_fits_computes_less_again(name, share):
    """share: of what keeping all activations takes beyond the leanest way."""
    shape, world = SHAPES[name], WORLD.get(name, 1)
    work, config = Work(row_tokens=4096, microbatch_rows=4, microbatches=2), ParallelConfig(device="cuda")

    def told(**options):
        return estimate_layout(shape, ParallelConfig(device="cuda", **options), world, work)

    most, least = told().peak, told(recompute="full").peak
    memory = (least + share * (most - least)) / 0.92
    chosen, estimate = choose_recompute(shape, config, world, work, memory)
    assert estimate == estimate_layout(shape, chosen, world, work)
    assert estimate.peak <= 0.92 * memory
    others = [told()]
    others += [told(recompute=r, recompute_every=k) for r, k in product(("selective", "full"), (1, 2, 3, 4, 8))]
    others += [told(recompute=r, recompute_blocks=n) for r, n in product(("selective", "full"), range(1, 6))]
    for other in others:
        assert other.peak > 0.92 * memory or other.recomputed >= estimate.recomputed
    if share > 1:
        assert chosen.recompute == "none"
    else:
        assert chosen.recompute != "none" and most > 0.92 * memory


def test_less_memory_means_more_computed_again():
    work = Work(row_tokens=4096, microbatch_rows=8)
    ways = []
    for memory in (90e9, 60e9, 50e9, 40e9):
        chosen, told = choose_recompute(SHAPES["1b"], ParallelConfig(compile=True), 1, work, memory)
        ways.append((chosen.recompute, chosen.recompute_blocks, told.recomputed))
    assert ways[0][0] == "none"
    assert [flops for *_, flops in ways] == sorted(flops for *_, flops in ways)
    assert len({*ways}) == 4
    with pytest.raises(
        ValueError, match=r"no way of keeping activations fits into 92% of 10\.00 GB; the leanest needs"
    ):
        choose_recompute(SHAPES["1b"], ParallelConfig(compile=True), 1, work, 10e9)


def test_what_a_layout_cannot_have_is_not_chosen():
    work = Work(row_tokens=4096, microbatch_rows=4, microbatches=8)
    tight = {"memory": 70e9, "work": work, "world_size": 2}
    zbv = ParallelConfig(pp=2, dp_shard=1, pp_schedule="zbv")
    assert choose_recompute(SHAPES["1b"], zbv, **{**tight, "memory": 200e9})[0].recompute == "none"
    with pytest.raises(ValueError, match="no way"):
        choose_recompute(SHAPES["1b"], zbv, **{**tight, "memory": 30e9})
    compiled = ParallelConfig(compile=True)
    ways = {
        choose_recompute(SHAPES["experts"], compile_, 1, work, memory)[0].recompute
        for compile_ in (compiled,)
        for memory in (60e9, 50e9, 45e9, 40e9)
    }
    assert "selective" not in ways and len(ways) == 2


def test_memory_of_a_device():
    assert memory_of(ParallelConfig(recompute="auto", memory_gb=80.0), "cpu") == 80e9
    with pytest.raises(ValueError, match=r"set parallel\.memory_gb to what a process may take"):
        memory_of(ParallelConfig(recompute="auto"), "cpu")
    with pytest.raises(ValueError, match=r"memory_gb = 80\.0 says what parallel\.recompute = auto fits into"):
        ParallelConfig(memory_gb=80.0)
    with pytest.raises(ValueError, match=r"memory_gb = -1\.0 must not be negative"):
        ParallelConfig(memory_gb=-1.0, recompute="auto")
    with pytest.raises(ValueError, match="auto is what an estimate decides"):
        estimate_layout(SHAPES["1b"], ParallelConfig(recompute="auto"), 1, Work(row_tokens=8))


def decided(rank, world, memory_gb, work, build):
    from kforge_parallel import build as building
    from kforge_parallel import launch, parallelize

    told = []
    building.recompute_blocks = lambda blocks, mode, **options: told.append((mode, sum(options["again"])))
    mesh = launch(ParallelConfig(precision="fp32", device="cpu", recompute="auto", memory_gb=memory_gb))
    try:
        parallelize(build, mesh, work=work)
    except ValueError as error:
        return str(error)
    return told


def test_parallelize_decides_and_says_what_it_lacks():
    work = Work(row_tokens=64, microbatch_rows=4)
    assert run_ranks(decided, 2, 1.0, work, toy.Sized, init=False) == [[("none", 0)]] * 2
    needs = estimate_layout(toy.Sized.shape, ParallelConfig(precision="fp32"), 2, work).peak
    ((ways,), _) = run_ranks(decided, 2, 0.9 * needs / 1e9 / 0.92, work, toy.Sized, init=False)
    assert ways[0] != "none"
    assert "lacks work=Work(row_tokens" in run_ranks(decided, 1, 1.0, None, toy.Sized, init=False)[0]
    assert "lacks Toy.shape" in run_ranks(decided, 1, 1.0, work, toy.Toy, init=False)[0]
    assert "set parallel.memory_gb" in run_ranks(decided, 1, 0.0, work, toy.Sized, init=False)[0]
