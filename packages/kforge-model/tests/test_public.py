"""Every public name exists, says what it is, and is what the package lists."""

from __future__ import annotations

import inspect

import pytest

import kforge_model


def test_names() -> None:
    assert sorted(kforge_model.__all__) == sorted(set(kforge_model.__all__)) == dir(kforge_model)
    for name in kforge_model.__all__:
        value = getattr(kforge_model, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("kforge_model.")
            assert (value.__doc__ or "").strip() and not (value.__doc__ or "").startswith(f"{name}("), name
    with pytest.raises(AttributeError, match="nothing_here"):
        kforge_model.nothing_here  # noqa: B018
