import pytest
import torch
from toy import IDS, Toy, fill, plain_steps, worst

import kforge_parallel as kp
from kforge_testing import RankFailure, run_ranks


def train(rank, world, tied, options, from_meta, accumulate=1):
    """Three AdamW steps on this rank's rows; what rank 0 sees in full."""
    mesh = kp.launch(kp.ParallelConfig())
    torch.manual_seed(rank)  # a layout that took its own rank's random values would be found out
    if from_meta:
        model = kp.parallelize(lambda: Toy(tied), mesh, init=fill, precision="fp64", gradients="sum", **options)
    else:

        def build():
            model = Toy(tied).double()
            if rank == 0:
                fill(model)
            return model

        model = kp.parallelize(build, mesh, precision="fp64", gradients="sum", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = IDS[rank * 4 // world : (rank + 1) * 4 // world]
    losses, gradients = [], []
    for _ in range(3):
        parts = mine.chunk(accumulate)
        total = torch.zeros((), dtype=torch.float64)
        for i, part in enumerate(parts):
            kp.set_last_microbatch(model, i == len(parts) - 1)
            loss = model(part).logsumexp(-1).sum()
            loss.backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        losses.append(total.item())
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    assert (model.head.weight is model.embed.weight) == tied
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Toy(tied).named_parameters()]
    return losses, gradients, kp.full_parameters(model)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("options", "from_meta", "accumulate"),
    [
        ({}, True, 1),
        ({}, False, 1),
        ({"recompute": "full"}, True, 1),
        ({"recompute": "selective", "recompute_every": 2}, True, 1),
        ({"reshard_after_forward": False}, True, 1),
    ],
    ids=["meta", "built", "recompute", "selective", "keep-gathered"],
)
def test_layout_changes_nothing(world, tied, options, from_meta, accumulate):
    ref_losses, ref_gradients, ref_weights = plain_steps(tied)
    for losses, gradients, weights in run_ranks(train, world, tied, options, from_meta, accumulate):
        assert losses == pytest.approx(ref_losses, rel=1e-13)
        assert max(worst(a, b) for a, b in zip(gradients, ref_gradients, strict=True)) < 1e-13
        assert worst(weights, ref_weights) < 1e-12


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 2)])
def test_accumulated_gradients_are_the_same_sums(world, accumulate):
    _, ref_gradients, ref_weights = plain_steps(False)
    for _, gradients, weights in run_ranks(train, world, False, {}, True, accumulate):
        assert max(worst(a, b) for a, b in zip(gradients, ref_gradients, strict=True)) < 1e-13
        assert worst(weights, ref_weights) < 1e-12


def mean_gradients(rank, world):
    mesh = kp.launch()
    model = kp.parallelize(Toy, mesh, init=fill, precision="fp64")
    model(IDS[rank * 2 : rank * 2 + 2]).logsumexp(-1).sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_gradients_are_means_over_ranks_unless_sums_are_asked_for():
    _, (ref, *_), _ = plain_steps(False)
    assert worst(run_ranks(mean_gradients, 2)[0], {k: v / 2 for k, v in ref.items()}) < 1e-13


