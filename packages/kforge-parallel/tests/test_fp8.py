"""FP8 products against float64, within bounds that follow from the formats; layouts against one process."""

import functools
import math
from typing import ClassVar

import mixture
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from toy import fill

import kforge_parallel as kp
from kforge_parallel import _torch, fp8
from kforge_testing import RankFailure, run_ranks

HALF_STEP = {fp8.E4M3: 2.0**-4, fp8.E5M2: 2.0**-3}
"""Relative error of rounding a value of the normal range: half a unit of 3 or 2 bits after the point."""
SMALL_STEP = {fp8.E4M3: 2.0**-10 / 224, fp8.E5M2: 2.0**-17 / 28672}
"""Error of a value below it, over the largest of the tensor: half of the least value; the largest is above half of
what the format holds."""


def representable(dtype):
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return bits[bits.isfinite()].unique()


def nearest(x, dtype):
    """x rounded under the greatest power of two that fits, by search among all values of the format."""
    values = representable(dtype)
    top = values.max().item()
    scale = 1.0
    while x.abs().max().item() * scale > top:
        scale /= 2
    while x.abs().max().item() * scale * 2 <= top:
        scale *= 2
    distance = (x.flatten()[:, None] * scale - values).abs()
    return values[distance.argmin(1)].view_as(x) / scale, distance.min(1).values.view_as(x) / scale


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-20, 0.75, 1.0, 3.7e4])
def test_rounds_to_the_nearest_value_under_the_greatest_scale(dtype, size):
    x = (torch.randn(40, 8, generator=torch.Generator().manual_seed(3)) * size).double().float().double()
    bits, unit = fp8.quantize(x, dtype)
    got = bits.double() * unit
    best, error = nearest(x, dtype)
    assert torch.equal((got - x).abs(), error)  # a tie may go either way
    assert (got - x).abs().le(x.abs() * HALF_STEP[dtype] + x.abs().max() * SMALL_STEP[dtype]).all()
    assert (got != best).sum() <= 2


@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=str)
def test_scales_at_the_edges(dtype):
    top = torch.finfo(dtype).max
    amax = torch.tensor([top, torch.nextafter(torch.tensor(top), torch.tensor(math.inf)), top / 2, 2.0**127, 2.0**-100])
    assert fp8.scale_for(amax, dtype).tolist() == [
        1.0,
        0.5,
        2.0,
        2.0 ** (fp8.TOP[dtype] - 127),
        2.0 ** (fp8.TOP[dtype] + 100),
    ]
    bits, unit = fp8.quantize(torch.zeros(3, 4), dtype)
    assert (bits.float() * unit == 0).all() and unit.isfinite()
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(3, 4)
        x[1, 2] = bad
        bits, unit = fp8.quantize(x, dtype)
        assert (bits.float() * unit).isnan().all()
        bits, unit = fp8.quantize(x, dtype, dim=1)
        assert (bits.float() * unit).isnan().any(1).tolist() == [False, True, False]


def off(a, dtype):
    """Bound on the rounding error of each value of a tensor that has one scale."""
    return a.abs() * HALF_STEP[dtype] + a.abs().max() * SMALL_STEP[dtype]


def bound(a, a_off, b, b_off):
    """|âb̂ - ab| ≤ (|a| + δa)(|b| + δb) - |a||b|, summed; and float32 sums of as many products."""
    wide = (a.abs() + a_off) @ (b.abs() + b_off)
    return wide - a.abs() @ b.abs() + a.shape[1] * 2.0**-24 * wide


def one_layer(mode, dtype, shape=(48,), bias=True, positive=True):
    generator = torch.Generator().manual_seed(1)

    def draw(*size):
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        return x.abs() if positive else x

    layer = nn.Linear(32, math.prod(shape), bias=bias, dtype=dtype)
    layer.weight = nn.Parameter(draw(*shape, 32).to(dtype))
    if bias:
        layer.bias = nn.Parameter(draw(*shape).to(dtype))
    assert fp8.multiply_in_fp8(layer, mode, ()) == {"": ""}
    x, g = draw(2, 7, 32).to(dtype).requires_grad_(), draw(2, 7, *shape).to(dtype)
    y = layer(x)
    assert y.shape == g.shape and y.dtype == dtype
    y.backward(g)
    return layer, x, g, y


