from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_optim import OptimConfig, build_schedule, constant, cosine, linear, register_schedule, wsd

DESCENDING = {"cosine": cosine, "linear": linear, "wsd": wsd}


def config(name: str, warmup: int = 0, decay: int | None = None, floor: float = 0.1) -> OptimConfig:
    return OptimConfig(schedule=name, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=floor)


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int | None]:
    total = draw(st.integers(1, 60))
    warmup = draw(st.integers(0, total))
    return total, warmup, draw(st.none() | st.integers(0, total - warmup))


@settings(deadline=None)  # a busy machine is no fault
@given(st.sampled_from(sorted(DESCENDING)), lengths(), st.floats(0, 1))
def test_factor_rises_then_falls_between_floor_and_peak(
    name: str, sizes: tuple[int, int, int | None], floor: float
) -> None:
    total, warmup, decay = sizes
    schedule = build_schedule(config(name, warmup, decay, floor), total)
    factors = [schedule(step) for step in range(total + 6)]
    for step in range(warmup):
        assert factors[step] == (step + 1) / warmup
    after = factors[warmup:]
    assert all(floor - 1e-12 <= factor <= 1 for factor in after)
    assert all(late <= early + 1e-12 for early, late in itertools.pairwise(after))
    assert factors[total:] == [floor] * 6
    assert all(0 < factor <= 1 for factor in factors[:total])  # no step of the run is spent at 0
    if warmup < total:
        assert factors[warmup] == 1.0  # the descent starts at the peak


@settings(deadline=None)  # a busy machine is no fault
@given(lengths())
def test_constant_and_none(sizes: tuple[int, int, int | None]) -> None:
    total, warmup, _ = sizes
    schedule = build_schedule(config("constant", warmup), total)
    assert [schedule(step) for step in range(warmup)] == [(step + 1) / warmup for step in range(warmup)]
    assert {schedule(step) for step in range(warmup, total + 6)} <= {1.0}
    assert {build_schedule(config("none"), total)(step) for step in range(total + 6)} == {1.0}


def test_values_by_hand() -> None:
    assert [cosine(s, total=14, warmup=2, floor=0.2) for s in (0, 1, 2, 8, 14)] == pytest.approx([0.5, 1, 1, 0.6, 0.2])
    assert cosine(11, total=14, warmup=2, floor=0.2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 9 / 12)) / 2)
    assert [linear(s, total=10, floor=0.0) for s in range(10)] == pytest.approx([1 - s / 10 for s in range(10)])
    assert [linear(s, total=10, decay=4, floor=0.0) for s in (5, 6, 7, 9, 10)] == pytest.approx([1, 1, 0.75, 0.25, 0])
    assert [wsd(s, total=10, warmup=2, floor=0.5) for s in (1, 7, 8, 9, 10)] == pytest.approx([1, 1, 1, 0.75, 0.5])
    assert [constant(s, total=10, warmup=4) for s in (0, 3, 4, 99)] == [0.25, 1, 1, 1]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_c24_edge_lengths_are_finite_or_refused_at_build(name: str) -> None:
    for total, warmup in ((10, 10), (1, 0), (1, 1), (10, 0)):
        schedule = build_schedule(config(name, warmup), total)
        assert all(0 < schedule(step) <= 1 for step in range(total))
        assert {schedule(step) for step in range(total, total + 5)} == {1.0 if name == "constant" else 0.1}
    with pytest.raises(ValueError, match=r"warmup_steps = 20 is longer than the run of 10 steps"):
        build_schedule(config(name, 20), 10)


def test_c24_wsd_decay() -> None:
    flat = build_schedule(config("wsd", 2, 0), 10)
    assert [flat(step) for step in range(2, 12)] == [1.0] * 8 + [0.1] * 2
    with pytest.raises(ValueError, match=r"do not fit into 10 steps; use decay_steps of at most 8"):
        build_schedule(config("wsd", 2, 9), 10)


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="has no warm-up"):
        build_schedule(config("none", 3), 10)
    for name in ("none", "constant"):
        with pytest.raises(ValueError, match="never descends"):
            build_schedule(config(name, 0, 3), 10)
    with pytest.raises(ValueError, match="total steps = 0"):
        build_schedule(config("cosine"), 0)
    with pytest.raises(ValueError, match="step = -1"):
        build_schedule(config("cosine"), 10)(-1)


def test_unknown_name_lists_the_known_ones_and_a_decorator_adds_one() -> None:
    with pytest.raises(ValueError, match=r"unknown schedule 'rex'; known are .*constant, cosine, linear, none, wsd"):
        build_schedule(config("rex"), 10)

    @register_schedule("test-halves")
    def halves(config: OptimConfig, total_steps: int):  # type: ignore[no-untyped-def]
        return lambda step: 0.5

    assert build_schedule(config("test-halves"), 10)(3) == 0.5
    with pytest.raises(ValueError, match="registered already"):
        register_schedule("cosine")(halves)


def test_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, EntryPoints

    import kforge_optim.registry as registry

    point = EntryPoint("test-installed", "kforge_optim.schedules:_build_none", "kforge.schedules")

    def entry_points(**select: str) -> EntryPoints:
        return EntryPoints([point]).select(**select)

    monkeypatch.setattr(registry, "entry_points", entry_points)
    assert build_schedule(config("test-installed"), 10)(3) == 1.0
    with pytest.raises(ValueError, match="test-installed"):
        build_schedule(config("nowhere"), 10)
