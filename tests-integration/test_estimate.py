"""Estimates against what is there: shards, state and activations counted on real ranks, and peaks measured on a GPU."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from kforge_model import ModelConfig, Transformer, model_shape
from kforge_parallel import (
    ParallelConfig,
    Work,
    decoder_parameters,
    estimate,
    estimate_layout,
    parameters_of,
    weight_bytes,
)
from kforge_parallel.activation_bytes import loss_bytes
from kforge_testing import run_ranks

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

# Sizes that divide by no number of shards: 61 rows of a norm or 44 features over 4 ranks leave one with less.
DENSE = {"vocab_size": 104, "dim": 36, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 44}
MOE = {**DENSE, "n_experts": 4, "expert_dim": 20, "moe_pattern": "DM", "balance_loss": 0.01}
TIED = {**DENSE, "tie_embeddings": True, "qk_norm": "per_head", "mlp": "gelu"}
ROW, ROWS, MICRO = 16, 2, 4


def tensor_bytes(tensor):
    """What this rank has of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def is_gathered(parameter):
    """Whether FSDP has put the whole, or the whole of this rank's part under tp and ep, in the place of the shard."""
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", ())
    return not {*names} & {"dp_shard", "expert_shard"}


class Sent(TorchDispatchMode):
    """Bytes that this rank sends, as rings do: by all-gathers and reductions of B bytes B (n - 1) / n, by sums twice
    that; to others what is not for itself. Numbers that say how much will come are not counted."""

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        group = next((a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())), None)
        if func.namespace == "c10d" and group is not None:
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            size = max(t.nbytes for t in tensors if t.numel()) if any(t.numel() for t in tensors) else 0
            n, name = dist.ProcessGroup.unbox(group).size(), func.name().removeprefix("c10d::")
            share = {"allreduce_": 2 * (n - 1) / n, "send": 1.0, "recv_": 0.0}.get(name, (n - 1) / n)
            self.total += size * share * all(t.is_floating_point() for t in tensors)
        return func(*args, **(kwargs or {}))


def counted(rank, world, model, parallel, optim):
    """Bytes of weights, gradients and state after a step, what the last block saved, and what was gathered for the
    head."""
    from torch.distributed.tensor import DTensor

    from kforge_optim import OptimConfig
    from kforge_optim.optimizer import Optimizer
    from kforge_parallel import launch, shutdown
    from kforge_train import JobConfig
    from kforge_train.build import build_job_optimizer, build_model
    from kforge_train.engine import build_engine

    config = JobConfig(
        model=ModelConfig(**model), parallel=ParallelConfig(device="cpu", **parallel), optim=OptimConfig(**optim)
    )
    mesh = launch(config.parallel)
    spread = build_model(config, mesh)
    with torch.device("meta"):
        whole = Transformer(config.model)
    optimizer: Optimizer = build_job_optimizer(config, spread, whole if mesh.pp_size > 1 else None)
    blocks = [*spread.layers.values()]
    saved, gathered = {}, []

    def pack(tensor):
        weights = {t.untyped_storage().data_ptr() for t in blocks[-1].parameters() if not isinstance(t, DTensor)}
        storage = tensor.untyped_storage()
        shared = tensor.ndim == 5 and tensor.shape[-1] == config.model.head_size // 2  # cos and sin, of all blocks
        if storage.data_ptr() not in weights and not shared and tensor.ndim > 1:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    inner = blocks[-1].forward

    def watched(*args, **kwargs):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args, **kwargs)

    blocks[-1].forward = watched

    def look(*_):
        gathered.append(sum(tensor_bytes(p) for p in spread.parameters() if is_gathered(p)))

    if spread.head is not None:
        spread.head.register_forward_pre_hook(look)
    engine = build_engine(spread, mesh)
    generator = torch.Generator().manual_seed(mesh.data_rank)
    window = []
    for _ in range(MICRO):
        ids = torch.randint(config.model.vocab_size, (ROWS, ROW + 1), generator=generator)
        window.append(
            {
                "input_ids": ids[:, :-1],
                "labels": ids[:, 1:].contiguous(),
                "position_ids": torch.arange(ROW).expand(ROWS, ROW),
                "cu_seqlens": torch.arange(0, ROWS * ROW + 1, ROW, dtype=torch.int32),
                "max_seqlen": ROW,
                "doc_ids": torch.arange(ROWS)[:, None].expand(ROWS, ROW),
            }
        )
    with Sent() as sent:
        engine.forward_backward(window, torch.ones((), dtype=torch.float64) / 100)
    gradients = sum(tensor_bytes(p.grad) for p in spread.parameters() if p.grad is not None)
    optimizer.init_state()
    state = optimizer.state_dict()["state"]
    found = {
        "parameters": sum(map(tensor_bytes, spread.parameters())),
        "gradients": gradients,
        "moments": sum(tensor_bytes(t) for kinds in state.values() for t in kinds.values()),
        "block": sum(size for size, _ in saved.values()),
        "gathered": max(gathered, default=0),
        "sent": sent.total,
    }
    shutdown()
    return found