def within_bounds(mode, layer, x, g, y, rounding=0.0):
    """Whether output and gradients are within their bounds of float64; ``rounding`` of the results."""
    w, x2, g2 = (t.detach().double() for t in (layer.weight, x, g))
    w, x2, g2 = w.flatten(0, -2), x2.flatten(0, 1), g2.flatten(2).flatten(0, 1)
    e4, e5 = fp8.E4M3, fp8.E5M2
    exact = {"y": x2 @ w.T, "dx": g2 @ w, "dw": g2.T @ x2}
    gradient = e5 if mode == "tensorwise" else e4
    allowed = {
        "y": bound(x2, off(x2, e4), w.T, off(w.T, e4)),
        "dx": bound(g2, off(g2, gradient), w, off(w, e4)),
        "dw": bound(g2.T, off(g2.T, e5), x2, off(x2, e4)) if mode == "tensorwise" else 0.0 * (g2.T @ x2),
    }
    if layer.bias is not None:
        exact["y"] = exact["y"] + layer.bias.detach().double().flatten()
    got = {"y": y.detach().double().view(14, -1), "dx": x.grad.double().view(14, -1)}
    got["dw"] = layer.weight.grad.double().flatten(0, -2)
    return {
        name: bool(((got[name] - exact[name]).abs() <= allowed[name] + exact[name].abs() * rounding + 1e-12).all())
        for name in exact
    }


@pytest.mark.parametrize("mode", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("dtype", "rounding", "positive"),
    [(torch.float64, 1e-6, True), (torch.float64, 1e-6, False), (torch.bfloat16, 3 * 2.0**-8, True)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(48,), (2, 24), (3, 2, 8)], ids=str)
def test_products_are_within_their_bounds(mode, dtype, rounding, positive, shape):
    layer, x, g, y = one_layer(mode, dtype, shape, positive=positive)
    assert within_bounds(mode, layer, x, g, y, rounding) == {"y": True, "dx": True, "dw": True}
    torch.testing.assert_close(layer.bias.grad, g.sum((0, 1)))


@pytest.mark.parametrize("which", ["y", "dx", "dw"])
def test_a_product_twice_too_large_is_outside(monkeypatch, which):
    calls = []
    real = fp8.product

    def planted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs) * (2 if ["y", "dx", "dw"][len(calls) - 1] == which else 1)

    monkeypatch.setattr(fp8, "product", planted)
    right = within_bounds("tensorwise", *one_layer("tensorwise", torch.float64), 1e-6)
    assert right == {name: name != which for name in ("y", "dx", "dw")}


@pytest.mark.parametrize("mode", ["tensorwise", "rowwise"])
def test_a_nan_is_seen(mode):
    layer = nn.Linear(32, 16)
    fp8.multiply_in_fp8(layer, mode, ())
    x = torch.ones(4, 32)
    x[2, 3] = math.inf
    assert layer(x)[2].isnan().all()
    y = layer(torch.ones(4, 32))
    g = torch.ones_like(y)
    g[1, 1] = math.nan
    y.backward(g)
    assert layer.weight.grad.isnan().any()


class Stacked(nn.Module):
    """Two matrices in one weight, as a foreign class says that it is linear."""

    is_linear = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 64, 32))
        self.bias = nn.Parameter(torch.empty(2, 64))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Stacked()
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        gate, up = self.up(x).unbind(-2)
        return x + self.down(torch.tanh(gate) * up)


