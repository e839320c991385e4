"""Pipeline parallelism: a model cut into stages, and the microbatches of a step sent through them.

A model can be cut when its class has ``stage(first, layers, last)``: the same class with the blocks ``layers`` (their
places in the whole list), the part before the first block if ``first``, what follows the last one if ``last``, all
under the names that they have in the whole, sharing its submodules. A stage that is not the first takes the hidden
states of the one before it, and gives hidden states unless it is the last. A parameter that both ends need (a tied
embedding) has a copy at each, under one name: `Pipeline` sums their gradients.

torch.distributed.pipelining has the schedules. What the caller's own function computes for a microbatch, it is asked
for by the microbatch's number: nothing but hidden states travels, and rows of any kind and number are looked up.
Gradients are sums over microbatches, as those of the data ranks are (``scale_grads=False``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kforge_parallel._torch import SPLITS_BACKWARD, begin_anew, no_greeting
from kforge_parallel.config import ParallelConfig
from kforge_parallel.fsdp import find_blocks
from kforge_parallel.mesh import Mesh
from kforge_parallel.precision import precision_of
from kforge_parallel.stages import SCHEDULES, rank_of_stage, split_layers, stages_of_rank, stages_per_rank

Call = Callable[[nn.Module, Tensor | None, int], Tensor]
"""(stage, hidden states or None on the first, number of the microbatch) -> hidden states; of the last stage the result:
in training the loss, a scalar."""
Shape = tuple[int, ...]
"""Of the hidden states of a microbatch on this rank, the rows first."""


class StageCall(nn.Module):
    """A stage as a schedule calls it, for a microbatch by its number; the root of its FSDP units."""

    def __init__(self, stage: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        self.stage = stage
        self.number = number
        """Of the stage, from 0."""
        self.first, self.last = number == 0, number == stages - 1
        self.call: Call | None = None
        self.rows: list[int] = []
        """Of each microbatch; all are sent as if they had the most."""

    def __call__(self, *hidden: Tensor, microbatch: Tensor) -> Tensor:
        # On the host, before FSDP moves what it is given to the device.
        result: Tensor = super().__call__(*hidden, number=int(microbatch))
        return result

    def forward(self, *hidden: Tensor, number: int) -> Tensor:
        assert self.call is not None
        rows, most = self.rows[number], max(self.rows)
        (x,) = hidden or (None,)
        y = self.call(self.stage, x if x is None or rows == most else x[:rows], number)
        if not self.last and rows < most:
            y = torch.cat((y, y.new_zeros(most - rows, *y.shape[1:])))
        return y if y.ndim == 0 else y.contiguous()


@dataclass
class Stages:
    """The stages of this rank, and the parameters that another stage has too."""

    calls: list[StageCall]
    """In their order."""
    config: ParallelConfig
    """What the model was spread by."""
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name of a parameter that two stages have -> their numbers."""
    twins: dict[str, nn.Parameter] = field(default_factory=dict)
    """Name -> the second copy of a parameter, where this rank has both stages. It is in no state, and not in the model:
    it takes its values from the first and gives it its gradient."""


def cut(model: nn.Module, mesh: Mesh, config: ParallelConfig, block_list: str | None = None) -> nn.Module:
    """The part of ``model`` that this rank has, with `Stages` as its attribute ``pipeline_stages``.

    Raises ValueError for a model that cannot be cut, or not so.
    """
    check_stages(model, mesh.pp_size)
    stages = mesh.pp_size * stages_per_rank(config)
    costs, last = stage_costs(model, block_list)
    layers = split_layers(config, mesh.pp_size, len(costs), costs, last)
    own = stages_of_rank(mesh.pp_rank, config, mesh.pp_size)

    def part(of: nn.Module, numbers: Sequence[int]) -> nn.Module:
        indices = [index for number in numbers for index in layers[number]]
        found: nn.Module = of.stage(first=0 in numbers, layers=indices, last=stages - 1 in numbers)  # type: ignore[operator]
        return found

    holders: dict[str, list[int]] = {}
    for number in range(stages):
        for name, _ in part(model, [number]).named_parameters():
            holders.setdefault(name, []).append(number)
    shared = {name: numbers for name, numbers in holders.items() if len(numbers) > 1}
    for name, numbers in shared.items():
        if len(numbers) > 2:
            raise ValueError(
                f"{name} is in {len(numbers)} stages, and can be in two: keep it in blocks, or at the ends"
            )
    mine = part(model, own)
    parts = [mine] if len(own) == 1 else [part(mine, [number]) for number in own]
    inside = {module for one in parts for module in one.modules()}
    for name, child in mine.named_children():
        owners = {module for module in child.modules() if module._parameters}
        if owners and not owners & inside:
            setattr(mine, name, None)  # the stage that needs it has one of its own
    mine.pipeline_stages = Stages(  # type: ignore[assignment]
        [StageCall(one, number, stages) for one, number in zip(parts, own, strict=True)],
        config,
        {name: (numbers[0], numbers[1]) for name, numbers in shared.items()},
    )
    return mine


