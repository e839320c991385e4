"""Every optimizer of this package, one row each: what it is checked against, and that it is right everywhere.

`test_reference`, `test_layouts` and `test_state` go through the rows: fifty steps in float64 against a reference of a
few lines, with scale and gate; steps on shards against one process; save, load elsewhere, go on. A new optimizer
needs a row and no test of its own for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kforge_optim import OptimConfig
from kforge_optim.orthogonal import POLAR_EXPRESS

Array = NDArray[np.float64]
State = dict[str, Any]
Reference = Callable[[Array, Array, State, float, float], Array]
"""(weight, gradient, what it remembers: {} at first, learning rate, weight decay) -> new weight."""


def adamw(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g * g
    return w - lr * decay * w - lr * (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["v"] / (1 - 0.95**t)) + EPS)


def muon(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    s["m"] = 0.95 * s.get("m", 0.0) + 0.05 * g
    x = 0.05 * g + 0.95 * s["m"]
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return w - lr * decay * w - lr * 0.2 * math.sqrt(max(w.shape)) * x


def normuon(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    """Polar Express, through an SVD; NorMuon's variance of rows; the scale of rate near 0.02."""
    s["m"] = 0.95 * s.get("m", 0.0) + 0.05 * g
    u, values, vt = np.linalg.svd(0.05 * g + 0.95 * s["m"], full_matrices=False)
    values = values / np.sqrt((values**2).sum()) / 1.01
    for a, b, c in POLAR_EXPRESS[:5]:
        values = a * values + b * values**3 + c * values**5
    x = (u * values) @ vt
    s["v"] = 0.9 * s.get("v", 0.0) + 0.1 * (x * x).mean(1, keepdims=True)
    x = x / (np.sqrt(s["v"]) + 1e-8)
    x = x / np.linalg.norm(x) * math.sqrt(min(w.shape))
    return w - lr * decay * w - lr * math.sqrt(max(1, w.shape[0] / w.shape[1])) * x


def schedule_free(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    """``w`` is y; z and x are remembered."""
    s["t"] = t = s.get("t", 0) + 1
    s["v"] = 0.95 * s.get("v", 0.0) + 0.05 * g * g
    s["z"] = s.get("z", w) - lr * (g / (np.sqrt(s["v"] / (1 - 0.95**t)) + EPS) + decay * w)
    s["highest"] = max(s.get("highest", 0.0), lr)
    s["sum"] = s.get("sum", 0.0) + s["highest"] ** 2
    share = s["highest"] ** 2 / s["sum"]
    s["x"] = (1 - share) * s.get("x", w) + share * s["z"]
    return 0.1 * s["z"] + 0.9 * s["x"]


def lion(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    m = s.get("m", np.zeros_like(g))
    s["m"] = 0.99 * m + 0.01 * g
    return w - lr * decay * w - lr * np.sign(0.9 * m + 0.1 * g)


def cautious_lion(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    m = s.get("m", np.zeros_like(g))
    s["m"] = 0.99 * m + 0.01 * g
    u = np.sign(0.9 * m + 0.1 * g)
    agree = u * g > 0
    return w - lr * decay * w - lr * u * agree / max(agree.mean(), 1e-3)


def adamax(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    """Its decay is part of the gradient."""
    s["t"] = t = s.get("t", 0) + 1
    g = g + decay * w
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["u"] = np.maximum(0.999 * s.get("u", 0.0), np.abs(g) + EPS)
    return w - lr / (1 - 0.9**t) * s["m"] / s["u"]


def sgd(w: Array, g: Array, s: State, lr: float, decay: float) -> Array:
    """Its decay is part of the gradient."""
    g = g + decay * w
    s["m"] = 0.9 * s.get("m", 0.0) + g
    return w - lr * (g + 0.9 * s["m"])


EPS = 1e-5
"""Large, so that a gradient of 0 up to rounding moves nothing."""


@dataclass(frozen=True)
class Row:
    """One optimizer in one configuration."""

    config: Mapping[str, Any]
    """Fields of `OptimConfig`."""
    reference: Reference
    """What it does to a matrix."""
    beside: Reference | None = None
    """What is done to a parameter that is no matrix. None: the same."""


ALGORITHMS: dict[str, Row] = {
    "adamw": Row({"name": "adamw"}, adamw),
    "cautious_lion": Row({"name": "cautious_lion"}, cautious_lion),
    "lion": Row({"name": "lion"}, lion),
    "torch.optim.Adamax": Row({"name": "torch.optim.Adamax", "options": {"eps": EPS}}, adamax),
    "torch.optim.SGD": Row(
        {"name": "torch.optim.SGD", "options": {"momentum": 0.9, "nesterov": True}, "lr": 1e-3}, sgd
    ),
    "muon": Row({"name": "muon"}, muon, beside=adamw),
    "normuon": Row(
        {"name": "muon", "muon_method": "polar_express", "muon_scale": "original", "muon_variance_beta": 0.9},
        normuon,
        beside=adamw,
    ),
    "schedule_free": Row({"name": "schedule_free"}, schedule_free),
}
NAMES = sorted(ALGORITHMS)


def config(row: str, **fields: Any) -> OptimConfig:
    """The config of a row with ``fields`` over it."""
    return OptimConfig(**{"lr": 0.02, "eps": EPS, **ALGORITHMS[row].config, **fields})
