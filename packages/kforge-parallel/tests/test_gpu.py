"""What differs on a device: NCCL beside gloo, and the compiled block."""

import pytest
import torch
from toy import IDS, Toy, fill

import kforge_parallel as kp


@pytest.fixture
def mesh():
    yield kp.launch(kp.ParallelConfig(device="cuda"), env={})
    kp.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"compile": True}], ids=str)
def test_one_device_equals_the_cpu(mesh, options):
    reference = Toy().double()
    fill(reference)
    reference(IDS).logsumexp(-1).sum().backward()
    model = kp.parallelize(Toy, mesh, init=fill, precision="fp64", gradients="sum", **options)
    loss = model(IDS.cuda()).logsumexp(-1).sum()
    loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), expected.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.gpu
def test_both_backends_are_there(mesh):
    for device in ("cpu", "cuda"):
        total = torch.ones(1, device=device)
        torch.distributed.all_reduce(total)
        assert total.item() == 1
