"""Saved in one layout, restored in another: FSDP2, DTensors of any placement, plain tensors, other numbers of ranks."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from stateful import Box
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, StateMismatchError, UnsupportedStateError
from kforge_testing import run_ranks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Widths 5 and 3 split unevenly over 2 and leave ranks empty over 4."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))  # the default mesh is of CUDA devices where there are any
        for layer in net:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Every rank sees the same batch, so that the mean over ranks is the gradient of one process."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()


def train_from_newest(rank: int, world: int, folder: str, steps: int) -> dict[str, torch.Tensor]:
    net, optimizer = build(world, seed=0 if not list(Path(folder).iterdir()) else 9)
    ckpt = Checkpointer(folder)
    first = ckpt.restore({"model": net, "optim": optimizer}, verify="full") or 0
    train(net, optimizer, first, steps)
    ckpt.save(first + steps, {"model": net, "optim": optimizer})
    return {name: whole(tensor).detach().clone() for name, tensor in net.state_dict().items()}


def test_fsdp_and_adamw_go_from_2_to_4_to_1_ranks_and_back(tmp_path: Path) -> None:
    net, optimizer = build(1, seed=0)
    for i, world in enumerate((2, 4, 1, 2)):
        results = run_ranks(train_from_newest, world, str(tmp_path), 3)
        train(net, optimizer, 3 * i, 3)
        for result in results:
            for name, tensor in net.state_dict().items():
                torch.testing.assert_close(result[name], tensor, rtol=1e-12, atol=1e-12)


def save_shards(rank: int, world: int, folder: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    tensor = torch.arange(24.0).reshape(6, 4)
    box = Box(
        rows=distribute_tensor(tensor, mesh, [Shard(0)]),
        columns=distribute_tensor(tensor.bfloat16(), mesh, [Shard(1)]),
        copies=distribute_tensor(tensor, mesh, [Replicate()]),
        short=distribute_tensor(torch.arange(1.0, 2.0), mesh, [Shard(0)]),
        empty=distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
        scalar=distribute_tensor(torch.tensor(7.0), mesh, [Replicate()]),
        plain=torch.arange(5),
        counter=3,
        mine=PerRank({"rank": rank, "t": torch.full((rank + 1,), rank)}),
    )
    Checkpointer(folder).save(1, {"box": box})
    return sorted(path.name for path in (Path(folder) / "step_00000001").iterdir())


def restore_shards(rank: int, world: int, folder: str, placement: str) -> dict[str, Any]:
    shapes = {"rows": (6, 4), "columns": (6, 4), "copies": (6, 4), "short": (1,), "empty": (0, 3), "scalar": ()}
    zeros = {k: torch.full(s, -1.0, dtype=torch.bfloat16 if k == "columns" else None) for k, s in shapes.items()}
    if placement == "plain":
        live: dict[str, torch.Tensor] = zeros
    elif placement == "2d":
        mesh = init_device_mesh("cpu", (world // 2, 2))
        live = {
            key: distribute_tensor(t, mesh, [Shard(0), Shard(1)] if t.dim() == 2 else [Replicate()] * 2)
            for key, t in zeros.items()
        }
    else:
        mesh = init_device_mesh("cpu", (world,))
        dim = int(placement)
        live = {
            key: distribute_tensor(t, mesh, [Shard(dim)] if t.dim() > dim else [Replicate()])
            for key, t in zeros.items()
        }
    box = Box(plain=torch.zeros(5, dtype=torch.int64), counter=0, mine=PerRank(None), **live)
    Checkpointer(folder).restore({"box": box})
    assert all(box.values[key] is tensor for key, tensor in live.items())
    return {key: whole(value) if isinstance(value, torch.Tensor) else value for key, value in box.values.items()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    names = run_ranks(save_shards, 3, str(folder))[0]
    assert [name for name in names if name.startswith(("tensors-", "rank-"))] == [
        *(f"rank-{r:05d}.{kind}" for r in range(3) for kind in ("json", "safetensors")),
        *(f"tensors-{r:05d}.safetensors" for r in range(3)),
    ]
    return folder


@pytest.mark.parametrize(
    ("world", "placement"), [(1, "plain"), (2, "plain"), (2, "0"), (3, "0"), (4, "0"), (2, "1"), (4, "2d")]
)
def test_any_placement_from_any_other(shards: Path, world: int, placement: str) -> None:
    tensor = torch.arange(24.0).reshape(6, 4)
    for values in run_ranks(restore_shards, world, str(shards), placement):
        assert values["rows"].equal(tensor) and values["copies"].equal(tensor)
        assert values["columns"].equal(tensor.bfloat16())
        assert values["short"].equal(torch.ones(1)) and values["scalar"].equal(torch.tensor(7.0))
        assert values["empty"].shape == (0, 3)
        assert values["plain"].equal(torch.arange(5)) and values["counter"] == 3
        assert [one["rank"] for one in values["mine"]] == [0, 1, 2]
        assert all(one["t"].equal(torch.full((r + 1,), r)) for r, one in enumerate(values["mine"]))


def test_the_files_can_be_read_with_safetensors_alone(shards: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((shards / "step_00000001").glob("tensors-*.safetensors")):
        loaded = load_file(path)
        assert not tensors.keys() & loaded.keys()  # what is replicated is written once
        tensors.update(loaded)
    whole_ones = {"box.copies", "box.short", "box.empty", "box.scalar", "box.plain"}
    pieces = {f"box.rows[{r}:{r + 2},0:4]" for r in (0, 2, 4)} | {f"box.columns[0:6,{c}]" for c in ("0:2", "2:4")}
    assert tensors.keys() == whole_ones | pieces
    assert tensors["box.rows[2:4,0:4]"].equal(torch.arange(24.0).reshape(6, 4)[2:4])


def stages(rank: int, world: int, folder: str) -> tuple[dict[str, Any], str]:
    """Two stages that own different layers, then each restores its own; then one wants a layer that is nobody's."""

    def mine(value: float) -> Box:
        own = {f"layers.{i}.w": {"m": torch.full((2,), value * i), "seen": i} for i in (2 * rank, 2 * rank + 1)}
        return Box(state=own, shared=torch.full((3,), value), step=4)

    ckpt = Checkpointer(folder)
    ckpt.save(1, {"optim": mine(1.0)})
    box = mine(0.0)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kforge_ckpt").addHandler(handler)
    ckpt.restore({"optim": box})
    assert not any("left there" in line for line in lines)  # another stage takes what this one does not
    for name, entry in box.values["state"].items():
        assert entry["m"].equal(torch.full((2,), float(entry["seen"]))) and str(entry["seen"]) in name
    lost = mine(0.0)
    if rank == 1:
        del lost.values["state"]["layers.3.w"]
    with pytest.raises(StateMismatchError) as error:
        ckpt.restore({"optim": lost})
    return box.values, str(error.value)