def work_of(optim):
    return Work(
        row_tokens=ROW,
        microbatch_rows=ROWS,
        microbatches=MICRO,
        optimizer=optim.get("name", "adamw"),
        moments=optim.get("moments", "fp32"),
        row_variance=optim.get("muon_variance_beta") is not None,
    )


LAYOUTS = {
    "shards": (DENSE, {"dp_shard": 4, "reshard_after_forward": False}, {}),
    "replicas-split-bf16": (TIED, {"dp_replicate": 2, "dp_shard": 2, "storage": "split"}, {"moments": "bf16"}),
    "tp-int8": (DENSE, {"tp": 2, "dp_shard": 2, "reshard_after_forward": False}, {"moments": "int8"}),
    "tp-without-sp": (DENSE, {"tp": 4, "sequence_parallel": False, "precision": "fp32"}, {"name": "lion"}),
    "cp-muon": (TIED, {"cp": 2, "dp_shard": 2}, {"name": "muon", "muon_variance_beta": 0.95}),
    "ulysses-stochastic": (DENSE, {"cp": 2, "dp_shard": 2, "cp_style": "ulysses", "storage": "stochastic"}, {}),
    "stages": (TIED, {"pp": 2, "dp_shard": 2, "pp_split": "cost"}, {"name": "schedule_free", "schedule": "constant"}),
    "stages-of-a-v": (TIED, {"pp": 2, "dp_shard": 2, "pp_schedule": "zbv"}, {}),
    "experts": (MOE, {"dp_shard": 4, "ep": 2}, {}),
    "experts-tp": (MOE, {"tp": 2, "dp_shard": 2, "ep": 4, "storage": "split"}, {"moments": "bf16"}),
    "experts-whole": (MOE, {"dp_replicate": 2, "tp": 2}, {"name": "muon"}),
    "experts-stages": (MOE, {"pp": 2, "dp_shard": 2, "ep": 2}, {}),
}


@cache
def there(name):
    """`counted` of every rank."""
    return run_ranks(counted, 4, *LAYOUTS[name], init=False)


def miscounted(name):
    """What an estimate has wrong, on any rank: by a byte of what lies there, by more than 10 % of what is kept and
    sent."""
    model, parallel, optim = LAYOUTS[name]
    config = ModelConfig(**model)
    with torch.device("meta"):
        listed = parameters_of(Transformer(config))
    layout, wrong = ParallelConfig(device="cpu", **parallel), set()
    for rank, found in enumerate(there(name)):
        told = estimate_layout(model_shape(config), layout, 4, work_of(optim), rank=rank, parameters=listed)
        exact = {part: getattr(told, part) for part in ("parameters", "gradients", "moments")}
        if parallel.get("reshard_after_forward") is False:
            exact["gathered"] = told.gathered
        near = {"sent": sum(told.sent.values())}
        if not model.get("n_experts"):  # of experts, tokens are where they are wanted, and not evenly
            near["block"] = told.block_kept
        wrong |= {part for part, size in exact.items() if size != found[part]}
        wrong |= {part for part, size in near.items() if size != pytest.approx(found[part], rel=0.1)}
    return wrong


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_every_rank_are_those_that_are_there(name):
    assert miscounted(name) == set()


def held_without(part, size):
    whole = weight_bytes._hold
    return lambda *args: dataclasses.replace(held := whole(*args), **{part: getattr(held, part) - size})


def block_of_compiled(kept=estimate.block_kept):
    return lambda sizes, mixed, config, *more: kept(sizes, mixed, dataclasses.replace(config, compile=True), *more)


PLANTED = {
    "gradients": (weight_bytes, "_hold", lambda: held_without("gradients", 4)),
    "moments": (weight_bytes, "_hold", lambda: held_without("state", 4)),
    "gathered": (estimate, "_gathered", lambda: lambda *args: (0, 0, 0)),
    "block": (estimate, "block_kept", block_of_compiled),
    "sent": (estimate, "sent_bytes", lambda sent=estimate.sent_bytes: lambda *args: {**sent(*args), "tp": 0}),
}


@pytest.mark.parametrize("part", PLANTED)
def test_a_part_that_is_forgotten_is_found(monkeypatch, part):
    module, name, fault = PLANTED[part]
    monkeypatch.setattr(module, name, fault())
    assert miscounted("tp-int8") == {part}


