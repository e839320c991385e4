"""Gradients of linear weights that are added in their products: against sums in float64, of integers so small that bf16
has them all, so that they are equal; gradients of weights are beyond that, where a rounding to bf16 would be seen."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toy import IDS, Toy, fill

import kforge_parallel as kp
from kforge_parallel import build, linear_sums
from kforge_parallel._torch import TorchDispatchMode
from kforge_parallel.linear_sums import sum_in_products
from kforge_parallel.sums import sum_gradients

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]


class Stacked(nn.Module):
    is_linear = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, 4))
        self.bias = nn.Parameter(torch.empty(2, 3))

    def forward(self, x):
        return F.linear(x, self.weight.flatten(0, -2), self.bias.flatten()).unflatten(-1, (2, 3))


class Net(nn.Module):
    """The input of its first product has no gradient, and one weight is used twice in the same way."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4, bias=False)
        self.stacked = Stacked()
        self.gain = nn.Parameter(torch.empty(4))

    def forward(self, x, skip=False):
        x = self.first(x).relu() * self.gain
        if not skip:
            x = self.twice(x) + self.twice(x)
        return self.stacked(x)


LINEAR = {"first.weight", "twice.weight", "stacked.weight"}


def integers(*shape, seed, least=-1):
    """That and the two above it, in float64."""
    return torch.randint(least, least + 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def net(device, *, products=True):
    model = Net()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=i))
    model.to(torch.bfloat16).to(device)
    sum_gradients(model, torch.float32)
    if products:
        assert set(sum_in_products(model)) == {"first", "twice", "stacked"}
    return model


def microbatches(device, dtype=torch.bfloat16):
    """Three, of other sizes each: x, and the gradient of y."""
    made = [[integers(2, rows, *size, seed=rows, least=0) for size in ((4,), (2, 3))] for rows in (150, 301, 211)]
    return [(x.to(device, dtype), g.to(device, dtype)) for x, g in made]


def expected(device, skipped=()):
    """The gradients in float64, by autograd."""
    model = net(device, products=False).double()
    exact = Net().to(device).double()
    exact.load_state_dict(model.state_dict())
    for i, (x, g) in enumerate(microbatches(device, torch.float64)):
        exact(x, i in skipped).backward(g)
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


def run(model, call, device, skipped=()):
    for i, (x, g) in enumerate(microbatches(device)):
        call(x, i in skipped).backward(g)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alike(gradient, old):
    """The very bits on the CPU; on a GPU other kernels may have been taken."""
    if gradient.is_cuda:
        return (gradient - old).abs().max() <= 2**-7 * old.abs().max()
    return torch.equal(gradient, old)


