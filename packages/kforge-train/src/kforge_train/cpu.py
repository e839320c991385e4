"""What this CPU is good at."""

from __future__ import annotations

from pathlib import Path


def has_fast_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware (AVX512-BF16 or AMX). Unknown systems: no."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
