from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim_models import Norm, batches, summed_loss, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kforge_optim import Group, GroupRule, OptimConfig, Optimizer, build_groups, build_optimizer, clip, groups_table
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
    assert " ".join(lines[0].split()) == "group optimizer peak lr schedule decay tensors parameters names"
    assert lines[1].split()[:7] == ["matrices", "muon", "0.02", "cosine", "0.1", "4", "512"]
    assert groups_table(optimizer.groups) == optimizer.groups_table()
    counts = [int(line.split()[6].replace(",", "")) for line in lines[1:]]
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


# Rules


def rule(name: str, **fields: Any) -> GroupRule:
    return GroupRule(name=name, **fields)


def settings(groups: Any) -> dict[str, tuple[str, float, float]]:
    return {group.name: (group.algorithm, group.lr, group.weight_decay) for group in groups}


def test_rules_go_before_roles_and_the_first_that_fits_wins() -> None:
    rules = (
        rule("ends", match=r"^layers\.[01]\.down", lr=5e-3),
        rule("layer 1", match=r"^layers\.1\.", lr_scale=0.1, schedule="constant"),
        rule("flat", role="norms_and_biases", weight_decay=0.01),
    )
    config = OptimConfig(lr=1e-2, weight_decay=0.5, groups=rules)
    groups = build_groups(tiny(), config, total_steps=10)
    assert names(groups) == {
        "ends": ["layers.0.down.weight", "layers.1.down.weight"],
        "layer 1.matrices": ["layers.1.up.weight"],
        "layer 1.norms_and_biases": ["layers.1.norm.weight", "layers.1.up.bias"],
        "flat": ["layers.0.norm.weight", "layers.0.up.bias", "norm.weight"],
        "matrices": ["layers.0.up.weight"],
        "embeddings": ["embed.weight"],
        "head": ["head.weight"],
    }
    assert settings(groups) == {
        "ends": ("adamw", 5e-3, 0.5),
        "layer 1.matrices": ("adamw", pytest.approx(1e-3), 0.5),
        "layer 1.norms_and_biases": ("adamw", pytest.approx(1e-3), 0.0),  # a rule of rates decays no norm
        "flat": ("adamw", 1e-2, 0.01),
        "matrices": ("adamw", 1e-2, 0.5),
        "embeddings": ("adamw", 1e-2, 0.0),
        "head": ("adamw", 1e-2, 0.5),
    }
    lines = groups_table(groups).splitlines()
    assert " ".join(lines[2].split()) == "layer 1.matrices adamw 0.001 constant 0.5 1 140 layers.1.up.weight"
    assert " ".join(lines[5].split()[:6]) == "matrices adamw 0.01 cosine 0.5 1"


def test_predicates_go_before_the_rules_of_the_config() -> None:
    config = OptimConfig(groups=(rule("all matrices", role="matrices", lr=1.0),))
    large = (lambda name, parameter: parameter.numel() > 140, rule("large", lr=0.5))
    narrow = (lambda name, parameter: parameter.shape[0] == 14, rule("up", role="matrices", lr=0.25))
    groups = build_groups(tiny(), config, rules=[large, narrow])
    assert names(groups)["large.embeddings"] == ["embed.weight"]
    assert names(groups)["large.head"] == ["head.weight"]
    assert names(groups)["up"] == ["layers.0.up.weight", "layers.1.up.weight"]
    assert names(groups)["all matrices"] == ["layers.0.down.weight", "layers.1.down.weight"]
    optimizer = build_optimizer(tiny(), config, 10, rules=[large])
    assert {group.lr for group in optimizer.groups if group.name.startswith("large")} == {0.5}


