from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_models import tiny
from torch import nn

from kforge_optim import (
    GroupRule,
    OptimConfig,
    Rates,
    build_optimizer,
    build_schedule,
    constant,
    cosine,
    inverse_sqrt,
    linear,
    polynomial,
    register_schedule,
    rex,
    wsd,
)
from kforge_optim.schedules import build_weight_decay_schedule, curves, plot

SHAPES = ["linear", "cosine", "1-sqrt", "polynomial", "rex"]
DESCENDING = ["cosine", "linear", "polynomial", "rex", "wsd"]
NAMES = [*DESCENDING, "inverse_sqrt", "constant", "none", "phases"]


def config(name: str, warmup: int = 0, decay: int | None = None, floor: float = 0.1, **more: Any) -> OptimConfig:
    return OptimConfig(schedule=name, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=floor, **more)


def factors(values: OptimConfig, total: int, steps: int | None = None) -> list[float]:
    schedule = build_schedule(values, total)
    return [schedule(step) for step in range(total if steps is None else steps)]


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int | None]:
    total = draw(st.integers(1, 60))
    warmup = draw(st.integers(0, total))
    return total, warmup, draw(st.none() | st.integers(0, total - warmup))


@settings(deadline=None)  # a busy machine is no fault
@given(st.sampled_from(DESCENDING), st.sampled_from(SHAPES), lengths(), st.floats(0, 1), st.floats(0.1, 5))
def test_factor_rises_then_falls_between_floor_and_peak(
    name: str, shape: str, sizes: tuple[int, int, int | None], floor: float, power: float
) -> None:
    total, warmup, decay = sizes
    more: dict[str, Any] = {"decay_shape": shape} if name == "wsd" else {}
    if name == "polynomial" or (name == "wsd" and shape == "polynomial"):
        more["decay_power"] = power
    found = factors(config(name, warmup, decay, floor, **more), total, total + 6)
    for step in range(warmup):
        assert found[step] == (step + 1) / warmup
    after = found[warmup:]
    assert all(floor - 1e-12 <= factor <= 1 for factor in after)
    assert all(late <= early + 1e-12 for early, late in itertools.pairwise(after))
    assert found[total:] == [floor] * 6
    assert all(0 < factor <= 1 for factor in found[:total])  # no step of the run is spent at 0
    if warmup < total:
        assert found[warmup] == 1.0  # the descent starts at the peak


@settings(deadline=None)
@given(lengths(), st.floats(0, 1), st.sampled_from(SHAPES))
def test_inverse_sqrt(sizes: tuple[int, int, int | None], floor: float, shape: str) -> None:
    total, warmup, decay = sizes
    found = factors(config("inverse_sqrt", warmup, decay, floor, decay_shape=shape), total, total + 6)
    assert found[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    flat = total - (decay or 0)
    for step in range(warmup, flat):
        expected = math.sqrt(warmup / step) if warmup else math.sqrt(1 / (step + 1))
        assert found[step] == pytest.approx(max(floor, expected))
    assert all(late <= early + 1e-12 for early, late in itertools.pairwise(found[warmup:]))
    assert len(set(found[total:])) == 1 and (not decay or found[total] == floor)


@settings(deadline=None)
@given(lengths())
def test_constant_and_none(sizes: tuple[int, int, int | None]) -> None:
    total, warmup, _ = sizes
    found = factors(config("constant", warmup), total, total + 6)
    assert found[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    assert set(found[warmup:]) <= {1.0}
    assert set(factors(config("none"), total, total + 6)) == {1.0}


def test_values_by_hand() -> None:
    assert [cosine(s, total=14, warmup=2, floor=0.2) for s in (0, 1, 2, 8, 14)] == pytest.approx([0.5, 1, 1, 0.6, 0.2])
    assert cosine(11, total=14, warmup=2, floor=0.2) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 9 / 12)) / 2)
    assert [linear(s, total=10, floor=0.0) for s in range(10)] == pytest.approx([1 - s / 10 for s in range(10)])
    assert [linear(s, total=10, decay=4, floor=0.0) for s in (5, 6, 7, 9, 10)] == pytest.approx([1, 1, 0.75, 0.25, 0])
    assert [wsd(s, total=10, warmup=2, floor=0.5) for s in (1, 7, 8, 9, 10)] == pytest.approx([1, 1, 1, 0.75, 0.5])
    assert [constant(s, total=10, warmup=4) for s in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    assert [polynomial(s, total=4, floor=0.0, power=3) for s in range(5)] == pytest.approx(
        [1, 27 / 64, 1 / 8, 1 / 64, 0]
    )
    assert [inverse_sqrt(s, total=99, warmup=4, floor=0.1) for s in (0, 3, 4, 16, 64)] == [0.25, 1, 1, 0.5, 0.25]


def test_rex_is_the_published_formula() -> None:
    """Chen et al. 2021: (1 - z) / (1/2 + (1 - z)/2), which is 2(1 - z)/(2 - z): above the line, not a polynomial."""
    found = [rex(s, total=100, floor=0.0) for s in range(101)]
    assert found == pytest.approx([2 * (1 - z) / (2 - z) for z in (s / 100 for s in range(101))])
    assert found[50] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("shape", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5)), ("polynomial", 0.25), ("rex", 2 / 3)],
)
def test_wsd_cools_down_in_shapes(shape: str, middle: float) -> None:
    found = factors(config("wsd", 2, 8, 0.2, decay_shape=shape), 20, 22)
    assert found[2:13] == [1.0] * 11
    assert found[16] == pytest.approx(0.2 + 0.8 * middle)
    assert found[20:] == [0.2] * 2


