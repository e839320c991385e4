"""Expert parallelism: each rank of a group holds whole experts, and tokens travel to them and back.

A mixture of experts is any module with two children: ``experts``, which holds the weights of E experts, the expert
being the first dimension of each, and computes ``experts(x [N,D], counts [E]) -> [N,D]`` for rows sorted by expert; and
``exchange``, without parameters, which is called as ``exchange(x [T,D], ids [T,k], weights [T,k], experts) -> y [T,D]``
and gives y_t = Σ_j weights_tj · expert_{ids_tj}(x_t). Alone, an exchange sorts and adds up what is in place. Here
`AllToAllExchange` takes its place. With n ranks, E' = E/n experts on each, S = T k slots (a token and one of its
choices) sent from a rank and N rows received:

    dispatch   y [N,D] = B A O x       O  row of each slot, sorted by expert     [S,T]
    combine    y [T,D] = W Oᵀ Aᵀ Bᵀ x  A  all-to-all: S rows sent, N received
                                       B  rows sorted by rank -> by own expert   [N,N]
                                       W  sum over a token's slots, weighted     [T,S]

Backward is the transpose: dispatch's is a combine without weights, combine's a dispatch of gradients, weighted. Each
row of an expert's input is another token of the group, so the gradient of its weights is whole for the group when it is
made: nothing is divided and nothing is counted twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from kforge_parallel.collectives import sum_all
from kforge_parallel.kept import keep
from kforge_parallel.mesh import Mesh
from kforge_parallel.tensor import compute_locally, cut, with_every_gradient

# ------------------------------------------------------------------------------------------ transport


def send_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first sent[0] rows to rank 0 of the group, the next sent[1] to rank 1, …; what came, in order of rank."""
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
    return came


def to_host(numbers: Tensor) -> Callable[[], Any]:
    """Start to copy a tensor to the host; the result waits for it and gives it as lists. Nothing else is waited for."""
    if numbers.device.type == "cpu":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Any:
        done.synchronize()
        return copy.tolist()

    return wait


class Route:
    """Where the slots of this rank go, and in which order rows of others come. Collective: ranks tell each other how
    many rows they send to each expert. The host learns the sizes of the transfers at `wait`."""

    def __init__(self, ids: Tensor, n_experts: int, group: dist.ProcessGroup) -> None:
        """ids: [T,k] int64, experts by their number among all."""
        self.group = group
        self.tokens, self.choices = ids.shape
        by_slot, self.order = ids.flatten().sort(stable=True)
        """[S] the slot at each place of what is sent; slots of one expert in order of token."""
        slots = torch.arange(len(by_slot), device=ids.device)
        self.place = torch.empty_like(slots).scatter_(0, self.order, slots)
        """[S] the place of each slot."""
        experts = torch.arange(n_experts + 1, device=ids.device)
        sizes = torch.searchsorted(by_slot, experts).diff().view(group.size(), -1)
        self.sizes = torch.empty_like(sizes)
        """[n,E'] how many rows come from each rank for each expert of this one."""
        dist.all_to_all_single(self.sizes, sizes, group=group)
        self.counts = self.sizes.sum(0)
        """[E'] rows of each expert of this rank; on the device."""
        self._on_host = to_host(torch.stack((sizes.sum(1), self.sizes.sum(1))))

    def wait(self) -> None:
        """Wait for the host to know how many rows go to and come from each rank."""
        self.sent, self.received = self._on_host()
        total, sizes = sum(self.received), self.sizes
        by_rank = _starts(sizes)  # where the rows of a rank and an expert begin as they come, and when sorted
        by_expert = _starts(sizes.t()).t()
        rows = torch.arange(total, device=sizes.device)

        def follow(shift: Tensor, lengths: Tensor) -> Tensor:
            return rows + shift.flatten().repeat_interleave(lengths.flatten(), output_size=total)

        self.by_expert = follow((by_rank - by_expert).t(), sizes.t())
        """[N] which of the rows, as they came, stands at each place when they are sorted by expert."""
        self.by_rank = follow(by_expert - by_rank, sizes)
        """[N] the inverse."""


