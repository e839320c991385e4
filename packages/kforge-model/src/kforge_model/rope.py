"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34), half-split layout.

Feature i of the rotated part of a head, R features wide, is paired with feature i + R/2, as in Hugging Face's Llama,
so that weights can be exchanged. There is no buffer: a table that lives in the module is cast along with it, and in
bf16 positions 256 and 257 are one number. The angles are computed where they are used, once per forward pass, in
float64: at position 32,767 an angle in float32 is off by 2e-3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kforge_model.config import ModelConfig


def rope_frequencies(config: ModelConfig, window: int | None = None) -> tuple[Tensor, float]:
    """Radians a position of every pair, [R/2] float64, and the factor on what is rotated.

    Unscaled: theta^(-2i/R), for pair i. With rope_scaling, s the rope_factor, L the rope_original_len and
    n = L f / 2π the turns that a frequency f makes over the original length:

        linear   f / s                                    (Chen et al. 2023, arXiv:2306.15595)
        ntk      theta · s^(R/(R-2)) in theta's place     (the slowest pair is divided by s, the fastest stays)
        llama3   f / s below rope_low turns, f above rope_high; between them (1-m) f/s + m f with
                 m = (n - rope_low) / (rope_high - rope_low)
        yarn     f / s below rope_low turns, f above rope_high; between them the same mixture, m linear in the pair's
                 index, the ends of the ramp being whole pairs (Peng et al. 2023, arXiv:2309.00071, section 3.2)

    and yarn multiplies what is rotated by rope_attn_factor, or 0.1 ln s + 1 (its equation 22). In windowed layers
    with a base of their own nothing is scaled.
    """
    width = config.rope_size
    own_base = window is not None and config.rope_theta_window is not None
    theta = config.rope_theta_window if own_base else config.rope_theta
    assert theta is not None
    pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
    kind, scale = ("none" if own_base else config.rope_scaling), config.rope_factor
    if kind == "ntk":
        theta *= scale ** (width / (width - 2))
    frequency = theta**-pairs
    if kind == "linear":
        return frequency / scale, 1.0
    if kind in ("none", "ntk"):
        return frequency, 1.0
    length = config.rope_original_len
    assert length is not None
    if kind == "llama3":
        turns = length * frequency / (2 * math.pi)
        kept = (turns - config.rope_low) / (config.rope_high - config.rope_low)
    else:

        def pair_that_turns(times: float) -> float:
            return width * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

        first = max(math.floor(pair_that_turns(config.rope_high)), 0)
        last = min(math.ceil(pair_that_turns(config.rope_low)), width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)
        kept = 1 - ramp
    kept = kept.clamp(0, 1)
    frequency = frequency / scale * (1 - kept) + frequency * kept
    if kind == "llama3":
        return frequency, 1.0
    factor = config.rope_attn_factor
    return frequency, (0.1 * math.log(scale) + 1.0 if factor is None else factor)


class Rotary:
    """The rotations of one forward pass, shared by all layers of a kind: cos and sin [B,S,1,R/2], float32 or wider.

    A plain class on purpose: FSDP's mixed precision casts every floating tensor that it finds among the arguments of a
    module, inside tuples, dicts and dataclasses too, and would round the tables to bf16.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin

    @classmethod
    def at(cls, position_ids: Tensor, frequency: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Rotary:
        """Rotations for position_ids [B,S] (int64) by ``frequency`` [R/2] radians a position (`rope_frequencies`), to
        be applied to tensors of ``dtype``; the tables are in dtype or float32, whichever is wider. What is rotated is
        also multiplied by ``factor``."""
        frequency = frequency.to(device=position_ids.device, dtype=torch.float64, non_blocking=True)
        angle = position_ids.to(torch.float64)[:, :, None, None] * frequency
        wide = torch.promote_types(dtype, torch.float32)
        return cls(cos=(angle.cos() * factor).to(wide), sin=(angle.sin() * factor).to(wide))

    def rotate(self, x: Tensor) -> Tensor:
        """x [B,S,...,Dh], its first R features turned by the position of each token: computed in the tables' dtype,
        returned in x's, contiguous."""
        cos, sin = self.cos, self.sin
        for _ in range(x.ndim - 4):
            cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        rotated = 2 * cos.shape[-1]
        a, b = x[..., :rotated].to(cos.dtype).chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
        return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)
