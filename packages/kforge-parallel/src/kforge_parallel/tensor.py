"""Tensor parallelism by a plan: weights become DTensors, modules compute on their local parts.

n ranks share a row; the plan's words (`plan`) say how each weight is cut. A module keeps its code: for the length of
its ``forward`` its parameters are this rank's plain local tensors, and what must travel does so before and after. With
x [B,S,D] on the residual stream, Wc [F,D] cut by rows (colwise), Wr [D,F] cut by columns (rowwise), F' = F/n:

    sequence_parallel      x is [B,S/n,D] on each rank:  gather -> x Wcᵀ [B,S,F'] -> h Wrᵀ -> scatter [B,S/n,D]
    without                x is [B,S,D] on every rank:   copy   -> x Wcᵀ [B,S,F'] -> h Wrᵀ -> reduce  [B,S,D]

Both send the same number of bytes; the first holds 1/n of the activations between the products. A weight that every
rank holds whole but uses on its own part of the data (a norm under sequence_parallel, a norm of heads) has a gradient
that is a sum over ranks; it is summed in backward, so that no gradient is ever partial.

The sequence is the last dimension but one of a module's input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from kforge_parallel.collectives import copy, gather, join, part, reduce, scatter, summed
from kforge_parallel.plan import Resolved

SEQUENCE = -2
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
COLWISE = ("colwise", "colwise_kv", "colwise_qkv", "packed_colwise", "colwise_join")
ROWWISE = ("rowwise", "rowwise_part")
WHOLE_ROWS = ("colwise_join", "rowwise_part", "experts_sum")
BY_KV_HEAD = ("colwise_kv", "colwise_qkv")

Local = Callable[[Tensor], Tensor]


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Resolved,
    *,
    sequence_parallel: bool = True,
    kv_heads: int | None = None,
) -> None:
    """Cut the parameters of ``model`` over the 1-D ``mesh`` as ``plan`` says, and make its modules compute so.

    In place; names do not change and tied parameters stay tied. Parameters may be on meta, or hold the same values on
    every rank; experts that ep has dealt out are left as they are. ``kv_heads``: key/value heads of each attention,
    for ``colwise_kv``.

    Raises ValueError for sizes that do not divide, with both numbers, and for what a module cannot be asked to do.
    """
    _check_whole_rows(plan, sequence_parallel)
    split = _Split(mesh, sequence_parallel, kv_heads)
    placed: dict[nn.Parameter, tuple[str, Placement]] = {}
    owners: dict[str, dict[str, str]] = {}
    for name, word in plan.parameters.items():
        owner, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        if isinstance(parameter, DTensor):
            continue
        owners.setdefault(owner, {})[leaf] = word
        placement = split.placement(name, parameter, word)
        first, where = placed.setdefault(parameter, (name, placement))
        if where != placement:
            raise ValueError(f"{first} and {name} are one parameter, but the plan cuts them as {where} and {placement}")
    parts = {parameter: cut(parameter, mesh, placement) for parameter, (_, placement) in placed.items()}
    for name in plan.parameters:
        owner, _, leaf = name.rpartition(".")
        whole = model.get_parameter(name)
        if whole in parts:  # not yet reached by another name of its module
            model.get_submodule(owner).register_parameter(leaf, parts[whole])
    gathers = [name for name, word in plan.modules.items() if word == "gather"]

    def inside(name: str, *, or_same: bool) -> bool:
        return any(name.startswith(whole + ".") or (or_same and name == whole) for whole in gathers)

    _check_experts([name for name, word in plan.parameters.items() if word == "experts"], split, inside)
    # A module that is used in two places has two names, and is changed once.
    for module in {model.get_submodule(name) for name in gathers if not inside(name, or_same=False)}:
        _replace_forward(module, before=split.enter, which="alike")
    done: set[nn.Module] = set()
    for name, words in owners.items():
        module = model.get_submodule(name)
        if module not in done:
            done.add(module)
            split.localise(name, module, words, gathered=inside(name, or_same=True))
    if not sequence_parallel:
        _refuse_dropout(model)


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p > 0:
            raise ValueError(
                f"{name or 'the model'} drops values with p = {module.p:g}, and without sequence_parallel every "
                "tensor-parallel rank would drop others of the same row; set parallel.sequence_parallel to true, or p "
                "to 0"
            )


def _check_whole_rows(plan: Resolved, sequence_parallel: bool) -> None:
    for name, word in plan.parameters.items():
        if sequence_parallel and word in WHOLE_ROWS:
            raise ValueError(
                f"the plan calls {name} {word!r}, which is for ranks that all have the whole row; set "
                "parallel.sequence_parallel to false, or use another word"
            )


def _check_experts(names: list[str], split: _Split, inside: Callable[..., bool]) -> None:
    """Raise ValueError where ranks of a group would hold the same tokens before experts."""
    for name in names:
        whole = inside(name, or_same=False)
        if whole or not split.sequence_parallel:
            raise ValueError(
                f"{name} is of experts, and under tp = {split.size} each rank sends them its own part of a row; here "
                "every rank would send the whole row, and a token be counted once a rank. "
                + (
                    "Take 'gather' off the modules around it in the plan"
                    if whole
                    else "Set parallel.sequence_parallel to true, or tp to 1"
                )
            )


def cut(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter as a DTensor over a 1-D mesh that holds this rank's part; nothing is sent."""
    local = parameter.detach()
    if isinstance(placement, Shard):
        part = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
        local = part.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(
        local, mesh, (placement,), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class _Split:
    """How one group of ranks cuts weights and activations."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool, kv_heads: int | None) -> None:
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.sequence_parallel = sequence_parallel
        self.kv_heads = kv_heads

    # ------------------------------------------------------------------------------------------ weights

    def placement(self, name: str, parameter: Tensor, word: str) -> Shard | Replicate:
        """How a parameter lies on the ranks. Raises ValueError where its size does not divide."""
        dim: int | None = None
        if word in ("colwise", "colwise_join", "experts_sum", "vocab_embedding", "vocab_loss") or (
            word in BY_KV_HEAD and self.has_own_head(name)
        ):
            dim = 0
        elif word == "packed_colwise" or (word in ROWWISE and name.rpartition(".")[2] != "bias"):
            dim = 1
        if word == "colwise_qkv":
            self.check_groups(name, parameter)
        if dim is None:
            return Replicate()
        if parameter.ndim <= dim:
            raise ValueError(
                f"{name} has {parameter.ndim} dimensions, and {word} cuts along dimension {dim}"
                + ("; it wants [parts, out, in]" if word == "packed_colwise" else "")
            )
        if parameter.shape[dim] % self.size:
            raise ValueError(
                f"{name} has {parameter.shape[dim]} entries along dimension {dim}, which tp = {self.size} does not "
                f"divide ({word}); choose a size that is a multiple, or a smaller tp"
            )
        return Shard(dim)

    def has_own_head(self, name: str) -> bool:
        """Whether each rank has key/value heads of its own; else several share one."""
        if self.kv_heads is None:
            raise ValueError(
                f"the plan cuts {name} by key/value heads, but the model does not say how many key/value heads it has; "
                "give it an attribute `shape`, a dict with 'n_kv_heads'"
            )
        if self.kv_heads % self.size and self.size % self.kv_heads:
            raise ValueError(
                f"n_kv_heads = {self.kv_heads} can neither be split over tp = {self.size} nor be shared by its ranks "
                "evenly; use a tp that divides n_kv_heads or is a multiple of it"
            )
        return self.kv_heads % self.size == 0

    def check_groups(self, name: str, parameter: Tensor) -> None:
        """Raise ValueError when a weight is no [KV, R + 2, …] whose queries can be dealt out."""
        shape = tuple(parameter.shape)
        if len(shape) < 2 or shape[0] != self.kv_heads or shape[1] < 3:
            raise ValueError(
                f"{name} has shape {shape}, and colwise_qkv wants [{self.kv_heads}, queries + 2, …]: of each key/value "
                "head its queries, its key, its value"
            )
        sharing = max(1, self.size // shape[0])
        if (shape[1] - 2) % sharing:
            raise ValueError(
                f"{name} has {shape[1] - 2} query heads for each of {shape[0]} key/value heads, which the {sharing} "
                f"ranks that share one under tp = {self.size} cannot have in equal numbers; use a smaller tp"
            )

    def own_head_rows(self, weight: Tensor) -> Tensor:
        """Of a whole [KV * Dh, …] weight, the rows of the head that this rank's queries need."""
        assert self.kv_heads is not None
        rows = weight.shape[0] // self.kv_heads
        return weight.narrow(0, self.rank * self.kv_heads // self.size * rows, rows)

    def own_group_rows(self, weight: Tensor) -> Tensor:
        """Of a whole [KV, R + 2, …] weight, this rank's queries with the key and the value that they need:
        [1, R' + 2, …]."""
        sharing = self.size // weight.shape[0]
        group = weight[self.rank // sharing]
        queries = group[:-2].chunk(sharing)[self.rank % sharing]
        return torch.cat((queries, group[-2:])).unsqueeze(0)

    # ------------------------------------------------------------------------------------------ activations

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to an input that is whole on every rank."""
        if not self.sequence_parallel:
            return copy(x, self.group)
        return gather(x, self.group, SEQUENCE)

    def leave(self, x: Tensor) -> Tensor:
        """From this rank's addend to the residual stream."""
        if not self.sequence_parallel:
            return reduce(x, self.group)
        if x.shape[SEQUENCE] % self.size:
            raise ValueError(
                f"rows of {x.shape[SEQUENCE]} tokens cannot be split over tp = {self.size}; use a multiple of it, or "
                "parallel.sequence_parallel = false"
            )
        return scatter(x, self.group, SEQUENCE)

    def own_features(self, x: Tensor) -> Tensor:
        """This rank's features of those that every rank has."""
        if x.shape[-1] % self.size:
            raise ValueError(
                f"{x.shape[-1]} features cannot be split over tp = {self.size}; use a tp that divides them"
            )
        return part(x, self.group, -1)

    def all_features(self, x: Tensor) -> Tensor:
        """The features of all ranks, from this one's."""
        return join(x, self.group, -1)

    # ------------------------------------------------------------------------------------------ modules

    def localise(self, name: str, module: nn.Module, words: Mapping[str, str], *, gathered: bool) -> None:
        """Make ``module`` compute on local parts of its own parameters, named in ``words``."""
        local = {leaf: self.local_part(word, gathered=gathered) for leaf, word in words.items()}
        enter = leave = None
        if not gathered and any(word in (*COLWISE, "vocab_loss") for word in words.values()):
            enter = self.enter
        if "rowwise_part" in words.values():
            enter = self.own_features
        if any(word in ROWWISE for word in words.values()):
            leave = self.leave
        if "colwise_join" in words.values():
            leave = self.all_features
        if "experts_sum" in words.values():
            use_own_experts(name, module, self.rank, self.size)
            enter, leave = self.enter, self.leave
        for leaf, word in words.items():
            rows = module.get_parameter(leaf).shape[0] // self.size
            if word == "vocab_embedding":
                self.look_up_own_rows(module, rows)
            elif word == "vocab_loss":
                if not hasattr(module, "vocab_start"):
                    raise ValueError(
                        f"{type(module).__name__} is to work on a part of the vocabulary (vocab_loss), but has no "
                        "attributes `group` and `vocab_start` to be told which"
                    )
                vars(module).update(group=self.group, vocab_start=self.rank * rows)
        if {*words.values()} <= {"colwise", "colwise_kv"}:
            self.tell_group(name, module, words)
        bias = [leaf for leaf, word in words.items() if word in ROWWISE and leaf == "bias"]
        told = f"{name} ({', '.join(f'{leaf} {word}' for leaf, word in words.items())})"
        # Experts get hidden states and the weights of the sum, and have a gradient for both.
        every = "floating" if "experts_sum" in words.values() else "first"
        _replace_forward(module, local=local, before=enter, which=every, after=leave, bias=bias, told=told)

    def tell_group(self, name: str, module: nn.Module, words: Mapping[str, str]) -> None:
        """A module with an attribute ``group`` computes over features of all ranks, and is told which these are.
        Raises ValueError for a norm of features that lie on several ranks and that cannot be told."""
        if hasattr(module, "group"):
            vars(module)["group"] = self.group
        elif "weight" in words and module.get_parameter("weight").ndim == 1:
            raise ValueError(
                f"{name} ({type(module).__name__}) has one weight a feature and its features are cut over "
                f"tp = {self.size}: a norm would be that of a part. Give it an attribute `group`, over whose ranks it "
                "averages, or call it 'replicate'"
            )

    def local_part(self, word: str, *, gathered: bool) -> Local:
        """From a DTensor parameter to the plain tensor that this rank computes with.

        A whole weight's gradient is summed where ranks use it on different data, or on the way to different parts of
        what follows: everything inside of a gathered module is followed by this rank's features only.
        """
        alone = (
            word in ("replicate", "experts")
            or (word == "sequence" and (gathered or self.sequence_parallel))
            or (word in ROWWISE and self.sequence_parallel)
            or (word in BY_KV_HEAD and not self.has_own_head(""))
        )
        group = self.group
        own = {"colwise_kv": self.own_head_rows, "colwise_qkv": self.own_group_rows}.get(word)

        def local(parameter: Tensor) -> Tensor:
            assert isinstance(parameter, DTensor)
            part = parameter.to_local()
            if isinstance(parameter.placements[0], Shard):
                return part
            part = summed(part, group) if alone else part
            return part if own is None else own(part)

        return local

    def look_up_own_rows(self, module: nn.Module, rows: int) -> None:
        """Make an embedding give zeros for ids of other ranks, and the sum over ranks to the residual stream."""
        for option in ("max_norm", "scale_grad_by_freq"):
            value = getattr(module, option, None)
            if value is not None and value is not False:
                raise ValueError(
                    f"an embedding with {option} = {value} cannot be cut over the vocabulary: it "
                    f"would be applied to each part's own rows; build it without {option}"
                )
        look_up, start = module.forward, self.rank * rows
        padding = getattr(module, "padding_idx", None)
        if padding is not None:  # the row without a gradient is one rank's
            vars(module)["padding_idx"] = padding - start if start <= padding < start + rows else None

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            (ids,) = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            own = ids - start
            elsewhere = (own < 0) | (own >= rows)
            return self.leave(look_up(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))

        module.forward = forward


def use_own_experts(name: str, module: nn.Module, rank: int, ranks: int) -> None:
    """Let experts that are called ``module(hidden [T,D], ids [T,k], weights [T,k])`` compute those that a rank has, E/n
    from r E/n on. Ids of others become E/n, the number that no expert has, and their weights 0: so Hugging Face's own
    experts are told. Raises ValueError for a module that is called otherwise."""
    total = getattr(module, "num_experts", None)
    if total is None or len(inspect.signature(module.forward).parameters) < 3:
        raise ValueError(
            f"{name} ({type(module).__name__}) is to compute a part of its experts, so it must have an attribute "
            "`num_experts` and be called with hidden states, numbers of experts and weights; call it 'sequence' in the "
            "plan, or set parallel.tp to 1"
        )
    own, forward = total // ranks, module.forward
    vars(module).update(num_experts=own, _is_expert_parallel=True)

    def of_own(hidden: Tensor, ids: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        here = ids - rank * own
        elsewhere = (here < 0) | (here >= own)
        y: Tensor = forward(
            hidden, here.masked_fill(elsewhere, own), weights.masked_fill(elsewhere, 0), *args, **kwargs
        )
        return y

    module.forward = of_own


def with_every_gradient(y: Tensor, module: nn.Module) -> Tensor:
    """y itself, of which every parameter of a module gets a gradient, of zeros where it took no part: which parameters
    have one must not differ between ranks."""
    for parameter in module.parameters(recurse=False):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        y = y + 0 * local.flatten()[:1].sum().to(y.dtype)
    return y


def compute_locally(module: nn.Module) -> None:
    """Make a module compute on this rank's part of its own parameters, which are DTensors."""

    def local(parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local()

    _replace_forward(module, local=dict.fromkeys((name for name, _ in module.named_parameters(recurse=False)), local))


def _replace_forward(
    module: nn.Module,
    *,
    local: Mapping[str, Local] | None = None,
    before: Local | None = None,
    which: str = "first",
    after: Local | None = None,
    bias: list[str] | None = None,
    told: str = "",
) -> None:
    """Wrap ``module.forward``: ``before`` on its input, ``after`` on the result, and in between the parameters of
    ``local`` in their local form. Those of ``bias`` are left out, and added to the result at last.

    The input is the first floating-point tensor among the arguments; where ``which`` is "alike" also every other one of
    its shape, where it is "floating" every one. ``told``: module and plan, for a note on errors.
    """
    forward = module.forward
    parameters: Mapping[str, Local] = local or {}
    left_out = bias or []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = _entered(module, before, which, args, kwargs)
        whole: dict[str, Any] = {name: module._parameters[name] for name in parameters}
        parts: dict[str, Any] = {name: part(whole[name]) for name, part in parameters.items()}
        module._parameters.update({name: None if name in left_out else part for name, part in parts.items()})
        try:
            y = forward(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            if told:
                shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
                error.add_note(f"in {told}, which holds on this rank {shapes}: does the plan say what the module does?")
            raise
        finally:
            module._parameters.update(whole)
        if after is not None:
            if not isinstance(y, Tensor):
                raise TypeError(
                    f"{type(module).__name__} ends a row-wise product, so it must return one tensor, which is summed "
                    f"over ranks; it returned {type(y).__name__}"
                )
            y = after(y)
        for name in left_out:
            y = y + parts[name].to(y.dtype)
        return y

    module.forward = wrapped


def _entered(
    module: nn.Module, before: Local, which: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with ``before`` on the first floating-point tensor, or on others too (`_replace_forward`); one that is
    given twice is sent once."""
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
    if not found:
        raise TypeError(
            f"{type(module).__name__} gets its input from other tensor-parallel ranks, so one of its arguments must be "
            f"a tensor of floating-point numbers; what came was {[type(v).__name__ for v in (*args, *kwargs.values())]}"
        )
    inputs = [
        v for v in found if v is found[0] or which == "floating" or (which == "alike" and v.shape == found[0].shape)
    ]
    entered = {id(v): before(v) for v in inputs}

    def new(value: Any) -> Any:
        # Not by the id of anything else: compiled code would hold to that, and be made anew for every object of rows.
        return entered.get(id(value), value) if isinstance(value, Tensor) else value

    return tuple(new(v) for v in args), {name: new(v) for name, v in kwargs.items()}
