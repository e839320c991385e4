from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_ckpt import PerRank, StateMismatchError, UnsupportedStateError
from kforge_ckpt.state import decode, difference, encode, leaves, merge, put_together, take_apart

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
keys: st.SearchStrategy[Any] = st.recursive(
    st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
nested: st.SearchStrategy[Any] = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "a"]), inner, max_size=2)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down, NaN equal to NaN, -0.0 not to 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


@settings(max_examples=300, deadline=None)
@given(nested)
def test_any_plain_value_comes_back_from_json_as_it_was(value: Any) -> None:
    assert same(decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False))), value)


def test_subclasses_come_back_as_their_base() -> None:
    class Color(IntEnum):
        RED = 3

    value = {"e": Color.RED, "d": defaultdict(int, a=1), "o": OrderedDict(b=2), "n": np.int64(4), "f": np.float32(0.5)}
    back = decode(json.loads(json.dumps(encode(value, "x"))))
    assert same(back, {"e": 3, "d": {"a": 1}, "o": {"b": 2}, "n": 4, "f": 0.5})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {2}]}, r"x\.a\.1 is a builtins\.set"),
        ({"a": {3: object()}}, r"x\.a\.3 is a builtins\.object"),
        ({"a": np.zeros(2)}, r"x\.a is a numpy\.ndarray.*from_numpy"),
        ({"f": len}, r"x\.f is a builtins\.builtin_function"),
        ({frozenset(): 1}, r"x \(key\) is a builtins\.frozenset"),
        ({"p": PerRank([PerRank(1)])}, r"x\.p\.0 is a PerRank inside"),
        ({"p": PerRank(object())}, r"x\.p is a builtins\.object"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, r"both called 'x\.a\.b'"),
        ({"s": torch.zeros(2, 2).to_sparse()}, r"x\.s is a sparse"),
        ({"m": torch.zeros(2, device="meta")}, r"x\.m lies on the meta device"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, r"x\.c has dtype torch\.complex128"),
    ],
)
def test_what_needs_pickle_is_refused_by_path(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedStateError, match=message):
        take_apart("x", value)


def test_take_apart_and_put_together() -> None:
    w, m, own = torch.zeros(2), torch.zeros(3), torch.ones(1)
    parts = take_apart("s", {"w": w, "list": [1, {"m": m}], 7: (None, PerRank({"own": own}))})
    assert parts.tensors == {"s.w": w, "s.list.1.m": m}
    assert list(parts.per_rank) == ["s.7.1"]
    assert parts.per_rank["s.7.1"].tensors == {"s.7.1.own": own}
    tree = json.loads(json.dumps(parts.tree))
    assert set(leaves(tree, "$tensor")) == {"s.w", "s.list.1.m"}
    back = put_together(tree, {}, parts.tensors, lambda path: [path])
    assert back["w"] is w and back["list"][0] == 1 and back["list"][1]["m"] is m and back[7] == (None, ["s.7.1"])


def test_a_stage_is_given_its_own_entries_only() -> None:
    layers = {i: {"m": torch.zeros(1), "count": i} for i in range(3)}
    tree = take_apart("o", {"layers": layers, "step": 5}).tree
    mine = take_apart("o", {"layers": {1: layers[1]}})
    assert put_together(tree, {}, mine.tensors, lambda _: None) == {"layers": {1: layers[1]}, "step": 5}
    with pytest.raises(StateMismatchError, match=r"o\.0"):
        put_together(
            take_apart("o", [torch.zeros(1), torch.zeros(1)]).tree, [], {"o.1": torch.zeros(1)}, lambda _: None
        )


def test_merge_unites_stages_and_names_a_disagreement() -> None:
    a = encode({"s": {"x": 1, 0: {"a": 2}, "l": [(1, 2)]}}, "")
    b = encode({"s": {"x": 1, 1: {"b": 3}, "l": [(1, 2)]}, "t": 4}, "")
    assert decode(merge([a, b])) == {"s": {"x": 1, 0: {"a": 2}, "l": [(1, 2)], 1: {"b": 3}}, "t": 4}
    assert decode(merge([encode({"d": {"a": 1}}, ""), encode({"d": {3: 1}}, "")])) == {"d": {"a": 1, 3: 1}}
    for other in ({"d": {"n": 6}}, {"d": {"n": True}}, {"d": {"n": [5]}}, {"d": {"n": 5.0}}):
        with pytest.raises(UnsupportedStateError, match=r"disagree about d\.n: .* on rank 1; wrap"):
            merge([encode({"d": {"n": 5}}, ""), encode(other, "")])


def test_the_difference_is_readable() -> None:
    saved = {"w": ("F32", (2, 3)), "b": ("F32", (3,)), "gone": ("F32", ())}
    assert difference(saved, {"w": ("F32", (2, 3)), "b": ("F32", (3,))}, []) is None
    text = difference(saved, {"w": ("BF16", (2, 3)), "b": ("F32", (4,)), "new": ("I64", ())}, ["gone"])
    assert text == (
        "1 not in the checkpoint: new; 1 only in the checkpoint: gone; 1 of another dtype: w (saved F32, here BF16); "
        "1 of another shape: b (saved (3,), here (4,))"
    )
    assert "and 12 more" in (difference({}, {f"t{i}": ("F32", ()) for i in range(20)}, []) or "")