PHASES = (
    {"steps": 4, "schedule": "linear", "from": 0.5, "to": 1.0},
    {"until": 12},
    {"steps": 4, "schedule": "cosine", "to": 0.5},
    {"schedule": "1-sqrt"},
)


def edge(name: str, warmup: int) -> OptimConfig:
    """A schedule of each name that fits into any number of steps."""
    if name == "phases":
        return config(name, warmup, phases=({"schedule": "linear"},))
    return config(name, 0 if name == "none" else warmup)


@pytest.mark.parametrize("name", NAMES)
def test_c24_edge_lengths_are_finite_or_refused_at_build(name: str) -> None:
    for total, warmup in ((10, 10), (1, 0), (1, 1), (10, 0)):
        if name == "phases" and warmup == total:
            with pytest.raises(ValueError, match=rf"phases\[0\] would begin at step {total}, but there are {total}"):
                build_schedule(edge(name, warmup), total)
            continue
        found = factors(edge(name, warmup), total, total + 5)
        assert all(0 < factor <= 1 for factor in found)
        ends = set(found[total:])
        assert ends == ({1.0} if name in ("constant", "none") else ends if name == "inverse_sqrt" else {0.1})
        assert len(ends) == 1
    if name != "none":
        with pytest.raises(ValueError, match=r"warmup_steps = 20 is longer than the run of 10 steps"):
            build_schedule(edge(name, 20), 10)


@pytest.mark.parametrize("shape", SHAPES)
def test_c24_wsd_decay(shape: str) -> None:
    flat = build_schedule(config("wsd", 2, 0, decay_shape=shape), 10)
    assert [flat(step) for step in range(2, 15)] == [1.0] * 8 + [0.1] * 5
    for name in ("wsd", "inverse_sqrt", "cosine", "rex", "linear", "polynomial"):
        with pytest.raises(ValueError, match=r"do not fit into 10 steps; use decay_steps of at most 8"):
            build_schedule(config(name, 2, 9), 10)


def test_c25_a_schedule_is_a_function_of_the_step_alone() -> None:
    """Built anew at 1, 5, 6 and 19 as a resume does, and asked in any order: the same factors."""
    for name in NAMES:
        values = config("phases", 5, phases=({"schedule": "rex"},)) if name == "phases" else edge(name, 5)
        straight = factors(values, 20)
        for stop in (1, 5, 6, 19):
            resumed = build_schedule(values, 20)
            assert [resumed(step) for step in range(stop, 20)] == straight[stop:]
            assert [resumed(step) for step in reversed(range(20))] == straight[::-1]


