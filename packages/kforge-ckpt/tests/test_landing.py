"""Bytes that come in blocks arrive in order, whole, and as often as asked."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_ckpt import landing
from kforge_ckpt.landing import Landing
from kforge_ckpt.safetensors import flat_bytes

DTYPES = [torch.float64, torch.bfloat16, torch.bool, torch.int32]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30), st.sampled_from(DTYPES)), max_size=5))
def test_targets_are_filled_one_after_the_other(shapes: list[tuple[int, int, torch.dtype]]) -> None:
    landing.BLOCK_BYTES = 512
    values = [torch.randint(0, 2, (rows, columns)).to(dtype) for rows, columns, dtype in shapes]
    file = io.BytesIO(b"".join(flat_bytes(value).numpy().tobytes() for value in values))

    def read(view: memoryview) -> None:
        assert len(view) <= 512
        assert file.readinto(view) == len(view)

    way = Landing()
    for value in values:
        target = torch.empty_like(value)
        way.fill(target, read)
        assert torch.equal(target, value)
    assert not file.read()


@pytest.mark.gpu
def test_on_a_device_a_block_is_not_filled_before_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "BLOCK_BYTES", 2**20)
    value = torch.randint(0, 256, (2**25 + 13,), dtype=torch.uint8)
    file = io.BytesIO(value.numpy().tobytes())
    target = torch.zeros_like(value, device="cuda")
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy  # copies wait for these
    way = Landing()
    way.fill(target, lambda view: file.readinto(view) and None)
    assert torch.equal(target.cpu(), value)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "BLOCK_BYTES", landing.BLOCK_BYTES)
