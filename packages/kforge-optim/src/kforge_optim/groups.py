"""Which parameter is treated how: every trainable parameter belongs to exactly one group.

The role of a parameter follows from its shape, the kind of module that holds it, and its name:

============================  ======================================================  ============  ===============
role                          what                                                    weight decay  under Muon
============================  ======================================================  ============  ===============
``norms_and_biases``          fewer than two dimensions, or called ``bias``           no            AdamW
``embeddings``                weights of ``nn.Embedding``, names with embed/wte/wpe   no            AdamW
``head``                      owned by ``head``, ``lm_head``, or the root's ``output`` yes           AdamW
``routers``                   names with ``router``, or ``gate`` beside ``experts``   yes           AdamW
``matrices``                  everything else (two or more dimensions)                yes           Muon
============================  ======================================================  ============  ===============

A tied weight is one parameter under several names: it keeps the first name, and is an embedding if any of its names
says so. Wrappers that put themselves into names (``torch.compile``, activation checkpointing, FSDP 1, DDP) are cut
out of the names first, so the partition is the same with and without them.

Rules go before roles: `GroupRule`, `build_groups`. Which matrices lie in a weight of ``matrices`` is plain data:
`fused_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kforge_optim.algorithm import Fused
from kforge_optim.config import ROLES, SCHEDULE_FIELDS, GroupRule, OptimConfig
from kforge_optim.schedules import Schedule, build_schedule

DECAYED = frozenset({"matrices", "head", "routers"})

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_BIAS = re.compile(r"(^|[._])bias$")
# "unembed" is a head, hence the look-behind.
_EMBEDDING = re.compile(r"(?<!un)embed|(^|[._])(wte|wpe)([._]|$)", re.IGNORECASE)
# The direct owner of a weight, or of whatever lies under it near the root. "output" counts near the root only: in
# "layers.0.attention.output.dense.weight" the word means something else.
_HEAD = re.compile(r"(^|\.)(head|lm_head|unembed(ding)?)\.[^.]+$|^([^.]+\.)?(head|lm_head|output|unembed(ding)?)\.")
_ROUTER = re.compile(r"(^|[._])router([._]|$)")


@dataclass(frozen=True)
class Group:
    """Parameters that share algorithm, rate and decay."""

    name: str
    """Name in tables and metrics, unique within an optimizer."""
    algorithm: str
    """Name of the optimizer that updates it, e.g. ``adamw``."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    """Decoupled weight decay: each step takes lr · weight_decay of the weight."""
    parameters: Mapping[str, nn.Parameter]
    """Clean name -> parameter, in the model's order."""
    fused_weights: Mapping[str, Fused] = field(default_factory=dict)
    """Clean name -> (dim, sizes) of those parameters that hold several matrices; see `fused_weights`."""
    schedule: Schedule | None = None
    """How its rate moves. None: as the optimizer's schedule says."""
    schedule_name: str = ""
    """Name of the schedule in tables."""


def clean_name(name: str) -> str:
    """``name`` without the segments that wrappers put in: ``a._orig_mod.b`` -> ``a.b``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_roles(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Clean name -> (role, parameter) of every trainable parameter, each once, in the model's order."""
    model = unwrapped(model)
    aliases: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(clean_name(name))
            parameters[id(parameter)] = parameter
    in_embedding = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    # Parents of modules called "experts": a "gate" beside them is a router, any other gate is a matrix.
    mixtures = {
        clean_name(name).removesuffix("experts")
        for name, _ in model.named_modules(remove_duplicate=False)
        if clean_name(name).split(".")[-1] == "experts"
    }
    roles: dict[str, tuple[str, nn.Parameter]] = {}
    for key, names in aliases.items():
        parameter = parameters[key]
        if names[0] in roles:
            raise ValueError(f"two parameters are both called {names[0]!r} once wrappers are cut out of their names")
        roles[names[0]] = (_role(names, parameter, key in in_embedding, mixtures), parameter)
    return roles