def test_the_horizon_is_apart_from_the_end_of_the_run() -> None:
    whole = factors(config("cosine", 4), 40)
    assert factors(config("cosine", 4, schedule_steps=40), 10) == whole[:10]  # stopped early, on the way
    assert factors(config("cosine", 4, schedule_steps=8), 40)[8:] == [0.1] * 32  # goes on at the floor
    with pytest.raises(ValueError, match=r"warmup_steps = 9 is longer than the run of 8 steps"):
        build_schedule(config("cosine", 9, schedule_steps=8), 40)


def test_phases_by_hand() -> None:
    found = factors(config("phases", 2, phases=PHASES), 20, 22)
    assert found == pytest.approx(
        [0.25, 0.5]  # the warm-up leads to where the first phase starts
        + [0.5, 0.625, 0.75, 0.875]
        + [1.0] * 6
        + [0.5 + 0.25 * (1 + math.cos(math.pi * p / 4)) for p in range(4)]
        + [0.1 + 0.4 * (1 - math.sqrt(p / 4)) for p in range(4)]
        + [0.1, 0.1]
    )


@st.composite
def phase_lists(draw: st.DrawFn) -> tuple[tuple[dict[str, Any], ...], int]:
    phases, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        steps = draw(st.integers(1, 20))
        at += steps
        phase: dict[str, Any] = {"steps": steps} if draw(st.booleans()) else {"until": at}
        phase["schedule"] = draw(st.sampled_from(["constant", *SHAPES]))
        if phases == [] or draw(st.booleans()):
            phase["from"] = draw(st.floats(0.01, 1))
        if phase["schedule"] != "constant" and draw(st.booleans()):
            phase["to"] = draw(st.floats(0, 1))
        phases.append(phase)
    return tuple(phases), at


