"""What differs on a device: NCCL beside gloo, and the compiled block."""

import os

import pytest
import torch
from chunks import packed, ring_by_chunks, whole_attention
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_tokens_are_exchanged_without_a_wait(dtype):
    """Over NCCL, of one rank; any other wait for the device than that for the sizes raises."""
    from kforge_parallel.expert import AllToAllExchange

    mesh = kp.launch(kp.ParallelConfig(device="cuda"), env={})
    try:
        exchange = AllToAllExchange(torch.distributed.group.WORLD, 4)
        x = torch.randn(6, 8, device=mesh.device).to(dtype).requires_grad_()
        ids = torch.tensor([[0, 2], [2, 0], [3, 2], [3, 3], [0, 3], [2, 3]], device=mesh.device)
        weights = torch.rand(6, 2, device=mesh.device).requires_grad_()
        factors = torch.arange(1, 5, device=mesh.device, dtype=dtype)

        def experts(rows, counts):
            return rows * factors.repeat_interleave(counts, output_size=12).unsqueeze(1)

        for again in (False, True):  # the first transfer of a group makes its communicator
            torch.cuda.set_sync_debug_mode("error" if again else "default")
            x.grad = weights.grad = None
            y = exchange(x, ids, weights, experts)
            y.sum().backward()
        torch.cuda.set_sync_debug_mode("default")
        factor = (weights * factors[ids]).sum(1, keepdim=True).to(torch.float64)
        wide = x.detach().to(torch.float64)
        limit = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(y.to(torch.float64), wide * factor, **limit)
        torch.testing.assert_close(x.grad.to(torch.float64), factor.expand_as(wide), **limit)
        of_weights = (wide.sum(1, keepdim=True) * factors[ids]).to(torch.float32)
        torch.testing.assert_close(weights.grad, of_weights, rtol=0.05, atol=0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        kp.shutdown()


# ------------------------------------------------------------------------------------------ context parallelism


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kernel", "dtype", "limit", "value", "window"),
    [
        # bfloat16 keeps 8 bits: operands, out and each rank's addends of a gradient are rounded to 2^-9
        ("flash", torch.bfloat16, 1e-2, 64, None),
        ("flash", torch.float16, 2e-3, 64, None),
        ("efficient", torch.bfloat16, 1e-2, 64, 100),
        ("efficient", torch.float16, 2e-3, 64, 100),
        ("efficient", torch.bfloat16, 1e-2, 48, None),
        ("efficient", torch.float32, 1e-4, 64, None),
        ("exact", torch.float64, 1e-12, 64, 100),
    ],
)
@pytest.mark.parametrize("documents", [True, False])
def test_chunks_of_a_ring_together_are_plain_attention(size, kernel, dtype, limit, value, window, documents):
    random = torch.Generator().manual_seed(5)
    shapes = ((8, 64), (2, 64), (2, value), (8, value))
    q, k, v, grad = (torch.randn(4, h, 1024, d, generator=random).cuda().to(dtype) for h, d in shapes)
    docs, ends, longest = packed(4, 1024)
    docs, ends = (docs.cuda(), ends.cuda()) if documents else (None, torch.arange(0, 4097, 1024).int().cuda())
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    right = whole_attention(*inputs, docs, window, 0.125)
    right.backward(grad.double())
    longest = longest if documents else 1024
    found = ring_by_chunks(q, k, v, grad, size, docs, ends, longest, window, 0.125, kernel)
    for name, mine, expected in zip("oqkv", found, (right.detach(), *(x.grad for x in inputs)), strict=True):
        assert error(mine, expected) < limit, name


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("documents", [True, False])
def test_queries_of_each_rank_against_gathered_keys_are_plain_attention(window, documents):
    from types import SimpleNamespace

    from kforge_parallel.columns import columns_of
    from kforge_parallel.context import AllGatherCore

    random = torch.Generator().manual_seed(6)
    q, k, v, grad = (torch.randn(4, h, 1024, 64, generator=random).cuda().bfloat16() for h in (8, 2, 2, 8))
    docs, ends, longest = packed(4, 1024)
    docs, ends = (docs.cuda(), ends.cuda()) if documents else (None, None)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    right = whole_attention(*inputs, docs, window, 0.125)
    right.backward(grad.double())
    parts = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.empty_like(q)
    for rank in range(4):
        own = torch.nn.Module()
        own.scale, own.window = 0.125, window
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 4)
        columns = columns_of(rank, 4, "allgather", 1024, q.device)
        whole = SimpleNamespace(doc_ids=docs, cu_seqlens=ends, max_seqlen=longest)
        part = AllGatherCore(own, group).by_chunks(parts[0][:, :, columns], parts[1], parts[2], whole)
        part.backward(grad[:, :, columns])
        out[:, :, columns] = part.detach()
    gradients = zip("qkv", (x.grad for x in parts), (x.grad for x in inputs), strict=True)
    for name, mine, expected in (("out", out, right.detach()), *gradients):
        assert error(mine, expected) < 1e-2, name