def _role(names: list[str], parameter: nn.Parameter, in_embedding: bool, mixtures: set[str]) -> str:
    if parameter.ndim < 2 or any(_BIAS.search(name) for name in names):
        return "norms_and_biases"
    if in_embedding or any(_EMBEDDING.search(name) for name in names):
        return "embeddings"
    if any(_HEAD.search(name) for name in names):
        return "head"
    if any(_ROUTER.search(name) or name.removesuffix("gate.weight") in mixtures for name in names):
        return "routers"
    return "matrices"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that DDP wraps, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def fused_weights(model: nn.Module) -> dict[str, Fused]:
    """Clean name -> (dim, sizes) of every parameter that holds several matrices, as the modules declare it.

    A module, the model itself or any in it, may have an attribute ``fused_weights`` that maps names of parameters,
    relative to the module, to (dim, sizes). Such a parameter is cut along ``dim`` into parts of these sizes, and each
    part with all dimensions but the last flattened is one matrix [rows, in]. Query, key and value of 2 groups of
    3 query heads of size 8, [2, 5, 8, D], are ``(1, (3, 1, 1))``: matrices of 48, 16 and 16 rows. A parameter that
    nobody names is a matrix, or a batch of matrices over all its dimensions but the last two.

    Raises ValueError, with the name and the entry, for a name that no parameter has, for sizes that do not add up to
    the parameter's, and for two entries of one parameter that differ.
    """
    model = unwrapped(model)
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    first_names: dict[int, str] = {}
    for name, parameter in parameters.items():
        first_names.setdefault(id(parameter), name)
    found: dict[str, Fused] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # Not what a wrapper passes on from the module in it: that one has its turn, under its own prefix.
        if "fused_weights" not in vars(module) and not hasattr(type(module), "fused_weights"):
            continue
        entries: Mapping[str, Fused] = module.fused_weights  # type: ignore[assignment]
        for relative, (dim, sizes) in entries.items():
            name, fused = clean_name(f"{prefix}.{relative}" if prefix else relative), (dim, tuple(sizes))
            if name not in parameters:
                raise ValueError(f"fused_weights says {name!r}: {fused}, but no parameter has this name")
            shape = tuple(parameters[name].shape)
            if not 0 <= dim < len(shape) or min(fused[1], default=0) < 1 or sum(fused[1]) != shape[dim]:
                raise ValueError(
                    f"fused_weights says {name!r}: {fused}, but its shape is {shape}; sizes must be positive and add "
                    "up to the length of that dimension"
                )
            if found.setdefault(first_names[id(parameters[name])], fused) != fused:
                raise ValueError(f"fused_weights says {name!r}: {fused}, and elsewhere another cut of this parameter")
    return found


Predicate = Callable[[str, nn.Parameter], bool]
"""(clean name, parameter) -> whether a rule holds for it. It must say the same on every rank."""

Rules = Sequence[tuple[Predicate, GroupRule]]
"""Rules in code, each with what it holds for; its ``match`` and ``role``, where it has them, must fit too."""


