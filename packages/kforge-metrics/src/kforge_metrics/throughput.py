"""Tokens a second, and what part of the hardware's peak that is (MFU).

MFU (model FLOPs utilisation, PaLM, arXiv 2204.02311, appendix B) = tokens/s x FLOPs a token / (devices x peak). FLOPs
a token are those the model needs, forward and backward; recomputation does not count. The peak is the dense one of the
data sheet, without sparsity; bfloat16 with fp32 accumulation unless another dtype is asked for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

T = 1e12
# Pattern -> peak in FLOP/s: (bfloat16, float8). Tried in order; the first that fits counts, so variants stand before
# the plain name. A name that fits none has no known peak: a made-up one would make a made-up MFU.
_PEAKS: list[tuple[str, float | None, float | None]] = [
    (r"\bGB300\b", 2500 * T, 5000 * T),
    (r"\bGB200\b", 2500 * T, 5000 * T),
    (r"\bB300\b", 2250 * T, 4500 * T),
    (r"\bB200\b", 2250 * T, 4500 * T),
    (r"\bB100\b", 1750 * T, 3500 * T),
    (r"\bGH200\b", 989 * T, 1979 * T),
    (r"\bH200 NVL\b", 835 * T, 1671 * T),
    (r"\bH200\b", 989 * T, 1979 * T),
    (r"\bH100\b.*\b(PCIE|HBM2E)\b", 756 * T, 1513 * T),
    (r"\bH100 NVL\b", 835 * T, 1671 * T),
    (r"\bH100\b", 989 * T, 1979 * T),
    (r"\bH800\b.*\bPCIE\b", 756 * T, 1513 * T),
    (r"\bH800\b", 989 * T, 1979 * T),
    (r"\bH20\b", 148 * T, 296 * T),
    (r"\bA100\b", 312 * T, None),
    (r"\bA800\b", 312 * T, None),
    (r"\bA30\b", 165 * T, None),
    (r"\bA40\b", 149.7 * T, None),
    (r"\bA10G\b", 70 * T, None),
    (r"\bA10\b", 125 * T, None),
    (r"\bL40S\b", 362 * T, 733 * T),
    (r"\bL40\b", 181 * T, 362 * T),
    (r"\bL4\b", 121 * T, 242 * T),
    (r"\bRTX A6000\b", 154.8 * T, None),
    # GeForce cards run at half rate when they accumulate in fp32, as training does.
    (r"\bRTX 4090$", 165.2 * T, 330.3 * T),
    (r"\bRTX 3090$", 71 * T, None),
    (r"\bMI355X\b", 2517 * T, 5033 * T),
    (r"\bMI325X\b", 1307 * T, 2615 * T),
    (r"\bMI300X\b", 1307 * T, 2615 * T),
    (r"\bMI250X\b", 191.5 * T, None),  # torch sees each of the two dies as a device
    # No bfloat16 units: float16 only.
    (r"\bV100\b.*\bSXM", 125 * T, None),
    (r"\bV100\b.*\bPCIE\b", 112 * T, None),
    (r"\bT4\b", 65 * T, None),
]
_FLOAT16_ONLY = (r"\bV100\b", r"\bT4\b")


def peak_flops(device_name: str, dtype: torch.dtype | str = "bfloat16") -> float | None:
    """Dense peak of one device in FLOP/s, or None where it is not known.

    ``device_name`` as ``torch.cuda.get_device_name()`` says it: "NVIDIA H100 PCIe" and "NVIDIA H100 80GB HBM3" (SXM)
    are two devices. A slice of one (MIG) has no known peak, nor has a CPU.
    ``dtype`` of the matrix products: bfloat16, float16 or one of the float8; any other gives None (that of float32
    depends on whether TF32 is allowed).
    """
    name = " ".join(re.sub(r"[-_]", " ", device_name.upper()).split())
    word = str(dtype).removeprefix("torch.")
    if re.search(r"\bMIG\b", name) or "LAPTOP" in name or "MAX Q" in name:
        return None
    for pattern, half, eighth in _PEAKS:
        if re.search(pattern, name):
            if word == "bfloat16":
                return None if pattern.startswith(_FLOAT16_ONLY) else half
            if word == "float16":
                return half
            return eighth if word.startswith("float8") else None
    return None


def tokens_per_second(tokens: float, seconds: float) -> float | None:
    """Tokens over seconds; None where no time has passed, or the clock went back."""
    return tokens / seconds if seconds > 0 else None


def mfu(
    tokens_per_s: float | None, flops_per_token: float | None, devices: int, peak_flops_per_device: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction (0.5 is 50 %), or None where one of its parts is not known.

    tokens_per_s: of all devices together. flops_per_token: forward and backward. devices: how many worked.
    """
    if tokens_per_s is None or flops_per_token is None or not peak_flops_per_device:
        return None
    return tokens_per_s * flops_per_token / (devices * peak_flops_per_device)
