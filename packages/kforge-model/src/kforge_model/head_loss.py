"""The head and the loss in one: cross-entropy of hidden states against labels, the logits never held whole.

Symbols: N tokens (B*S), C tokens a chunk, D features, V vocabulary; h [N,D] hidden, W [V,D] weight, y [N] labels,
s the scale.

    forward   z = h Wᵀ           nll_i = logsumexp(z_i) - z_i[y_i]  (0 where y_i = -100)      loss = Σ s nll_i
    dgrad     dh = dz W          with dz_i = s (softmax(z_i) - onehot(y_i))                   (0 where y_i = -100)
    wgrad     dW = dzᵀ h

s is known before forward, so dz is formed right where z is, chunk by chunk, and both products are taken at once:
backward only multiplies by the gradient of the loss, which is 1. Memory beside h and W: C*V logits (in float32, and
once more in W's dtype if that is another), dh, and dW in float32, then in W's dtype.

Over n ranks that hold V/n rows of W each and the same h: the greatest logit, the sum of exponentials and the target's
logit are reduced over the ranks (three numbers a token), nll and loss are then alike on all of them, and dh is this
rank's addend of a sum over ranks, which whoever gave h to all of them takes in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kforge_model._torch import add_product_

IGNORE = -100


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: Tensor,
        chunk_tokens: int,
        grad: bool,
        group: dist.ProcessGroup | None,
        vocab_start: int,
    ) -> tuple[Tensor, Tensor]:
        """hidden [N,D], weight [V,D] or this rank's rows of it from ``vocab_start`` on, labels [N] int64, scale [] ->
        (loss [], nll [N]), both float32 or wider."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        want_hidden, want_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        nll = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(hidden) if want_hidden else None
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if want_weight else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            h, y = hidden[part], labels[part, None]
            scored = y != IGNORE
            target = y - vocab_start
            own = scored if group is None else scored & (target >= 0) & (target < weight.shape[0])
            target = target.where(own, 0)
            z = (h @ weight.t()).to(wide)
            top = z.amax(-1, keepdim=True)
            if group is not None:
                dist.all_reduce(top, dist.ReduceOp.MAX, group)
            z.sub_(top)
            z_target = z.gather(1, target).where(own, 0)
            total = z.exp_().sum(-1, keepdim=True)
            if group is not None:
                sums = torch.cat((total, z_target), 1)
                dist.all_reduce(sums, group=group)
                total, z_target = sums.split(1, 1)
            nll[part] = (total.log() - z_target).where(scored, 0).squeeze(1)
            if dhidden is None and dweight is None:
                continue
            # From here on z is dz: s (softmax - onehot) in scored rows, 0 in the others. One buffer serves for all.
            # A row whose target lies with another rank subtracts nothing here, from its column 0.
            weighted = scale.where(scored, 0)
            z.mul_(weighted / total)
            z.scatter_(1, target, z.gather(1, target) - weighted.where(own, 0))
            dlogits = z.to(weight.dtype)
            if dhidden is not None:
                dhidden[part] = dlogits @ weight
            if dweight is not None:
                add_product_(dweight, dlogits.t(), h)
        ctx.save_for_backward(dhidden, None if dweight is None else dweight.to(weight.dtype))
        ctx.mark_non_differentiable(nll)
        return (nll * scale).sum(), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        scaled = (None if d is None else d * grad.to(d.dtype) for d in (dhidden, dweight))
        return (*scaled, *(None,) * 6)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    *,
    chunk_tokens: int = 4096,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T`` against labels, ``chunk_tokens`` tokens at a time.

    hidden [..., D] and weight [V,D] of one floating dtype; labels [...] int64, -100 where not scored; scale a float
    or a 0-dim tensor of float32 or wider, usually 1 / scored tokens of the whole global batch. With ``group``, weight
    is the rows of this rank's part of the vocabulary, which begins with ``vocab_start``; the hidden states, labels and
    results are alike on all its ranks, and the gradient of ``hidden`` is this rank's addend.

    Returns (loss, nll): the scalar Σ scale * nll, and nll [...] detached, in nats, 0 where not scored; both float32
    (float64 for float64 inputs). Products run in the inputs' dtype, log-sum-exp and softmax in float32 or wider. The
    weight's gradient is summed over chunks in float32 or wider and rounded to the weight's dtype once. Where nothing
    is scored the loss is 0 and so are all gradients. Differentiable once. Without grad mode no gradient is made.

    Raises ValueError on shapes or dtypes that do not fit, and on a half-precision scale: 1 / 4,000,000 in bf16 is
    off by up to 0.4 %, and so would be every gradient.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden states in {hidden.dtype} and a head in {weight.dtype}; cast one to the other's dtype")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=wide, device=hidden.device)
    elif scale.dtype.itemsize < 4:
        raise ValueError(
            f"scale came as {scale.dtype}, which rounds it by up to 0.4 %; was it cast on the way? "
            "FSDP's MixedPrecisionPolicy does so unless cast_forward_inputs=False"
        )
    loss, nll = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        scale.to(wide),
        chunk_tokens,
        torch.is_grad_enabled(),
        group,
        vocab_start,
    )
    return loss, nll.view(labels.shape)


class _JoinVocabulary(torch.autograd.Function):
    """Logits [...,V/n] of each rank -> [...,V] on all of them; in backward each takes its own part."""

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


class HeadLoss(nn.Module):
    """The output projection and the loss, the only reader of ``weight`` [V,D]: the end of the model, one FSDP unit.

    With ``group`` set, whoever spreads the model gives it this rank's rows of the weight, from ``vocab_start`` on.
    """

    group: dist.ProcessGroup | None
    """Ranks over which the vocabulary is cut, in equal parts. None: it is whole."""
    vocab_start: int
    """First token of this rank's part."""

    def __init__(self, dim: int, vocab_size: int, chunk_tokens: int = 4096) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.group = None
        self.vocab_start = 0
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, hidden: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None) -> Any:
        """hidden [B,S,D] -> logits [B,S,V]; with labels [B,S] and a scale, (Σ scale * nll, nll [B,S]).

        ``linear_cross_entropy`` says what the two are. Raises ValueError when labels come without a scale.
        """
        if labels is None:
            logits = F.linear(hidden, self.weight)
            return logits if self.group is None else _JoinVocabulary.apply(logits, self.group)
        if scale is None:
            raise ValueError(
                "labels need a scale, which only the caller knows: 1 / scored tokens of the whole global batch "
                "(all microbatches of all ranks)"
            )
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            scale,
            chunk_tokens=self.chunk_tokens,
            group=self.group,
            vocab_start=self.vocab_start,
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, chunk_tokens={self.chunk_tokens}"