def half_precision(rank, world):
    mesh = kp.launch()
    seen = []
    model = kp.parallelize(lambda: Toy(), mesh, init=fill, precision="bf16", gradients="sum")
    model.layers["0"].linear.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    model(IDS).logsumexp(-1).sum().backward()
    return seen[0], {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


def test_bf16_computes_in_bf16_and_keeps_fp32_weights_and_gradients():
    assert run_ranks(half_precision, 2)[0] == (torch.bfloat16, {torch.float32}, {torch.float32})


def forgetful(rank, world):
    mesh = kp.launch()
    kp.parallelize(Toy, mesh, init=lambda m: fill(m, skip=("layers.1.gain", "shift")), precision="fp32")


def test_a_value_that_init_forgets_is_named():
    with pytest.raises(RankFailure, match=r"init did not set layers\.1\.gain, shift"):
        run_ranks(forgetful, 1)


def copied(rank, world):
    """What a deep copy with other weights gives, of a model that one process holds unwrapped."""
    import copy

    mesh = kp.launch()
    model = kp.parallelize(Toy, mesh, init=fill, precision="bf16", storage="split", recompute="full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.layers.parameters():
            parameter.zero_()
    bare = other.head(other.embed(IDS) + other.shift.to(torch.bfloat16))
    return torch.equal(other(IDS), bare), torch.equal(model(IDS), bare)


def test_a_deep_copy_computes_with_its_own_weights():
    assert run_ranks(copied, 1)[0] == (True, False)


class Buffers(torch.nn.Module):
    """A weight, a table of angles and a table of integers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.register_buffer("angles", torch.arange(4.0) / 3)
        self.register_buffer("places", torch.arange(4))

    def forward(self, x):
        return x @ self.weight


def fill_buffers(model, skip):
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name != skip:
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(3)


def buffers(rank, world, skip, storage):
    mesh = kp.launch()
    try:
        init = None if skip is None else lambda model: fill_buffers(model, skip)
        model = kp.parallelize(Buffers, mesh, init=init, precision="bf16", storage=storage)
    except ValueError as error:
        return str(error)
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_integers_that_init_forgets_are_named_too():
    assert "init did not set places;" in run_ranks(buffers, 1, "places", "fp32")[0]
    assert run_ranks(buffers, 1, "", "fp32")[0]["places"] == torch.int64


@pytest.mark.parametrize("skip", [None, ""], ids=["on-the-cpu", "on-meta"])
def test_split_storage_halves_weights_and_no_buffer(skip):
    expected = {"weight": torch.bfloat16, "angles": torch.float32, "places": torch.int64}
    assert run_ranks(buffers, 2, skip, "split") == [expected] * 2


def compiled(rank, world):
    import torch._dynamo

    mesh = kp.launch()
    torch._dynamo.reset()
    results = []
    for compiled_blocks in (False, True):
        model = kp.parallelize(Toy, mesh, init=fill, precision="fp64", gradients="sum")
        if compiled_blocks:
            kp.compile_blocks(list(model.layers.values()), backend="aot_eager")
        loss = model(IDS).logsumexp(-1).sum()
        loss.backward()
        results.append((loss.item(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return results, graphs, breaks


def test_compiled_blocks_compute_the_same_in_one_shared_graph():
    (plain, compiled_), graphs, breaks = run_ranks(compiled, 1)[0]
    assert compiled_[0] == pytest.approx(plain[0], rel=1e-13)
    assert worst(compiled_[1], plain[1]) < 1e-12
    assert (graphs, breaks) == (1, 0)


def unknown_options(rank, world):
    mesh = kp.launch()
    errors = []
    for options in ({"precision": "fp8"}, {"recompute": "some"}, {"gradients": "max"}, {"blocks": "blocks"}):
        with pytest.raises(ValueError) as info:
            kp.parallelize(Toy, mesh, **options)
        errors.append(str(info.value))
    for build in (Toy(), lambda: None):
        with pytest.raises(ValueError) as info:
            kp.parallelize(build, mesh)
        errors.append(str(info.value))
    return errors


def test_unknown_words_list_the_known_ones_and_what_is_built_is_looked_at():
    precision, recompute, gradients, blocks, model, nothing = run_ranks(unknown_options, 1)[0]
    assert model.startswith("build is a Toy that is built already; give what builds it, such as lambda: Toy(…)")
    assert nothing == "build made NoneType None, and no module; let it return the model"
    assert "'fp8'" in precision and "bf16, fp16, tf32, fp32, fp64" in precision
    assert "'some'" in recompute and "none, full, selective" in recompute
    assert "'max'" in gradients
    assert "'blocks'" in blocks and "layers" in blocks