def measured():
    """Row of the speed benchmark -> its peak on one GPU in GB, and its settings."""
    rows = json.loads((RESULTS / "h200.json").read_text())["rows"]
    peaks = {row["row"].removesuffix(" peak memory"): row["value"] for row in rows if "peak memory" in row["row"]}
    return {row["row"]: (peaks[row["row"]], row["config"]) for row in rows if row["row"] in peaks}


@pytest.mark.parametrize(
    "name", ["350m", "1b", "8b-fp32", "8b-shape-24-layers", "moe", "8b", "8b-packed", "8b-32k", "1b-fp8", "8b-fp8"]
)
def test_peaks_on_one_gpu_are_foreseen(name):
    peak, run = measured()[name]
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    model = ModelConfig(**{key: value for key, value in run["model"].items() if key in fields})
    keys = ("recompute", "recompute_blocks", "reshard_after_forward", "compile", "storage", "fp8")
    keep = {"recompute_keep": tuple(run["recompute_keep"])} if run.get("recompute_keep") else {}
    layout = ParallelConfig(**{key: run[key] for key in keys if key in run}, **keep)
    micro = run["global_rows"] // run["microbatch_rows"]
    work = Work(
        row_tokens=run["row_tokens"],
        microbatch_rows=run["microbatch_rows"],
        microbatches=micro,
        moments=run.get("moments", "fp32"),
    )
    told = estimate_layout(model_shape(model), layout, 1, work)
    assert told.peak / 1e9 == pytest.approx(peak, rel=0.1)


def test_the_peak_of_head_and_loss_alone_is_foreseen():
    rows = json.loads((RESULTS / "model_cuda.json").read_text())["rows"]
    peak = next(row["parts"]["chunked GB"] for row in rows if row["row"].endswith("all logits, peak memory"))
    assert max(loss_bytes(8192, 4096, 128_256, 2048, 2)) / 1e9 == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {**TIED, "mlp": "relu2"},
        {"n_experts": 4, "expert_dim": 20, "shared_experts": 1, "moe_pattern": "DDMM"},
        {"n_experts": 4, "mtp_depth": 1},
    ],
    ids=["dense", "tied", "experts", "further-tokens"],
)
def test_sizes_alone_tell_the_parameters_of_a_decoder(more):
    config = ModelConfig(**{**DENSE, **more})
    with torch.device("meta"):
        model = Transformer(config)
    listed = {p.name: (p.shape, p.word, p.layer, p.first, p.last, p.expert) for p in parameters_of(model)}
    told = decoder_parameters(model_shape(config))
    assert {p.name: (p.shape, p.word, p.layer, p.first, p.last, p.expert) for p in told} == listed


def test_a_model_that_sizes_do_not_tell_of_is_refused():
    with pytest.raises(ValueError, match="parameters=parameters_of"):
        decoder_parameters(model_shape(ModelConfig(**DENSE, qkv_bias=True)))


RUNS = {
    "plain": {},
    "compiled": {"compile": True},
    "compiled-full": {"compile": True, "recompute": "full"},
    "selective": {"recompute": "selective"},
    "split": {"compile": True, "storage": "split"},
    "every-second": {"compile": True, "recompute": "full", "recompute_every": 2},
    "fp8": {"compile": True, "fp8": "tensorwise"},
}


def peak_of(rank, world, parallel):
    """The most that a device has held in three steps of two microbatches."""
    from kforge_optim import OptimConfig
    from kforge_parallel import launch, set_last_microbatch, shutdown
    from kforge_train import JobConfig
    from kforge_train.build import build_job_optimizer, build_model

    torch.set_float32_matmul_precision("high")
    config = JobConfig(model=ON_A_GPU, parallel=ParallelConfig(**parallel), optim=OptimConfig())
    mesh = launch(config.parallel)
    model = build_model(config, mesh)
    optimizer = build_job_optimizer(config, model)
    optimizer.init_state()
    ids = torch.randint(ON_A_GPU.vocab_size, (4, 2049), device="cuda")
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        for last in (False, True):
            set_last_microbatch(model, last)
            loss, _ = model(ids[:, :-1], labels=ids[:, 1:].contiguous(), scale=1e-4)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()  # of which an estimate says nothing
    shutdown()
    return peak - (held - torch.cuda.memory_allocated())


ON_A_GPU = ModelConfig(vocab_size=32_000, dim=1024, n_layers=12, n_heads=16, n_kv_heads=4, ffn_dim=4096)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_peaks_on_this_gpu_are_foreseen(name):
    (peak,) = run_ranks(peak_of, 1, {"device": "cuda", **RUNS[name]}, init=False, timeout_s=300)
    work = Work(row_tokens=2048, microbatch_rows=4, microbatches=2)
    told = estimate_layout(model_shape(ON_A_GPU), ParallelConfig(device="cuda", **RUNS[name]), 1, work)
    assert told.peak == pytest.approx(peak, rel=0.1), str(told)
