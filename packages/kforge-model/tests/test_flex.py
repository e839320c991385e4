"""Which blocks of scores flex computes, against the mask itself. Its kernels need CUDA (test_gpu.py)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from kforge_model import Rows
from kforge_model.core import attend_masked, attention_mask, document_ids
from kforge_model.flex import BLOCK, flex_blocks, seen_blocks


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.sets(st.integers(1, 499), max_size=6), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 600)),
    packed=st.booleans(),
)
def test_blocks_are_those_of_the_mask(cuts: list[set[int]], window: int | None, packed: bool) -> None:
    seq = 500
    lengths = [[b - a for a, b in zip([0, *sorted(c)], [*sorted(c), seq], strict=True)] for c in cuts]
    rows = Rows.packed(lengths) if packed else Rows.plain(len(cuts), seq)
    seen, whole = seen_blocks(document_ids(rows), len(cuts), seq, window, "cpu")
    mask = attention_mask(rows, torch.float32, window)[:, 0] == 0
    n = -(-seq // BLOCK)
    padding = n * BLOCK - seq
    some = torch.nn.functional.pad(mask, (0, padding, 0, padding)).unflatten(2, (n, BLOCK)).unflatten(1, (n, BLOCK))
    every = torch.nn.functional.pad(mask, (0, padding, 0, padding), value=True)
    every = every.unflatten(2, (n, BLOCK)).unflatten(1, (n, BLOCK))
    assert torch.equal(seen.expand(len(mask), -1, -1), some.any(4).any(2))  # none too many, none too few
    assert not (whole & ~every.all(4).all(2)).any()
    # All of them, but for the last queries, whose block reaches past the row's end.
    inner = torch.ones(n, n, dtype=torch.bool).tril(-1)
    inner[-1] = False
    assert torch.equal((whole & inner).expand(len(mask), -1, -1), every.all(4).all(2) & inner)


def test_values_are_those_of_the_mask() -> None:
    rows = Rows.packed([[100, 156, 1, 127], [384]])
    q, k, v = (torch.randn(2, heads, 384, 16) for heads in (4, 2, 2))
    for window in (None, 50, 200):
        blocks = flex_blocks(document_ids(rows), 2, 384, window, "cpu")
        got = flex_attention(q, k, v, block_mask=blocks, scale=0.25, enable_gqa=True)
        right = attend_masked(q, k, v, attention_mask(rows, torch.float32, window), scale=0.25)
        assert (got - right).abs().max() < 1e-5
