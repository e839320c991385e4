"""The module: what it returns, its options, losses of one's own, and a vocabulary cut over ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kforge_model import HeadLoss
from kforge_model.losses import LossOptions, cross_entropy, linear_cross_entropy
from kforge_model.registry import LOSSES

ALL: dict[str, Any] = {"softcap": 1.5, "label_smoothing": 0.1, "z_loss": 0.05}


def case(dtype: torch.dtype, head: HeadLoss | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, labels below 8 (or -100), and a scale for each token; fills the head."""
    if head is not None:
        with torch.no_grad():
            head.weight.normal_()
    labels = torch.randint(8, (3, 7)).masked_fill(torch.rand(3, 7) < 0.3, -100)
    return torch.randn(3, 7, 6, dtype=dtype, requires_grad=True), labels, torch.rand(3, 7, dtype=dtype)


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "cross_entropy"])
def test_module_equals_the_function(loss: str, options: dict[str, Any]) -> None:
    head = HeadLoss(6, 8, 4, rows=12, loss=loss, logit_scale=0.25, **options).double()
    hidden, labels, scales = case(torch.float64, head)
    function = {"linear_cross_entropy": linear_cross_entropy, "cross_entropy": cross_entropy}[loss]
    assert head.weight.shape == (12, 6)
    for scale in (0.5, torch.tensor(0.5), scales):
        got = head(hidden, labels, scale)
        right = function(hidden * 0.25, head.weight, labels, scale, vocab_size=8, **options)
        for one, two in zip(got, right, strict=True):
            assert torch.allclose(one, two, rtol=1e-14)
        both = (hidden, head.weight)
        for one, two in zip(torch.autograd.grad(got[0], both), torch.autograd.grad(right[0], both), strict=True):
            assert torch.allclose(one, two, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_labels_it_gives_logits(dtype: torch.dtype) -> None:
    head = HeadLoss(6, 8, rows=12).to(dtype)
    hidden, _, _ = case(dtype, head)
    plain = (hidden @ head.weight.T)[..., :8]
    logits = head(hidden)
    assert torch.equal(logits, plain) and logits.shape == (3, 7, 8)
    head.softcap = 2.0
    logits = head(hidden)
    right = 2 * torch.tanh(plain.double() / 2)
    assert logits.dtype == dtype and (logits.double() - right).abs().max() <= torch.finfo(dtype).eps * 2
    head.softcap, head.logit_scale = 0.0, 0.125  # a power of two: the product is exact
    assert torch.equal(head(hidden), plain * 0.125)


def test_errors() -> None:
    head = HeadLoss(6, 11)
    hidden, labels, _ = case(torch.float32, head)
    with pytest.raises(ValueError, match="labels need a scale"):
        head(hidden, labels)
    with pytest.raises(ValueError, match=r"unknown loss 'hinge'; known are .*cross_entropy, .*linear_cross_entropy"):
        HeadLoss(6, 11, loss="hinge")
    with pytest.raises(ValueError, match="rows = 10 of the head are fewer than vocab_size = 11"):
        HeadLoss(6, 11, rows=10)
    with pytest.raises(ValueError, match="label_smoothing = 2"):
        HeadLoss(6, 11, label_smoothing=2.0)


@LOSSES.register("squared_error_of_logits")
def squared_error_of_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | float, *, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """A loss as a user writes one."""
    assert options.vocab_size is not None
    z = hidden @ weight[: options.vocab_size].T
    wanted = torch.nn.functional.one_hot(labels.clamp_min(0), options.vocab_size)
    each = ((z - options.extra["height"] * wanted) ** 2).sum(-1) * (labels >= 0)
    return (each * scale).sum(), each.detach()


def test_a_loss_of_ones_own() -> None:
    head = HeadLoss(6, 8, rows=12, loss="squared_error_of_logits", options={"height": 3.0})
    hidden, labels, _ = case(torch.float32, head)
    loss, each = copy.deepcopy(head)(hidden, labels, 0.5)
    loss.backward()
    onehot = torch.eye(8)[labels.clamp_min(0)]
    right = ((hidden @ head.weight[:8].T - 3 * onehot) ** 2).sum(-1)[labels >= 0].sum() / 2
    assert torch.allclose(loss, right) and torch.allclose(each.sum() / 2, right)


def test_a_loss_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    import kforge_model.registry as registry

    point = EntryPoint("from_a_package", "kforge_model.losses:cross_entropy", LOSSES.entry_point_group)
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [point] if name in (None, point.name) else []
    )
    monkeypatch.setattr(LOSSES, "_parts", dict(LOSSES._parts))
    assert "from_a_package" in LOSSES.names()
    assert HeadLoss(6, 8, loss="from_a_package").loss == "from_a_package"
    assert LOSSES.get("from_a_package") is cross_entropy


def test_its_text_says_what_it_is() -> None:
    assert "6, 8, rows=12, loss=cross_entropy" in str(HeadLoss(6, 8, rows=12, loss="cross_entropy"))


def on_ranks(rank: int, world: int, loss: str) -> dict[str, Tensor]:
    """Loss, nll, gradients (this rank's rows of the weight's) and logits of a head whose vocabulary is cut."""
    import torch.distributed as dist

    head, hidden, labels, scales = on_one(loss)
    rows = 12 // world
    head.group, head.vocab_start = dist.group.WORLD, rank * rows
    head.weight = nn.Parameter(head.weight.detach()[rank * rows : (rank + 1) * rows].clone())
    return results(head, hidden, labels, scales, dist.all_reduce)


def on_one(loss: str) -> tuple[HeadLoss, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    head = HeadLoss(6, 8, 4, rows=12, loss=loss, logit_scale=0.7, **ALL).double()
    return head, *case(torch.float64, head)


def results(head: HeadLoss, hidden: Tensor, labels: Tensor, scales: Tensor, reduce: Any) -> dict[str, Tensor]:
    loss, nll = head(hidden, labels, scales)
    logits = head(hidden)
    both = (hidden, head.weight)
    grads = {}
    for name, value in (("loss", loss), ("logits", logits.square().sum())):
        grads[f"{name}: dhidden"], grads[f"{name}: dweight"] = torch.autograd.grad(value, both)
        reduce(grads[f"{name}: dhidden"])
    return {"loss": loss.detach(), "nll": nll, "logits": logits.detach(), **grads}


@pytest.mark.parametrize("world", [2, 3, 4])  # of 8 tokens ranks have 6 and 2; 4, 4 and 0; 3, 3, 2 and 0
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "cross_entropy"])
def test_a_vocabulary_cut_over_ranks_gives_the_same(world: int, loss: str) -> None:
    from kforge_testing import run_ranks

    right = results(*on_one(loss), lambda _: None)
    ranks = run_ranks(on_ranks, world, loss)
    for name, should in right.items():
        found = [rank[name] for rank in ranks]
        whole = [torch.cat(found)] if name.endswith("dweight") else found
        for one in whole:
            assert (one - should).abs().max() <= 1e-13 * should.abs().max(), name
