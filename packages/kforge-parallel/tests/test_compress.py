"""Gradients that replicas send in fewer bytes: what comes out, what is left over, and that nothing is lost for good."""

from functools import partial

import comparable
import exchanged
import pytest
import torch

from kforge_parallel import ParallelConfig, check_layout, compress
from kforge_parallel.testing import compare
from kforge_testing import RankFailure, run_ranks

SHAPES = [(40, 24), (24,), (3, 16, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_off_by_half_a_step_of_its_block_at_most(dtype):
    x = torch.randn(3, 4 * compress.BLOCK, dtype=dtype) * torch.logspace(-30, 8, 3, dtype=dtype)[:, None]
    x[1, :256] = 0
    sent = compress.to_int8(x)
    assert sent.dtype == torch.uint8 and sent.shape == (3, 4 * 260)
    blocks, back = x.view(3, 4, 256), compress.from_int8(sent, dtype).view(3, 4, 256)
    assert bool(((blocks - back).abs() <= blocks.abs().amax(-1, keepdim=True) * (1 / 254 + 1e-6)).all())
    assert back.dtype == dtype and not back[1, 0].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("codec", compress.CODECS)
def test_what_is_not_finite_stays_so(codec, bad):
    encode, decode = compress.CODECS[codec]
    x = torch.ones(2, 512)
    x[1, 300] = bad
    back = decode(encode(x), torch.float32)
    assert not back[1, 300].isfinite() and bool(back[:, :256].isfinite().all())


def test_columns_become_orthonormal_or_nothing():
    p = torch.randn(30, 4, dtype=torch.float64)
    p[:, 2] = 3 * p[:, 0] - p[:, 1]
    q = compress.orthonormal(p)
    expected = torch.eye(4, dtype=torch.float64)
    expected[2, 2] = 0
    torch.testing.assert_close(q.T @ q, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(q @ (q.T @ p), p)  # the same space


def left_over(mode, kept, rank_shapes, world):
    """What the replicas have not sent yet, all together, as the gradients lie."""
    if mode == "powersgd":
        errors = [sum(k[f"error.{i}"] for k in kept).flatten() if i in (0, 2) else None for i in range(3)]
        return torch.cat([torch.zeros(24, dtype=torch.float64) if e is None else e for e in errors])
    whole = sum(k["error"] for k in kept) + torch.stack([k["sum_error"] for k in kept])
    rooms = [-(-torch.Size(shape).numel() // 256) * 256 for shape in rank_shapes]
    parts = whole.flatten()[: sum(rooms)].split(rooms)
    return torch.cat([part[: torch.Size(s).numel()] for part, s in zip(parts, rank_shapes, strict=True)])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", ["int8", "powersgd"])
def test_what_is_lost_in_a_step_comes_later(mode, world):
    """Over any steps: what came out and what is left over are the gradients; replicas have the same."""
    found = run_ranks(exchanged.sums, world, mode, SHAPES, 4)
    total = sum(exchanged.gradients(SHAPES, rank, step) for rank in range(world) for step in range(4))
    outs, kept = found[0][0], [theirs[1] for theirs in found]
    assert all(torch.equal(a, b) for theirs in found for a, b in zip(theirs[0], outs, strict=True))
    left = left_over(mode, kept, SHAPES, world)
    assert left.abs().max() > 1e-3
    torch.testing.assert_close(sum(outs) + left, total, rtol=0, atol=1e-11 * total.abs().max())
    errors = [(out - sum(exchanged.gradients(SHAPES, r, 0) for r in range(world))).abs() for out in outs[:1]]
    assert errors[0].max() > 1e-4  # it is compressed


@pytest.mark.parametrize(("mode", "bound"), [("bf16", 2**-7), ("int8", 1 / 60)])
def test_one_step_is_off_by_its_bound_at_most(mode, bound):
    """bf16: 2⁻⁹ of each replica's gradient and of the sum; int8: 1/254 of the largest of a block, twice."""
    found = run_ranks(exchanged.sums, 2, mode, [(4, 256)], 1)
    parts = [exchanged.gradients([(4, 256)], rank, 0).view(4, 256) for rank in range(2)]
    sizes = sum(part.abs() for part in parts)
    sizes = sizes if mode == "bf16" else sizes.amax(1, keepdim=True)
    error = (found[0][0][0].view(4, 256) - sum(parts)).abs()
    assert 0 < (error / sizes).max() <= bound


def test_powersgd_is_exact_for_a_gradient_of_its_rank():
    found = run_ranks(low_rank, 2)
    for out, expected in found:
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def low_rank(rank, world):
    reduction = exchanged.made("powersgd", [(32, 24), (5,)])
    parts = [torch.randn(58, 2, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(2)]
    same = torch.randn(24, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    flat = [torch.cat(((part[:32] @ same.T).flatten(), part[:5, 0])) for part in parts]
    total = flat[rank].clone()
    reduction(total)
    return total, sum(flat)


@pytest.mark.parametrize("mode", ["int8", "powersgd"])
def test_a_step_that_does_not_count_leaves_nothing(mode):
    """Every bit is as if it had not been, also where it was NaN."""
    without = run_ranks(exchanged.sums, 2, mode, SHAPES, 2, [1.0, 1.0])
    refused = run_ranks(exchanged.sums, 2, mode, SHAPES, 3, [1.0, 1.0, 0.0])
    spoilt = run_ranks(spoilt_sums, 2, mode)
    for rank in range(2):
        for other in (refused, spoilt):
            assert other[rank][1].keys() == without[rank][1].keys()
            assert all(torch.equal(other[rank][1][n], t) for n, t in without[rank][1].items())
        assert not spoilt[rank][0][2].isfinite().all()


def spoilt_sums(rank, world, mode):
    """The third step has a NaN on one rank, and is refused."""
    plain = exchanged.gradients
    exchanged.gradients = lambda shapes, r, step: plain(shapes, r, step) * (torch.nan if step == 2 and r == 1 else 1)
    return exchanged.sums(rank, world, mode, SHAPES, 3, [1.0, 1.0, 0.0])


@pytest.mark.parametrize("feedback", [True, False])
def test_small_gradients_beside_a_large_one_arrive_through_feedback_alone(feedback):
    """Half of |w - 1|² under plain descent, with noise on one coordinate that makes the grid of its block too coarse
    for the others. After 300 steps they are where they should be, but for a bit of it; without feedback none moved."""
    for weights in run_ranks(descend, 2, feedback):
        off = (weights[1:] - 1).abs().max()
        assert off < 0.15 if feedback else off == 1


def descend(rank, world, feedback):
    reduction = exchanged.made("int8", [(2, 100)])
    weights = torch.zeros(200, dtype=torch.float64)
    for step in range(300):
        gradient = (weights - 1) / 2
        gradient[0] = 300.0 * (-1) ** step
        reduction(gradient)
        reduction.settle(None)
        if not feedback:
            reduction.remember({name: torch.zeros_like(tensor) for name, tensor in reduction.kept.items()})
        weights -= 0.02 * gradient
    return weights


@pytest.mark.parametrize("mode", ["bf16", "int8", "powersgd"])
def test_it_sends_as_many_bytes_as_it_says(mode):
    for seen, said in run_ranks(exchanged.counted, 4, mode, [(64, 48), (48,), (48, 64)]):
        assert seen == pytest.approx(said, abs=8) and seen < 0.6 * 2 * 0.75 * 4 * (64 * 48 * 2 + 48)


LAYOUTS = [
    ({"dp_replicate": 2, "dp_shard": 1}, {"microbatches": 2}),
    ({"dp_replicate": 2, "dp_shard": 2}, {}),
    ({"dp_replicate": 2, "tp": 2}, {"model": exchanged.split_sent_whole, "loss": comparable.split_loss}),
]


@pytest.mark.parametrize(("layout", "more"), LAYOUTS, ids=["replicas", "hsdp", "tp"])
def test_where_nothing_is_rounded_replicas_equal_one_process(layout, more):
    toy = partial(compare, model=exchanged.toy_sent_whole, batch=comparable.BATCH, loss=comparable.loss, run=run_ranks)
    toy(ParallelConfig(compress="bf16", **layout), **more).check()


@pytest.mark.parametrize("options", [{"compress": "int8"}, {"compress": "powersgd", "compress_rank": 2}], ids=str)
def test_gradients_are_near_and_replicas_stay_alike(options):
    plain = run_ranks(exchanged.replicas, 2, {"dp_replicate": 2, "dp_shard": 1}, False)[0]
    for each in (False, True):
        found = run_ranks(exchanged.replicas, 2, {"dp_replicate": 2, "dp_shard": 1, **options}, each)[0]
        for name, expected in plain[0][0].items():
            near = (found[0][0][name] - expected).norm() / expected.norm()
            assert near < (0.02 if options["compress"] == "int8" or expected.ndim < 2 else 0.9), (name, near)
        assert any(tensor.any() for tensor in found[2]["left"].values())


def test_means_are_sums_over_the_number_of_ranks():
    for total, mean in run_ranks(sum_and_mean, 4, init=False):
        assert all(torch.equal(total[name] / 4, mean[name]) for name in total)


def sum_and_mean(rank, world):
    import kforge_parallel as kp

    config = ParallelConfig(precision="fp32", device="cpu", dp_replicate=2, dp_shard=2, compress="int8")
    mesh, found = kp.launch(config), []
    for gradients in ("sum", "mean"):
        model = kp.parallelize(exchanged.Toy, mesh, config, init=exchanged.fill, gradients=gradients)
        model(torch.arange(24).view(4, 6) * (rank + 1) % 11).logsumexp(-1).sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return found


def test_what_is_left_over_comes_back_and_another_layout_forgets_it():
    for same, other, untouched in run_ranks(carried_on, 2, init=False):
        assert same is True and other is False and untouched


def carried_on(rank, world):
    import kforge_parallel as kp

    def model(**options):
        config = ParallelConfig(precision="fp32", device="cpu", dp_replicate=2, dp_shard=1, **options)
        return kp.parallelize(exchanged.Toy, mesh, config, init=exchanged.fill)

    mesh = kp.launch(ParallelConfig(precision="fp32", device="cpu", dp_replicate=2, dp_shard=1))
    first, second, third = model(compress="int8"), model(compress="int8"), model(compress="powersgd")
    first(torch.arange(24).view(4, 6) % 11).logsumexp(-1).sum().backward()
    state = kp.compression_of(first).state_dict()
    assert any(tensor.any() for tensor in state["left"].values())
    loaded = kp.compression_of(second)
    before = {name: tensor.clone() for name, tensor in kp.compression_of(third).state_dict()["left"].items()}
    same, other = loaded.load_state_dict(state), kp.compression_of(third).load_state_dict(state)
    same &= all(torch.equal(state["left"][n], t) for n, t in loaded.state_dict()["left"].items())
    after = kp.compression_of(third).state_dict()["left"]
    return same, other, all(torch.equal(before[name], after[name]) for name in after)


def test_a_parameter_without_a_gradient_is_told_of():
    with pytest.raises(RankFailure, match=r"one of them took no part in the loss\. Use all of them, freeze it"):
        run_ranks(unused, 2, init=False)


def unused(rank, world):
    import kforge_parallel as kp

    mesh = kp.launch(ParallelConfig(precision="fp32", device="cpu", dp_replicate=2, dp_shard=1, compress="int8"))
    model = kp.parallelize(exchanged.Toy, mesh, init=exchanged.fill)
    block = model.layers["1"]
    block.linear.register_forward_hook(lambda module, args, y: y.detach())
    model(torch.arange(24).view(4, 6) % 11).sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compress": "int8"}, r"is for what replicas send one another, and parallel\.dp_replicate = 1"),
        ({"compress": "powersgd", "dp_replicate": 2, "precision": "fp16"}, "scaled by another number; use bf16"),
        ({"compress": "bf16", "dp_replicate": 2, "cpu_offload": True}, "set one of them back"),
        ({"compress_rank": 8}, "only powersgd has a rank"),
        ({"compress": "powersgd", "dp_replicate": 2, "compress_rank": 0}, "at least 1"),
        ({"compress": "int4", "dp_replicate": 2}, "'int4' is unknown; use one of none, bf16, int8, powersgd"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ParallelConfig(**options)


def test_the_validator_knows_that_there_are_replicas():
    config = ParallelConfig(compress="int8", dp_replicate=-1, dp_shard=2)
    assert check_layout(config, 4)["dp_replicate"] == 2 and not config.layout_exact
    with pytest.raises(ValueError, match=r"parallel\.dp_replicate is 1 of 2 processes; start more"):
        check_layout(config, 2)
