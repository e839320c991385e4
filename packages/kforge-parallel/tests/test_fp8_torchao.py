"""The products of `kforge_parallel.fp8` against those of torchao, which works them out on the CPU too; and models of
torchao's own modules in layouts."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from kforge_parallel import ParallelConfig, fp8, full_state, launch, parallelize
from kforge_parallel.fsdp import full
from kforge_testing import RankFailure, run_ranks


@functools.cache
def torchao():
    """torchao.float8; it looks for its own kernels when it is imported, and logs that there are none on the CPU."""
    return pytest.importorskip("torchao.float8", reason="an oracle of the [test] extra")


def convert(model, recipe, **more):
    """Let torchao's linear modules take the place of torch's, under scales that are powers of two, as ours are."""
    config = torchao().Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=True)
    return torchao().convert_to_float8_training(model, config=config, **more)


def theirs(recipe, weight, x, gradient):
    """Output and gradients of torchao's linear."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    model = convert(nn.Sequential(layer), recipe)
    return run(model, model[0].weight, x, gradient)


def ours(mode, weight, x, gradient):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    model = nn.Sequential(layer)
    assert fp8.multiply_in_fp8(model, mode, ()) == {"0": ""}
    return run(model, layer.weight, x, gradient)


def run(model, weight, x, gradient):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(gradient)
    return y.detach(), x.grad, weight.grad


def inputs(dtype):
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(5))
    x, weight, gradient = draw(48, 64), draw(32, 64) / 8, draw(48, 32) / 100
    x[3] *= 300  # a token with large features
    return (tensor.to(dtype) for tensor in (weight, x, gradient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensorwise_is_torchaos(dtype):
    same(ours("tensorwise", *inputs(dtype)), theirs("tensorwise", *inputs(dtype)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rowwise_is_torchaos_with_the_gradient_of_the_weight_not_in_fp8(dtype):
    """torchao's recipe of that kind has one scale for the weight in the gradient of the input; ours one a column."""
    y, dx, _ = theirs("rowwise", *inputs(dtype))
    dw = theirs("rowwise_with_gw_hp", *inputs(dtype))[2]
    same(ours("rowwise", *inputs(dtype)), (y, dx, dw), dtype)


def same(mine, others, dtype):
    for a, b in zip(mine, others, strict=True):
        assert a.dtype == b.dtype == dtype
        size = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=size * (2e-6 if dtype == torch.float32 else 2**-8))


def test_one_scale_for_the_whole_instead_of_one_a_row_is_seen():
    """The control."""
    ours_, theirs_ = ours("tensorwise", *inputs(torch.float32)), theirs("rowwise", *inputs(torch.float32))
    for a, b in zip(ours_[1:], theirs_[1:], strict=True):  # of the gradients, which are in another format, too
        assert (a - b).abs().max() > 1e-3 * b.abs().max()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "sequence"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 12)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def converted():
    return convert(Model(), "tensorwise", module_filter_fn=lambda module, name: name != "head")


def gradients_of(rank, world, options):
    """Gradients of a model that torchao has converted while it was built, its names, and the class of a module."""
    mesh = launch(ParallelConfig(precision="fp32", device="cpu", sequence_parallel=False, **options))
    model = parallelize(converted, mesh, gradients="sum", plan=PLAN)
    x = torch.linspace(-1, 1, 8 * 4 * 32).sin().view(8, 4, 32).chunk(mesh.data_size)[mesh.data_rank]
    model(x).square().sum().backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    return gradients, [*full_state(model)], type(model.layers[1].down).__name__


def test_torchaos_own_modules_may_be_spread():
    torchao()
    ((wanted, names, _),) = run_ranks(gradients_of, 1, {}, init=False)
    assert names == [*Model().state_dict()]
    for options in ({"dp_shard": 2, "recompute": "full"}, {"tp": 2}):
        for gradients, also, kind in run_ranks(gradients_of, 2, options, init=False):
            assert kind == "Float8Linear" and also == names
            for name, gradient in gradients.items():
                assert (gradient - wanted[name]).norm() < 2e-6 * wanted[name].norm(), (options, name)


def both(rank, world):
    config = ParallelConfig(device="cpu", fp8="rowwise", fp8_skip=("layers.*",))
    parallelize(lambda: nn.ModuleDict({"one": converted(), "other": nn.Linear(32, 16)}), launch(config))


def test_both_at_once_are_refused():
    torchao()
    with pytest.raises(RankFailure, match=r"torchao's Float8Linear at one.*up, .* set parallel\.fp8 to none"):
        run_ranks(both, 1, init=False)
