"""What differs on a device: NCCL beside gloo, and the compiled block."""

import os

import pytest
import torch
from toy import IDS, Toy, fill

import kforge_parallel as kp


@pytest.fixture
def mesh():
    yield kp.launch(kp.ParallelConfig(device="cuda"), env={})
    kp.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"compile": True}, {"cpu_offload": True}], ids=str)
def test_one_device_equals_the_cpu(mesh, options):
    reference = Toy().double()
    fill(reference)
    reference(IDS).logsumexp(-1).sum().backward()
    model = kp.parallelize(Toy, mesh, init=fill, precision="fp64", gradients="sum", **options)
    loss = model(IDS.cuda()).logsumexp(-1).sum()
    loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.device.type == parameter.grad.device.type == ("cpu" if "cpu_offload" in options else "cuda")
        torch.testing.assert_close(parameter.grad.to_local().cpu(), expected.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.gpu
def test_both_backends_are_there(mesh):
    for device in ("cpu", "cuda"):
        total = torch.ones(1, device=device)
        torch.distributed.all_reduce(total)
        assert total.item() == 1


@pytest.mark.gpu
def test_every_group_of_both_backends_waits_for_the_time_of_a_step():
    mesh = kp.launch(kp.ParallelConfig(device="cuda", init_timeout_s=41, build_timeout_s=42, step_timeout_s=43), env={})
    try:
        for group in (None, *(mesh.device_mesh.get_group(name) for name in mesh.device_mesh.mesh_dim_names)):
            group = group or torch.distributed.group.WORLD
            for device in ("cpu", "cuda"):
                assert group._get_backend(torch.device(device)).options._timeout.total_seconds() == 43
            for device in ("cpu", "cuda"):
                total = torch.ones(1, device=device)
                torch.distributed.all_reduce(total, group=group)
                assert total.item() == 1
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    finally:
        kp.shutdown()
