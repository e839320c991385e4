"""Layouts over NCCL, a GPU a rank, in float32 and bf16: `nox -s gpu_multi`. Without GPUs a few of them over gloo.

KFORGE_RANKS says how many ranks there are, and KFORGE_DEVICE = cuda that each has a GPU. Each layout of
at most so many ranks is run with the first model and variant of its line in the table; layouts of the same axes share
processes.
"""

import os
from dataclasses import replace

import pytest
from cases import LIMIT_S, TABLE, VARIANTS, VOCAB, class_of, world_of
from jobs import write_tokens
from test_layouts import worst_over_ranks
from worker import compare_on_devices, parallel_config, write_references

from kforge_parallel.testing import Comparison, Limits
from kforge_testing import run_ranks

RANKS = int(os.environ.get("KFORGE_RANKS", "0"))
FEW = ("tp2", "pp2-zbv")
"""Layouts that are run where nobody says how many ranks there are."""
LIMITS = {
    "fp32": Limits(loss=1e-5, norm=1e-5, gradients=5e-5, weights=1e-4, measure="norm"),
    "bf16": Limits(loss=5e-3, norm=2e-2, gradients=0.5, weights=1e-2, measure="norm"),
}
"""In float32 the sharp ones: kernels of a GPU add in other orders. In bf16 about twice what was seen on CPUs in layouts
of 2 and 4 ranks; single gradients of experts differ by 0.3, as a token near a tie goes to another one."""
SIGNS = "router.bias"
"""Moves by the sign of a difference of loads, which bf16 turns where it is small: not compared there."""


def chosen():
    """(axes, ranks) -> (layout, model, variant) of each layout."""
    first = {}
    for layout, model, names in TABLE:
        if (1 < world_of(layout) <= RANKS) if RANKS else layout in FEW:
            first.setdefault(layout, (layout, model, VARIANTS[names[0]]))
    groups = {}
    for layout, *rest in first.values():
        groups.setdefault((class_of(layout), world_of(layout)), []).append((layout, *rest))
    return groups


CHOSEN = chosen()


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    write_tokens(folder / "heldout", documents=20, seed=2, vocab_size=VOCAB)
    cases = [(model, replace(v, precision="fp32")) for group in CHOSEN.values() for _, model, v in group]
    run_ranks(write_references, 1, str(folder), cases, timeout_s=LIMIT_S)
    return folder


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("group", CHOSEN, ids=[f"{axes}-{ranks}".replace(" × ", "+") for axes, ranks in CHOSEN])
def test_layouts_on_devices_compute_what_one_process_computes(group, precision, references):
    lines = [(layout, model, replace(variant, precision=precision)) for layout, model, variant in CHOSEN[group]]
    by_rank = run_ranks(compare_on_devices, group[1], lines, str(references), init=False, timeout_s=LIMIT_S)
    for (layout, model, variant), *errors in zip(lines, *by_rank, strict=True):
        worst = worst_over_ranks(errors)
        if precision == "bf16":
            worst["weights"] = {name: error for name, error in worst["weights"].items() if not name.endswith(SIGNS)}
        result = Comparison(parallel_config(layout, variant), worst, LIMITS[precision])
        print(layout, model, precision, {kind: f"{error:.1g}" for kind, error in result.worst.items()})
        try:
            result.check()
        except AssertionError as error:
            raise AssertionError(f"{layout}, {model}, {precision}: {error}") from None
