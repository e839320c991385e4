"""A checkpoint of a wrapped module is one of the module, whichever of the two saves and whichever loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from kforge_ckpt import Checkpointer, Fit, StateMismatchError, UnsupportedStateError, tools
from kforge_ckpt.modules import PlainModule, plain
from kforge_testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.rand(3))
        self.module = nn.Linear(3, 3)  # a name that a wrapper uses, too

    def get_extra_state(self) -> Any:
        return {"rows": 4}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"rows": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(self.norm(x) * self.scale)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), Block(), nn.Linear(3, 3))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def child_compiled(model: nn.Sequential) -> nn.Module:
    model[1] = compiled(model[1])
    return model


def grandchild_compiled(model: nn.Sequential) -> nn.Module:
    model[1].module = compiled(model[1].module)  # type: ignore[union-attr, assignment]
    return compiled(model)


def child_recomputed(model: nn.Sequential) -> nn.Module:
    model[1] = compiled(checkpoint_wrapper(model[1]))
    return model


WRAPS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled in place": lambda model: [model.compile(backend="eager"), model][1],  # type: ignore[func-returns-value]
    "child compiled": child_compiled,
    "twice compiled": grandchild_compiled,
    "child recomputed": child_recomputed,
}


def trained(model: nn.Module, steps: int = 2) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("ours", WRAPS)
@pytest.mark.parametrize("theirs", WRAPS)
def test_any_wrapping_loads_any_other(tmp_path: Path, ours: str, theirs: str) -> None:
    reference = net(0)
    names = {f"model.{name}" for name in reference.state_dict()} - {"model.1._extra_state"}
    trained(reference)
    model = WRAPS[ours](net(0))
    optimizer = trained(model)
    Checkpointer(tmp_path).save(2, {"model": model, "optim": optimizer})
    saved = tools.open_checkpoint(tmp_path)
    assert saved.tensors_of("model") == names
    bare = net(5)
    again = WRAPS[theirs](bare)
    fresh = trained(again, 0)
    assert Checkpointer(tmp_path).restore({"model": again, "optim": fresh}) == 2
    for name, tensor in reference.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tools.read_tensor(saved, f"model.{name}"), tensor), name
    for a, b in zip(again.parameters(), reference.parameters(), strict=True):
        assert a.equal(b)
    for buffer, other in zip(again.buffers(), reference.buffers(), strict=True):
        assert buffer.equal(other)


def test_a_fit_goes_by_plain_names(tmp_path: Path) -> None:
    model, again = child_compiled(net(0)), grandchild_compiled(net(1))
    Checkpointer(tmp_path).save(1, {"model": model})
    bias = again.state_dict()["_orig_mod.0.bias"].clone()
    Checkpointer(tmp_path).restore({"model": again}, fit=Fit(exclude=(r"^model\.0\.bias$",)))
    assert again.state_dict()["_orig_mod.0.bias"].equal(bias)
    assert again.state_dict()["_orig_mod.1.module._orig_mod.weight"].equal(
        model.state_dict()["1._orig_mod.module.weight"]
    )


def test_what_is_missing_is_told_by_its_plain_name(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"model": nn.Sequential(nn.Linear(3, 3))})
    with pytest.raises(
        StateMismatchError, match=r"8 not in the checkpoint: model\.1\.scale, model\.1\.norm\.weight, .*model\.2\.bias"
    ):
        Checkpointer(tmp_path).restore({"model": compiled(child_compiled(net(0)))})


def test_names_that_become_one_are_refused(tmp_path: Path) -> None:
    odd = nn.Module()
    odd.register_buffer("w", torch.ones(1))
    inner = nn.Module()
    inner.register_buffer("w", torch.ones(1))
    odd.add_module("_orig_mod", inner)
    with pytest.raises(UnsupportedStateError, match=r"w and _orig_mod\.w of model are both w"):
        PlainModule("model", odd).state_dict()
    assert plain("model", compiled(inner)) is inner and plain("model", inner) is inner


def in_ddp(rank: int, world: int, folder: Path) -> list[bool]:
    same = []
    for number, wrap in enumerate((DistributedDataParallel, lambda m: compiled(DistributedDataParallel(m)), nested)):
        model = wrap(net(0))
        optimizer = trained(model, 0)
        Checkpointer(folder / str(number)).save(1, {"model": model, "optim": optimizer})
        for other in (lambda m: m, DistributedDataParallel, nested):
            again = other(net(9))
            Checkpointer(folder / str(number)).restore({"model": again, "optim": trained(again, 0)})
            same.append(all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True)))
        names = tools.open_checkpoint(folder / str(number)).tensors_of("model")
        same.append(names == {f"model.{n}" for n in net(0).state_dict()} - {"model.1._extra_state"})
    assert dist.get_world_size() == world
    return same


def nested(model: nn.Sequential) -> nn.Module:
    model[1] = compiled(DistributedDataParallel(model[1]))
    model[2] = DistributedDataParallel(model[2])
    return model


def test_models_in_ddp_too(tmp_path: Path) -> None:
    for same in run_ranks(in_ddp, 2, tmp_path):
        assert same == [True] * 12


def in_fsdp1(rank: int, world: int, folder: Path) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    right = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    Checkpointer(folder).save(1, {"model": wrapped})
    saved = tools.open_checkpoint(folder)
    found = {}
    for file in saved.folder.glob("*.safetensors"):
        found |= load_file(file)
    return found.keys() == right.keys() and all(found[name].equal(value) for name, value in right.items())


def test_a_model_in_fsdp1_gives_its_own_state(tmp_path: Path) -> None:
    assert run_ranks(in_fsdp1, 2, tmp_path) == [True, True]
