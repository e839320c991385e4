from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_models import Norm, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kforge_optim import Group, OptimConfig, Optimizer, build_groups, build_optimizer, groups_table
from kforge_testing import run_ranks


class Mixture(nn.Module):
    """A transformer's odds and ends: q/k norms, biases, router with bias, 3-D experts, a 2-D bias, FFN gate."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(12, 8)
        attn = {"wq": nn.Linear(8, 8), "q_norm": Norm(4), "k_norm": Norm(4), "output": nn.Linear(8, 8, bias=False)}
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"attn": nn.ModuleDict(attn)})})
        self.moe = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.Linear(8, 8, bias=False)})
        self.moe["experts"].weight = nn.Parameter(torch.ones(4, 8, 8))
        self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 16, bias=False), "router": nn.Linear(8, 4, bias=False)})
        self.position_bias = nn.Parameter(torch.ones(2, 8))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(8, 12, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight


class Recomputed(nn.Module):
    """Puts itself into names as torch's activation checkpointing does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


EXPECTED = {
    "matrices": ["layers.0.attn.wq.weight", "layers.0.attn.output.weight", "moe.experts.weight", "mlp.gate.weight"],
    "embeddings": ["tok_embeddings.weight"],
    "head": ["lm_head.weight"],
    "routers": ["moe.gate.weight", "mlp.router.weight"],
    "norms_and_biases": [
        "position_bias",
        *(f"layers.0.attn.{n}" for n in ("wq.bias", "q_norm.weight", "k_norm.weight")),
        "moe.gate.bias",
    ],
}


def names(groups: list[Group]) -> dict[str, list[str]]:
    return {group.name: list(group.parameters) for group in groups}


def test_roles() -> None:
    model = Mixture()
    groups = build_groups(model, OptimConfig(weight_decay=0.5))
    assert {name: sorted(of) for name, of in names(groups).items()} == {n: sorted(of) for n, of in EXPECTED.items()}
    owned = [id(parameter) for group in groups for parameter in group.parameters.values()]
    assert sorted(owned) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    decays = {group.name: group.weight_decay for group in groups}
    assert decays == {"matrices": 0.5, "head": 0.5, "routers": 0.5, "embeddings": 0, "norms_and_biases": 0}


def test_tied_weight_is_one_embedding() -> None:
    groups = build_groups(Mixture(tied=True), OptimConfig())
    assert names(groups)["embeddings"] == ["tok_embeddings.weight"]
    assert "head" not in names(groups)


def test_embedding_is_known_by_its_module_too() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "unembed": nn.Linear(4, 5), "out": nn.Linear(4, 4, bias=False)})
    found = names(build_groups(model, OptimConfig()))
    assert (found["embeddings"], found["head"], found["matrices"]) == (
        ["words.weight"],
        ["unembed.weight"],
        ["out.weight"],
    )


def test_c22_wrappers_change_nothing() -> None:
    plain = names(build_groups(tiny(), OptimConfig()))
    wrapped = tiny()
    wrapped.layers["0"] = Recomputed(wrapped.layers["0"])
    wrapped.layers["1"] = torch.compile(wrapped.layers["1"], backend="eager")
    assert names(build_groups(torch.compile(wrapped, backend="eager"), OptimConfig())) == plain
    assert plain["norms_and_biases"] == [
        *(f"layers.{i}.{name}" for i in range(2) for name in ("norm.weight", "up.bias")),
        "norm.weight",
    ]


def _fsdp_names(rank: int, world: int) -> dict[str, list[str]]:
    model = tiny()
    mesh = init_device_mesh("cpu", (world,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    return names(build_groups(model, OptimConfig(name="muon"), matrices_only=True))


def test_c22_fsdp_changes_nothing() -> None:
    plain = names(build_groups(tiny(), OptimConfig(name="muon"), matrices_only=True))
    assert run_ranks(_fsdp_names, 2) == [plain, plain]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_c22_only_intended_weights_shrink(name: str) -> None:
    model = Mixture()
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.5, schedule="none")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, config, 10)
    optimizer.step()
    shrunk = {*EXPECTED["matrices"], *EXPECTED["head"], *EXPECTED["routers"]}
    for parameter_name, parameter in model.named_parameters():
        expected = 0.95 if parameter_name in shrunk else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected), msg=parameter_name)


def test_c23_what_muon_gets() -> None:
    config = OptimConfig(name="muon", lr=0.02, adamw_lr=3e-4, weight_decay=0.1)
    groups = build_groups(Mixture(), config, matrices_only=True)
    assert {group.name: group.algorithm for group in groups} == {
        "matrices": "muon",
        "embeddings": "adamw",
        "head": "adamw",
        "routers": "adamw",
        "norms_and_biases": "adamw",
    }
    found = names(groups)
    assert sorted(found["matrices"]) == sorted(EXPECTED["matrices"])
    assert {group.lr for group in groups if group.algorithm == "adamw"} == {3e-4}
    assert {group.lr for group in build_groups(Mixture(), OptimConfig(name="muon"), matrices_only=True)} == {3e-4}