@settings(deadline=None)
@given(phase_lists(), st.integers(0, 3))
def test_phases_stay_within_their_ends_and_meet(made: tuple[tuple[dict[str, Any], ...], int], over: int) -> None:
    phases, total = made
    found = factors(config("phases", phases=phases), total + over, total + over + 5)
    at, value = 0, 1.0
    for phase in phases:
        end = at + phase["steps"] if "steps" in phase else phase["until"]
        first = phase.get("from", value)
        value = first if phase["schedule"] == "constant" else phase.get("to", 0.1)
        assert found[at] == pytest.approx(first)
        low, high = sorted((first, value))
        assert all(low - 1e-12 <= factor <= high + 1e-12 for factor in found[at:end])
        steps = [late - early for early, late in itertools.pairwise(found[at:end])]
        assert all(step * (value - first) >= 0 for step in steps)  # one way
        at = end
    assert set(found[at:]) == {value}


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (({"steps": 3, "rate": 1},), r"optim\.phases\[0\] has no key 'rate'; a phase has steps, until"),
        (
            ({"steps": 3, "schedule": "step"},),
            r"phases\[0\]\.schedule = 'step' is no shape .* are constant, linear",
        ),
        (({"steps": 3, "until": 3},), r"has steps = 3 and until = 3; say one"),
        (({"schedule": "linear"}, {"steps": 3}), r"phases\[0\] says neither steps nor until"),
        (({"steps": 0},), r"phases\[0\]\.steps = 0 leaves no step from step 0 on; use at least 1"),
        (
            ({"steps": 3}, {"until": 3}),
            r"phases\[1\]\.until = 3 leaves no step from step 3 on; use .* least 4",
        ),
        (({"steps": 1.5},), r"steps = 1\.5 must be a whole number"),
        (({"steps": True},), r"steps = True must be a whole number"),
        (({"steps": 3, "to": 0.5},), r"to = 0\.5 means nothing to a constant phase"),
        (({"steps": 3, "schedule": "rex", "power": 2},), r"power = 2 means nothing to schedule 'rex'"),
        (({"steps": 3, "schedule": "polynomial", "power": 0},), r"power = 0 must be a number above 0"),
        (({"steps": 3, "from": 1.5},), r"from = 1\.5 must be a number in \[0, 1\]"),
        (({"steps": 3, "schedule": "linear", "to": "low"},), r"to = 'low' must be a number"),
        (({"steps": 3, "from": math.nan},), r"from = nan must be a number"),
    ],
)
def test_phases_that_cannot_be_are_named(phases: tuple[dict[str, Any], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config("phases", phases=phases)


def test_phases_that_do_not_fit_the_run() -> None:
    with pytest.raises(ValueError, match=r"ends at step 11, but the schedule has 10 steps; .*schedule_steps to 11"):
        build_schedule(config("phases", 1, phases=({"steps": 10},)), 10)
    with pytest.raises(ValueError, match=r"phases\[1\] would begin at step 10, but there are 10 steps"):
        build_schedule(config("phases", phases=({"steps": 10}, {"schedule": "linear"})), 10)
    with pytest.raises(ValueError, match=r"wants optim\.phases"):
        build_schedule(config("phases"), 10)


def test_the_first_step_moves_something() -> None:
    with pytest.raises(ValueError, match=r"gives the first step a factor of 0\.0"):
        build_schedule(config("phases", phases=({"schedule": "linear", "from": 0, "to": 1},)), 10)
    for name in NAMES:
        assert build_schedule(edge(name, 3), 10)(0) == (1.0 if name == "none" else pytest.approx(1 / 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["wsd", "constant", "inverse_sqrt", "none"])
def test_decay_from_cools_down_from_where_the_rate_stands(name: str, shape: str) -> None:
    warmup = 0 if name == "none" else 3
    before = factors(config("constant" if name == "wsd" else name, warmup), 100)
    values = config(name, warmup, 10, 0.05, decay_from=40, decay_shape=shape)
    found = factors(values, 50, 55)
    assert found[:41] == before[:41]  # the run so far, and no jump
    assert all(late < early for early, late in itertools.pairwise(found[40:51]))
    assert found[50:] == [0.05] * 5
    assert found == factors(values, 45, 55) == factors(values, 500, 55)  # wherever the run ends
    if name == "wsd":  # the same as a wsd run of that length
        assert found == pytest.approx(factors(config("wsd", warmup, 10, 0.05, decay_shape=shape), 50, 55))


def test_decay_from_that_cannot_be() -> None:
    for name in ("cosine", "linear", "polynomial", "rex"):
        with pytest.raises(ValueError, match=rf"decay_from = 5 is for schedules that go on .* '{name}' comes down"):
            build_schedule(config(name, 0, 3, decay_from=5), 10)
    for decay in (None, 0):
        with pytest.raises(ValueError, match=r"decay_from = 5 wants optim\.decay_steps"):
            build_schedule(config("wsd", 0, decay, decay_from=5), 10)
    with pytest.raises(ValueError, match=r"decay_from = 5 lies in the warm-up of 6 steps"):
        build_schedule(config("wsd", 6, 3, decay_from=5), 10)
    with pytest.raises(ValueError, match=r"schedule_steps = 9 means nothing beside optim\.decay_from = 5"):
        build_schedule(config("wsd", 0, 3, decay_from=5, schedule_steps=9), 10)


def test_warm_up_in_tokens_is_rounded_up_to_steps() -> None:
    values = OptimConfig(schedule="wsd", warmup_tokens=1000)
    assert [values.in_steps(n).warmup_steps for n in (1, 100, 334, 999, 1000, 5000)] == [1000, 10, 3, 2, 1, 1]
    assert values.in_steps(334).warmup_tokens == 0
    assert OptimConfig(warmup_steps=7).in_steps(10) == OptimConfig(warmup_steps=7)
    with pytest.raises(ValueError, match=r"warmup_tokens = 1000 is a number of tokens.*config\.in_steps"):
        build_schedule(values, 10)
    with pytest.raises(ValueError, match=r"warmup_steps = 3 and optim\.warmup_tokens = 1000 both say"):
        OptimConfig(warmup_steps=3, warmup_tokens=1000)


def test_momentum_and_weight_decay_move_in_phases() -> None:
    values = OptimConfig(
        name="muon",
        lr=0.1,
        weight_decay=0.4,
        schedule="constant",
        momentum_phases=(
            {"steps": 4, "schedule": "linear", "from": 0.85, "to": 0.95},
            {"until": 8},
            {"schedule": "linear", "to": 0.85},
        ),
        weight_decay_phases=({"steps": 5}, {"schedule": "cosine", "to": 0.0}),
    )
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(model, values, 10)
    seen = []
    for _ in range(12):
        seen.append(optimizer.rates())
        optimizer.step()
    assert [rates["matrices"].momentum for rates in seen] == pytest.approx(
        [0.85, 0.875, 0.9, 0.925, *[0.95] * 5, 0.9, 0.85, 0.85]
    )
    cosine = [(1 + math.cos(math.pi * p / 5)) / 2 for p in range(5)]
    assert [rates["matrices"].weight_decay for rates in seen] == pytest.approx(
        [*[0.4] * 5, *(0.4 * factor for factor in cosine), 0, 0]
    )
    # AdamW beside Muon: its own beta, no decay.
    assert all(rates["embeddings"] == Rates(0.1, 0.0, step=step) for step, rates in enumerate(seen))
    assert [rates["matrices"].lr for rates in seen] == [0.1] * 12


def test_a_rate_that_is_scaled_from_a_step_on() -> None:
    """Under any schedule, also that of a group, and seen in the curves."""
    scales = ({"step": 3, "scale": 0.5}, {"step": 6, "scale": 2.0})
    factors = [1.0] * 3 + [0.5] * 3 + [2.0] * 4
    for name in ("cosine", "wsd", "constant"):
        plain = OptimConfig(lr=0.1, schedule=name, warmup_steps=2)
        scaled = replace(plain, lr_scales=scales)
        before, after = build_schedule(plain, 10), build_schedule(scaled, 10)
        assert [after(step) for step in range(10)] == [factor * before(step) for step, factor in enumerate(factors)]
        (curve,) = curves(scaled, 10)["learning rate"].values()
        assert curve(4) == 0.1 * after(4)
    rule = GroupRule(name="last", match="^1", schedule="constant")
    optimizer = build_optimizer(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), replace(scaled, groups=(rule,), warmup_steps=0), 10
    )
    for factor in factors:
        assert set(optimizer.lrs().values()) == {0.1 * factor}
        optimizer.step()


def test_momentum_and_weight_decay_phases_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"momentum_phases\[0\]\.from is missing"):
        OptimConfig(momentum_phases=({"steps": 3},))
    with pytest.raises(ValueError, match=r"momentum_phases\[0\]\.from = 1\.0 must be a number in \[0, 1\)"):
        OptimConfig(momentum_phases=({"from": 1.0},))
    with pytest.raises(ValueError, match=r"weight_decay_phases\[0\]\.to is missing"):
        OptimConfig(weight_decay_phases=({"schedule": "linear"},))
    for name in ("momentum_phases", "weight_decay_phases"):
        values = OptimConfig(schedule_steps=9, **{name: ({"steps": 10, "from": 0.5},)})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"{name}\[0\]\.steps = 10 ends at step 10, but .* 9 steps"):
            build_optimizer(nn.Linear(1, 1), values, 20)
    cooled = OptimConfig(
        schedule="wsd", decay_from=3, decay_steps=4, weight_decay_phases=({"schedule": "linear", "to": 0.0},)
    )
    decay = build_weight_decay_schedule(cooled, 100)
    assert decay is not None and decay(6) == pytest.approx(1 / 7) and decay(7) == 0  # ends as the rate does


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="has no warm-up"):
        build_schedule(config("none", 3), 10)
    for name in ("none", "constant"):
        with pytest.raises(ValueError, match="never descends"):
            build_schedule(config(name, 0, 3), 10)
    with pytest.raises(ValueError, match=r"decay_shape = cosine means nothing to schedule 'linear'"):
        build_schedule(config("linear", decay_shape="cosine"), 10)
    for more in ({}, {"decay_shape": "rex"}, {"decay_from": 5, "decay_steps": 3}):
        with pytest.raises(ValueError, match=r"decay_power = 3 means nothing to schedule 'wsd': use polynomial"):
            build_schedule(OptimConfig(schedule="wsd", decay_power=3, **more), 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"means nothing to schedule 'wsd': use schedule = 'phases'"):
        build_schedule(config("wsd", phases=({"steps": 3},)), 10)
    with pytest.raises(ValueError, match="total steps = 0"):
        build_schedule(config("cosine"), 0)
    for name in NAMES:
        with pytest.raises(ValueError, match="step = -1"):
            build_schedule(edge(name, 0), 10)(-1)


