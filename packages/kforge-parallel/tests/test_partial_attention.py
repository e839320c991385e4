"""A softmax in parts: the formulas, the pairs of chunks of a ring, and the shapes that kernels of CUDA are given."""

from types import SimpleNamespace

import pytest
import torch
from chunks import KERNELS_OF_CUDA, packed, ring_by_chunks, rings, whole_attention

from kforge_parallel.partial_attention import KERNELS, UNSEEN, Pair, choose_kernel, merge


def tensors(batch=3, heads=4, kv=2, tokens=48, width=4, value=4, dtype=torch.float64, device="cpu"):
    random = torch.Generator().manual_seed(7)
    shapes = ((heads, width), (kv, width), (kv, value), (heads, value))
    made = [torch.randn(batch, h, tokens, d, generator=random, dtype=torch.float64) for h, d in shapes]
    return [x.to(device=device, dtype=dtype) for x in made]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("kv", "value"), [(4, 4), (2, 3), (1, 4)])
@pytest.mark.parametrize(("documents", "window"), [(True, None), (True, 5), (True, 17), (False, None), (False, 9)])
def test_all_chunks_together_are_attention(size, kv, value, documents, window):
    q, k, v, grad = tensors(kv=kv, value=value)
    docs, ends, longest = packed(3, 48)
    if not documents:
        docs = None
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    right = whole_attention(*inputs, docs, window, 0.6)
    right.backward(grad)
    found = ring_by_chunks(q, k, v, grad, size, docs, ends, longest, window, 0.6, "exact")
    for mine, expected in zip(found, (right.detach(), *(x.grad for x in inputs)), strict=True):
        assert (mine - expected).abs().max() < 1e-13


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize(
    ("kernel", "value", "documents", "window"),
    [
        ("flash", 4, True, None),
        ("flash", 4, False, None),
        ("efficient", 4, True, 5),
        ("efficient", 3, True, None),
        ("efficient", 4, False, 17),
    ],
)
def test_kernels_of_cuda_are_given_what_makes_attention(monkeypatch, size, kv, kernel, value, documents, window):
    """With what they compute by the formula in their place: lengths, masks, order of the rows, and what they leave."""
    for name, function in KERNELS_OF_CUDA.items():
        monkeypatch.setattr(torch.ops.aten, name, function)
    q, k, v, grad = tensors(kv=kv, value=value)
    docs, ends, longest = packed(3, 48)
    if not documents:
        docs, ends, longest = None, torch.arange(0, 145, 48), 48
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    right = whole_attention(*inputs, docs, window, 0.6)
    right.backward(grad)
    found = ring_by_chunks(q, k, v, grad, size, docs, ends, longest, window, 0.6, kernel)
    for mine, expected in zip(found, (right.detach(), *(x.grad for x in inputs)), strict=True):
        assert (mine - expected).abs().max() < 1e-13


def test_scores_beyond_what_exp_can_hold_are_merged():
    q, k, v, grad = tensors(tokens=8)
    docs, ends, longest = packed(3, 8)
    right = whole_attention(q * 1e3, k, v, docs, None, 1.0)
    found = ring_by_chunks(q * 1e3, k, v, grad, 2, docs, ends, longest, None, 1.0, "exact")
    assert all(x.isfinite().all() for x in found)
    assert (found[0] - right).abs().max() < 1e-9


def test_what_a_query_that_sees_no_key_adds_is_nothing():
    q, k, v, _ = tensors(batch=1, tokens=4)
    docs = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]])
    pair = Pair((4, 8), (0, 4), 8, torch.tensor([0, 6, 8]), 6, docs)
    out, lse = KERNELS["exact"].forward(q, k, v, pair, 1.0)
    assert not out[:, :, 2:].any() and (lse[:, :, 2:] == -torch.inf).all()
    assert out[:, :, :2].all() and lse[:, :, :2].isfinite().all()
    own, own_lse = torch.randn_like(out), torch.randn_like(lse)
    for nothing in (-torch.inf, UNSEEN):
        both, both_lse = merge(own, own_lse, out, torch.full_like(lse, nothing))
        assert torch.equal(both, own) and torch.equal(both_lse, own_lse)
    queries, keys = pair.linked()
    assert queries.flatten().tolist() == [True, True, False, False] and keys.all()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_has_every_pair_once_and_two_on_each_rank_at_a_time(size):
    length = 4
    every = []
    for columns, ring in rings(size, 2 * size * length, None, torch.zeros(1), 9, None, 1.0, "exact"):
        for step in range(size):
            pairs = list(ring.pairs(step))
            assert len(pairs) == (3 if step == 0 else 2)
            assert [pair.same for *_, pair in pairs] == ([True, True, False] if step == 0 else [False, False])
            for i, _, pair in pairs:
                assert columns.chunk(2)[i].tolist() == list(range(*pair.queries))
                every.append((pair.queries[0] // length, pair.keys[0] // length))
    assert sorted(every) == [(i, j) for i in range(2 * size) for j in range(i + 1)]


def test_chunks_that_a_window_leaves_out_are_not_computed():
    found = {}
    for window in (1, 4, 5, 13):
        ring = next(iter(rings(2, 16, None, torch.zeros(1), 16, window, 1.0, "exact")))[1]
        found[window] = [(pair.queries[0], pair.keys[0]) for step in range(2) for *_, pair in ring.pairs(step)]
    # a query at column 12 sees a key at 3 if the window is 10 or more
    assert found[1] == [(0, 0), (12, 12)]
    assert found[4] == found[5] == [(0, 0), (12, 12), (12, 8)]
    assert found[13] == [(0, 0), (12, 12), (12, 0), (12, 4), (12, 8)]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [("flash", torch.bfloat16, 16), ("efficient", torch.bfloat16, 16), ("efficient", torch.float32, 24)],
)
def test_kernels_of_cuda_take_and_give_the_shapes_that_are_expected(name, dtype, value, same):
    """On the meta device, where torch checks arguments and shapes as a device would."""
    q, k, v, grad = tensors(batch=2, tokens=40, width=16, value=value, dtype=dtype, device="meta")
    docs, ends, longest = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in packed(2, 160))
    pair = Pair((80, 120), (80, 120) if same else (0, 40), 160, ends, longest, docs)
    out, lse = KERNELS[name].forward(q, k, v, pair, 0.3)
    assert out.shape == grad.shape and lse.shape == q.shape[:3]
    assert out.dtype == lse.dtype == torch.float32
    gradients = KERNELS[name].backward(grad, q, k, v, out.to(dtype), lse, pair, 0.3)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_the_kernel_is_chosen_by_what_each_can_do():
    def chosen(dtype, width=64, value=64, window=None, by_length=True, cuda=True):
        q = SimpleNamespace(is_cuda=cuda, dtype=dtype, shape=(1, 4, 8, width))
        v = SimpleNamespace(shape=(1, 4, 8, value))
        return choose_kernel(q, v, window, documents_by_length=by_length)

    assert chosen(torch.bfloat16) == chosen(torch.float16, 256, 256) == "flash"
    for other in ({"window": 9}, {"value": 48}, {"width": 260, "value": 260}, {"width": 12, "value": 12}):
        assert chosen(torch.bfloat16, **other) == "efficient"
    assert chosen(torch.bfloat16, by_length=False) == chosen(torch.float32) == "efficient"
    assert chosen(torch.float64) == chosen(torch.bfloat16, cuda=False) == "exact"
