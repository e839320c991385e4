"""AdamW on local shards (Loshchilov and Hutter 2019, algorithm 2), with weights and moments kept in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from kforge_optim import moments as kept
from kforge_optim._torch import foreach_add_, foreach_mul_
from kforge_optim.algorithm import Rates, Slot, register_optimizer
from kforge_optim.config import OptimConfig
from kforge_optim.rounding import CHUNK, WEIGHT, Box, noise, noise_key, sixteen, to_bfloat16
from kforge_optim.sharding import local, local_gradient, same_strides
from kforge_optim.split import join_float32, split_float32

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """m = β₁m + (1-β₁)g;  v = β₂v + (1-β₂)g²;  w = w - lr·wd·w - lr · (m / (1-β₁ᵗ)) / (√(v / (1-β₂ᵗ)) + eps).

    It is elementwise, so each rank updates its own shard and nothing is sent. State of a parameter: ``exp_avg`` and
    ``exp_avg_sq`` in its placement, and ``step``, a 0-dim float32 tensor on its device that counts the accepted steps.

    moments: "fp32", or float64 beside float64 weights; "bf16" and "int8" keep fewer bits, rounded stochastically, see
        `moments`. In 8 bits, what has one dimension or fewer than 4096 elements keeps fp32. A weight whose last
        dimension is cut (rowwise tensor parallelism) sends the largest magnitudes of its blocks.
    cautious_decay: decay takes only elements whose update and weight agree in sign, 1[m·w ≥ 0] of the new m (Chen et
        al. 2025, "Cautious Weight Decay", algorithm 1): it hurries a weight on its way to 0 and never holds it back.

    Weights are float32 or float64, or bfloat16 with a remainder (split storage) or without (rounded stochastically).
    On CPU, and without Triton, the arithmetic is that of ``torch.optim.AdamW(fused=True)``, bit for bit where moments
    are fp32 and decay is the plain one, under split storage too. On CUDA one Triton kernel does all of it, for float32
    and split weights alike, so that these keep the same bits; torch's own differ from them in the last place.
    """

    matrices_only = False

    def __init__(
        self,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        moments: str = "fp32",
        cautious_decay: bool = False,
    ) -> None:
        self.betas = betas
        self.eps = eps
        self.moments = moments
        self.cautious_decay = cautious_decay

    def init_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero moments and counter."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **kept.new_moments(parameter, self.moments)}

    def update(self, slots: Sequence[Slot], *, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        """One step; see `Algorithm.update`. With ``scale`` torch's kernel leaves the scaled gradient in ``.grad``."""
        kernel = _kernel() if slots and slots[0].parameter.is_cuda else None
        others = slots
        if kernel is not None:
            in_kernel, others = kernel.divide(slots)
            if in_kernel:
                kernel.update(in_kernel, self, rates, scale, gate)
        step = _Step(self, rates, scale, gate)
        as_they_are = [slot for slot in others if self._torch_takes(slot)]
        if as_they_are:
            step.in_place(as_they_are)
        for slot in others:
            if not self._torch_takes(slot):
                step.in_chunks(slot)

    update_split = update
    """The same for bfloat16 weights: they are widened in a kernel's registers, or a chunk of `CHUNK` at a time."""

    def _torch_takes(self, slot: Slot) -> bool:
        """Whether torch's kernel can work on weight and moments as they are stored."""
        dtype = slot.parameter.dtype
        return dtype != torch.bfloat16 and slot.state["exp_avg"].dtype == dtype and not self.cautious_decay


