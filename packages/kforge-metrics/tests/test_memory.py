from __future__ import annotations

import pytest
import torch

from kforge_metrics import PeakMemory, process_rss


def test_resident_size_of_this_process_grows_with_what_it_holds() -> None:
    before = process_rss()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = PeakMemory("cpu").read()
    assert before is not None and after is not None
    assert 50 << 20 < after - before < 200 << 20
    assert held.numel() == 64 << 20


@pytest.mark.gpu
def test_cuda_peak_is_that_of_the_interval() -> None:
    memory = PeakMemory("cuda")
    spike = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del spike
    first, second = memory.read(), memory.read()
    assert first is not None and second is not None
    assert first >= 256 << 20 and second < 256 << 20