def test_stages_save_one_checkpoint_and_take_back_their_own(tmp_path: Path) -> None:
    results = run_ranks(stages, 2, str(tmp_path))
    for rank, (values, error) in enumerate(results):
        assert list(values["state"]) == [f"layers.{i}.w" for i in (2 * rank, 2 * rank + 1)]
        assert values["shared"].equal(torch.ones(3)) and values["step"] == 4
        assert "1 only in the checkpoint: optim.state.layers.3.w.m" in error
    everything = Box(
        state={f"layers.{i}.w": {"m": torch.zeros(2), "seen": 0} for i in range(4)}, shared=torch.zeros(3), step=0
    )
    Checkpointer(tmp_path).restore({"optim": everything})
    assert [entry["seen"] for entry in everything.values["state"].values()] == [0, 1, 2, 3]


def disagreeing(rank: int, world: int, folder: str) -> list[str]:
    ckpt = Checkpointer(folder)
    mesh = init_device_mesh("cpu", (world,))
    errors = []
    cases: list[tuple[int, Box]] = [
        (1, Box(position=5 + rank)),
        (1, Box(t=torch.zeros(3 + rank))),
        (1 + rank, Box(n=1)),
        (1, Box(t=DTensor.from_local(torch.ones(2), mesh, [Partial()]))),
        (1, Box(f=object() if rank == 1 else 3)),
    ]
    for step, box in cases:
        with pytest.raises(CheckpointError) as error:
            ckpt.save(step, {"box": box})
        errors.append(f"{type(error.value).__name__} {error.value}")
    assert list(Path(folder).iterdir()) == []
    return errors


