"""Steps of each optimizer on what fully_shard makes of tensor-parallel parameters, against one process in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from algorithms import NAMES, config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from kforge_optim import build_optimizer, clip
from kforge_testing import run_ranks

STEPS = 3
ROWS, COLUMNS, VOCAB = 8, 4, 13  # B, S; 13 rows of the embedding are cut unevenly by every mesh
LAYOUTS: dict[int, list[tuple[int, int, int]]] = {  # ranks -> (dp_replicate, dp_shard, tp)
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4), (2, 1, 2)],
    8: [(2, 2, 2), (1, 4, 2)],
}


class Model(nn.Module):
    """Embedding, a tall and a wide matrix, norm, head; 20 hidden features over 4 x 2 ranks come out uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.up = nn.Linear(6, 20, bias=True)
        self.down = nn.Linear(20, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.norm(self.down(self.up(x).sigmoid()))


def model() -> Model:
    torch.manual_seed(2)
    return Model().double()


def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
    return (hidden - target).square().sum() / (ROWS * COLUMNS)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(VOCAB, (ROWS, COLUMNS), generator=generator)
    return ids, torch.randn(ROWS, COLUMNS, 6, generator=generator, dtype=torch.float64)


def one_process(name: str) -> tuple[list[float], dict[str, Tensor]]:
    whole, norms = model(), []
    optimizer = build_optimizer(whole, config(name, warmup_steps=2), STEPS)
    for step in range(STEPS):
        ids, target = batch(step)
        loss_of(whole(ids), target).backward()
        norm = clip.total_norm(whole)
        norms.append(float(norm))
        optimizer.step(scale=clip.clip_factor(norm, 0.3), gate=torch.tensor(1.0))
        optimizer.zero_grad()
    weights = {name: weight.detach() for name, weight in whole.named_parameters()}
    state = {f"{n}:{k}": t for n, kinds in optimizer.state_dict()["state"].items() for k, t in kinds.items()}
    return norms, {**weights, **state}


def _train(rank: int, world: int) -> list[tuple[str, str, list[float], dict[str, Tensor]]]:
    results = []
    for name, (replicate, shard, tp) in itertools.product(NAMES, LAYOUTS[world]):
        mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        ours = model()
        if tp > 1:
            plan: dict[str, Any] = {
                "embed": RowwiseParallel(input_layouts=Replicate()),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(output_layouts=Shard(1)),
                # Each rank has its own columns, so the gradient of the norm is Partial over tp.
                "norm": SequenceParallel(use_local_output=True),
            }
            parallelize_module(ours, mesh["tp"], plan)
        if replicate * shard > 1:
            fully_shard(ours, mesh=mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"])
            ours.set_gradient_divide_factor(1.0)
            ours.set_force_sum_reduction_for_comms(True)
        optimizer, norms = build_optimizer(ours, config(name, warmup_steps=2), STEPS), []
        data_rank = mesh.get_local_rank("dp_replicate") * shard + mesh.get_local_rank("dp_shard")
        for step in range(STEPS):
            ids, target = (part.tensor_split(replicate * shard)[data_rank] for part in batch(step))
            hidden = ours(ids)
            loss_of(hidden, target.tensor_split(tp, dim=1)[mesh.get_local_rank("tp")]).backward()
            norm = clip.total_norm(ours)
            norms.append(float(norm))
            optimizer.step(scale=clip.clip_factor(norm, 0.3), gate=torch.tensor(1.0))
            optimizer.zero_grad()
        weights = dict(ours.named_parameters())
        state = {f"{n}:{k}": t for n, kinds in optimizer.state_dict()["state"].items() for k, t in kinds.items()}
        placements = {key: tensor.placements for key, tensor in weights.items() if isinstance(tensor, DTensor)}
        assert placements.keys() == weights.keys()
        strided = [
            key for key, kinds in placements.items() if "_StridedShard" in {type(kind).__name__ for kind in kinds}
        ]
        assert strided == (["embed.weight", "up.weight", "up.bias"] if shard * replicate > 1 and tp > 1 else [])
        for key, tensor in state.items():
            if tensor.shape == weights[key.split(":")[0]].shape:
                assert tensor.placements == placements[key.split(":")[0]]
        whole = {
            key: tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
            for key, tensor in {**weights, **state}.items()
        }
        results.append((name, f"dp_replicate {replicate}, dp_shard {shard}, tp {tp}", norms, whole))
    return results


@pytest.mark.parametrize("world", sorted(LAYOUTS))
def test_law_1_every_layout_equals_one_process(world: int) -> None:
    reference = {name: one_process(name) for name in NAMES}
    for ranks in zip(*run_ranks(_train, world, timeout_s=120), strict=True):
        for name, layout, found, tensors in ranks:
            norms, expected = reference[name]
            assert min(norms) > 0.3  # the clip is at work
            assert found == pytest.approx(norms, rel=1e-12), layout
            assert found == ranks[0][2], layout  # the same bits
            assert tensors.keys() == expected.keys()
            for key, tensor in expected.items():
                difference = float((tensors[key] - tensor).abs().max())
                assert difference <= 1e-10 * float(tensor.abs().max()), (name, layout, key, difference)
