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

Which matrices lie in a weight of ``matrices`` is plain data: `fused_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kforge_optim.algorithm import Fused
from kforge_optim.config import OptimConfig

ROLES = ("matrices", "embeddings", "head", "routers", "norms_and_biases")
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


def clean_name(name: str) -> str:
    """``name`` without the segments that wrappers put in: ``a._orig_mod.b`` -> ``a.b``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameter_roles(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Clean name -> (role, parameter) of every trainable parameter, each once, in the model's order."""
    model = _unwrapped(model)
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


def _unwrapped(model: nn.Module) -> nn.Module:
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
    model = _unwrapped(model)
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


def build_groups(model: nn.Module, config: OptimConfig, *, matrices_only: bool = False) -> list[Group]:
    """Split the trainable parameters of ``model`` into groups; a group without parameters is left out.

    With ``matrices_only`` the optimizer that ``config`` names takes only ``matrices``; AdamW takes all the rest at
    ``config.adamw_lr``.

    Raises ValueError when there is nothing to train, and as `fused_weights` does.
    """
    split: dict[str, dict[str, nn.Parameter]] = {}
    for name, (role, parameter) in parameter_roles(model).items():
        split.setdefault(role, {})[name] = parameter
    if not split:
        raise ValueError("the model has no trainable parameter; set requires_grad on what should learn")
    fused = fused_weights(model)
    groups = []
    for name in ROLES:
        if name not in split:
            continue
        beside = matrices_only and name != "matrices"
        groups.append(
            Group(
                name=name,
                algorithm="adamw" if beside else config.name,
                lr=config.adamw_lr if beside and config.adamw_lr is not None else config.lr,
                weight_decay=config.weight_decay if name in DECAYED else 0.0,
                parameters=split[name],
                fused_weights={key: cut for key, cut in fused.items() if key in split[name]},
            )
        )
    return groups


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
    rows = [("group", "optimizer", "peak lr", "decay", "tensors", "parameters", "names")]
    for group in groups:
        names = list(group.parameters)
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        count = sum(parameter.numel() for parameter in group.parameters.values())
        decay = f"{group.weight_decay:g}"
        rows.append((group.name, group.algorithm, f"{group.lr:g}", decay, str(len(names)), f"{count:,}", span))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    numeric = (2, 3, 4, 5)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
