"""Planted faults are found, each by the case that is named for it; the same cases are green without them."""

from collections import defaultdict
from functools import partial

import foreign
import pytest
from kept import kept_rows
from mutations import MUTATIONS
from test_foreign import compare_foreign
from test_layouts import compare_in

from kforge_parallel.testing import KINDS
from kforge_testing import RankFailure

USED = defaultdict(set)
POSSIBLE = {name: mutation for name, mutation in MUTATIONS.items() if mutation.possible}
for _mutation in POSSIBLE.values():
    USED[_mutation.layout, _mutation.model].add(_mutation.variant)


def run_case(layout, model, variants, folder, fault=None):
    """Variant -> Comparison, of a model of the table or the foreign one."""
    if model == "foreign":
        build = foreign.Foreign if fault is None else partial(foreign.Foreign, fault)
        return {variant: compare_foreign(layout, build) for variant in variants}
    return compare_in(layout, model, variants, folder, fault)


@pytest.mark.parametrize(("layout", "model"), USED, ids=["-".join(key) for key in USED])
def test_without_a_fault_the_cases_are_green(layout, model, references):
    for result in run_case(layout, model, sorted(USED[layout, model]), references).values():
        result.check()


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_planted_fault_is_found(name, references, record_property):
    fault = MUTATIONS[name]
    case = f"{fault.layout}, {fault.model}, {fault.variant}"
    if fault.kind not in KINDS:
        with pytest.raises(RankFailure, match=fault.kind):
            run_case(fault.layout, fault.model, (fault.variant,), references, name)
        record_property("parity", {"fault": fault.what, "caught_by": f"{case}: error"})
        return
    result = run_case(fault.layout, fault.model, (fault.variant,), references, name)[fault.variant]
    assert fault.kind in result.differing, f"{fault.what}: not found\n{result}"
    record_property("parity", {"fault": fault.what, "caught_by": f"{case}: {', '.join(result.differing)}"})


def test_faults_are_many_and_never_fewer():
    now = {fault.what for fault in MUTATIONS.values()}
    assert len(now) == len(MUTATIONS) >= 15
    assert {row["row"] for row in kept_rows("mutation")} <= now
