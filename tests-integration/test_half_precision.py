"""bf16 over layouts: as near to one process, and to the truth in float64, as rounding lets it be.

Copies and shards change nothing but the order in which fp32 gradients are added: they stay within three times the
distance of two runs of one process that differ only in the order of their microbatches. Tensor parallelism rounds other
partial sums to bf16, so it is another bf16 run; it is held to the truth, from which it must be no farther than one
process is, but for a tenth.
"""

import os

import pytest
import torch

from kforge_testing import run_ranks

STEPS, ROWS, TOKENS, VOCAB = 6, 16, 64, 256
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def train(rank, world, layout, precision, reverse, device):
    """Gathered gradients of the first step and weights after the last, in float64."""
    from kforge_model import ModelConfig, Transformer
    from kforge_optim import OptimConfig, build_optimizer, clip
    from kforge_parallel import ParallelConfig, launch, parallelize, set_last_microbatch

    os.environ["LOCAL_RANK"] = "0"  # on a GPU, all ranks share the first, through gloo
    config = ParallelConfig(precision=precision, device=device, **layout)
    mesh = launch(config)
    sizes = ModelConfig(vocab_size=VOCAB, dim=64, n_layers=2, n_heads=4, n_kv_heads=2)
    model = parallelize(
        lambda: Transformer(sizes), mesh, config, init=lambda m: m.init_weights(1), gradients="sum", cast_inputs=False
    )
    storage = "split" if layout.get("storage") else "fp32"
    optimizer = build_optimizer(model, OptimConfig(lr=3e-3, schedule="constant"), STEPS, storage=storage)
    generator = torch.Generator().manual_seed(5)
    first = None
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=generator).cumsum(1) * 3 % VOCAB
        parts = list(ids.chunk(mesh.data_size)[mesh.data_rank].to(mesh.device).split(2))
        for i, part in enumerate(parts[::-1] if reverse else parts):
            set_last_microbatch(model, i == len(parts) - 1)
            model(part[:, :-1], None, part[:, 1:].contiguous(), 1 / (ROWS * TOKENS))[0].backward()
        if first is None:
            first = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step(scale=clip.clip_factor(clip.total_norm(model.parameters()), 1.0))
        optimizer.zero_grad()
    return first, {name: whole(optimizer.full_weight(name)) for name, _ in model.named_parameters()}


def whole(tensor):
    """A tensor in full, in float64 on the CPU. Parts travel as objects: gloo's functional collectives take no CUDA."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", torch.float64)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (offset, tensor.detach().to_local().to("cpu", torch.float64)))
    full = torch.full(tensor.shape, torch.nan, dtype=torch.float64)
    for offset, part in parts:
        full[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
    return full


def distances(a, b):
    """Relative distance of first gradients, and of weights, over all parameters together."""
    return tuple(
        (sum((x[n] - y[n]).square().sum() for n in y) / sum(y[n].square().sum() for n in y)).sqrt().item()
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module", params=["cpu", GPU])
def runs(request):
    device = request.param

    def run(layout, precision="bf16", reverse=False):
        world = layout.get("dp_shard", 1) * layout.get("dp_replicate", 1) * layout.get("tp", 1)
        return run_ranks(train, world, layout, precision, reverse, device, timeout_s=300)[0]

    return {"run": run, "truth": run({}, "fp64"), "one": run({}), "reversed": run({}, reverse=True)}


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 2}], ids=["shards", "hsdp"])
def test_copies_and_shards_are_no_farther_than_another_order_of_microbatches(runs, layout):
    order = distances(runs["reversed"], runs["one"])
    assert 0 < order[0] < 1e-6
    for kind, ours, limit in zip(
        ("gradients", "weights"), distances(runs["run"](layout), runs["one"]), order, strict=True
    ):
        assert ours <= 3 * limit, kind


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dp_shard": 1},
        {"tp": 2, "dp_shard": 1, "sequence_parallel": False},
        {"tp": 2, "dp_shard": 2},
        {"storage": "split"},
        {"tp": 2, "dp_shard": 2, "storage": "split"},
    ],
    ids=["tp", "tp-whole-rows", "tp-shards", "split", "split-tp-shards"],
)
def test_split_matrices_and_storage_are_no_farther_from_the_truth(runs, layout):
    one, ours = distances(runs["one"], runs["truth"]), distances(runs["run"](layout), runs["truth"])
    assert 1e-3 < one[0] < 2e-2  # what bf16 costs
    for kind, error, limit in zip(("gradients", "weights"), ours, one, strict=True):
        assert error <= 1.1 * limit, kind
