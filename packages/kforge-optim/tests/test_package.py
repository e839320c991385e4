"""The package as its user meets it: public names, fields, and imports without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import kforge_optim
from kforge_optim import GroupRule, LossScaler, OptimConfig, build_optimizer, clip


def test_public_names_have_docstrings() -> None:
    for name in kforge_optim.__all__:
        value = getattr(kforge_optim, name)
        assert name == "__version__" or value.__doc__ or not callable(value), name
    with pytest.raises(AttributeError, match="nowhere"):
        kforge_optim.nowhere  # noqa: B018
    assert dir(kforge_optim) == sorted(kforge_optim.__all__)


def test_config_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kforge_optim.config; from kforge_optim import OptimConfig; print(OptimConfig().name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "adamw"


BASE = {"name": "muon", "schedule": "cosine", "warmup_steps": 2}
WSD = {"schedule": "wsd", "decay_steps": 3}


class Beside(NamedTuple):
    """A value of a field, and those of others that it shows under only."""

    others: dict[str, Any]
    value: Any


CHANGED: dict[str, Any] = {
    "name": "adamw",
    "options": Beside({"name": "torch.optim.SGD"}, {"momentum": 0.9}),
    "lr": 1e-3,
    "adamw_lr": 1e-3,
    "weight_decay": 0.3,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "moments": "bf16",
    "cautious_decay": Beside({"name": "adamw"}, True),
    "muon_momentum": 0.5,
    "muon_method": "polar_express",
    "muon_scale": "original",
    "muon_variance_beta": 0.9,
    "muon_ns_steps": 2,
    "muon_ns_dtype": "bfloat16",
    "qk_clip": 0.5,
    "qk_clip_every_steps": Beside({"qk_clip": 0.5}, 2),
    "schedule": "linear",
    "schedule_steps": 12,
    "warmup_steps": 3,
    "warmup_tokens": Beside({"warmup_steps": 0}, 20),
    "decay_steps": 3,
    "decay_shape": Beside(WSD, "cosine"),
    "decay_power": Beside({"schedule": "polynomial"}, 3.0),
    "decay_from": Beside(WSD, 3),
    "min_lr_ratio": 0.5,
    "phases": Beside({"schedule": "phases", "phases": ({"schedule": "linear"},)}, ({"schedule": "rex"},)),
    "lr_scales": ({"step": 3, "scale": 0.25},),
    "momentum_phases": ({"steps": 3, "schedule": "linear", "from": 0.5, "to": 0.9},),
    "weight_decay_phases": ({"schedule": "linear", "to": 0.0},),
    "groups": (GroupRule(name="slow", role="embeddings", lr_scale=0.1),),
    "clip_norm": 0.1,
    "clip_value": 0.01,
    "ema_decay": 0.9,
    "ema_every_steps": Beside({"ema_decay": 0.9}, 3),
    "ema_device": Beside({"ema_decay": 0.9}, "cpu"),
    "offload": Beside({"name": "adamw"}, True),
    "loss_scale_init": 2.0,
    "loss_scale_growth_steps": 2,
}


def _trained(**values: object) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
    config = OptimConfig(**{**BASE, **values})  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config.in_steps(tokens_per_step=8), 8)
    scaler = LossScaler(init_scale=config.loss_scale_init, growth_interval=config.loss_scale_growth_steps)
    for step in range(7):
        loss = nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8))
        (loss * scaler.scale).backward()
        norm = clip.total_norm(model) / scaler.scale
        clip.clip_values_(model, config.clip_value, scale=scaler.scale)
        optimizer.step(scale=clip.clip_factor(norm, config.clip_norm) / scaler.scale)
        optimizer.zero_grad()
        if config.qk_clip and step % config.qk_clip_every_steps == 0:  # the scores are the model's business
            optimizer.multiply([("1.weight", torch.full((1, 1), config.qk_clip))])
        scaler.update(torch.isfinite(norm))
    # On a CPU the weights do not tell.
    asked = torch.tensor([optimizer.ema is not None and optimizer.ema.device == "cpu", optimizer.offloads])
    with optimizer.evaluation_weights():
        weights = [parameter.detach().flatten() for parameter in model.parameters()]
        return torch.cat([scaler.scale[None], asked, *weights])


def test_law_8_each_field_changes_what_is_trained() -> None:
    assert list(CHANGED) == [field.name for field in fields(OptimConfig)]
    for field, change in CHANGED.items():
        beside, value = change if isinstance(change, Beside) else Beside({}, change)
        assert not torch.equal(_trained(**{**beside, field: value}), _trained(**beside)), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("adamw_lr", -1.0),
        ("weight_decay", -0.1),
        ("clip_norm", -1.0),
        ("clip_value", -1.0),
        ("warmup_steps", -1),
        ("betas", (0.9, 1.0)),
        ("moments", "fp8"),
        ("muon_momentum", 1.0),
        ("eps", 0.0),
        ("muon_ns_steps", 0),
        ("qk_clip", -1.0),
        ("qk_clip", float("inf")),
        ("qk_clip_every_steps", 0),
        ("warmup_tokens", -1),
        ("decay_steps", -1),
        ("decay_shape", "steep"),
        ("decay_power", 0.0),
        ("decay_from", -1),
        ("schedule_steps", 0),
        ("phases", ({"steps": 0},)),
        ("lr_scales", ({"step": 3},)),
        ("lr_scales", ({"step": 0, "scale": 1.0},)),
        ("lr_scales", ({"step": 3, "scale": 0.0},)),
        ("lr_scales", ({"step": 3, "scale": 1.0}, {"step": 3, "scale": 2.0})),
        ("momentum_phases", ({"from": 1.0},)),
        ("weight_decay_phases", ({"from": -1.0},)),
        ("min_lr_ratio", 1.5),
        ("loss_scale_init", 3.0),
        ("loss_scale_growth_steps", 0),
    ],
)
def test_values_that_cannot_be_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"optim\.{field}"):
        OptimConfig(**{"name": "muon", field: value})  # type: ignore[arg-type]