def check(found, exact, old):
    """Sums of linear weights are exact; all others are what they were."""
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        if name in LINEAR:
            assert torch.equal(gradient.double(), exact[name]), name
        else:
            assert alike(gradient, old[name]), name
    assert any(not torch.equal(old[name].double(), exact[name]) for name in LINEAR)  # rounded to bf16 on its way


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
@pytest.mark.parametrize("device", DEVICES)
def test_three_microbatches(device, again, compiled):
    model = net(device)

    def forward(x, skip):
        return checkpoint(model, x, use_reentrant=False) if again else model(x)

    torch.compiler.reset()
    backend = "aot_eager" if again and device == "cpu" else "inductor"
    call = torch.compile(forward, dynamic=True, backend=backend) if compiled else forward
    plain = net(device, products=False)
    check(run(model, call, device), expected(device), run(plain, plain, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_module_that_takes_no_part_in_a_microbatch_keeps_its_sum(device, skipped):
    model = net(device)
    exact, found = expected(device, skipped), run(model, model, device, skipped)
    for name in LINEAR:
        assert (exact[name] is None) == (found[name] is None) == (name == "twice.weight" and len(skipped) == 3)
        if found[name] is not None:
            assert torch.equal(found[name].double(), exact[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_who_else_uses_a_weight_has_its_part_added(device):
    model, plain = net(device), net(device, products=False)
    for each in (model, plain):
        for x, g in microbatches(device):
            (each(x) * g).sum().backward()
            (each(x)[:, :9] * g[:, :9] + each.twice.weight.square().sum()).sum().backward()
    exact = 2 * plain.twice.weight.detach().double() * 3 * 2 * 9 * 6
    for x, g in microbatches(device, torch.float64):
        other = copy.deepcopy(plain).double()
        (other(x) * g).sum().backward()
        (other(x)[:, :9] * g[:, :9]).sum().backward()
        exact += other.twice.weight.grad
    assert torch.equal(model.twice.weight.grad.double(), exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 7, 500])
def test_sums_of_ordinary_numbers_are_nearer_to_float64_than_those_of_bf16_gradients(device, rows):
    random = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(shape, generator=random).bfloat16().to(device)

    batches = [(draw(rows, 48), draw(rows, 80)) for _ in range(4)]
    exact = sum(g.double().t() @ x.double() for x, g in batches)
    errors = []
    for products in (False, True):
        layer = nn.Linear(48, 80, bias=False, dtype=torch.bfloat16, device=device)
        sum_gradients(layer, torch.float32)
        if products:
            sum_in_products(layer)
        for x, g in batches:
            layer(x.requires_grad_()).backward(g)
        errors.append((layer.weight.grad.double() - exact).abs().max() / exact.abs().max())
    old, new = errors
    assert new < 1e-5 and old > 5e-4


class Made(TorchDispatchMode):
    """dtype and number of elements of every tensor that an operation makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {(t.dtype, t.numel()) for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t)}
        return out


def test_no_gradient_of_a_weight_is_made_in_bf16():
    for products in (False, True):
        layer = nn.Sequential(nn.Linear(48, 80, bias=False, dtype=torch.bfloat16))
        sum_gradients(layer, torch.float32)
        if products:
            sum_in_products(layer)
        y = layer(torch.ones(3, 48, dtype=torch.bfloat16, requires_grad=True))
        with Made() as made:
            made.seen = set()
            y.backward(torch.ones_like(y))
        assert ((torch.bfloat16, 48 * 80) in made.seen) == (not products)
        assert torch.equal(layer[0].weight.grad, torch.full((80, 48), 3.0))


@pytest.mark.gpu
def test_memory_of_a_backward_is_that_of_the_sum():
    layer = nn.Linear(4096, 8192, bias=False, dtype=torch.bfloat16, device="cuda")
    sum_gradients(layer, torch.float32)
    sum_in_products(layer)
    x = torch.ones(16, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()  # workspaces stay
    layer.weight.grad = None
    for already in (0, 4):  # bytes a weight that are there before
        y = layer(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(torch.ones_like(y))
        grown = (torch.cuda.max_memory_allocated() - before) / layer.weight.numel()
        assert grown < 4 - already + 0.5
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight.grad, 16.0 + 4 * already))


def test_what_is_not_plain_is_left_alone():
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def bf16(*sizes):
        return nn.Linear(*sizes, dtype=torch.bfloat16)

    model = nn.ModuleDict({name: bf16(4, 4) for name in ("plain", "a", "b", "frozen", "replaced", "turned", "changed")})
    model["other"] = Other(4, 4, dtype=torch.bfloat16)
    model["wide"] = nn.Linear(4, 4)
    model["b"].weight = model["a"].weight
    model["frozen"].weight.requires_grad_(False)
    model["replaced"].forward = lambda x: x
    model["turned"].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16).tril().t())
    nn.utils.parametrizations.weight_norm(model["changed"])
    assert sum_in_products(model) == ["plain"]


def test_an_input_without_dimensions_of_rows():
    layer = net("cpu").first
    layer(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(4, 4)) and torch.equal(layer.bias.grad, torch.ones(4))


def test_a_gradient_that_somebody_has_set_is_added_to():
    layer = net("cpu").twice
    layer.weight.grad = torch.full((4, 4), 300.0, dtype=torch.bfloat16)
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 301.0)) and layer.weight.grad.dtype == torch.float32


def test_a_copy_of_a_model_is_told_that_it_has_no_sums():
    model = copy.deepcopy(net("cpu"))
    x, g = microbatches("cpu")[0]
    with pytest.raises(RuntimeError, match="not where it was when `parallelize` returned"):
        model(x).backward(g)


def test_without_gradients_it_is_the_same_product():
    model, plain = net("cpu"), net("cpu", products=False)
    x, _ = microbatches("cpu")[0]
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))


@pytest.fixture(params=DEVICES)
def mesh(request):
    yield kp.launch(kp.ParallelConfig(device=request.param), env={})
    kp.shutdown()


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ({"storage": "split"}, True),
        ({"storage": "stochastic", "recompute": "full"}, True),
        ({"storage": "split", "fp8": "tensorwise", "fp8_skip": ("*head", "*.0.linear")}, True),
        ({"storage": "fp32"}, False),
    ],
    ids=str,
)
def test_parallelize(mesh, options, on, monkeypatch):
    """Off unless it is turned on; then where FSDP2 does not wrap the model, of what does not multiply in FP8."""

    def gradients(types):
        monkeypatch.setattr(build, "LINEAR_SUMS", types)
        model = kp.parallelize(
            lambda: Toy(dim=16), mesh, init=fill, precision="bf16", gradients="sum", compile=False, **options
        )
        for rows in (1, 3):
            model(IDS[:rows].to(mesh.device)).float().logsumexp(-1).sum().backward()
        forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
        changed = {n for n, forward in forwards.items() if getattr(forward, "__func__", None) is linear_sums._forward}
        return changed, {name: p.grad for name, p in model.named_parameters()}

    none, old = gradients(())
    some, new = gradients((mesh.device.type,))
    all_linear = {"head", "layers.0.linear", "layers.1.linear", "layers.2.linear"}
    assert not none
    assert some == ({"head", "layers.0.linear"} if "fp8" in options else all_linear if on else set())
    for name, gradient in new.items():
        assert gradient.dtype == old[name].dtype
        if name.removesuffix(".weight") in some:
            assert (gradient - old[name]).abs().max() <= 2**-8 * old[name].abs().max()
        else:
            assert alike(gradient, old[name]), name
