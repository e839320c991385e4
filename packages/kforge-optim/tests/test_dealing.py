from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kforge_optim.dealing import Layout, balanced, deal, in_flight, moved
from kforge_optim.sharding import shard_box
from kforge_testing import run_ranks


def test_balanced() -> None:
    assert balanced([1, 5, 3, 3, 2], 2) == [[1, 4], [2, 3, 0]]
    assert balanced([7, 7], 3) == [[0], [1], []]
    generator = torch.Generator().manual_seed(0)
    for ranks in (1, 2, 3, 8, 64):
        costs = torch.randint(1, 1000, (100,), generator=generator).tolist()
        dealt = balanced(costs, ranks)
        assert sorted(itertools.chain(*dealt)) == list(range(100))
        loads = [sum(costs[job] for job in jobs) for jobs in dealt]
        assert max(loads) <= sum(costs) / ranks + max(costs)


def test_jobs_in_flight_begin_before_older_ones_go_on() -> None:
    said = []

    def job(name: str) -> Generator[None]:
        said.append(f"{name} sends")
        yield
        said.append(f"{name} works")
        yield
        said.append(f"{name} ends")

    in_flight(job(name) for name in "abc")
    assert said == [
        "a sends",
        *("b sends", "a works"),
        *("c sends", "b works", "a ends"),
        *("c works", "b ends"),
        "c ends",
    ]
    in_flight(iter([]))


def test_pieces_move_at_once_and_stay_where_they_are_right() -> None:
    pieces = [torch.ones(2, 3), torch.ones(4, 2)[:, 1:], torch.ones(0, 5)]
    assert moved(pieces, torch.device("cpu")) is pieces
    there = moved(pieces, torch.device("meta"))
    assert [piece.shape for piece in there] == [(6,), (4,), (0,)]
    assert len({piece.untyped_storage()._cdata for piece in there}) == 1
    assert moved([], torch.device("meta")) == []


def test_a_transformer_is_dealt_evenly() -> None:
    """24 layers of 2,048 by 8,192 over 8 ranks: the busiest has at most 3 % more work than the mean."""
    layer = [
        Layout((8, 4, 128, 2048), (1, (2, 1, 1)), (Shard(0),)),
        Layout((2048, 2048), None, (Shard(0),)),
        Layout((2, 8192, 2048), (0, (1, 1)), (Shard(1),)),
        Layout((2048, 8192), None, (Shard(1),)),
    ]
    loads, buckets = [], set()
    for rank in range(8):
        plan = deal(tuple(layer * 24), (0,), (8,), (rank,), 0, 2**25)
        owned = [(batch.rows, batch.columns, batch.count) for bucket in plan for batch in bucket.batches]
        loads.append(sum(rows * columns * min(rows, columns) * count for rows, columns, count in owned))
        buckets.add(len(plan))
        for bucket in plan:
            assert sum(batch.rows * batch.columns * batch.count for batch in bucket.batches) <= 2**25
    assert max(loads) <= 1.03 * sum(loads) / 8
    assert len(buckets) == 1


def test_both_ends_of_an_exchange_agree() -> None:
    layouts = (Layout((7, 5), None, (Shard(0), Shard(1))), Layout((3, 2, 9), None, (Shard(2), Shard(1)))) * 2
    mesh, over = (3, 2), (0, 1)
    plans = {at: deal(layouts, over, mesh, at, 2, 40) for at in itertools.product(range(3), range(2))}
    assert len({len(plan) for plan in plans.values()}) == 1
    for at, plan in plans.items():
        for number, bucket in enumerate(plan):
            assert [exchange.mesh_dim for exchange in bucket.exchanges] == [1, 0]
            for step, exchange in enumerate(bucket.exchanges):
                for peer in range(mesh[exchange.mesh_dim]):
                    other = tuple(peer if dim == exchange.mesh_dim else c for dim, c in enumerate(at))
                    theirs = plans[other][number].exchanges[step]
                    assert exchange.sent_to[peer] == theirs.received_from[at[exchange.mesh_dim]]


def _boxes(rank: int, world: int) -> None:
    """Each shard that torch makes is the box of the whole that `shard_box` says."""
    whole = torch.arange(7 * 12 * 8).reshape(7, 12, 8)
    for shape, placements in (
        ((4,), [Shard(0)]),
        ((4,), [Shard(2)]),
        ((2, 2), [Shard(1), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Replicate(), Shard(1)]),
    ):
        mesh = init_device_mesh("cpu", shape)
        check(whole, distribute_tensor(whole, mesh, placements))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim, tp_dim in itertools.product(range(3), range(3)):
        module = nn.Module()
        weight = distribute_tensor(whole.double(), mesh["tp"], [Shard(tp_dim)])
        module.register_parameter("weight", nn.Parameter(weight))
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda parameter, dim=dim: Shard(dim))
        check(whole.double(), module.weight.detach())


def check(whole: torch.Tensor, cut: Any) -> None:
    mesh = cut.device_mesh
    box = shard_box(whole.shape, mesh.shape, cut.placements, mesh.get_coordinate())
    assert torch.equal(cut.to_local(), whole[tuple(slice(*bounds) for bounds in box)]), (cut.placements, box)


def test_shards_are_boxes() -> None:
    run_ranks(_boxes, 4)


def test_what_is_no_box_is_refused() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = (_StridedShard(0, split_factor=2), Replicate())
    with pytest.raises(ValueError, match=r"is no range of its tensor, as those behind it make 1 pieces"):
        shard_box((8,), (2, 2), placements, (0, 0))
