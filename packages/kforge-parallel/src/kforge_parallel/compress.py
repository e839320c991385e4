"""Gradients that replicas send one another in fewer bytes: bf16, int8 under error feedback, or PowerSGD.

FSDP2 shards over ``dp_shard`` alone, and what it has summed there goes through a `Reduction`, the all-reduce hook of
each unit. With n replicas, g_i the gradient of replica i, and C(·) what survives of a tensor on the wire:

    uncompressed   G = Σ g_i
    bf16           G = C(Σ C(g_i))             each replica sums a chunk in fp32: all-to-all, sum, all-gather
    int8           G = C(Σ C(g_i + e_i) + f)   the same; what was lost is sent the next time:
                   e_i ← (g_i + e_i) - C(g_i + e_i),   f ← the same of the sum, of the own chunk
    powersgd       M_i = g_i + e_i [N,M];   P = orthonormal(Σ M_i Q);   Q_i = M_iᵀ P;   G = P (Σ Q_i)ᵀ
                   e_i ← M_i - P Q_iᵀ,   Q ← Σ Q_i

int8 has a scale (fp32) for each block of 256 values, which is never of two parameters. Error feedback on both ways is
that of DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957); PowerSGD is algorithm 1 of Vogels et al. 2019
(arXiv:1905.13727), with the residual of each replica's own projection, which keeps e_i from growing with what replicas
disagree in. Weights in which it would save less than half, and vectors, are summed as they are.

Every replica computes G from the same bytes in the same order, so replicas stay alike to the bit. inf and NaN stay so.

Whether a step counts is known after its gradients are: what it leaves over is kept beside the old until `settle`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from kforge_parallel._torch import all_gather, reduced_shapes

BLOCK = 256
"""Values under one scale."""
SMALLEST = 2.0**-126
"""The least scale: the smallest normal number of fp32."""
WORTH = 2
"""PowerSGD is used where it sends so many times fewer values than there are."""

State = dict[str, Tensor]

# ------------------------------------------------------------------------------------------------------- on the wire


def to_int8(x: Tensor) -> Tensor:
    """x [..., K] with K a multiple of `BLOCK` -> bytes [..., K + 4 K / BLOCK]: values, then a scale (fp32) a block.

    A value is off by at most 1/254 of the largest of its block. inf and NaN make their block inf or NaN.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    # A product, not a division by 127: torch on CUDA divides by a number as if by its rounded inverse, the CPU exactly.
    scale = (blocks.abs().amax(-1, keepdim=True) * (1 / 127)).float().clamp(min=SMALLEST)
    values = (blocks / scale).round().clamp(-127, 127).nan_to_num(nan=0.0).to(torch.int8)
    return torch.cat((values.flatten(-2).view(torch.uint8), scale.squeeze(-1).view(torch.uint8)), -1)