class _Step:
    """A step by torch's fused kernel."""

    def __init__(self, algorithm: AdamW, rates: Rates, scale: Tensor | None, gate: Tensor | None) -> None:
        self.algorithm, self.rates, self.scale, self.gate = algorithm, rates, scale, gate
        self.accepted = None if gate is None else gate != 0
        # The kernel skips everything when found_inf is 1, and divides by grad_scale; it reads both, as float32, on
        # the device, so the host never waits.
        self.found_inf = None if gate is None else 1 - gate.to(torch.float32)
        self.beta1 = algorithm.betas[0] if rates.momentum is None else rates.momentum

    def in_place(self, slots: Sequence[Slot]) -> None:
        """Weights and moments of one dtype each, all in one launch a dtype."""
        by_dtype: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault(slot.parameter.dtype, []).append(slot)
        for dtype, batch in by_dtype.items():
            weights = [local(slot.parameter) for slot in batch]
            grads = [local_gradient(slot.parameter).to(dtype) for slot in batch]
            grads = [_laid_out_as(weight, grad) for weight, grad in zip(weights, grads, strict=True)]
            exp_avgs = [local(slot.state["exp_avg"]) for slot in batch]
            for weight, moment, slot in zip(weights, exp_avgs, batch, strict=True):
                if not same_strides(weight, moment):
                    raise ValueError(
                        f"parameter {slot.name!r} has strides {weight.stride()}, which leave gaps; make it contiguous"
                    )
            exp_avg_sqs = [local(slot.state["exp_avg_sq"]) for slot in batch]
            steps = [slot.state["step"] for slot in batch]
            self._fused(weights, grads, exp_avgs, exp_avg_sqs, steps, self.rates.weight_decay)

    def in_chunks(self, slot: Slot) -> None:
        """One weight, widened `CHUNK` elements at a time."""
        here, state = local(slot.parameter), slot.state
        tensors = {"weight": here, "exp_avg": local(state["exp_avg"]), "exp_avg_sq": local(state["exp_avg_sq"])}
        if slot.remainder is not None:
            tensors["remainder"] = local(slot.remainder)
        flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}  # views where they are contiguous
        flat["grad"] = local_gradient(slot.parameter).reshape(-1)
        box, key = Box.of(slot.parameter), noise_key(self.rates.seed, self.rates.step, slot.name)

        columns, size = 1, CHUNK
        block, groups = None, kept.column_groups(slot.parameter)
        if "exp_avg_scale" in state:
            columns = max(here.shape[-1], 1)
            size = max(CHUNK // columns, 1) * columns
            block = kept.block_of(box.offset[-1], here.shape[-1], here.device)
            if groups:  # ranks that hold parts of one block meet once, even a rank whose own part is empty
                size = max(here.numel(), 1)
            for name in MOMENTS:
                flat[f"{name}_scale"] = local(state[f"{name}_scale"]).view(-1, kept.blocks(box.whole[-1]))
        for start in range(0, size if block is not None and groups else here.numel(), size):
            stop = min(start + size, here.numel())
            part = {name: tensor[start:stop] for name, tensor in flat.items()}
            if block is not None:
                rows = slice(start // columns, -(-stop // columns) if stop else None)
                part |= {name: tensor[rows] for name, tensor in flat.items() if name.endswith("_scale")}
            random = noise(box.index(start, stop, here.device), key) if self._rounds(slot) else None
            self._chunk(part, slot.state["step"].clone(), random, block, groups)
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                tensor.copy_(flat[name].view(tensor.shape))
        _count([slot], self.gate)

    def _rounds(self, slot: Slot) -> bool:
        rounded_weight = slot.parameter.dtype == torch.bfloat16 and slot.remainder is None
        return rounded_weight or slot.state["exp_avg"].dtype in (torch.bfloat16, torch.uint8)

    def _chunk(
        self,
        part: dict[str, Tensor],
        step: Tensor,
        random: Tensor | None,
        block: Tensor | None,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        """Flat pieces of a weight, its gradient, its moments; with ``block`` [columns], scales [rows, blocks]."""
        stored, low = part["weight"], part.get("remainder")
        wide = torch.promote_types(stored.dtype, torch.float32)
        weight = stored.to(wide) if low is None else join_float32(stored, low)
        full = [kept.widen(part[name], part.get(f"{name}_scale"), block, name == "exp_avg", wide) for name in MOMENTS]
        if self.algorithm.cautious_decay:
            before = weight.clone()
            self._fused([weight], [part["grad"].to(wide, copy=True)], full[:1], full[1:], [step], 0.0)
            agrees = full[0] * before >= 0
            if self.accepted is not None:
                agrees &= self.accepted
            decay = self.rates.lr * self.rates.weight_decay
            weight.copy_(torch.where(agrees, weight - decay * before, weight))
        else:
            grad = part["grad"].to(wide, copy=True)
            self._fused([weight], [grad], full[:1], full[1:], [step], self.rates.weight_decay)

        if low is not None:
            high, remainder = split_float32(weight)
            stored.copy_(high)
            low.copy_(remainder)
        elif stored.dtype == torch.bfloat16:
            assert random is not None
            stored.copy_(to_bfloat16(weight, sixteen(random, WEIGHT)))
        if block is not None:
            tops = torch.stack([kept.largest(moment, part["exp_avg_scale"], block) for moment in full])
            for group in groups if tops.numel() else ():
                dist.all_reduce(tops, dist.ReduceOp.MAX, group)
            for name, top in zip(MOMENTS, tops, strict=True):
                self._keep(part[f"{name}_scale"], top)
        for name, moment in zip(MOMENTS, full, strict=True):
            if moment is not part[name]:
                assert random is not None
                scale = part.get(f"{name}_scale")
                self._keep(part[name], kept.narrow(moment, random, scale, block, name == "exp_avg"))

    def _keep(self, stored: Tensor, value: Tensor) -> None:
        """``stored = value`` in an accepted step."""
        stored.copy_(value if self.accepted is None else torch.where(self.accepted, value, stored))

    def _fused(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        weight_decay: float,
    ) -> None:
        """torch's kernel on tensors of one dtype."""
        grad_scale = None
        if self.scale is not None and grads[0].dtype == torch.float64:
            foreach_mul_(grads, self.scale.to(torch.float64))  # a float32 divisor would round the gradients to 1e-7
        elif self.scale is not None:
            grad_scale = self.scale.to(torch.float32).reciprocal()
        adamw(
            weights,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=True,
            grad_scale=grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.algorithm.betas[1],
            lr=self.rates.lr,
            weight_decay=weight_decay,
            eps=self.algorithm.eps,
            maximize=False,
        )


@cache
def _kernel() -> ModuleType | None:
    """`adamw_kernel`, or None where Triton is not installed."""
    return None if find_spec("triton") is None else import_module("kforge_optim.adamw_kernel")


def _count(slots: Sequence[Slot], gate: Tensor | None) -> None:
    """One more accepted step, unless the gate is 0."""
    if slots:
        one = torch.ones((), device=slots[0].state["step"].device) if gate is None else gate.to(torch.float32)
        foreach_add_([slot.state["step"] for slot in slots], one)


def _laid_out_as(weight: Tensor, grad: Tensor) -> Tensor:
    """``grad`` with the strides of ``weight``: the kernel walks through memory and looks at no strides.

    Autograd sees to it for plain tensors; for the shards of a DTensor (a transposed product under tensor parallelism)
    nobody does.
    """
    return grad if same_strides(weight, grad) else torch.empty_like(weight).copy_(grad)


@register_optimizer("adamw")
def build_adamw(config: OptimConfig) -> AdamW:
    """AdamW with the betas, the eps, the moments and the decay of ``config``."""
    betas = config.betas or (0.9, 0.95)
    return AdamW(betas=betas, eps=config.eps, moments=config.moments, cautious_decay=config.cautious_decay)