def test_mixed_optimizers_under_one_object_and_one_state() -> None:
    """What each does to its own parameters is what it does alone, gate and scale included."""
    rules = (
        rule("tables", role="embeddings", optimizer="torch.optim.SGD", options={"momentum": 0.9}, lr=0.1),
        rule("first", match=r"^layers\.0\..*weight", role="matrices", optimizer="muon", weight_decay=0.2),
        rule("second", match=r"^layers\.1\.", optimizer="adamw", schedule="constant"),
    )
    shared: dict[str, Any] = {"name": "lion", "lr": 0.01, "adamw_lr": 0.02, "warmup_steps": 2}
    mixed = tiny()
    optimizer = build_optimizer(mixed, OptimConfig(**shared, groups=rules), 10)
    alone = {
        "torch.optim.SGD": OptimConfig(name="torch.optim.SGD", options={"momentum": 0.9}, lr=0.1, warmup_steps=2),
        "muon": OptimConfig(name="muon", lr=0.01, warmup_steps=2, weight_decay=0.2),
        "adamw": OptimConfig(name="adamw", lr=0.02, warmup_steps=2, schedule="constant"),
        "lion": OptimConfig(name="lion", lr=0.01, warmup_steps=2),
    }
    models = {name: tiny() for name in alone}
    others = {name: build_optimizer(models[name], config, 10) for name, config in alone.items()}
    for step, ids in enumerate(batches(4)):
        summed_loss(mixed, ids, 48).backward()
        for name in others:
            for mine, theirs in zip(mixed.parameters(), models[name].parameters(), strict=True):
                theirs.grad = mine.grad.clone()
        for one in (optimizer, *others.values()):
            one.step(torch.tensor(0.5, dtype=torch.float64), torch.tensor(float(step != 2)))
            one.zero_grad()
        for name, model in models.items():  # their gradients are those of the mixed weights
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if owner(parameter_name) != name:
                        parameter.copy_(mixed.get_parameter(parameter_name))
    for name, parameter in mixed.named_parameters():
        assert torch.equal(parameter, models[owner(name)].get_parameter(name)), name
    state = optimizer.state_dict()["state"]
    assert list(state["embed.weight"]) == list(state["layers.0.up.weight"]) == ["momentum_buffer"]
    assert list(state["layers.1.down.weight"]) == ["step", "exp_avg", "exp_avg_sq"]
    assert list(state["head.weight"]) == list(state["layers.0.norm.weight"]) == ["exp_avg"]
    resumed = build_optimizer(tiny(), OptimConfig(**shared, groups=rules), 10)
    resumed.load_state_dict(optimizer.state_dict())
    for name, kinds in resumed.state_dict()["state"].items():
        assert all(torch.equal(tensor, state[name][kind]) for kind, tensor in kinds.items())
    assert resumed.lrs() == optimizer.lrs()


def owner(name: str) -> str:
    if name == "embed.weight":
        return "torch.optim.SGD"
    if name.startswith("layers.0.") and name.endswith(("up.weight", "down.weight")):
        return "muon"
    return "adamw" if name.startswith("layers.1.") else "lion"


