"""Weights that are cast once a step: the same bits as those cast in each product, and new ones when weights are new."""

import pytest
import torch
from toy import IDS, Toy, fill

import kforge_parallel as kp
from kforge_parallel import fp8
from kforge_parallel.fp8_kept import KeptWeights


@pytest.fixture(params=["tensorwise", "rowwise"])
def model(request):
    mesh = kp.launch(kp.ParallelConfig(device="cpu"), env={})
    options = {"precision": "bf16", "storage": "split", "gradients": "sum"}
    yield kp.parallelize(lambda: Toy(dim=32), mesh, init=fill, fp8=request.param, **options)
    kp.shutdown()


def run(model):
    model.zero_grad()
    loss = model(IDS).float().logsumexp(-1).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_the_bits_are_those_of_a_cast_in_each_product(model, monkeypatch):
    kept = run(model)
    linears = [block.linear for block in model.layers.values()]
    for linear in linears:
        names = fp8.KEPT[linear.fp8]
        for i, dim in enumerate([None] if linear.fp8 == "tensorwise" else [1, 0]):
            bits, unit = fp8.quantize(linear.weight.detach(), fp8.E4M3, dim)
            mine, own = (getattr(linear, name) for name in names[2 * i : 2 * i + 2])
            assert torch.equal(mine.view(torch.uint8), bits.view(torch.uint8)) and torch.equal(own, unit)
    monkeypatch.setattr(KeptWeights, "cast", lambda self: None)
    for linear in linears:
        for name in fp8.KEPT[linear.fp8]:
            delattr(linear, name)
    assert all(torch.equal(mine, expected) for mine, expected in zip(kept, run(model), strict=True))


def test_one_cast_a_step_however_many_microbatches_and_one_more_where_weights_change(model, monkeypatch):
    casts = []
    cast = KeptWeights.cast
    monkeypatch.setattr(KeptWeights, "cast", lambda self: (casts.append(1), cast(self))[1])
    for step in (1, 2):
        for last in (False, False, True):
            kp.set_last_microbatch(model, last)
            loss = model(IDS).float().logsumexp(-1).sum()
            loss.backward()
        assert len(casts) == step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # a step of the optimizer
    kp.set_last_microbatch(model, True)
    assert torch.equal(run(model)[0], run(model)[0]) and len(casts) == 4  # each may be the last before a change


def test_a_checkpoint_does_not_have_them(model):
    assert not [name for name in model.state_dict() if "fp8" in name]
