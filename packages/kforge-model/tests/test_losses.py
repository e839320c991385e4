"""Both losses against a few lines in float64, option by option, and the corners that go wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kforge_model.losses import LossOptions, cross_entropy, linear_cross_entropy

Loss = Callable[..., tuple[Tensor, Tensor]]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"vocab_size": 8},
    "softcap": {"softcap": 1.5},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.05},
    "smoothing and padding": {"label_smoothing": 0.1, "vocab_size": 8},
    "all": {"vocab_size": 8, "softcap": 1.5, "label_smoothing": 0.1, "z_loss": 0.05},
}
LOSSES: dict[str, Loss] = {
    "chunks of 1": partial(linear_cross_entropy, chunk_tokens=1),
    "chunks of 7": partial(linear_cross_entropy, chunk_tokens=7),
    "one chunk": partial(linear_cross_entropy, chunk_tokens=1000),
    "from all logits": cross_entropy,
}


@pytest.fixture(params=LOSSES)
def loss_of(request: pytest.FixtureRequest) -> Loss:
    return LOSSES[request.param]


def case(dtype: torch.dtype, rows: int = 3, seq: int = 8, dim: int = 6, vocab: int = 11) -> tuple[Tensor, ...]:
    """hidden, weight, labels below 8 (or -100), and a scale for each token."""
    hidden = torch.randn(rows, seq, dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    labels = torch.randint(min(vocab, 8), (rows, seq)).masked_fill(torch.rand(rows, seq) < 0.3, -100)
    return hidden, weight, labels, torch.rand(rows, seq, dtype=torch.promote_types(dtype, torch.float32))


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor | float,
    *,
    vocab_size: int | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, nll and both gradients from the distribution that the model is to learn, written out."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = h @ w[:vocab_size].T
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    scored = labels >= 0
    onehot = torch.nn.functional.one_hot(labels.clamp_min(0), z.shape[-1]).double()
    wanted = (1 - label_smoothing) * onehot + label_smoothing / z.shape[-1]
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    each = -(wanted * log_p).sum(-1) + z_loss * z.exp().sum(-1).log() ** 2
    loss = (each * scale)[scored].sum()
    nll = -(onehot * log_p).sum(-1) * scored
    return loss, nll, *torch.autograd.grad(loss, (h, w))


def close(got: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool((got.double() - right).abs().max() <= tolerance * right.abs().max())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("per_token", [False, True], ids=["one scale", "a scale a token"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 4e-6), (torch.bfloat16, 3e-2)]
)
def test_values_and_gradients(
    loss_of: Loss, dtype: torch.dtype, tolerance: float, per_token: bool, options: dict[str, Any]
) -> None:
    hidden, weight, labels, scales = case(dtype)
    scale = scales if per_token else 0.125
    loss, nll = loss_of(hidden, weight, labels, scale, **options)
    wide = torch.promote_types(dtype, torch.float32)
    assert loss.dtype == nll.dtype == wide and loss.shape == () and nll.shape == labels.shape
    assert not nll.requires_grad and not nll[labels < 0].any()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    right = reference(hidden, weight, labels, scale, **options)
    for got, should in zip((loss, nll, hidden.grad, weight.grad), right, strict=True):
        assert close(got, should, tolerance)
    assert not weight.grad[options.get("vocab_size") :].any() or "vocab_size" not in options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: dict[str, Any]) -> None:
    hidden, weight, labels, scales = case(torch.float64, rows=1, seq=5, dim=3)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, scales, chunk_tokens=3, **options)[0] * 3, (hidden, weight)
    )


def test_the_incoming_gradient() -> None:
    hidden, weight, labels, _ = case(torch.float64)
    loss, _ = linear_cross_entropy(hidden, weight, labels, 0.3)
    once, twice = (
        torch.autograd.grad(loss, weight, g, retain_graph=True)[0] for g in (loss.new_ones(()), loss.new_full((), 2))
    )
    assert torch.equal(once * 2, twice)


def test_only_what_needs_a_gradient_gets_one(loss_of: Loss) -> None:
    hidden, weight, labels, _ = case(torch.float64)
    _, _, dh, dw = reference(hidden, weight, labels, 1.0)
    frozen_hidden = loss_of(hidden.detach(), weight, labels, 1.0)[0]
    assert torch.allclose(torch.autograd.grad(frozen_hidden, weight)[0], dw)
    frozen_weight = loss_of(hidden, weight.detach(), labels, 1.0)[0]
    assert torch.allclose(torch.autograd.grad(frozen_weight, hidden)[0], dh)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("scale", [1.0, float("inf")])  # 1 / scored tokens, of which there are none
def test_nothing_scored_is_zero_with_zero_gradients(
    loss_of: Loss, dtype: torch.dtype, options: dict[str, Any], scale: float
) -> None:
    hidden, weight, labels, _ = case(dtype)
    loss, nll = loss_of(hidden, weight, torch.full_like(labels, -100), scale, **options)
    assert loss == 0 and not nll.any()
    loss.backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_unscored_tokens_add_nothing_to_the_z_loss(loss_of: Loss) -> None:
    hidden, weight, labels, scales = case(torch.float64)
    options = OPTIONS["all"]
    loss, _ = loss_of(hidden, weight, labels, scales, **options)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert not grad[labels < 0].any() and grad[labels >= 0].any(-1).all()
    there = labels >= 0
    alone, _ = loss_of(hidden[there], weight, labels[there], scales[there], **options)
    assert abs(loss - alone) < 1e-13


def test_chunks_rows_and_scales_add_up() -> None:
    hidden, weight, labels, scales = case(torch.float64)
    whole = linear_cross_entropy(hidden, weight, labels, scales, **OPTIONS["all"])[0]
    parts = sum(linear_cross_entropy(hidden[i], weight, labels[i], scales[i], **OPTIONS["all"])[0] for i in range(3))
    assert abs(whole - parts) < 1e-13


def test_what_lies_in_padding_rows_does_not_matter(loss_of: Loss) -> None:
    hidden, weight, labels, scales = case(torch.float64)
    with torch.no_grad():
        weight[8:] = 1e3
    cut = weight.detach()[:8].requires_grad_()
    padded, _ = loss_of(hidden, weight, labels, scales, **OPTIONS["all"])
    alone, _ = loss_of(hidden, cut, labels, scales, **OPTIONS["all"])
    got, right = torch.autograd.grad(padded, (hidden, weight)), torch.autograd.grad(alone, (hidden, cut))
    assert abs(padded - alone) < 1e-14 and torch.allclose(got[0], right[0], rtol=0, atol=1e-14)
    assert torch.allclose(got[1][:8], right[1], rtol=0, atol=1e-14) and not got[1][8:].any()


def test_a_loss_from_all_logits_can_be_differentiated_twice() -> None:
    hidden, weight, labels, _ = case(torch.float64, rows=1, seq=3, dim=2)
    assert torch.autograd.gradgradcheck(
        lambda h, w: cross_entropy(h, w, labels, 1.0, **OPTIONS["all"])[0], (hidden, weight)
    )


class Seen(TorchDispatchMode):
    """Elements of the largest tensor that any operation made, how often each size came, and the products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.data_ptr() not in inputs:
                self.elements = max(self.elements, t.numel())
                self.sizes[t.numel()] = self.sizes.get(t.numel(), 0) + 1
        self.products += str(func).split(".")[1] in ("mm", "addmm", "addmm_")
        return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_are_never_whole_and_no_grad_makes_no_gradients(options: dict[str, Any]) -> None:
    hidden, weight, labels, _ = case(torch.float32, rows=8, seq=64, dim=4, vocab=50)
    with Seen() as seen:
        linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=32, **options)[0].backward()
    assert seen.elements <= 8 * 64 * 4 and seen.products == 3 * 16  # 16 chunks of 1,600 logits; the whole is 25,600
    assert seen.sizes[32 * 50] == 16 * (2 if "softcap" in options else 1)  # one buffer a chunk; a cap wants its slope
    with Seen() as seen, torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=32, **options)
    assert seen.products == 16 and seen.sizes[32 * 50] == 16 and not loss.requires_grad


