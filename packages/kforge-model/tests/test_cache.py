"""The cache keeps what attention will see, in buffers whose size never changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kforge_model import ModelConfig
from kforge_model.cache import KVCache


def tiny(**options: Any) -> ModelConfig:
    return ModelConfig(vocab_size=37, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=64, **options)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT + mask).softmax(-1) @ v


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 12),
    padding=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)),
    spare=st.integers(0, 5),
)
def test_what_a_query_sees(chunks: list[int], window: int | None, padding: tuple[int, int] | None, spare: int) -> None:
    """Attention over the buffers, chunk by chunk, is attention over the whole rows without padding."""
    total = sum(chunks)
    pads = (0, 0) if padding is None else tuple(min(pad, total - 1) for pad in padding)
    q, k, v = (torch.randn(2, 1, total, 3, dtype=torch.float64) for _ in range(3))
    cache = KVCache(
        tiny(window=window),
        total + spare,
        padding=None if padding is None else torch.tensor(pads),
        chunk=max(chunks),
    )
    start, parts, positions = 0, [], []
    for chunk in chunks:
        rows = cache.begin(2, chunk, "cpu", torch.float64)
        new = slice(start, start + chunk)
        held = cache.layer("1").append(k[:, :, new], v[:, :, new], rows.slots[window])
        parts.append(attend(q[:, :, new], *held, rows.masks[window]))
        positions.append(rows.position_ids)
        start += chunk
    got, position_ids = torch.cat(parts, 2), torch.cat(positions, 1)
    assert cache.length == total and got.isfinite().all()
    if window is not None:
        assert held[0].shape[2] <= window - 1 + max(chunks)
    for row, pad in enumerate(pads):
        size = total - pad
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        mask = torch.zeros(size, size, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        right = attend(q[row, 0, pad:], k[row, 0, pad:], v[row, 0, pad:], mask)
        assert (got[row, 0, pad:] - right).abs().max() < 1e-12
        assert (got[row, 0, :pad] == v[row, 0, :pad]).all()  # padding sees itself
        assert position_ids[row].tolist() == [0] * pad + list(range(size))


def test_memory_is_as_documented() -> None:
    config = tiny(window=5, window_pattern="WF")
    cache = KVCache(config, 40, chunk=4)
    rows = cache.begin(3, 4, "cpu", torch.float32)
    assert set(rows.slots) == set(rows.masks) == {5, None}
    assert rows.cu_seqlens is None and rows.doc_ids is None
    for name in ("0", "1"):
        window = config.window_of(int(name))
        k = torch.randn(3, 2, 4, 8)
        keys, _ = cache.layer(name).append(k, k, rows.slots[window])
        assert rows.masks[window].shape == (1, 1, 4, keys.shape[2])
    assert cache.bytes == 4 * 3 * (2 * 2 * 8) * (40 + 8)
    before = keys.data_ptr()
    rows = cache.begin(3, 1, "cpu", torch.float32)
    keys, _ = cache.layer("1").append(k[:, :, :1], k[:, :, :1], rows.slots[None])
    assert keys.data_ptr() == before


def test_a_slot_never_written_is_no_nan() -> None:
    cache = KVCache(tiny(), 9)
    rows = cache.begin(1, 2, "cpu", torch.float32)
    keys, values = cache.layer("0").append(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), rows.slots[None])
    assert (keys[:, :, 2:] == 0).all() and (values[:, :, 2:] == 0).all()


def test_user_errors() -> None:
    config = tiny()
    with pytest.raises(ValueError, match="capacity = 0"):
        KVCache(config, 0)
    with pytest.raises(ValueError, match="chunk = 0"):
        KVCache(config, 3, chunk=0)
    with pytest.raises(ValueError, match="one count a row"):
        KVCache(config, 3, padding=torch.zeros(2, 1, dtype=torch.int64))
    cache = KVCache(config, 6, chunk=4)
    with pytest.raises(ValueError, match="made for chunk = 4"):
        cache.begin(2, 5, "cpu", torch.float32)
    for batch, seq in ((0, 1), (2, 0)):
        with pytest.raises(ValueError, match=f"{batch} rows of {seq} tokens leave nothing to continue"):
            cache.begin(batch, seq, "cpu", torch.float32)
    for padding, words in (([-1, 0], "must lie in 0 .. 2"), ([0, 3], "must lie in 0 .. 2"), ([0.5, 1.0], "float32")):
        with pytest.raises(ValueError, match=words):
            KVCache(config, 3, padding=torch.tensor(padding))
    cache.begin(2, 4, "cpu", torch.float32)
    with pytest.raises(ValueError, match="3 rows do not fit a cache of 2 rows"):
        cache.begin(3, 1, "cpu", torch.float32)
    with pytest.raises(ValueError, match="the cache holds 6 tokens, 8 were asked"):
        cache.begin(2, 4, "cpu", torch.float32)
    assert cache.length == 4  # a refused call leaves it as it was