def check_stages(model: nn.Module, pp: int) -> None:
    """Raise ValueError for a model that cannot be cut into stages."""
    if not hasattr(model, "stage"):
        raise ValueError(
            f"parallel.pp = {pp} needs to know how to cut {type(model).__name__}: give the class a method "
            "stage(first, layers, last) that returns the part of it with these blocks, or set parallel.pp to 1"
        )


def stage_costs(model: nn.Module, block_list: str | None = None) -> tuple[list[float], float]:
    """What each block costs, and what follows the last: as the model's ``stage_costs()`` says, or its parameters."""
    own: Callable[[], tuple[list[float], float]] | None = getattr(model, "stage_costs", None)
    if own is not None:
        return own()
    blocks = find_blocks(model, block_list)
    return [float(sum(p.numel() for p in block.parameters())) for block in blocks], 0.0


def stages_of(model: nn.Module) -> Stages:
    """What `cut` left. Raises ValueError for a model that was not cut."""
    found = getattr(model, "pipeline_stages", None)
    if not isinstance(found, Stages):
        raise ValueError("the model is in one piece; a pipeline wants what `parallelize` returns on a mesh with pp > 1")
    return found


def take_own(model: nn.Module) -> None:
    """Give the model of several stages the parameters and buffers that these hold in no submodule, as they are now:
    each stage has a register of its own for them, and so has the model."""
    for call in reversed(stages_of(model).calls):
        for register, taken in ((model._parameters, call.stage._parameters), (model._buffers, call.stage._buffers)):
            register.update({name: value for name, value in taken.items() if name in register})  # type: ignore


def find_twins(model: nn.Module) -> None:
    """Note the second copies that this rank has, once every parameter is what it stays, and give them their values."""
    stages = stages_of(model)
    own = {call.number: call.stage for call in stages.calls}
    for name, (_, second) in stages.shared.items():
        if second in own and own[second].get_parameter(name) is not model.get_parameter(name):
            stages.twins[name] = own[second].get_parameter(name)
    refresh_twins(model)


@torch.no_grad()
def refresh_twins(model: nn.Module) -> None:
    """Give second copies the values of the first."""
    for name, twin in stages_of(model).twins.items():
        _local(twin).copy_(_local(model.get_parameter(name)))