def test_loss_of_half_precision_is_not_rounded_to_it(loss_of: Loss) -> None:
    """In bf16 a loss near 11 comes in steps of 0.0625."""
    hidden, weight, labels, _ = case(torch.bfloat16, vocab=60_000)
    loss, nll = loss_of(hidden * 0.01, weight, labels.clamp_min(0), 1 / labels.numel())
    assert loss.dtype == torch.float32
    assert abs(loss.double() - nll.double().mean()) < 1e-5
    assert loss.bfloat16() != loss


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_extreme_logits_stay_finite(loss_of: Loss, cap: float) -> None:
    hidden = torch.tensor([[[1e4, 0.0]]], requires_grad=True)
    weight = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 1.0]], requires_grad=True)
    loss, _ = loss_of(hidden, weight, torch.tensor([[1]]), 1.0, softcap=cap)
    loss.backward()
    assert loss == (2 * cap or 2e8)
    assert torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()  # type: ignore[arg-type]


def test_weight_gradient_is_summed_wide() -> None:
    """4,096 chunks of one token each: a bf16 accumulator would stop growing at 1/256 of its value."""
    tokens = 4096
    hidden = torch.ones(1, tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, 1.0, chunk_tokens=1)[0].backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_user_errors(loss_of: Loss) -> None:
    hidden, weight, labels, scales = case(torch.float32)
    for scale in (torch.tensor(0.1, dtype=torch.bfloat16), scales.half()):
        with pytest.raises(ValueError, match="cast_forward_inputs"):
            loss_of(hidden, weight, labels, scale)
    with pytest.raises(ValueError, match=r"\(3, 7\) do not fit hidden states \(3, 8, 6\)"):
        loss_of(hidden, weight, labels[:, 1:], 1.0)
    with pytest.raises(ValueError, match="cast one"):
        loss_of(hidden.bfloat16(), weight, labels, 1.0)
    for wrong in (scales[:, 1:], scales[0], scales.new_ones(1)):
        with pytest.raises(ValueError, match=r"one a label, of shape \(3, 8\)"):
            loss_of(hidden, weight, labels, wrong)
    with pytest.raises(ValueError, match="vocab_size = 12 is more than the head's 11 rows"):
        loss_of(hidden, weight, labels, 1.0, vocab_size=12)
    with pytest.raises(ValueError, match="give its group too"):
        loss_of(hidden, weight, labels, 1.0, vocab_start=11)
    with pytest.raises(ValueError, match=r"label_smoothing = 1.0 must lie in \[0, 1\)"):
        loss_of(hidden, weight, labels, 1.0, label_smoothing=1.0)
    for name in ("softcap", "z_loss"):
        for value in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} = .* must be finite and not negative"):
                loss_of(hidden, weight, labels, 1.0, **{name: value})
    for name in ("vocab_size", "chunk_tokens"):
        with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
            LossOptions(**{name: 0})
        with pytest.raises(ValueError, match=rf"{name} = 2\.5 must be a whole number"):
            LossOptions(**{name: 2.5})
    for wrong in (hidden[..., :5], weight[None], weight[0]):
        pair = (wrong, weight) if wrong.shape[-1] == 5 else (hidden, wrong)
        with pytest.raises(ValueError, match=r"do not fit: they are \[..., D\] and \[rows, D\]"):
            loss_of(*pair, labels, 1.0)
    with pytest.raises(ValueError, match=r"hidden states in torch\.int64 have no logits"):
        loss_of(hidden.long(), weight.long(), labels, 1.0)
    for dtype in (torch.float32, torch.int16, torch.bool):
        with pytest.raises(ValueError, match=f"labels came as {dtype}, and must be int64"):
            loss_of(hidden, weight, labels.to(dtype), 1.0)
    with pytest.raises(ValueError, match=r"scale came as torch\.bool; give a weight in float32"):
        loss_of(hidden, weight, labels, labels >= 0)


