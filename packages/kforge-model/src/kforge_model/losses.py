"""The losses: cross-entropy of hidden states against labels through the head, in chunks or from all logits at once.

Symbols: N tokens (B*S), C tokens a chunk, D features, R rows of the head, of which the first V are tokens and the
others padding; h [N,D] hidden, W [R,D] weight, y [N] labels, s [N] scale, c soft-cap, ε label smoothing, λ weight of
the z-loss.

    forward   z⁰ = h Wᵀ     z = c tanh(z⁰/c), or z⁰ without a cap; -inf where padding     lse_i = log Σ_j exp(z_ij)
              nll_i = lse_i - z_i[y_i]                                                    (0 where y_i = -100)
              l_i   = lse_i - (1-ε) z_i[y_i] - (ε/V) Σ_{j<V} z_ij + λ lse_i²              (0 where y_i = -100)
              loss  = Σ_i s_i l_i
    dgrad     dh = dz⁰ W    with dz_ij  = s_i ((1 + 2λ lse_i) softmax(z_i)_j - (1-ε) [j = y_i] - ε/V)
                                        (0 where y_i = -100, and where j is padding)
                                 dz⁰_ij = dz_ij (1 - (z_ij/c)²)
    wgrad     dW = dz⁰ᵀ h

Label smoothing: Szegedy et al. 2016, arXiv:1512.00567, section 7. z-loss: Chowdhery et al. 2022, arXiv:2204.02311,
section 5. Soft-cap: Gemma 2, arXiv:2408.00118, section 2.

In `linear_cross_entropy` s is known before forward, so dz⁰ is formed right where z is, chunk by chunk, and both
products are taken at once: backward only multiplies by the gradient of the loss, which is 1. Memory beside h and W:
C*R logits in W's dtype (twice with a soft-cap if that is float32), of which a part at a time is float32; dh; dW in
float32, rounded in place; and in backward both once more, times the gradient. Padding rows take part in the products,
whose sizes they are there to make even.

Over n ranks that hold R/n rows of W each and the same h, every sum over j is a sum over ranks: the greatest logit,
then Σ exp, the target's logit, and with smoothing Σ z are reduced (three or four numbers a token). A rank without a
row of some kind adds nothing: -inf to the greatest, 0 to the sums. lse, nll and loss are then alike on all of them,
dW is right for the rows that a rank has, and dh is this rank's addend of a sum over ranks, which whoever gave h to
all of them takes in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kforge_model._torch import add_product_
from kforge_model.inputs import INDEX_DTYPES, check_indices
from kforge_model.registry import LOSSES

IGNORE = -100
BLOCK_ELEMENTS = 2**26
"""Logits that are float32 at one time where the head is in a narrower dtype: 268 MB."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a loss is told beside its tensors. Raises ValueError for values out of range."""

    vocab_size: int | None = None
    """Tokens of the whole vocabulary; rows of the head beyond are padding. None: every row is a token."""
    chunk_tokens: int = 2048
    """Tokens whose logits exist at one time, for a loss that works in chunks."""
    softcap: float = 0.0
    """Bound of the logits. 0: none."""
    label_smoothing: float = 0.0
    """Share of the target's probability that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of logsumexp(logits)² of each scored token."""
    group: dist.ProcessGroup | None = None
    """Ranks over which the rows of the head are cut. None: they are whole."""
    vocab_start: int = 0
    """First row of this rank's part."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Options of losses that are not kforge's own (`ModelConfig.options`)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
            if value is not None and not isinstance(value, Integral):
                raise ValueError(f"{name} = {value} must be a whole number")
        for name in ("softcap", "z_loss", "vocab_start"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be finite and not negative; 0 is without it")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing = {self.label_smoothing} must lie in [0, 1)")
        if self.group is None and self.vocab_start:
            raise ValueError(
                f"vocab_start = {self.vocab_start} says that the weight is a part of the vocabulary; give its group too"
            )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    *,
    chunk_tokens: int = 2048,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T`` against labels, ``chunk_tokens`` tokens at a time.

    hidden [..., D] and weight [R,D] of one floating dtype; labels [...] int64 (or int32), -100 where not scored; scale
    a float, a 0-dim tensor, or a tensor of the labels' shape (a weight a token), of float32 or wider and a constant to
    autograd; usually 1 / scored tokens of the whole global batch. vocab_size: tokens of the whole vocabulary; rows
    beyond it are padding, with probability 0 and gradient 0. None: every row is a token. softcap, label_smoothing,
    z_loss: see ``LossOptions`` and the formulas of this module.

    With ``group``, weight is the rows of this rank's part of the vocabulary, which begins with ``vocab_start``; the
    hidden states, labels and results are alike on all its ranks, and the gradient of ``hidden`` is this rank's addend.
    A label that is no token then gives nll = NaN if vocab_size is given.

    Under torch.autocast both factors are cast as torch's own linear casts them.

    Returns (loss, nll): the scalar Σ scale * (nll, with smoothing and z-loss) over scored tokens, and the plain nll
    [...] detached, in nats, 0 where not scored; both float32 (float64 for float64 inputs). Products run in the inputs'
    dtype, log-sum-exp and softmax in float32 or wider. The weight's gradient is summed over chunks in float32 or wider
    and rounded to the weight's dtype once. Where nothing is scored the loss is 0 and so are all gradients.
    Differentiable once. Without grad mode no gradient is made.

    Raises ValueError on shapes, dtypes or options that do not fit, on labels that are no tokens (on the CPU, where they
    can be read; on CUDA their nll is NaN), and on a half-precision scale: 1 / 4,000,000 in bf16 is off by up to 0.4 %,
    and so would be every gradient.
    """
    options = LossOptions(
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        group=group,
        vocab_start=vocab_start,
    )
    return _linear_cross_entropy(hidden, weight, labels, scale, options=options)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same as ``linear_cross_entropy``, from all logits at once by torch's own operations.

    For comparison, and where the loss is to be differentiated twice; it holds several times N*R logits in float32. With
    ``group``, equal parts of the logits are gathered, so that every rank holds all of them, and once is the limit.
    """
    options = LossOptions(
        vocab_size=vocab_size,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        group=group,
        vocab_start=vocab_start,
    )
    return _cross_entropy(hidden, weight, labels, scale, options=options)


@LOSSES.register("linear_cross_entropy")
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | float, *, options: LossOptions
) -> tuple[Tensor, Tensor]:
    if (dtype := _autocast_dtype(hidden)) is not None:
        with torch.autocast(hidden.device.type, enabled=False):
            return _linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, scale, options=options)
    labels, scale = _checked(hidden, weight, labels, scale, options)
    loss, nll = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.flatten(),
        scale.flatten() if scale.ndim else scale,
        options,
        torch.is_grad_enabled(),
    )
    return loss, nll.view(labels.shape)


@LOSSES.register("cross_entropy")
def _cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | float, *, options: LossOptions
) -> tuple[Tensor, Tensor]:
    if (dtype := _autocast_dtype(hidden)) is not None:
        with torch.autocast(hidden.device.type, enabled=False):
            return _cross_entropy(hidden.to(dtype), weight.to(dtype), labels, scale, options=options)
    labels, scale = _checked(hidden, weight, labels, scale, options)
    scored = labels != IGNORE
    scale = scale.where(scored, 0)  # 1 / 0 where nothing is scored: times a gradient of 0 it would be NaN
    z = softcapped(all_logits(hidden, weight, options).to(scale.dtype), options.softcap)
    log_p = z.log_softmax(-1)
    flat = log_p.reshape(-1, log_p.shape[-1])
    nll = F.nll_loss(flat, labels.flatten(), reduction="none", ignore_index=IGNORE).view(labels.shape)
    each = nll
    if options.label_smoothing:
        each = (1 - options.label_smoothing) * nll - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        each = each + options.z_loss * z.logsumexp(-1).square()
    return (each * scale).sum(), nll.detach()


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """What torch.autocast casts the factors of a product to here; None: it is off, or leaves them as they are."""
    kind = hidden.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return None if hidden.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def _checked(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | float, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """The labels as int64 and the scale as a tensor of float32 or wider, after a look at what goes with what."""
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} and a head {tuple(weight.shape)} do not fit: they are [..., D] and "
            "[rows, D]"
        )
    if not hidden.is_floating_point():
        raise ValueError(f"hidden states in {hidden.dtype} have no logits; they must be of a floating dtype")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden states in {hidden.dtype} and a head in {weight.dtype}; cast one to the other's dtype")
    if options.vocab_size is None:
        if options.group is not None and options.label_smoothing:
            raise ValueError("label_smoothing over a group wants vocab_size: a rank sees the rows of its own part only")
    elif options.group is None and options.vocab_size > weight.shape[0]:
        raise ValueError(f"vocab_size = {options.vocab_size} is more than the head's {weight.shape[0]} rows")
    if options.group is None:
        check_indices("labels", labels, options.vocab_size or weight.shape[0], IGNORE)
    elif labels.dtype not in INDEX_DTYPES:
        raise ValueError(f"labels came as {labels.dtype}, and must be int64 (or int32)")
    labels = labels.to(torch.int64)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        return labels, torch.full((), scale, dtype=wide, device=hidden.device)
    if scale.dtype in (torch.bool, torch.int8, torch.uint8, torch.int16):
        raise ValueError(f"scale came as {scale.dtype}; give a weight in float32, such as scale.float()")
    if scale.dtype.itemsize < 4:
        raise ValueError(
            f"scale came as {scale.dtype}, which rounds it by up to 0.4 %; was it cast on the way? "
            "FSDP's MixedPrecisionPolicy does so unless cast_forward_inputs=False"
        )
    if scale.ndim and scale.shape != labels.shape:
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} must be one number, or one a label, of shape {tuple(labels.shape)}"
        )
    return labels, scale.to(device=hidden.device, dtype=wide, non_blocking=True)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, options: LossOptions, grad: bool
    ) -> tuple[Tensor, Tensor]:
        """hidden [N,D], weight [R,D] or this rank's rows of it, labels [N] int64, scale [] or [N] ->
        (loss [], nll [N]), both in scale's dtype."""
        want_hidden, want_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        nll = torch.empty(hidden.shape[0], dtype=scale.dtype, device=hidden.device)
        each = torch.empty_like(nll) if options.label_smoothing or options.z_loss else nll
        dhidden = torch.empty_like(hidden) if want_hidden else None
        dweight = _WideSum(weight, scale.dtype) if want_weight else None
        for start in range(0, hidden.shape[0], options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            z = hidden[chunk] @ weight.t()
            s = scale[chunk] if scale.ndim else scale
            _rows(z, labels[chunk], s, nll[chunk], each[chunk], options, want_hidden or want_weight)
            # z is dz⁰ now, if a gradient is wanted.
            if dhidden is not None:
                torch.mm(z, weight, out=dhidden[chunk])
            if dweight is not None:
                dweight.add_product_(z.t(), hidden[chunk])
            del z  # or this chunk's logits would still be there while the next one's are made
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.rounded())
        ctx.mark_non_differentiable(nll)
        return (each * scale).where(labels != IGNORE, 0).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        scaled = (None if d is None else d * grad.to(d.dtype) for d in (dhidden, dweight))
        return (*scaled, *(None,) * 4)