def build_groups(
    model: nn.Module,
    config: OptimConfig,
    *,
    matrices_only: bool = False,
    rules: Rules = (),
    total_steps: int | None = None,
) -> list[Group]:
    """Split the trainable parameters of ``model`` into groups; a group without parameters is left out.

    A parameter is of the first rule that fits it, of ``rules`` and then of ``config.groups``; what none fits is grouped
    by role. What a rule says takes the place of what the role gives, parameter by parameter: a rule that scales the
    rate of a layer leaves its norms undecayed.

    With ``matrices_only`` the optimizer that ``config`` names takes only ``matrices``; AdamW takes all the rest at
    ``config.adamw_lr``. total_steps: horizon of the schedules that rules bring along.

    Raises ValueError when there is nothing to train, for a rule that fits nothing or only what rules before it have
    taken, for two rules of one name, and as `fused_weights` and `build_schedule` do.
    """
    roles = parameter_roles(model)
    if not roles:
        raise ValueError("the model has no trainable parameter; set requires_grad on what should learn")
    fused = fused_weights(model)
    every: list[tuple[Predicate, GroupRule]] = [*rules, *((_always, rule) for rule in config.groups)]
    taken = _first_fits(roles, every)
    groups = []
    for index, rule in [*enumerate(rule for _, rule in every), (None, GroupRule(name="by role"))]:
        schedule = _own_schedule(rule, config, total_steps)
        split: dict[str, dict[str, nn.Parameter]] = {}
        for name, (role, parameter) in roles.items():
            if taken.get(name) == index:
                split.setdefault(role, {})[name] = parameter
        for role in ROLES:
            if role not in split:
                continue
            of_rule = rule.name if len(split) == 1 else f"{rule.name}.{role}"
            groups.append(
                Group(
                    name=role if index is None else of_rule,
                    parameters=split[role],
                    fused_weights={key: cut for key, cut in fused.items() if key in split[role]},
                    schedule=schedule,
                    **_settings(rule, role, config, matrices_only),
                )
            )
    check_owned_once(groups)
    return groups


def _always(name: str, parameter: nn.Parameter) -> bool:
    return True


def _first_fits(
    roles: Mapping[str, tuple[str, nn.Parameter]], rules: Sequence[tuple[Predicate, GroupRule]]
) -> dict[str, int]:
    """Clean name -> number of the first rule that fits, of those that one does."""
    taken: dict[str, int] = {}
    for index, (holds, rule) in enumerate(rules):
        fitting = [
            name
            for name, (role, parameter) in roles.items()
            if rule.role in (None, role)
            and (rule.match is None or re.search(rule.match, name))
            and holds(name, parameter)
        ]
        said = " and ".join(
            f"{key} = {value!r}" for key, value in (("match", rule.match), ("role", rule.role)) if value is not None
        )
        if not fitting:
            known = ", ".join(role for role in ROLES if any(role == one for one, _ in roles.values()))
            raise ValueError(
                f"group rule {rule.name!r} ({said or 'a predicate'}) fits no trainable parameter; their names are as "
                f"{', '.join(list(roles)[:3])}, and their roles {known}"
            )
        new = [name for name in fitting if name not in taken]
        if not new:
            raise ValueError(
                f"group rule {rule.name!r} ({said or 'a predicate'}) fits only what rules before it have taken, "
                f"{fitting[0]} by {rules[taken[fitting[0]]][1].name!r}; put it before that one"
            )
        taken.update(dict.fromkeys(new, index))
    return taken


