"""Attention against loops, plain and packed, and what its core must not do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kforge_model.attention as attention_module
from kforge_model import Attention, ModelConfig, Rotary, Rows, SdpaCore, Transformer

LENGTHS = [[5, 1, 10], [16], [3, 13]]


def reference_core(q: Tensor, k: Tensor, v: Tensor, docs: Tensor) -> Tensor:
    """One query at a time, in float64."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(i + 1) if docs[b, j] == docs[b, i]]
                scores = k[b, h // share, seen].double() @ q[b, h, i].double() / q.shape[-1] ** 0.5
                out[b, h, i] = scores.softmax(0) @ v[b, h // share, seen].double()
    return out


def qkv(dtype: torch.dtype = torch.float64, heads: int = 4, kv: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(3, heads, 16, dim, dtype=torch.float64)
    k, v = torch.randn(2, 3, kv, 16, dim, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_core_against_loops(dtype: torch.dtype, tolerance: float, kv: int) -> None:
    q, k, v = qkv(dtype, kv=kv)
    core = SdpaCore(8)
    for rows in (Rows.plain(3, 16), Rows.packed(LENGTHS)):
        docs = torch.zeros(3, 16) if rows.doc_ids is None else rows.doc_ids
        right = reference_core(q, k, v, docs)
        for given in (rows, core.prepare(rows, dtype)):
            got = core(q, k, v, given)
            assert got.dtype == dtype
            assert (got.double() - right).abs().max() < tolerance


def test_documents_by_cu_seqlens_or_by_ids_are_the_same() -> None:
    rows, (q, k, v), core = Rows.packed(LENGTHS), qkv(), SdpaCore(8)
    assert rows.cu_seqlens is not None
    padded = torch.cat([rows.cu_seqlens, rows.cu_seqlens[-1:].expand(9)])  # as loaders do, for a fixed shape
    both = core(q, k, v, rows)
    for change in ({"doc_ids": None}, {"cu_seqlens": None}, {"doc_ids": None, "cu_seqlens": padded}):
        assert torch.equal(core(q, k, v, dataclasses.replace(rows, **change)), both)


def test_packed_rows_know_their_lengths() -> None:
    rows = Rows.packed([[2, 3], [5]])
    assert rows.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows.doc_ids is not None and rows.doc_ids.tolist() == [[0, 0, 1, 1, 1], [0] * 5]
    assert rows.cu_seqlens is not None and rows.cu_seqlens.tolist() == [0, 2, 5, 10]
    assert rows.cu_seqlens.dtype == torch.int32 and rows.max_seqlen == 5
    with pytest.raises(ValueError, match="rectangle"):
        Rows.packed([[2, 3], [4]])
    with pytest.raises(ValueError, match="empty document"):
        Rows.packed([[5, 0]])


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), [tuple(a.shape) for a in args if isinstance(a, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_not_repeated_in_memory(packed: bool) -> None:
    q, k, v = qkv(torch.float32)
    core = SdpaCore(8)
    rows = core.prepare(Rows.packed(LENGTHS) if packed else Rows.plain(3, 16), torch.float32)
    with Ops() as ops:
        core(q, k, v, rows)
    fused = [shapes for name, shapes in ops.calls if "scaled_dot_product_flash_attention_for_cpu" in name]
    assert [shapes[1] for shapes in fused] == [(3, 2, 16, 8)]
    assert not any("repeat" in name or "expand" in name or "clone" in name for name, _ in ops.calls)


def test_mask_is_built_once_a_forward_and_never_for_plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = attention_module.attention_mask
    monkeypatch.setattr(attention_module, "attention_mask", lambda *args: built.append(1) or real(*args))
    model = Transformer(ModelConfig(vocab_size=16, dim=16, n_layers=3, n_heads=2))
    ids = torch.randint(16, (3, 16))
    model(ids, Rows.packed(LENGTHS))
    assert len(built) == 1
    model(ids, Rows.plain(3, 16))
    model(ids)
    assert len(built) == 1


def test_projections_and_rope_around_the_core() -> None:
    config = ModelConfig(vocab_size=8, dim=24, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8)
    layer = Attention(config).double()
    x = torch.randn(3, 16, 24, dtype=torch.float64)
    rows = Rows.packed(LENGTHS)
    rotary = Rotary.at(rows.position_ids, 8, 10_000.0, torch.float64)
    q, k, v = ((x @ w.weight.T).view(3, 16, -1, 8) for w in (layer.wq, layer.wk, layer.wv))
    assert rows.doc_ids is not None
    core = reference_core(*(t.transpose(1, 2) for t in (rotary.rotate(q), rotary.rotate(k), v)), rows.doc_ids)
    right = core.transpose(1, 2).reshape(3, 16, 32) @ layer.wo.weight.T
    assert (layer(x, rotary, rows) - right).abs().max() < 1e-12


def test_core_can_be_exchanged_and_gets_the_rows_as_they_came() -> None:
    seen: list[Any] = []

    class Mine(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Any) -> Tensor:
            seen.append((rows, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return q

    model = Transformer(ModelConfig(vocab_size=16, dim=16, n_layers=2, n_heads=4, n_kv_heads=2))
    names = list(model.state_dict())
    for block in model.layers.values():
        assert list(block.attn.core.parameters()) == []
        block.attn.core = Mine()
    rows = Rows.packed(LENGTHS)
    model(torch.randint(16, (3, 16)), rows)
    assert [call[0] is rows for call in seen] == [True, True]
    assert seen[0][1:] == ((3, 4, 16, 4), (3, 2, 16, 4), (3, 2, 16, 4))
    assert list(model.state_dict()) == names
