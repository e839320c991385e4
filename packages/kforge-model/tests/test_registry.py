"""A user's own parts: found by name, built from the config, told of wrong names."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from kforge_model import (
    ATTENTION_CORES,
    LOSSES,
    MLPS,
    MODELS,
    NORMS,
    ModelConfig,
    Registry,
    Transformer,
    build_model,
    registry,
)


def test_a_name_is_one_part() -> None:
    registry: Registry[Any] = Registry("thing", "kforge.things")
    registry.register("a")(one := object())
    assert registry.get("a") is one and registry.register("a")(one) is one
    with pytest.raises(ValueError, match="'a' is registered already"):
        registry.register("a")(object())
    with pytest.raises(ValueError, match="unknown thing 'b'; known are a"):
        registry.get("b")


def test_entry_points_that_cannot_be_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    points = EntryPoints(
        [
            EntryPoint("twice", "one:part", "kforge.things"),
            EntryPoint("twice", "other:part", "kforge.things"),
            EntryPoint("gone", "no_such_package:part", "kforge.things"),
            EntryPoint("moved", "json:no_such_part", "kforge.things"),
            EntryPoint("same", "json:dumps", "kforge.things"),
            EntryPoint("same", "json:dumps", "kforge.things"),  # a package that is on the path twice
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda **select: points.select(**select))
    things: Registry[Any] = Registry("thing", "kforge.things")
    with pytest.raises(ValueError, match="'twice' is an entry point of one:part and other:part; uninstall one"):
        things.get("twice")
    with pytest.raises(
        ImportError, match=r"'gone' is the entry point no_such_package:part .* does not load: No module"
    ):
        things.get("gone")
    with pytest.raises(ImportError, match=r"'moved' is the entry point json:no_such_part .* does not load: .*no_such"):
        things.get("moved")
    assert things.get("same") is json.dumps


@pytest.mark.parametrize("field", ["kind", "norm", "mlp", "attention_core", "loss"])
def test_an_unknown_name_lists_the_known_ones(field: str) -> None:
    known = {
        "kind": "transformer",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "attention_core": "sdpa",
        "loss": "cross_entropy",
    }
    with pytest.raises(ValueError, match=f"'nonsense'; known are .*{known[field]}"):
        build_model(ModelConfig(dim=8, n_heads=2, n_layers=1, vocab_size=8, **{field: "nonsense"}))  # type: ignore[arg-type]


@MLPS.register("test-bilinear")
class Bilinear(nn.Module):
    """w_down((a x)^power * b x)."""

    options: ClassVar = {"power": 1}
    plan: ClassVar = {"": "gather", "a": "colwise", "b": "colwise", "w_down": "rowwise"}
    init: ClassVar = {"a.weight": "matrix", "b.weight": "matrix", "w_down.weight": "residual"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.power = config.options.get("power", 1)
        self.a, self.b = (nn.Linear(config.dim, config.ffn_size, bias=False) for _ in range(2))
        self.w_down = nn.Linear(config.ffn_size, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w_down(self.a(x) ** self.power * self.b(x))
        return y


@NORMS.register("test-unit")
class Unit(nn.Module):
    """x / |x|, without parameters."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + self.eps)


@ATTENTION_CORES.register("test-mean")
class Mean(nn.Module):
    """Every token before it counts alike."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Any) -> Tensor:
        mean = v.cumsum(2) / torch.arange(1, v.shape[2] + 1, dtype=v.dtype)[:, None]
        return mean.repeat_interleave(q.shape[1] // v.shape[1], 1)


@LOSSES.register("test-square")
def square(hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, *, options: Any) -> tuple[Tensor, Tensor]:
    nll = (hidden @ weight.T).square().mean(-1) * options.extra.get("factor", 1.0)
    return (nll * scale).sum(), nll.detach()


square.options = ("factor",)  # type: ignore[attr-defined]


def test_parts_of_ones_own_compute_and_start_as_they_say() -> None:
    config = ModelConfig(
        vocab_size=16, dim=8, n_layers=2, n_heads=2, mlp="test-bilinear", norm="test-unit", attention_core="test-mean",
        loss="test-square", options={"power": 2, "factor": 3.0}, ffn_dim=16,
    )  # fmt: skip
    model = build_model(config)
    assert isinstance(model, Transformer)
    model.init_weights(1)
    assert model.layers["0"].mlp.power == 2
    ratio = model.layers["0"].mlp.a.weight.std() / model.layers["0"].mlp.w_down.weight.std()
    assert ratio.item() == pytest.approx(2.0, rel=0.3)
    assert model.plan["layers.*.mlp.a"] == "colwise"
    ids = torch.randint(16, (2, 5))
    loss, _ = model(ids, labels=ids, scale=1.0)
    head, h = model.head, torch.randn(2, 5, 8)
    assert head is not None
    right = 3 * (h @ head.weight.T).square().mean(-1)
    assert torch.allclose(head(h, ids, 0.5)[1], right) and torch.allclose(head(h, ids, 0.5)[0], right.sum() / 2)
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "mlp" in n)


def test_options_that_no_part_takes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.options has powr, which no part of this model takes; it takes power"):
        build_model(ModelConfig(dim=8, n_heads=2, mlp="test-bilinear", options={"powr": 2}))
    with pytest.raises(ValueError, match="its parts take no options"):
        build_model(ModelConfig(dim=8, n_heads=2, options={"power": 2}))


def test_a_model_of_ones_own_is_built_by_its_kind() -> None:
    @MODELS.register("test-kind")
    def build(config: ModelConfig) -> nn.Module:
        return nn.Linear(config.dim, 3)

    assert isinstance(build_model(ModelConfig(dim=8, n_heads=2, kind="test-kind")), nn.Linear)