def on_ranks(rank: int, world: int, rows: int, dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Loss, nll and gradients (this rank's rows of the weight's) of both losses with the vocabulary cut, by option."""
    import torch.distributed as dist

    out = {}
    for name, loss_of in LOSSES.items():
        for label, options in OPTIONS.items():
            torch.manual_seed(5)
            hidden, weight, labels, scales = case(dtype, vocab=rows * world)
            labels[0] = -100
            own = weight.detach()[rank * rows : (rank + 1) * rows].requires_grad_()
            told = {"vocab_size": rows * world, **options}
            loss, nll = loss_of(hidden, own, labels, scales, group=dist.group.WORLD, vocab_start=rank * rows, **told)
            loss.backward()
            assert hidden.grad is not None and own.grad is not None
            dist.all_reduce(hidden.grad)
            found = {"loss": loss.detach(), "nll": nll, "dhidden": hidden.grad, "dweight": own.grad}
            out[f"{name}, {label}"] = found
    return out


# Of 8 tokens: ranks with 6 and 2, with 4, 4 and none, with 5, 3 and none but padding.
@pytest.mark.parametrize(("world", "rows"), [(2, 6), (3, 4), (3, 5)])
def test_a_vocabulary_cut_over_ranks_gives_the_same(world: int, rows: int) -> None:
    from kforge_testing import run_ranks

    ranks = run_ranks(on_ranks, world, rows, torch.float64)
    for name in LOSSES:
        for label, options in OPTIONS.items():
            torch.manual_seed(5)
            hidden, weight, labels, scales = case(torch.float64, vocab=rows * world)
            labels[0] = -100
            right = reference(hidden, weight, labels, scales, **options)
            found = [rank[f"{name}, {label}"] for rank in ranks]
            for one in found:
                for key, should in zip(("loss", "nll", "dhidden"), right, strict=False):
                    assert close(one[key], should, 1e-12), (name, label, key)
                assert torch.equal(one["nll"], found[0]["nll"]) and torch.equal(one["loss"], found[0]["loss"])
            dweight = torch.cat([one["dweight"] for one in found])
            assert close(dweight, right[3], 1e-12), (name, label)
            assert not dweight[options.get("vocab_size", rows * world) :].any()


def on_ranks_by_mistake(rank: int, world: int) -> None:
    import torch.distributed as dist

    hidden, weight, labels, _ = case(torch.float64, vocab=4)
    told = {"group": dist.group.WORLD, "vocab_start": rank * 4}
    with pytest.raises(ValueError, match="label_smoothing over a group wants vocab_size"):
        linear_cross_entropy(hidden, weight, labels, 1.0, label_smoothing=0.1, **told)
    labels = torch.full_like(labels, 3)
    labels[0, 0] = 7  # padding, where 7 are tokens
    loss, nll = linear_cross_entropy(hidden, weight, labels, 1.0, vocab_size=7, **told)
    assert loss.isnan() and nll.isnan().sum() == 1 and nll[0, 0].isnan()


def test_mistakes_on_a_cut_vocabulary_are_seen() -> None:
    from kforge_testing import run_ranks

    run_ranks(on_ranks_by_mistake, 2)


@pytest.mark.parametrize("wrong", [9, 11, -1, -99, 2**40])
@pytest.mark.parametrize("options", [OPTIONS["padding"], OPTIONS["all"]], ids=["padding", "all"])
def test_a_label_that_is_no_token_is_told(loss_of: Loss, options: dict[str, Any], wrong: int) -> None:
    """Those between vocab_size and the head's rows, too: their nll has once been infinite."""
    hidden, weight, labels, _ = case(torch.float64)
    labels[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"labels hold {wrong}, which is no token: .* in 0 \.\. 7, or -100"):
        loss_of(hidden, weight, labels, 1.0, **options)


def test_labels_in_32_bits_and_a_scale_of_another_kind_are_the_same(loss_of: Loss) -> None:
    hidden, weight, labels, _ = case(torch.float64)
    right = reference(hidden, weight, labels, 2.0, **OPTIONS["all"])
    scale = torch.tensor(2.0, dtype=torch.float64)
    for given in (2, torch.tensor(2), torch.tensor(2, dtype=torch.int32), scale.float(), scale):
        loss, nll = loss_of(hidden, weight, labels.int(), given, **OPTIONS["all"])
        assert loss.dtype == torch.float64 and close(loss, right[0], 1e-13) and close(nll, right[1], 1e-13)


def test_a_scale_elsewhere_is_brought_to_the_hidden_states(loss_of: Loss) -> None:
    hidden, weight, labels, _ = (t.to("meta") for t in case(torch.float32))
    loss, nll = loss_of(hidden, weight, labels, torch.tensor(0.1))
    assert loss.device.type == nll.device.type == "meta"


def test_one_token_without_a_dimension_of_tokens(loss_of: Loss) -> None:
    hidden, weight, _, _ = case(torch.float64)
    label = torch.tensor(3)
    loss, nll = loss_of(hidden[0, 0], weight, label, 0.5, **OPTIONS["all"])
    right = reference(hidden[:1, 0], weight, label[None], 0.5, **OPTIONS["all"])
    assert nll.shape == () and close(loss, right[0], 1e-13) and close(nll, right[1], 1e-13)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_no_token_at_all(loss_of: Loss, shape: tuple[int, int]) -> None:
    _, weight, _, _ = case(torch.float64)
    hidden = torch.randn(*shape, 6, dtype=torch.float64, requires_grad=True)
    loss, nll = loss_of(hidden, weight, torch.zeros(shape, dtype=torch.int64), 1.0, **OPTIONS["all"])
    loss.backward()
    assert loss == 0 and nll.shape == shape and weight.grad is not None and not weight.grad.any()


def test_strides_do_not_matter(loss_of: Loss) -> None:
    hidden, weight, labels, scales = case(torch.float64)
    right = reference(hidden, weight, labels, scales, **OPTIONS["all"])
    turned = hidden.detach().transpose(0, 1).contiguous().requires_grad_()
    apart = weight.detach().t().contiguous().requires_grad_()
    across = labels.t().contiguous().t(), scales.t().contiguous().t()
    loss, nll = loss_of(turned.transpose(0, 1), apart.t(), *across, **OPTIONS["all"])
    loss.backward()
    assert turned.grad is not None and apart.grad is not None
    found = (loss, nll, turned.grad.transpose(0, 1), apart.grad.t())
    assert all(close(got, should, 1e-13) for got, should in zip(found, right, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_infinite_scale_where_nothing_is_scored_reaches_no_gradient(loss_of: Loss, options: dict[str, Any]) -> None:
    """A row without labels has a weight of 1 / 0; the other rows' gradients are theirs."""
    hidden, weight, labels, scales = case(torch.float64)
    labels[0] = -100
    right = reference(hidden, weight, labels, scales, **options)
    scales[0] = torch.inf
    loss, nll = loss_of(hidden, weight, labels, scales, **options)
    found = (loss, nll, *torch.autograd.grad(loss, (hidden, weight)))
    assert all(close(got, should, 1e-13) for got, should in zip(found, right, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_autocast_casts_the_factors_and_nothing_else(loss_of: Loss, options: dict[str, Any]) -> None:
    hidden, weight, labels, scales = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, nll = loss_of(hidden, weight, labels, scales, **options)
    assert loss.dtype == nll.dtype == torch.float32
    narrow = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    alone, nll_alone = loss_of(*narrow, labels, scales, **options)
    assert torch.equal(loss, alone) and torch.equal(nll, nll_alone)
    grads, right = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(alone, narrow)
    for got, should in zip(grads, right, strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, should.float())
    double = hidden.detach().double(), weight.detach().double()
    with torch.autocast("cpu", torch.bfloat16):
        wide, _ = loss_of(*double, labels, scales.double(), **options)
    assert close(wide, reference(*double, labels, scales.double(), **options)[0], 1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_blocks_within_a_chunk_change_no_bit(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    import kforge_model.losses as losses

    hidden, weight, labels, scales = case(torch.bfloat16)
    found = []
    for elements in (losses.BLOCK_ELEMENTS, 5 * 11):
        monkeypatch.setattr(losses, "BLOCK_ELEMENTS", elements)
        loss, nll = linear_cross_entropy(hidden, weight, labels, scales, chunk_tokens=12, **options)
        found.append((loss.detach(), nll, *torch.autograd.grad(loss, (hidden, weight))))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