def algorithm_name(optimizer: str, options: Mapping[str, Any]) -> str:
    """What an optimizer is called in tables and to `Optimizer`: ``torch.optim.SGD(momentum=0.9)``."""
    return optimizer + (f"({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else "")


def _own_schedule(rule: GroupRule, config: OptimConfig, total_steps: int | None) -> Schedule | None:
    """The schedule that a rule brings along, one for all its groups."""
    if rule.schedule is None and not rule.schedule_options:
        return None
    if total_steps is None:
        raise ValueError(f"group rule {rule.name!r} has a schedule of its own, which wants total_steps")
    with _of_rule(rule):
        return build_schedule(_schedule_config(rule, config), total_steps)


def _settings(rule: GroupRule, role: str, config: OptimConfig, matrices_only: bool) -> dict[str, Any]:
    """The fields of a group that do not depend on which parameters are in it."""
    optimizer, options = config.name, config.options
    if rule.optimizer is not None:
        optimizer, options = rule.optimizer, rule.options
    elif matrices_only and role != "matrices":
        optimizer, options = "adamw", {}
    lr = config.adamw_lr if optimizer == "adamw" and config.adamw_lr is not None else config.lr
    decay = config.weight_decay if role in DECAYED else 0.0
    return {
        "algorithm": algorithm_name(optimizer, options),
        "lr": rule.lr if rule.lr is not None else lr * (rule.lr_scale or 1.0),
        "weight_decay": decay if rule.weight_decay is None else rule.weight_decay,
        "schedule_name": rule.schedule or config.schedule,
    }


def _schedule_config(rule: GroupRule, config: OptimConfig) -> OptimConfig:
    """The config of a rule's schedule. One of another name has the warm-up and the floor of ``config``, no more: how
    that one comes down may mean nothing to it."""
    if rule.schedule is not None and rule.schedule != config.schedule:
        plain = OptimConfig()
        theirs = {key: getattr(plain, key) for key in SCHEDULE_FIELDS if key not in ("warmup_steps", "min_lr_ratio")}
        if rule.schedule == "none":
            theirs["warmup_steps"] = 0
        config = replace(config, schedule=rule.schedule, **theirs)
    return replace(config, **rule.schedule_options)


@contextmanager
def _of_rule(rule: GroupRule) -> Iterator[None]:
    """Errors within it say whose they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"group rule {rule.name!r}: {error}") from None


def scaled_rates(group: Group, lr_scales: Mapping[str, float]) -> list[Group]:
    """A group with the rate of each parameter times its factor, 1 where it has none: one group for each factor that
    there is, those other than 1 called as ``matrices x0.25``.

    Raises ValueError for a factor that is not above 0.
    """
    by_factor: dict[float, list[str]] = {}
    for name in group.parameters:
        by_factor.setdefault(lr_scales.get(name, 1.0), []).append(name)
    parts = []
    for factor, names in by_factor.items():
        if not factor > 0:
            raise ValueError(f"the learning rate of {names[0]!r} cannot be scaled by {factor}; use a factor above 0")
        parts.append(
            replace(
                group,
                name=group.name if factor == 1.0 else f"{group.name} x{factor:g}",
                lr=group.lr * factor,
                parameters={name: group.parameters[name] for name in names},
                fused_weights={name: cut for name, cut in group.fused_weights.items() if name in names},
            )
        )
    return parts


def groups_of_stage(groups: Iterable[Group], stage: nn.Module) -> list[Group]:
    """The groups of a whole model with the parameters that ``stage``, a part of it under the same names, has of each:
    all of the groups in their order, some perhaps empty.

    Raises ValueError for a parameter of the stage that no group of the whole has.
    """
    own = {name: parameter for name, (_, parameter) in parameter_roles(stage).items()}
    known = {name for group in groups for name in group.parameters}
    if unknown := sorted(own.keys() - known):
        raise ValueError(f"the stage has parameters {unknown}, which the whole model does not have")
    return [
        replace(
            group,
            parameters={name: own[name] for name in group.parameters if name in own},
            fused_weights={name: cut for name, cut in group.fused_weights.items() if name in own},
        )
        for group in groups
    ]


def check_owned_once(groups: Iterable[Group]) -> None:
    """Raises ValueError when a parameter, or a name, is in two groups, or two groups share a name."""
    owners: dict[object, str] = {}
    names: set[str] = set()
    for group in groups:
        if group.name in names:
            raise ValueError(f"two groups are called {group.name!r}")
        names.add(group.name)
        for name, parameter in group.parameters.items():
            for key in (name, id(parameter)):
                if key in owners:
                    raise ValueError(f"parameter {name!r} is in group {group.name!r} and in {owners[key]!r}")
                owners[key] = group.name


def groups_table(groups: Iterable[Group]) -> str:
    """A table for people: one line a group, with the first and last name in it."""
    rows = [("group", "optimizer", "peak lr", "schedule", "decay", "tensors", "parameters", "names")]
    for group in groups:
        names = list(group.parameters)
        span = f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names)
        count = sum(parameter.numel() for parameter in group.parameters.values())
        rates = (f"{group.lr:g}", group.schedule_name, f"{group.weight_decay:g}")
        rows.append((group.name, group.algorithm, *rates, str(len(names)), f"{count:,}", span))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = (2, 4, 5, 6)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
