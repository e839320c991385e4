"""Which experts are chosen and what they weigh, against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kforge_model import ROUTERS, ModelConfig, Router, Routing, Transformer, build_model

SIZES: dict[str, Any] = {"vocab_size": 32, "dim": 16, "n_layers": 1, "n_heads": 2, "n_experts": 8}


def router_of(**changes: Any) -> Router:
    config = ModelConfig(**{**SIZES, **changes})
    router = ROUTERS.get(config.router)(config)
    assert isinstance(router, Router)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    return router


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(40, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_formula(kind: str, norm: bool) -> None:
    router, x = router_of(router=kind, router_norm=norm, router_scale=2.5, moe_top_k=3).double(), tokens()
    ids, weights, probabilities, logits = router(x)
    right = x @ router.weight.T
    scores = right.exp() / right.exp().sum(1, keepdim=True) if kind == "softmax" else 1 / (1 + (-right).exp())
    assert ids.dtype == torch.int64 and torch.equal(ids, scores.topk(3, 1).indices)
    chosen = scores.topk(3, 1).values
    chosen = chosen / chosen.sum(1, keepdim=True) if norm else chosen
    assert torch.allclose(weights, 2.5 * chosen, rtol=1e-12)
    assert torch.allclose(probabilities, scores / scores.sum(1, keepdim=True), rtol=1e-12)
    assert torch.allclose(logits, right, rtol=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_weight_of_one_expert_is_one_and_teaches_nothing(kind: str) -> None:
    """To the last bit: Lion takes the sign of a gradient, and Muon its direction, however small it is."""
    router, x = router_of(router=kind, moe_top_k=1, router_scale=2.5).double(), tokens().requires_grad_()
    ids, weights, _, logits = router(x)
    assert torch.equal(ids, logits.argmax(1, keepdim=True))
    assert torch.equal(weights, torch.full((40, 1), 2.5, dtype=torch.float64))
    (weights * torch.randn(40, 1, generator=torch.Generator().manual_seed(3))).sum().backward()
    assert router.weight.grad is not None and not router.weight.grad.any()
    assert x.grad is not None and not x.grad.any()


def test_scores_are_made_in_float32() -> None:
    """Of weights and tokens in bfloat16 too: the same choice as of the same numbers in float32."""
    router, x = router_of().bfloat16(), tokens(torch.bfloat16)
    got = router(x)
    wide = router_of()
    wide.weight = nn.Parameter(router.weight.float())
    right = wide(x.float())
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    assert got.weights.dtype == got.logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_are_made_in_float32(dtype: torch.dtype) -> None:
    router, x = router_of(router="sigmoid").to(dtype), tokens(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.randn(40, 8, dtype=wide)
    got = torch.autograd.grad(router(x).logits, (x, router.weight), out)
    right = (out @ router.weight.to(wide), out.T @ x.to(wide))
    for a, b in zip(got, right, strict=True):
        assert a.dtype == dtype and torch.equal(a, b.to(dtype))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router, x = router_of(router="sigmoid", router_bias=True).double(), tokens()
    assert router.bias is not None
    plain = router(x)
    router.bias[5] = 10.0
    biased = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    assert (biased.ids[:, 0] == 5).all() and not (plain.ids == 5).any(1).all()
    chosen = scores.gather(1, biased.ids)
    assert torch.allclose(biased.weights, chosen / chosen.sum(1, keepdim=True), rtol=1e-12)
    assert torch.equal(biased.probabilities, plain.probabilities)
    biased.weights.square().sum().backward()
    assert router.bias.grad is None and not router.bias.requires_grad
    assert [name for name, _ in router.named_parameters()] == ["weight"] and "bias" in router.state_dict()


def test_the_bias_stays_wide() -> None:
    config = ModelConfig(**SIZES, router_bias=True)
    for dtype, right in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        model = Transformer(config)
        bias = model.layers["0"].moe.router.bias.fill_(0.001)
        assert bias.dtype == torch.float32
        router = model.to(dtype).layers["0"].moe.router
        assert router.weight.dtype == dtype and router.bias.dtype == right
        assert torch.equal(router.bias, bias.to(right))
    with torch.device("meta"):
        built = Transformer(config).bfloat16()
    built.to_empty(device="cpu")
    built.init_weights(0)
    assert torch.equal(built.layers["0"].moe.router.bias, torch.zeros(8))


@pytest.mark.parametrize(("kind", "groups"), [("softmax", [0, 1]), ("sigmoid", [2, 3])])
def test_only_the_best_groups_take_part(kind: str, groups: list[int]) -> None:
    """Groups 0 and 1 have the best expert each; 2 and 3 the best pair."""
    router = router_of(router=kind, router_groups=4, router_top_groups=2, moe_top_k=4).double()
    with torch.no_grad():
        router.weight.zero_()[:, 0] = torch.tensor([3.0, -9.0, 2.9, -9.0, 2.0, 1.9, 1.8, 1.7])
    x = torch.zeros(3, 16, dtype=torch.float64)
    x[:, 0] = 1.0
    ids = router(x).ids
    assert sorted(ids[0].tolist()) == sorted(e for g in groups for e in (2 * g, 2 * g + 1))


def test_groups_with_negative_biases_stay_apart() -> None:
    """What is not in the best groups is never chosen, though all biased scores are below 0."""
    router = router_of(router="sigmoid", router_groups=4, router_top_groups=1, router_bias=True).double()
    assert router.bias is not None
    router.bias.fill_(-5.0)
    ids = router(tokens()).ids
    assert (ids[:, 0] // 2 == ids[:, 1] // 2).all()


def test_equal_scores_go_to_the_first_experts() -> None:
    router = router_of(moe_top_k=3)
    nn.init.zeros_(router.weight)
    assert (router(tokens(torch.float32)).ids == torch.arange(3)).all()


def test_scores_of_nothing_are_no_division_by_zero() -> None:
    router = router_of(router="sigmoid")
    with torch.no_grad():
        router.weight.fill_(-1e4)
    routing = router(torch.ones(2, 16))
    assert routing.weights.isfinite().all() and routing.probabilities.isfinite().all()


@ROUTERS.register("test-first")
class First(nn.Module):
    """Every token to the first experts, alike."""

    options = ("share",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.n_experts = config.moe_top_k, config.n_experts
        self.share = config.options.get("share", 0.5)

    def forward(self, x: Tensor) -> Routing:
        ids = torch.arange(self.top_k, device=x.device).expand(len(x), -1)
        every = x.new_full((len(x), self.n_experts), 1 / self.n_experts)
        return Routing(ids, torch.full_like(ids, self.share, dtype=x.dtype), every, every.log())


def test_a_router_of_ones_own() -> None:
    config = ModelConfig(**SIZES, router="test-first", options={"share": 0.25}, balance_loss=0.1, router_z_loss=0.1)
    model = build_model(config)
    moe = model.layers["0"].moe  # type: ignore[union-attr, index]
    x = torch.randn(2, 3, 16)
    ids = torch.tensor([[0, 1]]).expand(6, 2)
    right = moe.exchange(x.flatten(0, 1), ids, torch.full((6, 2), 0.25), moe.experts).view_as(x)
    assert torch.equal(moe(x), right)
    loss, _ = model(torch.zeros(2, 4, dtype=torch.int64), labels=torch.ones(2, 4, dtype=torch.int64), scale=0.1)
    loss.backward()
    assert model.balance_stats()["moe/0/load_max"].item() == 4.0  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"model.options has shares.*it takes share"):
        build_model(ModelConfig(**SIZES, router="test-first", options={"shares": 0.25}))
    with pytest.raises(ValueError, match="router 'test-first' has no buffer called bias"):
        build_model(ModelConfig(**SIZES, router="test-first", router_bias=True))