def from_int8(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_int8` stands for, in ``dtype``."""
    blocks = sent.shape[-1] // (BLOCK + 4)
    values, scale = sent.split((blocks * BLOCK, blocks * 4), -1)
    scale = scale.contiguous().view(torch.float32).to(dtype)
    return (values.view(torch.int8).unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(-2)


def to_bf16(x: Tensor) -> Tensor:
    """x [..., K] -> bytes [..., 2 K]."""
    return x.to(torch.bfloat16).view(torch.uint8)


def from_bf16(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_bf16` stands for, in ``dtype``."""
    return sent.view(torch.bfloat16).to(dtype)


CODECS = {"bf16": (to_bf16, from_bf16), "int8": (to_int8, from_int8)}


@torch.no_grad()
def orthonormal(p: Tensor) -> Tensor:
    """The columns of p [N,R] made orthogonal, each of length 1 (Gram-Schmidt); 0 where nothing is left of one."""
    columns: list[Tensor] = []
    for column in p.unbind(1):
        length = column.norm()
        for _ in range(2):  # once more for what rounding leaves
            for other in columns:
                column = column - other * (other @ column)
        left = column.norm()
        columns.append(torch.where(left <= 1e-5 * length, torch.zeros_like(column), column / left))
    return torch.stack(columns, 1)


# --------------------------------------------------------------------------------------------------------- one unit


class Reduction(ABC):
    """The sum over replicas of the gradients of one FSDP unit, and what it has left over.

    Called with what the unit has reduced over its shards: a flat tensor of the parts of its parameters that this rank
    holds, one after the other, which becomes the sum. ``divide``: by what the sum is divided.
    """

    def __init__(self, shapes: Sequence[torch.Size], group: dist.ProcessGroup, divide: int = 1) -> None:
        self.shapes, self.group, self.divide = list(shapes), group, divide
        self.sizes = [shape.numel() for shape in self.shapes]
        self.replicas = group.size()
        self.kept: State = {}
        """What is left over of all steps that counted."""
        self.next: State = {}
        """The same after the last call."""
        self.open = False
        """Whether `next` has something that `kept` has not."""

    def __call__(self, total: Tensor) -> None:
        if total.numel() != sum(self.sizes):
            raise RuntimeError(
                f"gradients of {total.numel():,} values came where parameters have {sum(self.sizes):,}: one of them "
                "took no part in the loss. Use all of them, freeze it, or set parallel.compress to none"
            )
        if total.is_cuda:  # made on another stream, which may give its memory away while this one still reads it
            total.record_stream(torch.cuda.current_stream())
        after = self.reduce(total, self.next if self.open else self.kept)
        for name, tensor in after.items():
            self.next[name].copy_(tensor)
        self.open = True
        if self.divide != 1:
            total.div_(self.divide)

    @abstractmethod
    def reduce(self, total: Tensor, before: Mapping[str, Tensor]) -> State:
        """Sum ``total`` over replicas, in place; return what is left over."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """What this rank sends in one call."""

    def remember(self, state: State) -> None:
        """Keep tensors like these from call to call."""
        self.kept, self.next = state, {name: tensor.clone() for name, tensor in state.items()}

    @torch.no_grad()
    def settle(self, gate: Tensor | None) -> None:
        """Take up what the last calls have left over; not where ``gate`` is 0."""
        if self.open and gate is None:
            self.kept, self.next = self.next, self.kept
        elif self.open and gate is not None:
            counts = gate > 0
            for name, kept in self.kept.items():
                torch.where(counts, self.next[name], kept, out=kept)
        self.open = False


class Rounded(Reduction):
    """Under ``codec``, in two transfers: each replica gets one chunk of all others, and gives its sum to all."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        group: dist.ProcessGroup,
        divide: int,
        codec: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, group, divide)
        self.encode, self.decode = CODECS[codec]
        # Parameters begin at multiples of a block: a replicated one has the same blocks on all tensor-parallel ranks.
        self.rooms = [-(-size // BLOCK) * BLOCK for size in self.sizes]
        self.chunk = -(-sum(self.rooms) // (BLOCK * self.replicas)) * BLOCK
        self.feedback = codec == "int8"
        if self.feedback:
            shape = (self.replicas, self.chunk)
            error = torch.zeros(shape, dtype=dtype, device=device)
            self.remember({"error": error, "sum_error": torch.zeros_like(error[0])})

    def _places(self, x: Tensor) -> list[Tensor]:
        """Where each parameter is in x [replicas, chunk]."""
        rooms = x.view(-1)[: sum(self.rooms)].split(self.rooms)
        return [room[:size] for room, size in zip(rooms, self.sizes, strict=True)]

    @torch.no_grad()
    def reduce(self, total: Tensor, before: Mapping[str, Tensor]) -> State:
        """As `Reduction.reduce`."""
        dtype, after = total.dtype, {}
        x = before["error"].clone() if self.feedback else total.new_zeros(self.replicas, self.chunk)
        for place, part in zip(self._places(x), total.split(self.sizes), strict=True):
            place += part
        sent = self.encode(x)
        if self.feedback:
            after["error"] = x - self.decode(sent, dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        own = self.decode(received, dtype).sum(0)
        if self.feedback:
            own += before["sum_error"]
        sent = self.encode(own)
        if self.feedback:
            after["sum_error"] = own - self.decode(sent, dtype)
        all_gather(received.view(-1), sent, group=self.group)
        for place, part in zip(self._places(self.decode(received, dtype)), total.split(self.sizes), strict=True):
            part.copy_(place)
        return after

    @property
    def bytes_sent(self) -> int:
        """As `Reduction.bytes_sent`."""
        return 2 * (self.replicas - 1) * self.encode(torch.empty(self.chunk, device="meta")).numel()


class PowerSGD(Reduction):
    """Of rank ``rank``. Stacks of matrices are taken for one, of all their rows."""

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        group: dist.ProcessGroup,
        divide: int,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shapes, group, divide)
        self.rank = rank
        self.matrices = {i: shape for i, shape in enumerate(map(_matrix, self.shapes)) if self._is_worth(shape)}
        generator = torch.Generator().manual_seed(0)  # the same on all ranks
        self.start = {
            i: torch.randn(columns, rank, generator=generator, dtype=torch.float64).to(device, dtype)
            for i, (_, columns) in self.matrices.items()
        }
        zeros = {f"error.{i}": torch.zeros(shape, dtype=dtype, device=device) for i, shape in self.matrices.items()}
        self.remember({**zeros, **{f"q.{i}": q.clone() for i, q in self.start.items()}})

    def _is_worth(self, shape: tuple[int, int]) -> bool:
        return WORTH * self.rank * sum(shape) <= math.prod(shape)

    @torch.no_grad()
    def reduce(self, total: Tensor, before: Mapping[str, Tensor]) -> State:
        """As `Reduction.reduce`."""
        parts = total.split(self.sizes)
        m = {i: parts[i].view(shape) + before[f"error.{i}"] for i, shape in self.matrices.items()}
        plain = [part for i, part in enumerate(parts) if i not in m]
        products = self._sum([*plain, *(m[i] @ before[f"q.{i}"] for i in m)])
        for part, summed in zip(plain, products, strict=False):
            part.copy_(summed)
        p = {i: orthonormal(product) for i, product in zip(m, products[len(plain) :], strict=True)}
        mine = {i: m[i].t() @ p[i] for i in m}
        after: State = {}
        for i, q in zip(m, self._sum([*mine.values()]), strict=True):
            parts[i].view(m[i].shape).copy_(p[i] @ q.t())
            after[f"error.{i}"] = m[i] - p[i] @ mine[i].t()
            length = q.norm(dim=0)
            after[f"q.{i}"] = torch.where(length == 0, self.start[i], q / length)  # 0 would stay 0
        return after

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each of some tensors summed over replicas, in one transfer."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        shares = flat.split([tensor.numel() for tensor in tensors])
        return [share.view(tensor.shape) for share, tensor in zip(shares, tensors, strict=True)]

    @property
    def bytes_sent(self) -> int:
        """As `Reduction.bytes_sent`, in rings."""
        values = sum(self.rank * sum(self.matrices[i]) if i in self.matrices else n for i, n in enumerate(self.sizes))
        width = next((tensor.element_size() for tensor in self.kept.values()), 4)
        return 2 * (self.replicas - 1) * values * width // self.replicas


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """[..., M] as [N,M]; a vector has one row."""
    return math.prod(shape[:-1]), shape[-1]


# ------------------------------------------------------------------------------------------------------- all units


class Compression:
    """How a model's replicas compress what they send, and what they have left over.

    A loop that may refuse a step calls `settle` with its gate after each; without it a step counts once the next one's
    gradients come. Checkpoints want `state_dict`, which differs by rank.
    """

    def __init__(self, mode: str, rank: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
        self.mode, self.rank, self.dtype, self.device = mode, rank, dtype, device
        self.kind = f"{mode}{f' {rank}' if mode == 'powersgd' else ''}, {layout}"
        """What is left over fits a model that is compressed and spread in the same way, and no other."""
        self.reductions: list[Reduction] = []
        """One a unit, in the order of the units."""

    def add(self, unit: FSDPModule, group: dist.ProcessGroup, divide: int = 1) -> None:
        """Let a unit sum up over the replicas in ``group``, and divide by ``divide``."""
        shapes = reduced_shapes(unit)
        if not shapes:
            return
        made: Reduction
        if self.mode == "powersgd":
            made = PowerSGD(shapes, group, divide, self.rank, dtype=self.dtype, device=self.device)
        else:
            made = Rounded(shapes, group, divide, self.mode, dtype=self.dtype, device=self.device)
        unit.set_all_reduce_hook(made)
        self.reductions.append(made)

    @property
    def bytes_sent(self) -> int:
        """What this rank sends its replicas in one reduction of all gradients."""
        return sum(reduction.bytes_sent for reduction in self.reductions)

    @property
    def bytes_uncompressed(self) -> int:
        """The same of fp32 gradients summed in rings."""
        return sum(2 * (r.replicas - 1) * 4 * sum(r.sizes) // r.replicas for r in self.reductions)

    def settle(self, gate: Tensor | None = None) -> None:
        """Take up what the step's reductions have left over, or where ``gate`` (0-dim, on the device) is 0 leave every
        bit as it was before them. No host sync."""
        for reduction in self.reductions:
            reduction.settle(gate)

    def state_dict(self) -> dict[str, Any]:
        """What is left over on this rank: tensors, and ``kind``. A step that is not settled counts."""
        self.settle()
        left = {f"{i}.{name}": t for i, reduction in enumerate(self.reductions) for name, t in reduction.kept.items()}
        return {"kind": self.kind, "left": left}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Take up what a rank in this one's place had left over. False, and nothing is changed, where it was spread or
        compressed in another way: what was left over then is forgotten, once."""
        mine = self.state_dict()
        old, new = mine["left"], state["left"]
        if state["kind"] != self.kind or {n: t.shape for n, t in old.items()} != {n: t.shape for n, t in new.items()}:
            return False
        for name, tensor in old.items():
            tensor.copy_(new[name])
        return True


def compression_of(model: nn.Module) -> Compression | None:
    """How the replicas of a model that `parallelize` returned compress; None where they do not."""
    found = vars(model).get("compression")
    assert found is None or isinstance(found, Compression)
    return found
