"""One rank of 1,024, looked at from one process."""

import pytest
import torch
import torch.distributed as dist

from kforge_model import ModelConfig, Transformer, model_shape, preset
from kforge_parallel import ParallelConfig, Work, check_rank, estimate_layout, parameters_of

WORLD = 1024
ALL = {"pp": 4, "dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 8}
DENSE = preset("llama3.1-70b")
MOE = ModelConfig(
    vocab_size=151_936,
    dim=4096,
    n_layers=12,
    n_heads=64,
    n_kv_heads=4,
    head_dim=128,
    n_experts=128,
    moe_top_k=8,
    expert_dim=1536,
    qk_norm="per_head",
    moe_pattern="DMM",
)


@pytest.mark.parametrize(
    ("model", "layout", "rank"),
    [
        (DENSE, ALL, 0),
        (DENSE, ALL, WORLD - 1),
        (DENSE, {**ALL, "pp_schedule": "interleaved_1f1b", "storage": "split"}, 777),
        (MOE, {**ALL, "ep": 16}, 300),
        (MOE, {**ALL, "ep": 128, "pp_schedule": "zbv"}, 5),
        (MOE, {"dp_shard": -1, "ep": 64}, 1000),
    ],
    ids=["dense-first", "dense-last", "dense-interleaved", "experts", "experts-v", "experts-shards"],
)
def test_a_rank_of_1024_holds_what_is_counted(model, layout, rank):
    config = ParallelConfig(**layout)
    found = check_rank(lambda: Transformer(model), config, WORLD, rank)
    assert not dist.is_initialized()
    with torch.device("meta"):
        listed = parameters_of(Transformer(model))
    work = Work(row_tokens=4096, microbatches=8)
    told = estimate_layout(model_shape(model), config, WORLD, work, rank=rank, parameters=listed)
    assert found.parameters == told.parameters
    assert found.place["tp"] == rank % found.axes["tp"]
    part = next(s for n, s in found.shapes.items() if n.endswith("attn.wo.weight"))
    shards = found.axes["dp_shard"] * found.axes["cp"]
    assert part == (model.dim // shards, model.n_heads * model.head_size // found.axes["tp"])
    if config.ep > 1:
        part = next(s for n, s in found.shapes.items() if n.endswith("experts.w_down"))
        experts = model.n_experts // config.ep
        inner = shards * found.axes["tp"] // config.ep
        assert part[0] * part[1] * part[2] == experts * model.dim * model.expert_size // inner
    blocks = {int(n.split(".")[1]) for n in found.shapes if n.startswith("layers.")}
    assert len(blocks) == model.n_layers // found.axes["pp"]
