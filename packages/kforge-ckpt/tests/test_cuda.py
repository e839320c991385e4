"""CUDA tensors, and a process group that has only NCCL."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from kforge_ckpt import Checkpointer, CheckpointError, RngState

pytestmark = pytest.mark.gpu


def build(device: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4)).to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, device: str) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 16, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_on_the_device_resumes_bit_for_bit(tmp_path: Path) -> None:
    net, optimizer = build("cuda", 0)
    train(net, optimizer, 3, "cuda")
    Checkpointer(tmp_path).save(3, {"model": net, "optim": optimizer, "rng": RngState()})
    expected = train(net, optimizer, 3, "cuda")
    net, optimizer = build("cuda", 1)
    Checkpointer(tmp_path).restore({"model": net, "optim": optimizer, "rng": RngState()}, verify="full")
    assert train(net, optimizer, 3, "cuda") == expected


@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_from_one_kind_of_device_to_the_other(tmp_path: Path, saved_on: str, loaded_on: str) -> None:
    net, optimizer = build(saved_on, 0)
    train(net, optimizer, 1, saved_on)
    Checkpointer(tmp_path).save(1, {"model": net, "optim": optimizer})
    other, fresh = build(loaded_on, 1)
    Checkpointer(tmp_path).restore({"model": other, "optim": fresh})
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert b.device.type == loaded_on and a.cpu().equal(b.cpu())
        assert optimizer.state[a]["exp_avg"].cpu().equal(fresh.state[b]["exp_avg"].cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool, torch.int64])
def test_dtypes_and_strides_on_the_device(tmp_path: Path, dtype: torch.dtype) -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"t": self.tensor, "turned": self.tensor.t()}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            pass

    tensor = (torch.randn(5, 3, device="cuda") * 4).to(dtype)
    Checkpointer(tmp_path).save(1, {"box": Box(tensor)})
    live = Box(torch.zeros(5, 3, device="cuda").to(dtype))
    Checkpointer(tmp_path).restore({"box": live})
    assert live.tensor.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_fsdp_with_nccl_alone(tmp_path: Path) -> None:
    """The messages of a save go over a gloo group of its own, tensors never over NCCL."""
    with tempfile.TemporaryDirectory() as store:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{store}/store", rank=0, world_size=1)
        try:
            net, _ = build("cuda", 0)
            fully_shard(net)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            train(net, optimizer, 2, "cuda")
            ckpt = Checkpointer(tmp_path)
            ckpt.save(2, {"model": net, "optim": optimizer, "rng": RngState()})
            expected = train(net, optimizer, 2, "cuda")
            again, _ = build("cuda", 1)
            fully_shard(again)
            fresh = torch.optim.AdamW(again.parameters(), lr=0.01)
            assert ckpt.restore({"model": again, "optim": fresh, "rng": RngState()}) == 2
            assert train(again, fresh, 2, "cuda") == expected
            with pytest.raises(CheckpointError, match="step 9"):
                ckpt.restore({"model": again}, step=9)
        finally:
            dist.destroy_process_group()