def test_table() -> None:
    model = Mixture()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.02, adamw_lr=3e-4), 10)
    lines = optimizer.groups_table().splitlines()
    assert lines[0].split() == ["group", "optimizer", "peak", "lr", "decay", "tensors", "parameters", "names"]
    assert lines[1].split()[:6] == ["matrices", "muon", "0.02", "0.1", "4", "512"]
    assert groups_table(optimizer.groups) == optimizer.groups_table()
    counts = [int(line.split()[5].replace(",", "")) for line in lines[1:]]
    assert sum(counts) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_owned_twice_and_nothing_to_train_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    one = Group("one", "adamw", 0.1, 0.0, {"w": weight})
    with pytest.raises(ValueError, match=r"'v' is in group 'two' and in 'one'"):
        Optimizer([one, Group("two", "adamw", 0.1, 0.0, {"v": weight})], {}, lambda step: 1.0)
    with pytest.raises(ValueError, match="two groups are called 'one'"):
        Optimizer([one, one], {}, lambda step: 1.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig(), 10)


class Attention(nn.Module):
    """Declares by names of its own how its weight is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_weights: Any = {"wqkv.weight": (1, [2, 1, 1])}
        self.wqkv = nn.Module()
        self.wqkv.weight = nn.Parameter(torch.ones(2, 4, 3, 6))
        self.wqkv.bias = nn.Parameter(torch.ones(2, 4, 3))


class Model(nn.Module):
    """Declares the weights of its layers, one of which does so itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.ModuleDict({"attn": Attention(), "gate_up": nn.Linear(6, 8)})})
        self.down = nn.Linear(4, 6, bias=False)

    @property
    def fused_weights(self) -> dict[str, Any]:
        return {"layers.0.gate_up.weight": (0, (4, 4)), "layers.0.attn.wqkv.weight": (1, (2, 1, 1))}


def cuts(model: nn.Module) -> list[dict[str, Any]]:
    groups = build_groups(model, OptimConfig(name="muon"), matrices_only=True)
    assert names(groups)["norms_and_biases"] == ["layers.0.attn.wqkv.bias", "layers.0.gate_up.bias"]
    return [dict(group.fused_weights) for group in groups]


CUTS = [{"layers.0.gate_up.weight": (0, (4, 4)), "layers.0.attn.wqkv.weight": (1, (2, 1, 1))}, {}]


def test_fused_weights_are_what_modules_declare() -> None:
    assert cuts(Model()) == CUTS
    wrapped = Model()
    wrapped.layers["0"]["attn"] = Recomputed(wrapped.layers["0"]["attn"])
    wrapped.layers["0"] = torch.compile(wrapped.layers["0"], backend="eager")
    assert cuts(torch.compile(wrapped, backend="eager")) == CUTS


def _distributed_cuts(rank: int, world: int) -> list[Any]:
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return [cuts(DistributedDataParallel(Model())), cuts(model)]


def test_fused_weights_under_fsdp_and_ddp() -> None:
    assert run_ranks(_distributed_cuts, 1) == [[CUTS, CUTS]]


def test_fused_weights_of_a_tied_or_frozen_parameter() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 6), "other": nn.Linear(4, 6), "third": nn.Linear(4, 6)})
    model["other"].weight = model["one"].weight
    model["third"].requires_grad_(False)
    model.fused_weights = {"other.weight": (0, (3, 3)), "third.weight": (0, (2, 4))}
    assert build_groups(model, OptimConfig())[0].fused_weights == {"one.weight": (0, (3, 3))}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"wkv.weight": (1, (2, 1, 1))}, r"'layers\.0\.attn\.wkv\.weight': \(1, \(2, 1, 1\)\), but no parameter"),
        (
            {"wqkv.weight": (1, (2, 1))},
            r"'layers\.0\.attn\.wqkv\.weight': \(1, \(2, 1\)\), but its shape is \(2, 4, 3, 6\)",
        ),
        ({"wqkv.weight": (1, (4, 0))}, r"wqkv\.weight': \(1, \(4, 0\)\), but its shape"),
        ({"wqkv.weight": (1, ())}, r"wqkv\.weight': \(1, \(\)\), but its shape"),
        ({"wqkv.weight": (4, (4,))}, r"wqkv\.weight': \(4, \(4,\)\), but its shape"),
        ({"wqkv.weight": (-3, (4,))}, r"wqkv\.weight': \(-3, \(4,\)\), but its shape"),
        ({"wqkv.weight": (1, (1, 3))}, r"wqkv\.weight': \(1, \(1, 3\)\), and elsewhere another cut"),
    ],
)
def test_fused_weights_that_do_not_fit_are_refused(name: str, entry: Any, message: str) -> None:
    model = Model()
    model.layers["0"]["attn"].fused_weights = entry
    with pytest.raises(ValueError, match=message):
        build_optimizer(model, OptimConfig(name=name), 10)
