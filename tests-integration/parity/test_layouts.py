"""Every layout computes what one process computes: the table of cases.py, in float64 to the last bits."""

import pytest
from cases import CHOSEN, LAYOUTS, LIMIT_S, TABLE, VARIANTS, axes_of, class_of, counts, world_of
from kept import kept_counts
from worker import compare_variants, parallel_config

from kforge_parallel import ParallelConfig
from kforge_parallel.layout import LAYOUT_CLASSES, check_layout
from kforge_parallel.testing import LIMITS, Comparison
from kforge_testing import run_ranks


def worst_over_ranks(by_rank):
    """Errors of several ranks as one: the largest of each place."""
    merged = {}
    for errors in by_rank:
        for kind, places in errors.items():
            into = merged.setdefault(kind, {})
            for place, error in places.items():
                into[place] = max(error, into.get(place, 0.0))
    return merged


def compare_in(layout, model, variants, folder, fault=None):
    """Variant -> Comparison."""
    by_rank = run_ranks(
        compare_variants, world_of(layout), layout, model, variants, str(folder), fault, timeout_s=LIMIT_S
    )
    return {
        name: Comparison(
            parallel_config(layout, VARIANTS[name]),
            worst_over_ranks(errors[name] for errors in by_rank),
            LIMITS[VARIANTS[name].precision],
        )
        for name in variants
    }


@pytest.mark.parametrize(
    ("layout", "model", "variants"), CHOSEN, ids=["-".join((*line[:2], line[2][0])) for line in CHOSEN]
)
def test_layout_computes_what_one_process_computes(layout, model, variants, references, record_property):
    results = compare_in(layout, model, variants, references)
    for name, result in results.items():
        if VARIANTS[name].precision == "fp64":
            record_property("parity", {"class": class_of(layout), "worst": result.worst})
    wrong = {name: result for name, result in results.items() if not result.ok}
    for name, result in wrong.items():
        try:
            result.check()
        except AssertionError as error:
            raise AssertionError(f"{layout}, {model}, {name}: {error}\nwrong: {', '.join(wrong)}") from None


@pytest.mark.parametrize("axes", LAYOUT_CLASSES, ids=lambda axes: "+".join(sorted(axes)) or "one")
def test_every_class_of_layouts_is_proven_or_refused(axes):
    sentence = LAYOUT_CLASSES[axes]
    config = ParallelConfig(**{"dp_shard": 1, **dict.fromkeys(axes - {"ep"}, 2)}, ep=2 if "ep" in axes else 1)
    world = 2 ** len(axes - {"ep"})
    if sentence is None:
        assert check_layout(config, world)
        assert any(axes_of(layout).keys() == axes for layout in LAYOUTS if any(layout == line[0] for line in TABLE))
    elif axes == {"ep"}:  # lies over other axes, so it cannot be alone
        with pytest.raises(ValueError):
            check_layout(config, world)
    else:
        with pytest.raises(ValueError) as error:
            check_layout(config, world)
        assert sentence in str(error.value)


def test_cases_grow_and_never_shrink():
    now = counts()
    for name, count in kept_counts().items():
        assert now.get(name, 0) >= count, f"{name}: {count} cases were kept, {now.get(name, 0)} are left"
