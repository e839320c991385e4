"""What modules are found to keep for backward, beside what their formulas say that it is."""

import families
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kforge_parallel.eager import eager_sizes


class Norm(nn.Module):
    """Saves x in fp32 (for the square), and what is scaled, in bf16, for the gradient of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)


class Gated(nn.Module):
    """Saves gate, up, silu(gate) and their product."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Plain(nn.Sequential):
    """Saves what goes into the activation, and what comes out."""

    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Block(nn.Module):
    def __init__(self, norms, mlp):
        super().__init__()
        for i in range(norms):
            self.add_module(f"norm_{i}", Norm())
        self.mlp = mlp


@pytest.mark.parametrize(("norms", "mlp", "kept"), [(2, Gated, 4), (4, Plain, 2), (1, Plain, 2)])
def test_kept_elements_are_those_of_the_formulas(norms, mlp, kept):
    found = eager_sizes([Block(norms, mlp())], dim=8, ffn=32)
    assert found == {"norm_wide": norms, "norm_narrow": norms, "mlp_kept": kept}


def test_a_model_is_left_as_it_is():
    model = families.build("Gemma3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert eager_sizes(model.model.layers, families.DIM, 24) == {
        "norm_wide": 8,
        "norm_narrow": 0,
        "head_norm_wide": 2,
        "head_norm_narrow": 0,
        "mlp_kept": 4,
    }
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_asked_is_left_out():
    class Pair(nn.Module):
        def forward(self, x, y):
            return x

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = Norm(), Pair()

    assert eager_sizes([Odd()], 8, 32) == {"norm_wide": 1, "norm_narrow": 1}
