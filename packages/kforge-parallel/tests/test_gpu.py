"""What differs on a device: NCCL beside gloo, and the compiled block."""

import os

import pytest
import torch
from chunks import packed, ring_by_chunks, whole_attention
from toy import IDS, Toy, fill

import kforge_parallel as kp
from kforge_parallel import compress, fp8


@pytest.fixture
def mesh():
    yield kp.launch(kp.ParallelConfig(device="cuda"), env={})
    kp.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "selective", "compile": True},
        {"offload_activations": True},
        {"offload_activations": True, "recompute": "full"},
        {"compile": True},
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_one_device_equals_the_cpu(mesh, options, monkeypatch):
    monkeypatch.setattr("kforge_parallel.offload.SMALL", 0)
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 56])
@pytest.mark.parametrize(("dim", "gradient"), [(None, fp8.E4M3), (None, fp8.E5M2), (1, fp8.E4M3)], ids=str)
def test_products_in_fp8_equal_the_product_of_what_the_bits_say(rows, dim, gradient):
    random = torch.Generator().manual_seed(7)
    a, a_unit = fp8.quantize(torch.randn(rows, 96, generator=random), gradient, dim)
    b, b_unit = fp8.quantize(torch.randn(48, 96, generator=random), fp8.E4M3, dim)
    units = (a_unit, b_unit.t()) if dim else (a_unit, b_unit)
    right = (a.double() * units[0]) @ (b.double().t() * units[1])
    size = (a.double() * units[0]).abs() @ (b.double().t() * units[1]).abs()
    for fast in (False, True):
        got = fp8.product(a.cuda(), units[0].cuda(), b.cuda().t(), units[1].cuda(), torch.bfloat16, fast=fast)
        # A result in bf16; tensor cores keep 13 bits of a sum, or more.
        assert ((got.cpu().double() - right).abs() <= right.abs() * 2.0**-8 + size * 2.0**-10).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tensorwise", "rowwise"])
def test_a_module_in_fp8_equals_the_cpu_waits_for_nothing_and_is_one_graph(mode):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, bias=False).bfloat16()
    x, g = torch.randn(40, 64).bfloat16(), torch.randn(40, 48).bfloat16()  # 40 tokens: padded in the sum over them
    fp8.multiply_in_fp8(layer, mode, ())

    def run(module, device, call=None):
        own = x.to(device, copy=True).requires_grad_()
        module.weight.grad = None
        y = (module if call is None else call)(own)  # what is compiled has no length
        y.backward(g.to(device))
        return [t.detach().float().cpu() for t in (y, own.grad, module.weight.grad)]

    right = run(layer, "cpu")
    layer = layer.cuda()
    run(layer, "cuda")
    inputs = x.cuda().requires_grad_(), g.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(inputs[0]).backward(inputs[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got in (run(layer, "cuda"), run(layer, "cuda", torch.compile(layer, fullgraph=True))):
        for mine, expected in zip(got, right, strict=True):
            torch.testing.assert_close(mine, expected, rtol=2.0**-7, atol=2.0**-7 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"compile": True, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("mode", ["tensorwise", "rowwise"])
def test_a_model_in_fp8_is_near_the_one_in_bf16(mesh, mode, options):
    def gentle(model):
        """Weights small enough that an error of one layer does not grow in the next."""
        fill(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("linear.weight"):
                    parameter.mul_(0.1)

    def loss_and_gradients(**more):
        model = kp.parallelize(lambda: Toy(dim=32), mesh, init=gentle, precision="bf16", gradients="sum", **more)
        loss = model(IDS.cuda()).float().logsumexp(-1).sum()
        loss.backward()
        return loss.item(), {name: p.grad.to_local().cpu() for name, p in model.named_parameters()}

    loss, gradients = loss_and_gradients()
    got_loss, got = loss_and_gradients(fp8=mode, **options)
    assert got_loss == pytest.approx(loss, rel=0.01)
    for name in ("layers.0.linear.weight", "embed.weight"):
        assert 1e-3 < (got[name] - gradients[name]).norm() / gradients[name].norm() < 0.15, name


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_compressed_gradients_are_those_of_the_cpu(codec):
    encode, decode = compress.CODECS[codec]
    x = torch.randn(4, 64 * 256) * torch.logspace(-20, 4, 4)[:, None]
    assert torch.equal(encode(x.cuda()).cpu(), encode(x))
    assert torch.equal(decode(encode(x).cuda(), torch.float32).cpu(), decode(encode(x), torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"compress": "int8"}, {"compress": "powersgd", "compress_rank": 1}], ids=str)
def test_no_reduction_waits_for_the_device(mesh, options):
    """Of one replica alone, which is all that one device has: nothing is lost by what is sent to nobody."""
    mode, rank = options["compress"], options.get("compress_rank", 4)
    compression = compress.Compression(mode, rank, "one", torch.float32, mesh.device)
    model = torch.nn.Linear(64, 64, device=mesh.device)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh.device_mesh["dp_shard"])
    compression.add(model, mesh.replicas())
    model(torch.randn(8, 64, device=mesh.device)).sum().backward()
    model.zero_grad()
    x, gate = torch.randn(8, 64, device=mesh.device), torch.ones((), device=mesh.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
        compression.settle(gate)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    left = compression.state_dict()["left"]
    assert any(name.partition(".")[2].startswith("error") for name in left)
    gradient = x.sum(0).expand(64, 64).contiguous()
    near = (model.weight.grad.to_local() - gradient).norm() / gradient.norm()
    assert near < (0.02 if mode == "int8" else 1e-3)  # the gradient of this loss has rank 1