def test_ranks_that_disagree_are_told_about_what(tmp_path: Path) -> None:
    first, second = run_ranks(disagreeing, 2, str(tmp_path))
    assert first[3:] == second[3:] and first[:2] == second[:2]
    assert "disagree about box.position: 5 before, 6 on rank 1; wrap what differs by rank in PerRank" in first[0]
    assert "disagree about box.t: 'F32 [3]' before, 'F32 [4]' on rank 1" in first[1]
    assert "different steps, [1, 2]" in first[2]
    assert "box.t is a partial sum" in first[3]
    assert "rank 1: box.f is a builtins.object" in first[4]
    assert first[4].startswith(UnsupportedStateError.__name__)


def own_group(rank: int, world: int, folder: str) -> tuple[int, int]:
    """A process group made, used, destroyed and made again: the checkpointer goes with the one that is there."""
    ckpt = Checkpointer(folder)
    ckpt.save(1, {"box": Box(r=PerRank(rank))})
    dist.destroy_process_group()
    if rank == 0:
        # Under a launcher every process would write a checkpoint of its own here.
        with pytest.raises(CheckpointError, match="WORLD_SIZE = 2, but there is no process group"):
            ckpt.save(2, {"box": Box(r=PerRank(rank))})
        del os.environ["WORLD_SIZE"]
        ckpt.save(2, {"box": Box(r=PerRank(rank))})
    box1, box2 = Box(r=PerRank(0)), Box(r=PerRank(0))
    ckpt.restore({"box": box1}, step=1)
    if rank == 0:
        ckpt.restore({"box": box2}, step=2)
        assert box2.values["r"] == [0]
    return tuple(box1.values["r"])  # type: ignore[return-value]


def save_to_own_disk(rank: int, world: int, folder: str, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Each rank has a folder of its own where all should have one."""
    ckpt = Checkpointer(f"{folder}/{rank}", **options)
    tensor = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (world,)), [Shard(0)])
    with pytest.raises(CheckpointError) as error:
        ckpt.save(1, {"box": Box(t=tensor)})
        ckpt.wait()
    return str(error.value), ckpt.steps()


@pytest.mark.parametrize(
    "options", [{}, {"mode": "async", "overlap": True, "remote": "memory://node-local"}], ids=["sync", "copied"]
)
def test_disks_of_single_hosts_are_refused_and_the_way_out_is_told(tmp_path: Path, options: dict[str, Any]) -> None:
    for text, steps in run_ranks(save_to_own_disk, 2, str(tmp_path), options):
        assert "rank 1: this rank does not see" in text and "save to an object store" in text
        assert steps == []
    assert list((tmp_path / "0").iterdir()) == []


def test_with_and_without_a_process_group(tmp_path: Path) -> None:
    assert run_ranks(own_group, 2, str(tmp_path)) == [(0, 1), (0, 1)]


def on_two_hosts(rank: int, world: int, folder: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: f"node{rank // 2}")
        Checkpointer(folder).save(1, {"box": Box(n=1)})
    return json.loads((Path(folder) / "step_00000001" / "meta.json").read_text())


def test_ranks_and_hosts_are_noted(tmp_path: Path) -> None:
    about = run_ranks(on_two_hosts, 3, str(tmp_path))[0]
    assert (about["world_size"], about["hosts"], about["format"], about["step"]) == (3, 2, 1, 1)