class Pipeline:
    """Sends microbatches through the stages of a model that `parallelize` has cut. Every rank of the pipeline calls it
    alike."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model = model
        self.mesh = mesh
        self.stages = stages_of(model)
        self.config = self.stages.config
        self.kind = SCHEDULES[self.config.pp_schedule]
        self.group = mesh.pp.get_group()
        self.total = mesh.pp_size * stages_per_rank(self.config)
        self.dtype = precision_of(self.config.precision, self.config.storage).compute
        self._schedules: dict[tuple[int, Shape], Any] = {}

    @property
    def has_last(self) -> bool:
        """Whether the last stage, where the loss is, lies on this rank."""
        return self.stages.calls[-1].last

    @property
    def copies(self) -> dict[str, int]:
        """Name of a parameter that lies on several ranks of the pipeline -> on how many."""
        return {name: 2 for name, ends in self.stages.shared.items() if len({*map(self._rank, ends)}) == 2}

    def hidden_shape(self, ids: Tensor, dim: int) -> Shape:
        """Shape of the hidden states between stages for a microbatch of ids [rows, tokens] as this rank has them."""
        rows, tokens = ids.shape
        return (rows, tokens // self.mesh.tp_size if self.config.sequence_parallel else tokens, dim)

    def train(self, call: Call, shapes: Sequence[Shape]) -> list[Tensor]:
        """Forward and backward of a step's microbatches, their gradients added up in ``.grad``, to what is there.

        shapes: of the hidden states of each, all alike but for the rows. Returns the losses, in order, where the last
        stage is, and nothing elsewhere. Raises ValueError for shapes that differ in more.
        """
        numbers = torch.arange(len(shapes))
        losses: list[Tensor] = []
        before = self._set_aside()
        with self._running(call, shapes) as most:
            schedule = self._schedule(len(shapes), most)
            schedule.step(microbatch=numbers, target=numbers, losses=losses, return_outputs=False)
        self._sum_shared()
        for parameter, grad in before:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def forward(self, call: Call, shapes: Sequence[Shape]) -> list[Tensor]:
        """The forward of some microbatches, one behind the other. Returns what the last stage gives for each, in order,
        where that is, and nothing elsewhere.

        torch's schedules are not asked: their evaluation fails for V schedules, and spoils training before torch 2.13.
        """
        own = {one.number: one for one in self.stages.calls}
        results: list[Tensor] = []
        sent: list[dist.Work] = []
        with self._running(call, shapes) as most:
            for microbatch in torch.arange(len(shapes)):
                x: list[Tensor] = []
                for number, stage in own.items():
                    if number and number - 1 not in own:
                        x = [self._receive(number - 1, most)]
                    y = stage(*x, microbatch=microbatch)
                    x = [y]
                    if stage.last:
                        results.append(y)
                    elif number + 1 not in own:
                        work = dist.isend(y, group=self.group, group_dst=self._rank(number + 1))
                        assert work is not None
                        sent.append(work)
            for work in sent:
                work.wait()
        return results

    @contextmanager
    def _running(self, call: Call, shapes: Sequence[Shape]) -> Iterator[Shape]:
        """The stages know what to compute, and hold no gathered weights afterwards. Yields the shape that is sent."""
        if len({shape[1:] for shape in shapes}) != 1:
            raise ValueError(f"shapes = {list(shapes)} must be of one microbatch or more, and alike but for the rows")
        refresh_twins(self.model)
        for stage in self.stages.calls:
            if (weights := vars(stage).get("fp8_weights")) is not None:
                weights.begin()
            stage.call, stage.rows = call, [shape[0] for shape in shapes]
            stage.train(self.model.training)  # which does not reach what is no child of the model
        try:
            yield max(shapes)
        finally:
            for stage in self.stages.calls:
                stage.call = None
                for module in stage.modules():
                    if isinstance(module, FSDPModule):
                        begin_anew(module)

    def _rank(self, stage: int) -> int:
        return rank_of_stage(stage, self.mesh.pp_size, self.kind.v)

    def _receive(self, stage: int, shape: Shape) -> Tensor:
        x = torch.empty(shape, dtype=self.dtype, device=self.mesh.device)
        dist.recv(x, group=self.group, group_src=self._rank(stage))
        return x

    def _schedule(self, microbatches: int, shape: Shape) -> Any:
        """torch's schedule for so many microbatches of this shape, made when it is first needed."""
        key = (microbatches, shape)
        if key not in self._schedules:
            stages = []
            for call in self.stages.calls:
                hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
                loss = torch.empty((), dtype=torch.promote_types(self.dtype, torch.float32), device="meta")
                stage = pipelining.PipelineStage(
                    call,
                    call.number,
                    self.total,
                    self.mesh.device,
                    input_args=() if call.first else (hidden,),  # given, so that no trial forward is run
                    output_args=(loss.requires_grad_(),) if call.last else (hidden,),
                    group=self.group,
                    dw_builder=None if SPLITS_BACKWARD and not self._whole_backward(call) else _all_done,
                )
                if self.kind.v:
                    no_greeting(stage)
                stages.append(stage)
            options = {"loss_fn": _loss, "scale_grads": False}
            several = self.kind.stages > 1
            make = getattr(pipelining, self.kind.torch_name)
            self._schedules[key] = make(stages if several else stages[0], microbatches, **options)
        return self._schedules[key]

    def _whole_backward(self, call: StageCall) -> bool:
        """Whether a stage wants all its gradients at once. It may under any schedule: what is left for later is then
        nothing."""
        return bool(getattr(call.stage, "whole_backward", False))

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take away the gradients that shared parameters have from a call before: those are sums already."""
        own = {call.number for call in self.stages.calls}
        here = [self.model.get_parameter(name) for name, ends in self.stages.shared.items() if own & set(ends)]
        kept = [(parameter, parameter.grad) for parameter in here if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    @torch.no_grad()
    def _sum_shared(self) -> None:
        """Let both copies of a shared parameter have the sum of their gradients; a twin gives its own away."""
        own = {call.number for call in self.stages.calls}
        for name, numbers in sorted(self.stages.shared.items()):
            if not own & set(numbers):
                continue
            parameter = self.model.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mine = _local(parameter.grad)
            twin = self.stages.twins.get(name)
            if twin is not None:
                if twin.grad is not None:
                    mine += _local(twin.grad)
                    twin.grad = None
                continue
            (peer,) = (self._rank(number) for number in numbers if number not in own)
            theirs = torch.empty_like(mine)
            transfers = [
                dist.P2POp(dist.isend, mine.contiguous(), group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
            mine += theirs


def _loss(output: Tensor, _: Tensor) -> Tensor:
    """What the last stage gave, but another tensor: torch detaches a stage's output in place after its backward."""
    return output.clone()


def _all_done() -> Callable[[], None]:
    """What is left of a backward that was computed as a whole."""
    return lambda: None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
