from __future__ import annotations

import pytest
import torch

from kforge_metrics import mfu, peak_flops, tokens_per_second

# Names as torch.cuda.get_device_name() says them; dense TFLOP/s of the data sheets.
BF16 = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 80GB HBM2e": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H20": 148,
    "NVIDIA H800": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A10G": 70,
    "NVIDIA A10": 125,
    "NVIDIA A30": 165,
    "NVIDIA A40": 149.7,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181,
    "NVIDIA L40S": 362,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI300X OAM": 1307,
}


@pytest.mark.parametrize("name", BF16)
def test_peaks_of_known_devices(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) == BF16[name] * 1e12
    assert peak_flops(name) == peak_flops(name, "float16") == peak_flops(name.lower(), "bfloat16")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "AMD EPYC 9654 96-Core Processor",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A1000",
        "NVIDIA H2000",
        "NVIDIA X200",
    ],
)
def test_no_figure_is_made_up(name: str) -> None:
    for dtype in ("bfloat16", "float16", torch.float8_e4m3fn):
        assert peak_flops(name, dtype) is None


def test_dtypes() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn) == 1979e12
    assert peak_flops("NVIDIA H100 PCIe", "float8_e5m2") == 1513e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None  # has no such units
    assert peak_flops("NVIDIA H200", torch.float32) is None
    assert peak_flops("Tesla V100-SXM2-16GB", torch.float16) == 125e12
    assert peak_flops("Tesla V100-PCIE-32GB", torch.float16) == 112e12
    assert peak_flops("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert peak_flops("Tesla T4", torch.float16) == 65e12


def test_mfu_is_one_at_the_peak_and_none_where_a_part_is_not_known() -> None:
    peak, flops, devices = 989e12, 6 * 8e9, 8
    at_the_peak = peak * devices / flops
    assert mfu(at_the_peak, flops, devices, peak) == pytest.approx(1.0, abs=1e-15)
    assert mfu(at_the_peak / 4, flops, devices, peak) == pytest.approx(0.25)
    assert mfu(None, flops, devices, peak) is None
    assert mfu(1.0, None, devices, peak) is None
    assert mfu(1.0, flops, devices, None) is None


def test_no_time_gives_no_rate() -> None:
    assert tokens_per_second(10_000, 10) == 1000
    assert tokens_per_second(10_000, 0.0) is None
    assert tokens_per_second(10_000, -1.0) is None