def test_schedules_of_rules() -> None:
    rules = (
        rule("slow start", match=r"^layers\.0", schedule_options={"warmup_steps": 5}),
        rule("flat", role="head", schedule="none"),
        rule("early", role="embeddings", schedule="linear", schedule_options={"decay_steps": 4, "min_lr_ratio": 0.0}),
    )
    of = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=3, min_lr_ratio=0.5, groups=rules)
    optimizer = build_optimizer(tiny(), of, 10)
    used = []
    for _ in range(10):
        used.append(optimizer.lrs())
        optimizer.step()
    for name, values in {
        "matrices": [0.5, 1, 1, 1, 1, 1, 1, 1, 5 / 6, 4 / 6],
        "slow start.matrices": [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 5 / 6, 4 / 6],
        "flat": [1.0] * 10,
        "early": [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
    }.items():
        assert [rates[name] for rates in used] == pytest.approx(values), name


def test_c22_rules_under_fsdp_and_compiled_names() -> None:
    of = OptimConfig(name="muon", groups=RULES)
    plain = names(build_groups(tiny(), of, matrices_only=True))
    wrapped = tiny()
    wrapped.layers["0"] = Recomputed(torch.compile(wrapped.layers["0"], backend="eager"))
    assert names(build_groups(torch.compile(wrapped, backend="eager"), of, matrices_only=True)) == plain
    assert plain["lowest.matrices"] == ["layers.0.up.weight", "layers.0.down.weight"]
    assert run_ranks(_fsdp_rules, 2) == [plain, plain]


RULES = (GroupRule(name="lowest", match=r"^layers\.0\.", lr_scale=0.5),)


def _fsdp_rules(rank: int, world: int) -> dict[str, list[str]]:
    model = tiny()
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    return names(build_groups(model, OptimConfig(name="muon", groups=RULES), matrices_only=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"match": "layers.("}, r"rule 'r': match = 'layers.\(' is no regular expression: .*backslash"),
        ({"role": "norms"}, "role = 'norms' must be one of matrices, embeddings, head, routers, norms_and_biases"),
        ({"match": "", "lr": 1.0, "lr_scale": 2.0}, "lr = 1.0 and lr_scale = 2.0 both say the rate"),
        ({"match": "", "lr": 0.0}, "lr = 0.0 must be above 0; requires_grad = False freezes"),
        ({"match": "", "lr_scale": math.inf}, "lr_scale = inf must be above 0"),
        ({"match": "", "weight_decay": -1.0}, "weight_decay = -1.0 must not be negative"),
        ({"match": "", "options": {"momentum": 0.9}}, r"options = \{'momentum': 0.9\} are of an optimizer; name it"),
        ({"match": "", "schedule_options": {"lr": 1}}, "schedule_options has 'lr'; it may have schedule_steps, warmup"),
        ({}, "rule 'r' has neither match nor role"),
        (
            {"match": "zzz"},
            r"rule 'r' \(match = 'zzz'\) fits no trainable parameter; their names are as embed",
        ),
        ({"match": "up", "role": "head"}, r"rule 'r' \(match = 'up' and role = 'head'\) fits no trainable parameter"),
        ({"match": "", "optimizer": "addamw"}, "unknown optimizer 'addamw'; known are adamw, "),
        ({"match": "", "optimizer": "lion", "options": {"a": 1}}, r"options = \{'a': 1\} mean nothing to 'lion'"),
        ({"match": "", "schedule": "cosinus"}, "rule 'r': unknown schedule 'cosinus'; known are constant, cosine"),
        ({"match": "", "schedule_options": {"warmup_steps": 50}}, "rule 'r': optim.warmup_steps = 50 is longer than"),
        (
            {"match": "", "optimizer": "muon"},
            "gives 'layers.0.norm.weight' to muon, which takes matrices",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(tiny(), OptimConfig(groups=(rule("r", **fields),)), 10)


def test_rules_that_take_nothing_or_share_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rule 'b' .* fits only what rules before it have taken, head.weight by 'a'"):
        build_optimizer(tiny(), OptimConfig(groups=(rule("a", match=""), rule("b", role="head"))), 10)
    with pytest.raises(ValueError, match="rule 'a' must be called otherwise: there are two of that name"):
        OptimConfig(groups=(rule("a", match=""), rule("a", role="head")))
    with pytest.raises(ValueError, match="rule 'head' must be called otherwise: a role is called that"):
        OptimConfig(groups=(rule("head", match=""),))
    with pytest.raises(ValueError, match="a group rule has no name"):
        rule("", match="")
    with pytest.raises(ValueError, match="schedule of its own, which wants total_steps"):
        build_groups(tiny(), OptimConfig(groups=(rule("a", match="", schedule="none"),)))
    with pytest.raises(ValueError, match=r"adamw_lr = 0.1 is the rate of what AdamW owns beside lion, and it"):
        build_optimizer(tiny(), OptimConfig(name="lion", adamw_lr=0.1), 10)


def test_scales_of_rates_by_parameter() -> None:
    """As μP has them: hidden matrices at a quarter of the rate, under any optimizer but Muon."""
    scales = {name: 0.25 if name.startswith("layers.") else 1.0 for name, _ in tiny().named_parameters()}
    of = OptimConfig(lr=0.1, groups=(rule("ends", match=r"^embed|^layers\.1\.down", lr=0.2),))
    optimizer = build_optimizer(tiny(), of, 10, lr_scales=scales)
    assert {name: lr for name, (_, lr, _) in settings(optimizer.groups).items()} == {
        "ends.matrices x0.25": 0.05,
        "ends.embeddings": 0.2,
        "matrices x0.25": 0.025,
        "head": 0.1,
        "norms_and_biases x0.25": 0.025,
        "norms_and_biases": 0.1,
    }
    muon = build_optimizer(tiny(), OptimConfig(name="muon", lr=0.1), 10, lr_scales=scales)
    assert settings(muon.groups)["matrices"] == ("muon", 0.1, 0.1)
    assert settings(muon.groups)["norms_and_biases x0.25"] == ("adamw", 0.025, 0.0)
    with pytest.raises(ValueError, match=r"lr_scales names \['nowhere'\], which are no parameters"):
        build_optimizer(tiny(), OptimConfig(), 10, lr_scales={"nowhere": 1.0})
    with pytest.raises(ValueError, match=r"rate of 'head.weight' cannot be scaled by 0.0; use a factor above 0"):
        build_optimizer(tiny(), OptimConfig(), 10, lr_scales={"head.weight": 0.0})


def test_a_stage_has_the_groups_of_the_whole_model() -> None:
    whole, rules = Mixture(), OptimConfig(groups=(GroupRule(name="slow", match="^mlp", lr_scale=0.1),))
    stage = nn.Module()
    stage.layers = whole.layers
    scales = {"lm_head.weight": 0.5, "layers.0.attn.wq.weight": 0.5}
    with torch.device("meta"):
        meta = Mixture()
    found = build_optimizer(stage, rules, 4, lr_scales=scales, whole=meta)
    every = build_optimizer(whole, rules, 4, lr_scales=scales)
    assert [(group.name, group.lr, group.weight_decay) for group in found.groups] == [
        (group.name, group.lr, group.weight_decay) for group in every.groups
    ]
    own = dict(stage.named_parameters())
    assert {name for group in found.groups for name in group.parameters} == own.keys()
    assert all(parameter is own[name] for group in found.groups for name, parameter in group.parameters.items())
    assert {"embeddings", "head"} <= {group.name.split(" ")[0] for group in found.groups if not group.parameters}
    assert "slow" in found.groups_table()
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    found.step()
    total, norms = clip.total_norm(stage, also=found.groups)
    assert norms.keys() == {group.name for group in every.groups}
    assert total.item() == pytest.approx(sum(norm.item() ** 2 for norm in norms.values()) ** 0.5)
    stage.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"the stage has parameters \['extra.bias', 'extra.weight'\], which the whole"):
        build_optimizer(stage, rules, 4, whole=meta)