def test_unknown_name_lists_the_known_ones_and_a_decorator_adds_one() -> None:
    with pytest.raises(ValueError, match=r"unknown schedule 'step'; known are .*constant, cosine, inverse_sqrt"):
        build_schedule(config("step"), 10)

    @register_schedule("test-halves")
    def halves(config: OptimConfig, total_steps: int):  # type: ignore[no-untyped-def]
        return lambda step: 0.5

    assert build_schedule(config("test-halves"), 10)(3) == 0.5
    assert build_schedule(config("test-halves", 0, 4, decay_from=4), 10)(6) == pytest.approx(0.3)  # cooled down, too
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


def test_plot(tmp_path: Path) -> None:
    from matplotlib.image import imread

    plain = OptimConfig(schedule="wsd", warmup_steps=10)
    moving = replace(plain, momentum_phases=({"from": 0.9},), weight_decay_phases=({"schedule": "linear", "to": 0.0},))
    plot(plain, 5000, tmp_path / "plain.png")
    plot(moving, 100, tmp_path / "moving.png")
    one, three = imread(tmp_path / "plain.png"), imread(tmp_path / "moving.png")
    assert three.shape[1] == one.shape[1] == 1050 and three.shape[0] > 2 * one.shape[0]
    assert one[..., :3].std() > 0.01  # not blank
    found = curves(moving, 100)
    assert list(found) == ["learning rate", "momentum", "weight decay"]
    assert {line: curve(50) for lines in found.values() for line, curve in lines.items()} == {
        "all": pytest.approx(0.05),
        "adamw": 0.9,
    }
    assert found["learning rate"]["all"](50) == pytest.approx(3e-4)
    with pytest.raises(ValueError, match="longer than the run"):
        plot(plain, 5, tmp_path / "none.png")


