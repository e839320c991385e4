"""What the workers of test_compress.py run."""

import torch
import torch.distributed as dist
from comparable import Split, loss
from toy import Toy, fill

from kforge_parallel import ParallelConfig, compress, compression_of, launch, parallelize, set_last_microbatch


def exact(x):
    return x.view(torch.uint8)


def whole(sent, dtype):
    return sent.view(dtype)


def toy_sent_whole():
    """A toy whose replicas send every bit: what is left to differ from one process is where things go."""
    compress.CODECS["bf16"] = (exact, whole)
    return Toy(dim=8)


def made(mode, shapes, rank=2):
    device, group = torch.device("cpu"), dist.group.WORLD
    shapes = [torch.Size(shape) for shape in shapes]
    if mode == "powersgd":
        return compress.PowerSGD(shapes, group, 1, rank, dtype=torch.float64, device=device)
    return compress.Rounded(shapes, group, 1, mode, dtype=torch.float64, device=device)


def gradients(shapes, rank, step):
    """Of one replica: a part that all have, and its own, with blocks of very different sizes."""
    parts = []
    for i, shape in enumerate(shapes):
        common, own = (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in (1000 * step + i, 10_000 * rank + 100 * step + i)
        )
        parts.append((common + 0.5 * own).flatten() * 10.0**i)
    return torch.cat(parts)


def sums(rank, world, mode, shapes, steps, gates=None):
    """(what came out of each step, what is left over, bytes sent) of a reduction."""
    reduction, outs = made(mode, shapes), []
    for step in range(steps):
        total = gradients(shapes, rank, step)
        reduction(total)
        outs.append(total)
        if gates is not None:
            reduction.settle(torch.tensor(gates[step]))
    reduction.settle(None)
    return outs, reduction.kept, reduction.bytes_sent


def counted(rank, world, mode, shapes):
    """Bytes that a call hands to collectives for other ranks, and what it says of itself."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Bytes(TorchDispatchMode):
        sent = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            if name.startswith("c10d.alltoall_base"):
                self.sent += args[1].nbytes * (world - 1) // world
            elif name.startswith("c10d._allgather_base"):
                self.sent += args[1].nbytes * (world - 1)
            elif name.startswith("c10d.allreduce"):
                self.sent += 2 * sum(tensor.nbytes for tensor in args[0]) * (world - 1) // world
            else:
                assert not name.startswith("c10d."), name
            return func(*args, **(kwargs or {}))

    reduction = made(mode, shapes)
    with Bytes() as seen:
        reduction(gradients(shapes, rank, 0))
    return seen.sent, reduction.bytes_sent


def replicas(rank, world, options, each):
    """Weights and gradients of two steps of two microbatches, and the left-over state, of this rank's part."""
    from kforge_parallel import check_replicas, full_parameters

    config = ParallelConfig(precision="fp32", device="cpu", **options)
    mesh = launch(config)
    model = parallelize(lambda: Toy(dim=64), mesh, config, init=fill, gradients="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(2):
        for i in range(2):
            set_last_microbatch(model, each or i == 1)
            ids = (torch.arange(24).view(4, 6) * (3 + rank + 7 * i + step)) % 11
            loss(model, {"ids": ids, "labels": ids.flip(1)}, torch.tensor(1 / 24)).backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        check_replicas(model)
    compression = compression_of(model)
    left = compression and compression.state_dict()
    return found, full_parameters(model), left


def split_sent_whole():
    compress.CODECS["bf16"] = (exact, whole)
    return Split()
