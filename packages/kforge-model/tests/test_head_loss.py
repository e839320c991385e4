"""The fused head and loss against F.cross_entropy in float64, and the corners that go wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kforge_model import HeadLoss, linear_cross_entropy


def case(
    dtype: torch.dtype, rows: int = 3, seq: int = 7, dim: int = 6, vocab: int = 11
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(rows, seq, dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (rows, seq)).masked_fill(torch.rand(rows, seq) < 0.3, -100)
    return hidden, weight, labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    nll = F.cross_entropy((h @ w.T).flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    loss = (nll * scale).sum()
    return loss, nll, *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients(dtype: torch.dtype, tolerance: float, chunk: int) -> None:
    hidden, weight, labels = case(dtype)
    loss, nll = linear_cross_entropy(hidden, weight, labels, 0.125, chunk_tokens=chunk)
    wide = torch.promote_types(dtype, torch.float32)
    assert loss.dtype == nll.dtype == wide and loss.shape == () and nll.shape == labels.shape
    assert not nll.requires_grad
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    for got, right in zip((loss, nll, hidden.grad, weight.grad), reference(hidden, weight, labels, 0.125), strict=True):
        assert (got.double() - right).abs().max() <= tolerance * right.abs().max()


def test_gradcheck_and_the_incoming_gradient() -> None:
    hidden, weight, labels = case(torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, scale, chunk_tokens=5)[0] * 3, (hidden, weight)
    )
    loss, _ = linear_cross_entropy(hidden, weight, labels, scale)
    once, twice = (
        torch.autograd.grad(loss, weight, g, retain_graph=True)[0] for g in (loss.new_ones(()), loss.new_full((), 2))
    )
    assert torch.equal(once * 2, twice)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, labels = case(torch.float64)
    _, _, dh, dw = reference(hidden, weight, labels, 1.0)
    frozen_hidden = linear_cross_entropy(hidden.detach(), weight, labels, 1.0)[0]
    assert torch.allclose(torch.autograd.grad(frozen_hidden, weight)[0], dw)
    frozen_weight = linear_cross_entropy(hidden, weight.detach(), labels, 1.0)[0]
    assert torch.allclose(torch.autograd.grad(frozen_weight, hidden)[0], dh)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_scored_is_zero_with_zero_gradients(dtype: torch.dtype) -> None:
    hidden, weight, labels = case(dtype)
    loss, nll = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), 1.0, chunk_tokens=4)
    loss.backward()
    assert loss == 0 and not nll.any()
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_chunks_rows_and_scales_add_up() -> None:
    hidden, weight, labels = case(torch.float64)
    whole = linear_cross_entropy(hidden, weight, labels, 0.1)[0]
    parts = sum(linear_cross_entropy(hidden[i], weight, labels[i], 0.1)[0] for i in range(3))
    assert abs(whole - parts) < 1e-14


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, and the names of the products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        self.products += str(func).split(".")[1] in ("mm", "addmm", "addmm_")
        return out


def test_logits_are_never_whole_and_no_grad_makes_no_gradients() -> None:
    hidden, weight, labels = case(torch.float32, rows=8, seq=64, dim=4, vocab=50)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=32)[0].backward()
    assert seen.elements <= 8 * 64 * 4 and seen.products == 3 * 16  # 16 chunks of 1,600 logits; the whole is 25,600
    with Largest() as seen, torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=32)
    assert seen.products == 16 and not loss.requires_grad


def test_loss_of_half_precision_is_not_rounded_to_it() -> None:
    """In bf16 a loss near 11 comes in steps of 0.0625."""
    hidden, weight, labels = case(torch.bfloat16, vocab=60_000)
    loss, nll = linear_cross_entropy(hidden * 0.01, weight, labels.clamp_min(0), 1 / labels.numel())
    assert loss.dtype == torch.float32
    assert abs(loss.double() - nll.double().mean()) < 1e-5
    assert loss.bfloat16() != loss


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[[1e4, 0.0]]], requires_grad=True)
    weight = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 1.0]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([[1]]), 1.0)
    loss.backward()
    assert loss == 2e8 and torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()  # type: ignore[arg-type]


def test_weight_gradient_is_summed_wide() -> None:
    """4,096 chunks of one token each: a bf16 accumulator would stop growing at 1/256 of its value."""
    tokens = 4096
    hidden = torch.ones(1, tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=1)[0].backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_user_errors() -> None:
    hidden, weight, labels = case(torch.float32)
    head = HeadLoss(6, 11)
    with pytest.raises(ValueError, match="labels need a scale"):
        head(hidden, labels)
    with pytest.raises(ValueError, match="cast_forward_inputs"):
        linear_cross_entropy(hidden, weight, labels, torch.tensor(0.1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:, 1:], 1.0)
    with pytest.raises(ValueError, match="cast one"):
        linear_cross_entropy(hidden.bfloat16(), weight, labels, 1.0)


def test_module_without_labels_gives_logits() -> None:
    head = HeadLoss(6, 11, chunk_tokens=2)
    with torch.no_grad():
        head.weight.normal_()
    hidden, _, labels = case(torch.float32)
    assert torch.equal(head(hidden), hidden @ head.weight.T)
    loss, _ = head(hidden, labels, torch.tensor(0.5))
    assert torch.allclose(loss.double(), reference(hidden, head.weight, labels, 0.5)[0])


def on_ranks_of_the_vocabulary(rank: int, world: int, chunk: int, dtype: torch.dtype) -> dict[str, Any]:
    """Loss, nll, gradients (this rank's rows of the weight's) and logits of a head whose vocabulary is cut."""
    import torch.distributed as dist

    torch.manual_seed(5)
    hidden, weight, labels = case(dtype, vocab=12)
    labels[0] = -100
    rows = 12 // world
    head = HeadLoss(6, rows, chunk).to(dtype)
    head.group, head.vocab_start = dist.group.WORLD, rank * rows
    with torch.no_grad():
        head.weight.copy_(weight[rank * rows : (rank + 1) * rows])
    loss, nll = head(hidden, labels, 0.125)
    loss.backward()
    assert hidden.grad is not None and head.weight.grad is not None
    dhidden, dweight = hidden.grad.clone(), head.weight.grad.clone()
    logits = head(hidden)
    logits.square().sum().backward()
    late = hidden.grad - dhidden
    for addend in (dhidden, late):
        dist.all_reduce(addend)
    return {"loss": loss.detach(), "nll": nll, "dhidden": dhidden, "dweight": dweight, "logits": logits.detach(),
            "from_logits": late}  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("chunk", [4, 1000])
def test_a_vocabulary_cut_over_ranks_gives_the_same(world: int, chunk: int) -> None:
    from kforge_testing import run_ranks

    torch.manual_seed(5)
    hidden, weight, labels = case(torch.float64, vocab=12)
    labels[0] = -100
    loss, nll, dhidden, dweight = reference(hidden, weight, labels, 0.125)
    logits = hidden @ weight.T
    (from_logits,) = torch.autograd.grad(logits.square().sum(), hidden)
    ranks = run_ranks(on_ranks_of_the_vocabulary, world, chunk, torch.float64)
    assert torch.equal(torch.cat([r["dweight"] for r in ranks]).isfinite(), torch.ones(12, 6, dtype=torch.bool))
    for rank in ranks:
        for name, right in {"loss": loss, "nll": nll, "dhidden": dhidden, "logits": logits}.items():
            assert (rank[name] - right).abs().max() <= 1e-13 * right.abs().max(), name
        assert torch.equal(rank["nll"], ranks[0]["nll"])
        assert (rank["from_logits"] - from_logits).abs().max() <= 1e-13 * from_logits.abs().max()
    whole = torch.cat([rank["dweight"] for rank in ranks])
    assert (whole - dweight).abs().max() <= 1e-13 * dweight.abs().max()