def _rows(z: Tensor, y: Tensor, s: Tensor, nll: Tensor, each: Tensor, options: LossOptions, grad: bool) -> None:
    """Write nll [T] and l [T] (each, which may be nll) of logits z⁰ [T,R], labels y [T] and scale s [] or [T].

    With grad, dz⁰ takes the place of z⁰; without, anything may. One kernel on CUDA; elsewhere, in float64 and over a
    group torch's operations, a block at a time, so small that wide copies cost no memory to speak of, and so large
    that the device is busy. One block where there is no copy, or where each costs collectives.
    """
    fused = _kernel() if z.is_cuda and z.dtype != torch.float64 and options.group is None else None
    if fused is not None:
        tokens = z.shape[1] if options.vocab_size is None else options.vocab_size
        also = None if each.data_ptr() == nll.data_ptr() else each
        fused(
            z, y, s, nll, also, tokens, options.softcap, options.label_smoothing, options.z_loss, IGNORE, grad
        )  # fmt: skip
        return
    count, rows = z.shape
    step = count if z.dtype == s.dtype or options.group is not None else max(1, BLOCK_ELEMENTS // rows)
    for first in range(0, count, step):
        block = slice(first, first + step)
        scale = s[block, None] if s.ndim else s
        nll_part, each_part = _block(z[block], y[block, None], scale, options, grad)
        nll[block] = nll_part.squeeze(1)
        each[block] = each_part.squeeze(1)


@cache
def _kernel() -> Callable[..., None] | None:
    """`loss_kernel.loss_rows`, or None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return import_module("kforge_model.loss_kernel").loss_rows  # type: ignore[no-any-return]


def _block(logits: Tensor, y: Tensor, s: Tensor, options: LossOptions, grad: bool) -> tuple[Tensor, Tensor]:
    """logits z⁰ [T,R] as the product gave them, labels y [T,1], scale s [] or [T,1] -> nll [T,1] and l [T,1] in s's
    dtype. With grad, dz⁰ takes the place of z⁰; without, anything may."""
    smoothing, group, vocab = options.label_smoothing, options.group, options.vocab_size
    rows = logits.shape[1]
    tokens = rows if vocab is None else min(max(vocab - options.vocab_start, 0), rows)
    scored = y != IGNORE
    target = y - options.vocab_start
    own = scored if group is None else scored & (target >= 0) & (target < tokens)
    target = target.where(own, 0)
    z, slope = logits, None
    if options.softcap:
        slope = logits.to(s.dtype).div_(options.softcap).tanh_()
        z = slope * options.softcap if grad else slope.mul_(options.softcap)
    if tokens < rows:
        z[:, tokens:].fill_(-torch.inf)

    top = z.amax(-1, keepdim=True).to(s.dtype)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
    z = z.sub_(top) if z.dtype == s.dtype else z - top
    sums = [z.gather(1, target).where(own, 0)]
    if smoothing:
        sums.append(z[:, :tokens].sum(-1, keepdim=True))
    sums.append(z.exp_().sum(-1, keepdim=True))
    if group is not None:
        joined = torch.cat(sums, 1)
        dist.all_reduce(joined, group=group)
        sums = list(joined.split(1, 1))
        if vocab is not None:
            sums[0] = sums[0].where((y >= 0) & (y < vocab), torch.nan)  # no rank had it, and 0 would look fine
    z_target, total = sums[0], sums[-1]
    log_total = total.log()
    nll = each = (log_total - z_target).where(scored, 0)
    evenly = smoothing / (rows if vocab is None else vocab)
    if smoothing:
        each = log_total - (1 - smoothing) * z_target - evenly * sums[1]
    if options.z_loss:
        lse = top + log_total
        each = each + options.z_loss * lse.square()
    if not grad:
        return nll, each

    # A row whose target lies with another rank subtracts nothing here, from its column 0.
    weighted = s.where(scored, 0)
    factor = weighted / total if not options.z_loss else weighted / total * (1 + 2 * options.z_loss * lse)
    onehot = (weighted if not smoothing else weighted * (1 - smoothing)).where(own, 0)
    if not smoothing and slope is None:  # one pass multiplies, and rounds where logits are narrow
        at_target = z.gather(1, target) * factor - onehot
        torch.mul(z, factor, out=logits)
        logits.scatter_(1, target, at_target.to(logits.dtype))
        return nll, each
    z.mul_(factor)
    if smoothing:
        z[:, :tokens].sub_(weighted * evenly)
    z.scatter_(1, target, z.gather(1, target) - onehot)
    if slope is not None:
        torch.addcmul(z, z, slope.square_(), value=-1, out=logits)
    else:
        logits.copy_(z)
    return nll, each


class _WideSum:
    """A sum of products in the shape of ``weight`` [R,D], held in a wider dtype and then rounded to weight's, in the
    memory of the wide one alone.

    The rows are in as many tensors as a wide number has times the bytes of a narrow one (2 for bf16), so the first is
    as large as the whole result: rounding puts the result there, and the others are free.
    """

    def __init__(self, weight: Tensor, wide: torch.dtype) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        step = -(-weight.shape[0] // (wide.itemsize // weight.dtype.itemsize))
        self.parts = [torch.empty(w.shape, dtype=wide, device=w.device) for w in weight.split(step)]
        self.begun = False

    def add_product_(self, a: Tensor, b: Tensor) -> None:
        """Add a [R,K] times b [K,D]."""
        for part, rows in zip(self.parts, a.split(self.parts[0].shape[0]), strict=True):
            add_product_(part, rows, b, begun=self.begun)
        self.begun = True

    def rounded(self) -> Tensor:
        """The sum in weight's dtype; zeros where nothing was added. Afterwards this object is empty."""
        if not self.begun:
            for part in self.parts:
                part.zero_()
        if self.parts[0].dtype == self.dtype:
            return self.parts.pop()
        out = self.parts[0].view(self.dtype).flatten()[: self.shape.numel()].view(self.shape)
        row = 0
        while self.parts:
            # Row i goes to where row i / 2 was, which has been read. Each block is rounded elsewhere before it goes.
            part = self.parts.pop(0)
            for block in part.split(max(1, -(-part.shape[0] // 16))):
                out[row : row + block.shape[0]] = block.to(self.dtype)
                row += block.shape[0]
        return out


def all_logits(hidden: Tensor, weight: Tensor, options: LossOptions) -> Tensor:
    """hidden [..., D] -> logits [..., V] of all tokens in hidden's dtype, without padding, before the soft-cap."""
    logits = F.linear(hidden, weight)
    if options.group is not None:
        logits = _JoinVocabulary.apply(logits, options.group)
    return logits if options.vocab_size is None else logits[..., : options.vocab_size]


def softcapped(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)``, in float32 or wider inside and in the logits' dtype outside; cap 0: unchanged."""
    if not cap:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((wide / cap).tanh() * cap).to(logits.dtype)


class _JoinVocabulary(torch.autograd.Function):
    """Logits [...,R/n] of each rank -> [...,R] on all of them; in backward each takes its own part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None