def _starts(sizes: Tensor) -> Tensor:
    """Where each of several runs of these lengths begins, one after the other."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


class _Dispatch(torch.autograd.Function):
    """x [T,D] -> rows [N,D] for the experts of this rank, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        rows = x.index_select(0, route.order // route.choices)  # the device works on while the host waits
        route.wait()
        rows = keep("transfers", partial(send_rows, rows, route.sent, route.received, route.group))
        ctx.save_for_backward(route.place, route.by_rank)
        ctx.sent, ctx.received, ctx.group = route.sent, route.received, route.group
        ctx.slots = (route.tokens, route.choices)
        return rows.index_select(0, route.by_expert)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        place, by_rank = ctx.saved_tensors
        rows = send_rows(grad.index_select(0, by_rank), ctx.received, ctx.sent, ctx.group)
        # Not index_add: its order of addition is not fixed on CUDA.
        return rows.index_select(0, place).view(*ctx.slots, grad.shape[1]).sum(1), None


class _Combine(torch.autograd.Function):
    """rows [N,D] of the experts of this rank, weights [T,k] -> y [T,D]; added up in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, route: Route) -> Tensor:
        rows = rows.index_select(0, route.by_rank)
        rows = keep("transfers", partial(send_rows, rows, route.received, route.sent, route.group))
        slots = rows.index_select(0, route.place).view(route.tokens, route.choices, rows.shape[1])
        ctx.save_for_backward(slots if ctx.needs_input_grad[1] else None, weights, route.order, route.by_expert)
        ctx.sent, ctx.received, ctx.group = route.sent, route.received, route.group
        weights = _wide(weights)
        y = slots[:, 0] * weights[:, :1]
        for j in range(1, route.choices):
            y.addcmul_(slots[:, j], weights[:, j : j + 1])
        return y.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        slots, weights, order, by_expert = ctx.saved_tensors
        rows = grad.index_select(0, order // weights.shape[1])
        rows.mul_(_wide(weights).flatten().index_select(0, order).unsqueeze(1))
        rows = send_rows(rows, ctx.sent, ctx.received, ctx.group)
        of_weights = None
        if slots is not None:
            grad = _wide(grad)
            each = [(slots[:, j] * grad).sum(-1) for j in range(weights.shape[1])]
            of_weights = torch.stack(each, 1).to(weights.dtype)
        return rows.index_select(0, by_expert), of_weights, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class AllToAllExchange(nn.Module):
    """The exchange of a mixture whose experts are dealt out over a group: rank r of n holds E/n of them, from r E/n on.

    Of each layer, the host waits once in forward, for 2 n numbers: how many rows to send to and expect from each rank.
    Memory a layer: k T D elements until backward, and the N rows that the experts keep.
    """

    def __init__(self, group: dist.ProcessGroup, n_experts: int, rows: Sequence[dist.ProcessGroup] = ()) -> None:
        """rows: groups over which a sum, one after the other, is one over all ranks that hold tokens of the same
        rows."""
        super().__init__()
        self.group, self.n_experts, self.rows = group, n_experts, tuple(rows)

    # Sizes depend on the data: a graph would be made anew for each.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """x [T,D], ids [T,k], weights [T,k], experts(rows [N,D], counts [E/n]) -> y [T,D]. T may differ from rank to
        rank, and be 0."""
        route = keep("routes", lambda: Route(ids, self.n_experts, self.group))
        rows: Tensor = _Dispatch.apply(x, route)
        y: Tensor = _Combine.apply(experts(rows, route.counts), weights, route)
        return y

    def sum_counts(self, counts: Tensor) -> Tensor:
        """Counts of a row's tokens, over all ranks that hold a part of it. No gradient."""
        return _sum_over(self.rows, counts)

    def extra_repr(self) -> str:
        return f"{self.n_experts} experts over {self.group.size()} ranks"


# ------------------------------------------------------------------------------------------ models


def find_mixtures(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, for every mixture of experts of a model: modules that have children ``exchange`` and
    ``experts``."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, part, None), nn.Module) for part in ("exchange", "experts"))
    }


def find_called(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module, for experts as Hugging Face's models have them: parameters [E,…], an attribute ``num_experts``,
    called ``experts(hidden [T,D], ids [T,k], weights [T,k])``."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
        and isinstance(getattr(module, "num_experts", None), int)
        and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        and len(inspect.signature(module.forward).parameters) > 2
    }


def has_experts(model: nn.Module) -> bool:
    """Whether a model has experts that ep can deal out."""
    return bool(find_mixtures(model) or find_called(model))


def check_experts(model: nn.Module, ep: int, tp: int) -> None:
    """Raise ValueError for a model that has no experts to be dealt out, or that cannot have them so under ``tp``."""
    if not has_experts(model):
        raise ValueError(
            f"parallel.ep = {ep}, but {type(model).__name__} has no experts: no module of it has children "
            "`exchange` and `experts`; set parallel.ep to 1"
        )
    if tp > 1 and not find_mixtures(model):
        raise ValueError(
            f"parallel.ep = {ep} with parallel.tp = {tp}: all tensor-parallel ranks of a Hugging Face model have whole "
            "rows and would send each token several times; set tp to 1, or ep to 1 (its plan then deals whole experts "
            "out over tp)"
        )


def spread_called(experts: dict[str, nn.Module], mesh: Mesh) -> list[nn.Module]:
    """Deal out experts as `find_called` finds them over the ep ranks of ``mesh``. In place; returns their modules."""
    assert mesh.expert_mesh is not None
    ep = mesh.expert_mesh["ep"]
    for name, module in experts.items():
        exchange = AllToAllExchange(ep.get_group(), _deal_out(name, module, ep))
        vars(module)["num_experts"] = exchange.n_experts // ep.size()
        module.forward = partial(exchange.forward, experts=partial(_call_sorted, module, module.forward))
    return [*experts.values()]


def _call_sorted(module: nn.Module, call: Callable[..., Tensor], rows: Tensor, counts: Tensor) -> Tensor:
    """Experts that want ids and weights, on rows sorted by expert."""
    ids = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
    return with_every_gradient(call(rows, ids[:, None], rows.new_ones(len(rows), 1)), module)


def spread_experts(model: nn.Module, mesh: Mesh, words: Mapping[str, str]) -> list[nn.Module]:
    """Deal the experts of every mixture out over the ep ranks of ``mesh``, or, where ep is 1, let the ranks that hold
    parts of a row count together. In place; names do not change.

    words: what the plan says of each parameter; empty where tp is 1 and there is none.
    Returns the modules of experts that were dealt out: FSDP2 shards them on the expert root.
    Raises ValueError for a model without experts, a number of experts that ep does not divide, and a plan that cuts
    experts over tp.
    """
    mixtures = find_mixtures(model)
    row = [] if mesh.cp_group is None else [mesh.cp_group]
    if mesh.expert_mesh is None:
        for name, mixture in mixtures.items():
            cut = "experts" in {words.get(parameter) for parameter in _names(name, mixture)}
            rows = [*row, mesh.tp.get_group()] if cut else row
            if rows:
                vars(mixture.exchange)["sum_counts"] = partial(_sum_over, rows)
        return []
    rows = [*row, mesh.tp.get_group()] if mesh.tp_size > 1 else row
    ep = mesh.expert_mesh["ep"]
    check_experts(model, ep.size(), mesh.tp_size)
    if not mixtures:
        return spread_called(find_called(model), mesh)
    dealt = []
    for name, mixture in mixtures.items():
        experts = mixture.experts
        assert isinstance(experts, nn.Module)
        for parameter in _names(name, mixture):
            if words.get(parameter, "experts") != "experts":
                raise ValueError(
                    f"the plan cuts {parameter} as {words[parameter]!r} over tp, but parallel.ep = {ep.size()} deals "
                    "whole experts out over the same ranks; call it 'experts' in the plan, or set parallel.ep to 1"
                )
        mixture.exchange = AllToAllExchange(ep.get_group(), _deal_out(f"{name}.experts".lstrip("."), experts, ep), rows)
        dealt.append(experts)
    return dealt


def _names(name: str, mixture: nn.Module) -> list[str]:
    """Parameters of the experts of a mixture."""
    return [f"{name}.experts.{leaf}".lstrip(".") for leaf, _ in mixture.experts.named_parameters()]  # type: ignore


def _sum_over(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    for group in groups:
        counts = keep("routes", partial(sum_all, counts, group))
    return counts


def _deal_out(name: str, experts: nn.Module, ep: DeviceMesh) -> int:
    """Make parameters [E,…] DTensors of which each rank holds E/n, and the modules compute on those. Returns E."""
    sizes = {leaf: parameter.shape[0] if parameter.ndim else 0 for leaf, parameter in experts.named_parameters()}
    if len({*sizes.values()}) != 1 or 0 in sizes.values():
        found = ", ".join(f"{leaf} {size}" for leaf, size in sizes.items()) or "none"
        raise ValueError(
            f"{name} must hold the experts as the first dimension of each of its parameters, which are, by its size: "
            f"{found}; stack the weights of all experts, or set parallel.ep to 1"
        )
    (total,) = {*sizes.values()}
    if total % ep.size():
        raise ValueError(
            f"{name} holds {total} experts, which cannot be split over parallel.ep = {ep.size()}; set ep to a divisor "
            f"of {total}"
        )
    for module in experts.modules():
        leaves = list(module.named_parameters(recurse=False))
        for leaf, parameter in leaves:
            module.register_parameter(leaf, cut(parameter, ep, Shard(0)))
        if leaves:
            compute_locally(module)
    return total
