"""A small model whose blocks ask an operator for a length, as attention over packed rows asks for the longest one."""

import torch
from torch import nn


@torch.library.custom_op("kforge_tests::measure", mutates_args=())
def measure(x: torch.Tensor, longest: int) -> torch.Tensor:
    return x.sum() + longest


@measure.register_fake
def _(x: torch.Tensor, longest: int) -> torch.Tensor:
    return x.new_empty(())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, longest):
        mixed = torch.softmax(x @ x.mT, -1) @ x
        return x + self.down(torch.tanh(self.up(mixed))) / (1 + measure(x.detach(), longest).abs())


class Measured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, longest):
        for layer in self.layers:
            x = layer(x, longest)
        return x
