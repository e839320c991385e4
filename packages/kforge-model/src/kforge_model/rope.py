"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34), half-split layout.

Feature i of a head is paired with feature i + Dh/2, as in Hugging Face's Llama, so that weights can be exchanged.
There is no buffer: a table that lives in the module is cast along with it, and in bf16 positions 256 and 257 are one
number. The angles are computed where they are used, once per forward pass, in float64: at position 32,767 an angle in
float32 is off by 2e-3.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """The rotations of one forward pass, shared by all layers: cos and sin [B,S,1,Dh/2], float32 or wider.

    A plain class on purpose: FSDP's mixed precision casts every floating tensor that it finds among the arguments of a
    module, inside tuples, dicts and dataclasses too, and would round the tables to bf16.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    @classmethod
    def at(cls, position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
        """Rotations for position_ids [B,S] (int64), to be applied to tensors of ``dtype``.

        Angle of pair i at position p: p * theta^(-2i/Dh). The tables are in dtype or float32, whichever is wider.
        """
        exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float64) / head_dim
        angle = position_ids.to(torch.float64)[:, :, None, None] * torch.pow(theta, -exponent)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(cos=angle.cos().to(wide), sin=angle.sin().to(wide))

    def rotate(self, x: Tensor) -> Tensor:
        """x [B,S,H,Dh] turned by the position of each token: computed in the tables' dtype, returned in x's."""
        a, b = x.to(self.cos.dtype).chunk(2, dim=-1)
        turned = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)
        return turned.to(x.dtype)
