"""Sampling draws from what it claims."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_model.sampling import sample

P = torch.tensor([0.15, 0.3, 0.05, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.0}, [3]),
        ({"top_p": 1e-9}, [3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.5}, [3]),
        ({"top_p": 0.6}, [1, 3]),
        ({"top_p": 0.85}, [0, 1, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # of the three left, 0.5 / 0.95 and 0.3 / 0.95 make 0.84
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"min_p": 0.2}, [0, 1, 3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [3]),
        ({"top_p": 0.85, "min_p": 0.4}, [1, 3]),
    ],
)
def test_frequencies(options: dict[str, Any], kept: list[int]) -> None:
    n = 20_000
    drawn = sample(P.log().expand(n, 4), generator=torch.Generator().manual_seed(0), **options)
    frequency = torch.bincount(drawn, minlength=4) / n
    right = torch.zeros(4, dtype=torch.float64)
    right[kept] = P[kept] / P[kept].sum()
    assert ((frequency > 0) == (right > 0)).all()
    assert (frequency - right).abs().max() < 4 * 0.5 / n**0.5


def test_temperature_sharpens_and_zero_takes_the_first() -> None:
    p = torch.tensor([0.2, 0.8], dtype=torch.float64)
    drawn = sample(p.log().expand(20_000, 2), temperature=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.double().mean().item() == pytest.approx(0.64 / 0.68, abs=0.01)
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), temperature=0).tolist() == [1]


def test_min_p_comes_after_the_temperature() -> None:
    drawn = sample(P.log().expand(20_000, 4), temperature=2.0, min_p=0.5, generator=torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {0, 1, 3}  # sqrt(0.15 / 0.5) is 0.55


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_setting_fails_or_leaves_the_vocabulary(data: st.DataObject) -> None:
    unit = st.sampled_from([0.0, 1e-12, 0.3, 1 - 1e-12, 1.0])
    logits = torch.tensor(data.draw(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6)))[None]
    drawn = sample(
        logits,
        temperature=data.draw(st.sampled_from([0.0, 1e-6, 1.0, 50.0])),
        top_k=data.draw(st.integers(0, 8)),
        top_p=data.draw(unit),
        min_p=data.draw(unit),
        repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 1.3])),
        seen=torch.zeros(1, 2, dtype=torch.int64),
    )
    assert 0 <= drawn.item() < logits.shape[1]


def test_repetition_penalty() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, 1.9], [2.0, -1.0, 3.0, 1.9]], dtype=torch.float64)
    seen = torch.tensor([[2, 2, 0], [2, 1, 3]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    # Row 0: 3 becomes 1.5, so 0 is the greatest. Row 1: the same; 3 counts not, being padding.
    assert sample(logits, temperature=0, repetition_penalty=2.0, seen=seen, seen_mask=mask).tolist() == [0, 0]
    assert sample(logits, temperature=0, repetition_penalty=2.0, seen=seen).tolist() == [3, 0]
    n = 40_000
    drawn = sample(
        logits[1].expand(n, 4),
        repetition_penalty=2.0,
        seen=seen[1].expand(n, 3),
        seen_mask=mask[1].expand(n, 3),
        generator=torch.Generator().manual_seed(1),
    )
    right = torch.tensor([2.0, -2.0, 1.5, 1.9], dtype=torch.float64).softmax(0)
    assert (torch.bincount(drawn, minlength=4) / n - right).abs().max() < 4 * 0.5 / n**0.5


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1.2},  # of what?
    ],
)
def test_user_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        sample(P.log()[None], **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_says_nothing_is_refused(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 7)
    logits[1] = bad if bad < 0 else logits[1].index_fill(0, torch.tensor(2), bad)
    with pytest.raises(ValueError, match=rf"the greatest logit of row 1 is {bad}: the model gives no token there"):
        sample(logits, temperature=temperature)
    logits[1] = -math.inf
    logits[1, 4] = 0.0  # one token is left, and that is enough
    assert sample(logits, temperature=temperature)[1] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_coldest_temperature_is_the_most_likely_token(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 9).to(dtype)
    assert torch.equal(sample(logits, temperature=1e-46), logits.argmax(-1))


def test_settings_that_are_not_finite_are_refused() -> None:
    for setting in ("temperature", "repetition_penalty"):
        for value in (math.inf, math.nan):
            with pytest.raises(ValueError, match=f"{setting} = {value} must be"):
                sample(torch.zeros(1, 3), seen=torch.zeros(1, 1, dtype=torch.int64), **{setting: value})  # type: ignore[arg-type]


def test_the_penalty_is_not_rounded_to_bfloat16() -> None:
    """31.0 / 2.002 is 15.4845; in bfloat16 it would be 15.5, above the other's 15.4922… of float32."""
    logits = torch.tensor([[31.0, 15.5]], dtype=torch.bfloat16)
    assert sample(logits, temperature=0.0, repetition_penalty=2.002, seen=torch.tensor([[0]])).item() == 1