class Wide(nn.Module):
    """Sizes that fit and one that does not, and a router."""

    block_list = "layers"
    plan: ClassVar[dict[str, str]] = {
        "embed": "vocab_embedding",
        "layers.*.up": "packed_colwise",
        "layers.*.down": "rowwise",
        "odd": "sequence",
        "router": "sequence",
    }

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 32)
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.odd = nn.Linear(32, 24)
        self.router = nn.Linear(32, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return torch.cat((self.odd(x), self.router(x)), -1)


def small(model):
    """Values by name, small enough for tanh; of each weight the last row 8 times as large, which one part has alone."""
    fill(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(0.2)
            if name.endswith("down.weight"):
                whole = kp.fsdp.full(parameter)
                whole[-1] *= 8
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                    parameter.to_local().copy_(whole.to_local())
                else:
                    parameter.copy_(whole)


IDS = torch.arange(32).view(4, 8) * 7 % 11


def train(rank, world, axes, options, accumulate=1, fault=None):
    """Losses, gradients by step and last weights of two steps; and how often scales were taken."""
    config = kp.ParallelConfig(precision="fp64", device="cpu", **axes)
    mesh = kp.launch(config)
    model = kp.parallelize(Wide, mesh, config, init=small, gradients="sum", cast_inputs=False, **options)
    if fault == "scales of one rank":
        vars(model)["fp8_weights"].groups.clear()
    taken, came = [], set()
    model.layers[1].down.register_forward_pre_hook(
        lambda module, args: came.add(type(_torch.local_tensor(module.weight)).__name__)
    )
    if weights := vars(model).get("fp8_weights"):
        real = weights.take_scales
        weights.take_scales = lambda: (taken.append(1), real())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    mine = IDS.chunk(mesh.data_size)[mesh.data_rank]
    if fault == "twice the gradient of an input":
        backward = fp8.Tensorwise.backward
        fp8.Tensorwise.backward = staticmethod(
            lambda ctx, g: tuple(2 * t if i == 0 else t for i, t in enumerate(backward(ctx, g)))
        )
    gradients = []
    for _ in range(2):
        for i, part in enumerate(mine.chunk(accumulate)):
            kp.set_last_microbatch(model, i == accumulate - 1)
            model(part).logsumexp(-1).sum().backward()
        gradients.append({name: kp.fsdp.full(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Wide().named_parameters()]
    return gradients, kp.full_parameters(model), len(taken), list(model.state_dict()), came


LAYOUT_BOUND = 2e-4
"""A scale of other ranks' rows moves only values below the normal range, each by 2 · `SMALL_STEP` of the largest, which
is about 5 times the norm's share of a value: 4e-5 an operand, and five products follow one another."""
LAYOUTS = [
    ("tensorwise", {"dp_shard": 2}, {"recompute": "full"}, 2),
    ("tensorwise", {"dp_shard": 2}, {"reshard_after_forward": False}, 2),
    ("tensorwise", {"tp": 2}, {"sequence_parallel": False}, 1),
    ("tensorwise", {"dp_shard": 2, "tp": 2}, {}, 1),
    ("rowwise", {"dp_shard": 2, "tp": 2}, {"recompute": "full"}, 1),
]


@functools.cache
def alone(mode):
    return run_ranks(train, 1, {"fp8": mode}, {})[0]


@pytest.mark.parametrize(("mode", "axes", "options", "accumulate"), LAYOUTS, ids=str)
def test_layouts_agree_with_one_process(mode, axes, options, accumulate):
    gradients, weights, _, names, _ = alone(mode)
    for got in run_ranks(train, math.prod(axes.values()), {**axes, "fp8": mode}, options, accumulate):
        for a, b in zip([*got[0], got[1]], [*gradients, weights], strict=True):
            assert far(a, b) < LAYOUT_BOUND
        assert got[2] == (2 if mode == "tensorwise" else 0), "scales are taken once a step"
        assert got[3] == names
        assert ("Fp8Weight" in got[4]) == (mode == "tensorwise")


@pytest.mark.parametrize("fault", ["scales of one rank", "twice the gradient of an input"])
def test_a_fault_is_found(fault):
    gradients = alone("tensorwise")[0]
    got = run_ranks(train, 2, {"dp_shard": 2, "fp8": "tensorwise"}, {}, 1, fault)[0]
    assert far(got[0][0], gradients[0]) > 10 * LAYOUT_BOUND


def far(a, b):
    """Largest norm of a difference, over that of the tensor."""
    return max(((a[k] - b[k]).norm() / b[k].norm()).item() for k in b)


def test_what_does_not_fit_stays_and_says_why():
    model = nn.ModuleDict({
        "fits": nn.Linear(32, 48), "narrow": nn.Linear(32, 24), "head": nn.Linear(32, 16), "twin": nn.Linear(32, 16),
        "cut": nn.Linear(32, 48),
    })  # fmt: skip
    model["other"] = nn.Linear(32, 16)
    model["other"].weight = model["twin"].weight
    reasons = fp8.multiply_in_fp8(model, "rowwise", ("*head",), {"cut.weight": "colwise"}, tp=2)
    assert reasons == {
        "fits": "",
        "narrow": "[24, 32] has a size that is no multiple of 16",
        "head": "fp8_skip has *head",
        "twin": "the weight is shared with another module",
        "other": "the weight is shared with another module",
        "cut": "[48, 32], [24, 32] on a rank, has a size that is no multiple of 16",
    }
    x = torch.randn(4, 32)
    for name in ("narrow", "head", "twin", "cut"):
        module = model[name]
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert not torch.equal(model["fits"](x), nn.functional.linear(x, model["fits"].weight, model["fits"].bias))
    names = {"layers.0.up": "", "layers.1.up": "", "head": "fp8_skip has *head"}
    assert fp8.described(names) == "layers.*.up (2): fp8; head: fp8_skip has *head"


def test_what_multiplies_in_a_way_of_its_own_is_listed():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(6, 32)), nn.Parameter(torch.ones(6))

    model = nn.ModuleDict({"router": Router(), "mixer": Router(), "norm": nn.LayerNorm(32), "up": nn.Linear(32, 32)})
    model["embed"] = nn.Embedding(4, 32)
    assert fp8.other_matrices(model, ("*router",)) == {
        "router": "fp8_skip has *router",
        "mixer": "Router is no linear module",
    }


def test_views_of_a_gathered_weight_keep_its_bits_and_the_rest_sees_values():
    bits, unit = fp8.quantize(torch.randn(4, 8, 16), fp8.E4M3)
    weight = fp8.Fp8Weight(bits, unit, torch.bfloat16)
    values = (bits.float() * unit).bfloat16()
    for part in (lambda t: t[1:3], lambda t: t.flatten(0, 1), lambda t: t[2].t(), lambda t: t.narrow(1, 2, 4)):
        assert isinstance(part(weight), fp8.Fp8Weight)
        assert torch.equal(part(weight).dequantize(), part(values))
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(nn.functional.linear(x, weight[0]), nn.functional.linear(x, values[0]))


def test_compiles_to_one_graph_with_the_same_result():
    layer = nn.Linear(32, 16)
    fp8.multiply_in_fp8(layer, "tensorwise", ())
    x = torch.randn(6, 32)
    want = layer(x)
    want.sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    got.sum().backward()
    assert torch.equal(got, want) and torch.equal(layer.weight.grad, gradient)


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4", "MXFP8"])
def test_block_formats_are_refused(word):
    with pytest.raises(ValueError, match=f"parallel.fp8 = {word} scales blocks of 16 or 32 values"):
        kp.ParallelConfig(fp8=word)


def too_small(rank, world):
    config = kp.ParallelConfig(fp8="rowwise", device="cpu")
    kp.parallelize(lambda: nn.Linear(8, 8), kp.launch(config), config)


def experts(rank, world):
    config = kp.ParallelConfig(fp8="rowwise", device="cpu")
    kp.parallelize(mixture.Model, kp.launch(config), config, init=mixture.fill)


def test_experts_are_listed():
    with pytest.raises(RankFailure, match=r"layers\.\*\.moe\.experts \(\d\): experts stay in the compute dtype"):
        run_ranks(experts, 1)


def test_a_model_in_which_nothing_fits_and_an_old_device_are_refused(monkeypatch):
    with pytest.raises(RankFailure, match=r"no module would multiply in it: .*no multiple of 16; set it to none"):
        run_ranks(too_small, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"capability 8\.9 or above .* A100 has 8\.0; set parallel\.fp8 to none"):
        fp8.check_device("rowwise", torch.device("cuda", 0))


def compiled_blocks(rank, world):
    """Loss and gradient of two steps, plain and compiled, and how many graphs were made."""
    config = kp.ParallelConfig(precision="fp32", device="cpu", fp8="tensorwise")
    mesh = kp.launch(config)
    found = []
    for compiled in (False, True):
        model = kp.parallelize(Wide, mesh, config, init=small, gradients="sum", cast_inputs=False)
        for block in model.layers if compiled else ():
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(2):
            loss = model(IDS).logsumexp(-1).sum()
            loss.backward()
            optimizer.step()
        found.append((loss.item(), kp.fsdp.full(model.layers[0].up.weight.grad)))
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_compile_once_with_weights_that_travelled_in_8_bits():
    (plain, compiled), graphs = run_ranks(compiled_blocks, 1)[0]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-6)
    assert far({"": compiled[1]}, {"": plain[1]}) < 1e-5
    assert graphs == 1  # two blocks, two steps, and scales of their own
