"""What is dropped when an expert has more than its share, against a loop over the slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_model.moe.capacity import limited


@given(
    tokens=st.integers(1, 20), experts=st.integers(2, 6), top_k=st.integers(1, 3),
    capacity=st.floats(0.2, 2.5), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_against_a_loop(tokens: int, experts: int, top_k: int, capacity: float, seed: int) -> None:
    top_k = min(top_k, experts)
    generator = torch.Generator().manual_seed(seed)
    # Crowded, and many of one weight.
    ids = torch.stack([(torch.rand(experts, generator=generator) ** 3).argsort()[:top_k] for _ in range(tokens)])
    weights = (torch.randint(1, 5, (tokens, top_k), generator=generator) / 8).double()
    given_ids, got, kept = limited(ids, weights, experts, capacity)

    places = math.ceil(capacity * tokens * top_k / experts)
    right = torch.zeros(tokens, top_k, dtype=torch.bool)
    for e in range(experts):
        slots = sorted((-weights[t, j].item(), t, j) for t in range(tokens) for j in range(top_k) if ids[t, j] == e)
        for _, t, j in slots[:places]:
            right[t, j] = True
    assert torch.equal(kept, right)
    assert torch.equal(given_ids[kept], ids[kept]) and not got[~kept].any()
    for t in range(tokens):
        left = weights[t][kept[t]]
        factor = weights[t].sum() / left.sum() if len(left) else 0.0
        assert torch.allclose(got[t][kept[t]], left * factor)
    loads = given_ids.flatten().bincount(minlength=experts)
    assert given_ids.min() >= 0 and given_ids.max() < experts and loads.sum() == tokens * top_k
    if capacity >= 1:
        assert loads.max() <= places


def test_room_for_all_changes_nothing() -> None:
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    given_ids, got, kept = limited(ids, weights, 4, 4.0)
    assert kept.all() and torch.equal(given_ids, ids) and torch.equal(got, weights)


def test_gradients_go_through_the_weights_that_stay() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 1]])
    weights = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.7, 0.3]], dtype=torch.float64, requires_grad=True)
    _, got, kept = limited(ids, weights, 3, 1.0)  # two places: expert 0 drops the first token
    assert kept.tolist() == [[False, True], [True, True], [True, True]]
    assert torch.allclose(got[0], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda w: limited(ids, w, 3, 1.0)[1], weights)


@pytest.mark.parametrize("capacity", [0.1, 0.5])
def test_a_token_that_keeps_none_gets_nothing_and_no_gradient_that_is_not_a_number(capacity: float) -> None:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    weights = torch.ones(4, 1, requires_grad=True)
    _, got, kept = limited(ids, weights, 2, capacity)
    assert kept.sum() == math.ceil(capacity * 2) and kept[0, 0]
    got.sum().backward()
    assert weights.grad is not None and weights.grad.isfinite().all()
    assert not got[~kept].any()
