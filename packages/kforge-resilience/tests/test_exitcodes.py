from __future__ import annotations

from kforge_resilience import exitcodes


def test_codes_are_those_of_the_table() -> None:
    assert (exitcodes.OK, exitcodes.CONFIG, exitcodes.STOPPED, exitcodes.NONFINITE) == (0, 2, 75, 76)
    assert exitcodes.__doc__ is not None
    for code in exitcodes.SENTENCES:
        assert f"\n{code} " in exitcodes.__doc__


def test_describe() -> None:
    assert "start it again" in exitcodes.describe(75)
    assert exitcodes.describe(1).startswith("an exception")
    assert exitcodes.describe(-15) == exitcodes.describe(143) == "the process was ended by signal 15"
    assert exitcodes.describe(42) == "status 42 is not one of ours"
