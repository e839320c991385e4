"""The feed-forward half of a block: gated (two matrices in, in one weight) or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from kforge_model.config import ModelConfig
from kforge_model.gated import gated
from kforge_model.linear import StackedLinear, linear
from kforge_model.registry import MLPS

Activation = Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


gelu_tanh: Activation = partial(F.gelu, approximate="tanh")

GATED: Mapping[str, Activation] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}
PLAIN: Mapping[str, Activation] = {"gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "relu2": relu2}


class GatedMLP(nn.Module):
    """w_down(act(gate x) * up x) (Shazeer 2020, arXiv:2002.05202, equations 5 and 6); with act = silu, SwiGLU.

    ``w_gate_up.weight`` is [2,F,D]: gate, then up. One product reads x once.
    """

    def __init__(self, dim: int, hidden: int, activation: Activation = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.plan = {"": "gather", "w_gate_up": "packed_colwise", "w_down": "rowwise"}
        self.activation = activation
        self.w_gate_up = StackedLinear(dim, (2, hidden), bias)
        self.w_down = linear(hidden, dim, bias, "residual")

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,D] -> [B,S,D]."""
        return self.w_down(gated(self.w_gate_up(x), self.activation))


class PlainMLP(nn.Module):
    """w_down(act(w_up x))."""

    def __init__(self, dim: int, hidden: int, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.plan = {"": "gather", "w_up": "colwise", "w_down": "rowwise"}
        self.activation = activation
        self.w_up = linear(dim, hidden, bias, "matrix")
        self.w_down = linear(hidden, dim, bias, "residual")

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,D] -> [B,S,D]."""
        return self.w_down(self.activation(self.w_up(x)))


def _register(name: str, kind: type[GatedMLP | PlainMLP], activation: Activation) -> None:
    def build(config: ModelConfig) -> nn.Module:
        return kind(config.dim, config.ffn_size, activation, config.mlp_bias)

    MLPS.register(name)(build)


for _name, _activation in GATED.items():
    _register(_name, GatedMLP, _activation)
for _name, _activation in PLAIN.items():
    _register(_name, PlainMLP, _activation)


def build_mlp(config: ModelConfig) -> nn.Module:
    """The feed-forward half that ``config`` names."""
    mlp: nn.Module = MLPS.get(config.mlp)(config)
    return mlp
