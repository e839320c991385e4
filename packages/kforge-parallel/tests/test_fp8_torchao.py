"""The products of `kforge_parallel.fp8` against those of torchao, which works them out on the CPU too."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from kforge_parallel import fp8


@functools.cache
def torchao():
    """torchao.float8; it looks for its own kernels when it is imported, and logs that there are none on the CPU."""
    return pytest.importorskip("torchao.float8", reason="an oracle of the [test] extra")


def theirs(recipe, weight, x, gradient):
    """Output and gradients of torchao's linear under scales that are powers of two, as ours are."""
    ao = torchao()
    config = ao.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=True)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    model = ao.convert_to_float8_training(nn.Sequential(layer), config=config)
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
