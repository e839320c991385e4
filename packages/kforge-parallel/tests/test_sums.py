"""Sums of bf16 gradients in float32, against the sum by hand."""

import pytest
import torch
from toy import IDS, Toy, fill

import kforge_parallel as kp
from kforge_parallel import build
from kforge_parallel.sums import sum_gradients

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def mesh(request, monkeypatch):
    monkeypatch.setattr(build, "LINEAR_SUMS", ())  # those have no rounding to bf16, and tests of their own
    yield kp.launch(kp.ParallelConfig(device=request.param), env={})
    kp.shutdown()


def gradients(model, ids, weight):
    model.zero_grad()
    (model(ids).float().logsumexp(-1).sum() * weight).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
def test_three_microbatches_are_the_sum_of_each_alone_bit_for_bit(mesh, tied, options):
    model = kp.parallelize(
        lambda: Toy(tied), mesh, init=fill, precision="bf16", storage="split", gradients="sum", **options
    )
    ids = IDS.to(mesh.device)
    alone = [gradients(model, ids, weight) for weight in (1.0, 3.0, 0.37)]
    model.zero_grad()
    for weight in (1.0, 3.0, 0.37):
        (model(ids).float().logsumexp(-1).sum() * weight).backward()
    for name, parameter in model.named_parameters():
        first, second, third = (each[name] for each in alone)
        assert parameter.dtype == torch.bfloat16 and parameter.grad.dtype == first.dtype == torch.float32
        assert torch.equal(parameter.grad, first + second + third), name
        assert torch.equal(first, first.bfloat16().float())


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_that_takes_no_part_keeps_its_sum(device):
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 3, bias=False, dtype=torch.bfloat16) for _ in range(2)).to(device)
    sum_gradients(layers, torch.float32)
    x = torch.arange(5.0, device=device).bfloat16()
    (layers[0](x) + layers[1](x)).sum().backward()
    kept = layers[1].weight.grad
    before = kept.clone()
    layers[0](x).sum().backward()
    assert layers[1].weight.grad is kept and torch.equal(kept, before)
    assert torch.equal(layers[0].weight.grad, 2 * before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_that_gives_a_parameter_no_gradient_leaves_its_sum(device):
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, learns):
            ctx.save_for_backward(x)
            ctx.learns = learns
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient * ctx.saved_tensors[0] if ctx.learns else None, None

    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=device))
    sum_gradients(torch.nn.ParameterList([weight]), torch.float32)
    x = torch.arange(3.0, device=device).bfloat16()
    for learns in (True, False, True, False):
        Times.apply(x, weight, learns).sum().backward()
    assert torch.equal(weight.grad, 2 * x.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(1,), (4095,), (4097,), (3, 5000), (0, 4)], ids=str)
def test_odd_sizes_and_strides(device, shape):
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=random).bfloat16().to(device) for _ in range(2))
    for turn in (lambda x: x, lambda x: x.transpose(0, -1)):
        weight = torch.nn.Parameter(turn(torch.zeros_like(a)))
        sum_gradients(torch.nn.ParameterList([weight]), torch.float32)
        for gradient in (a, b, a):
            weight.backward(turn(gradient))
        assert torch.equal(weight.grad, turn(a.float() + b.float() + a.float()))
