"""The way of keeping activations that recompute = auto takes, against all others."""

from itertools import product

import pytest
import toy

from kforge_parallel import ParallelConfig, Work, choice, choose_recompute, estimate_layout
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


def broken(name, share):
    """Of what recompute = auto promises, what does not hold for a shape in so much memory.

    share: of what keeping all activations takes beyond the leanest way.
    """
    shape, world = SHAPES[name], WORLD.get(name, 1)
    work, config = Work(row_tokens=4096, microbatch_rows=4, microbatches=2), ParallelConfig(device="cuda")

    def told(**options):
        return estimate_layout(shape, ParallelConfig(device="cuda", **options), world, work)

    most, least = told().peak, told(recompute="full").peak
    memory = (least + share * (most - least)) / 0.92
    chosen, estimate = choose_recompute(shape, config, world, work, memory)
    assert estimate == estimate_layout(shape, chosen, world, work)
    others = [told()]
    others += [told(recompute=r, recompute_every=k) for r, k in product(("selective", "full"), (1, 2, 3, 4, 8))]
    others += [told(recompute=r, recompute_blocks=n) for r, n in product(("selective", "full"), range(1, 6))]
    fitting = [other for other in others if other.peak <= 0.92 * memory]
    wrong = set()
    if estimate.peak > 0.92 * memory:
        wrong.add("it fits")
    if any(other.recomputed < estimate.recomputed for other in fitting):
        wrong.add("nothing that fits computes less again")
    if (chosen.recompute == "none") != (most <= 0.92 * memory):
        wrong.add("nothing is computed again where all fits")
    fewer = (chosen.recompute_blocks or shape["n_layers"]) - 1
    again = chosen.recompute != "none" and fewer > 0
    if again and told(recompute=chosen.recompute, recompute_blocks=fewer).peak <= 0.92 * memory:
        wrong.add("fewer blocks do not fit")
    return wrong


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.05])
@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_and_nothing_that_fits_computes_less_again(name, share):
    assert broken(name, share) == set()


def always(mode):
    """Ways of one mode alone, after the plain one."""
    ways = choice._ways
    return lambda plain, *more: (way for way in ways(plain, *more) if way.recompute in ("none", mode))


def of_all_blocks(ways=choice._ways):
    return lambda *args: (way for way in ways(*args) if not way.recompute_blocks)


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("FREE", lambda: 0.0, {"it fits", "nothing is computed again where all fits"}),  # all of the memory is taken
        ("FREE", lambda: 0.5, {"nothing that fits computes less again"}),
        ("_ways", lambda: always("full"), {"nothing that fits computes less again"}),
        ("_ways", of_all_blocks, {"fewer blocks do not fit"}),
    ],
    ids=["no-memory-left", "much-memory-left", "full-only", "all-blocks-only"],
)
def test_a_choice_that_is_not_the_best_is_found(monkeypatch, name, fault, found):
    monkeypatch.setattr(choice, name, fault())
    seen = set()
    for share in (0.3, 0.5, 0.7, 0.97):
        try:
            seen |= broken("1b", share)
        except ValueError as error:  # nothing fits, where something does
            assert "no way of keeping activations fits" in str(error)
            seen.add("nothing that fits computes less again")
    assert seen & found


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