def test_each_group_has_its_curve(tmp_path: Path) -> None:
    """What the optimizer will use, of every group and every step."""
    values = OptimConfig(
        name="muon",
        lr=0.02,
        adamw_lr=0.01,
        schedule="linear",
        warmup_steps=3,
        momentum_phases=({"steps": 9, "schedule": "linear", "from": 0.8, "to": 0.95},),
        weight_decay_phases=({"schedule": "cosine", "to": 0.5},),
        groups=(
            GroupRule(name="slow", match=r"^layers\.0", lr_scale=0.1, weight_decay=0.3),
            GroupRule(name="steady", role="embeddings", schedule="constant", lr=0.01),
        ),
    )
    optimizer = build_optimizer(tiny(), values, 20)
    found = curves(values, 20, optimizer.groups)
    whose = {
        "slow.matrices": ("slow.matrices", "slow.matrices, slow.norms_and_biases"),
        "slow.norms_and_biases": ("slow.norms_and_biases", "slow.matrices, slow.norms_and_biases"),
        "steady": ("steady", "steady, norms_and_biases"),
        "matrices": ("matrices", "matrices, head"),
        "head": ("head, norms_and_biases", "matrices, head"),
        "norms_and_biases": ("head, norms_and_biases", "steady, norms_and_biases"),
    }
    assert {rate for rate, _ in whose.values()} == found["learning rate"].keys()
    assert {decay for _, decay in whose.values()} == found["weight decay"].keys()
    for step in range(25):
        optimizer.schedule_step = step
        for name, rates in optimizer.rates().items():
            assert found["learning rate"][whose[name][0]](step) == rates.lr
            assert found["weight decay"][whose[name][1]](step) == rates.weight_decay
            if name.endswith("matrices"):
                assert found["momentum"]["muon"](step) == rates.momentum
    plot(values, 20, tmp_path / "groups.png", optimizer.groups)
    assert (tmp_path / "groups.png").stat().st_size > 10_000


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'kforge-optim\[plot\]'"):
        plot(OptimConfig(), 10, tmp_path / "rate.png")
    assert not list(tmp_path.iterdir())
