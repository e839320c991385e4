"""The attention core against loops, plain and packed, with every option, and what it must not do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kforge_model.core as core_module
from kforge_model import AttentionCore, ModelConfig, Rows, Transformer

LENGTHS = [[5, 1, 10], [16], [3, 13]]


def core_of(window: int | None = None, **options: Any) -> AttentionCore:
    return AttentionCore(ModelConfig(**{"dim": 32, "n_heads": 4, "head_dim": 8, **options}), window)


def reference_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    docs: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query at a time, in float64."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                start = 0 if window is None else max(0, i - window + 1)
                seen = [j for j in range(start, i + 1) if docs[b, j] == docs[b, i]]
                scores = k[b, h // share, seen].double() @ q[b, h, i].double() / q.shape[-1] ** 0.5
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[h].exp()))
                out[b, h, i] = weights @ v[b, h // share, seen].double()
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
    core = core_of()
    for rows in (Rows.plain(3, 16), Rows.packed(LENGTHS)):
        docs = torch.zeros(3, 16) if rows.doc_ids is None else rows.doc_ids
        right = reference_core(q, k, v, docs)
        for given in (rows, core.prepare(rows, dtype)):
            got = core(q, k, v, given)
            assert got.dtype == dtype
            assert (got.double() - right).abs().max() < tolerance


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [0.0, 0.8])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_options_of_the_core_against_loops(window: int | None, softcap: float, with_sinks: bool, packed: bool) -> None:
    q, k, v = qkv()
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    core = core_of(window, attn_softcap=softcap, sinks=with_sinks)
    rows = Rows.packed(LENGTHS) if packed else Rows.plain(3, 16)
    docs = torch.zeros(3, 16) if rows.doc_ids is None else rows.doc_ids
    right = reference_core(q, k, v, docs, window, softcap, sinks)
    for given in (rows, core.prepare(rows, q.dtype)):
        assert (core(q, k, v, given, sinks=sinks) - right).abs().max() < 1e-13


def test_the_kernel_is_the_fastest_that_can() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    plain, packed, half = Rows.plain(3, 16), Rows.packed(LENGTHS), torch.bfloat16
    by_ids = dataclasses.replace(packed, cu_seqlens=None)
    table = [
        (core_of(), plain, cpu, half, "sdpa"),
        (core_of(), plain, cuda, half, "sdpa"),
        (core_of(), packed, cpu, half, "masked"),
        (core_of(), packed, cuda, half, "varlen"),
        (core_of(head_dim=16), packed, cuda, torch.float32, "flex"),
        (core_of(head_dim=16), by_ids, cuda, half, "flex"),
        (core_of(), packed, cuda, torch.float64, "masked"),
        (core_of(4), plain, cuda, half, "varlen"),
        (core_of(4), packed, cuda, half, "varlen"),
        (core_of(16), plain, cpu, half, "sdpa"),  # the window is as long as the row
        (core_of(15), plain, cpu, half, "masked"),
        (core_of(head_dim=16, attn_softcap=1.0), plain, cuda, half, "flex"),
        (core_of(head_dim=16, sinks=True), packed, cuda, half, "flex"),
        (core_of(sinks=True), packed, cuda, half, "masked"),  # heads too narrow for flex
    ]
    for core, rows, device, dtype, kernel in table:
        assert core.kernel(rows, device, dtype) == kernel, (core, device, dtype)


@pytest.mark.parametrize(
    ("options", "window", "packed", "reason"),
    [
        ({"attention_core": "sdpa"}, None, True, "one document only"),
        ({"attention_core": "sdpa"}, 4, False, "no window"),
        ({"attention_core": "sdpa", "sinks": True}, None, False, "no sinks"),
        ({"attention_core": "varlen"}, None, True, "CUDA only, and this is cpu"),
        ({"attention_core": "flex"}, None, True, "CUDA only"),
    ],
)
def test_a_kernel_that_cannot_is_refused(
    options: dict[str, Any], window: int | None, packed: bool, reason: str
) -> None:
    rows = Rows.packed(LENGTHS) if packed else Rows.plain(3, 16)
    with pytest.raises(ValueError, match=reason) as error:
        core_of(window, **options).prepare(rows, torch.float32)
    assert options["attention_core"] in str(error.value) and "use 'auto'" in str(error.value)


def test_what_was_asked_for_is_used() -> None:
    q, k, v = qkv()
    core, rows = core_of(attention_core="masked"), Rows.plain(3, 16)
    assert core.kernel(rows, q.device, q.dtype) == "masked"
    right = reference_core(q, k, v, torch.zeros(3, 16))
    assert (core(q, k, v, core.prepare(rows, q.dtype)) - right).abs().max() < 1e-13


def test_the_choice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    core_module._announce.cache_clear()
    model = Transformer(ModelConfig(vocab_size=16, dim=16, n_layers=3, n_heads=2))
    with caplog.at_level("INFO", logger="kforge_model"):
        for _ in range(3):
            model(torch.zeros(3, 16, dtype=torch.int64), Rows.packed(LENGTHS))
    assert [r.getMessage() for r in caplog.records] == ["attention: masked for packed rows in float32 on cpu"]


def test_documents_by_cu_seqlens_or_by_ids_are_the_same() -> None:
    rows, (q, k, v), core = Rows.packed(LENGTHS), qkv(), core_of()
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
    core = core_of()
    rows = core.prepare(Rows.packed(LENGTHS) if packed else Rows.plain(3, 16), torch.float32)
    with Ops() as ops:
        core(q, k, v, rows)
    fused = [shapes for name, shapes in ops.calls if "scaled_dot_product_flash_attention_for_cpu" in name]
    assert [shapes[1] for shapes in fused] == [(3, 2, 16, 8)]
    assert not any("repeat" in name or "expand" in name or "clone" in name for name, _ in ops.calls)


def test_mask_is_built_once_a_forward_and_never_for_plain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = core_module.attention_mask
    monkeypatch.setattr(core_module, "attention_mask", lambda *args: built.append(args[2]) or real(*args))
    model = Transformer(ModelConfig(vocab_size=16, dim=16, n_layers=3, n_heads=2))
    ids = torch.randint(16, (3, 16))
    model(ids, Rows.packed(LENGTHS))
    assert len(built) == 1
    model(ids, Rows.plain(3, 16))
    model(ids)
    assert len(built) == 1
    two = ModelConfig(vocab_size=16, dim=16, n_layers=4, n_heads=2, window=3, window_pattern="WF")
    Transformer(two)(ids, Rows.packed(LENGTHS))
    assert built[1:] == [3, None]  # once for each kind of layer


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


@pytest.mark.parametrize("options", [{"softcap": 50.0}, {"with_sinks": True}, {}], ids=["soft-cap", "sinks", "plain"])
def test_scores_are_not_rounded_to_bfloat16(options: dict[str, Any]) -> None:
    """Scores up to 60, where bfloat16 has steps of 0.25: what is lost is the rounding of weights and result."""
    q, k, v = (x.bfloat16() for x in qkv())
    q, k = q * 5, k * 5
    sinks = torch.randn(4, dtype=torch.float64) if options.get("with_sinks") else None
    softcap = options.get("softcap", 0.0)
    right = reference_core(q, k, v, torch.zeros(3, 16), None, softcap, sinks)
    mask = core_module.attention_mask(Rows.plain(3, 16), torch.bfloat16)
    given = {"scale": 8**-0.5, "softcap": softcap, "sinks": sinks}
    got = core_module.attend_masked(q, k, v, mask, **given)
    assert (got.double() - right).abs().max() < 2**-7 * right.abs().max()
    weights = core_module.attention_weights_of(q, k, mask, **given)
    wide = core_module.attention_weights_of(q.double(), k.double(), mask, **given)
    assert (weights - wide).abs().max() < 1e-4


def test_one_graph_for_documents_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of CUDA is called with its bound on lengths, which is a part of a compiled graph."""
    graphs = 0

    def by_documents(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, **_: Any) -> Tensor:
        return torch.zeros_like(q) + longest

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    monkeypatch.setattr(AttentionCore, "kernel", lambda *_: "varlen")
    monkeypatch.setattr(core_module, "varlen_causal", by_documents)
    core = core_of()
    compiled = torch.compile(core.forward, backend=backend, fullgraph=True, dynamic=False)
    q = k = v = torch.randn(1, 4, 16, 8)
    for longest in range(8, 16):
        rows = Rows.packed([[longest, 16 - longest]])
        assert (compiled(q, k, v, rows) == 16).all() and (core(q, k, v, rows) == longest).all()
    assert graphs == 1
