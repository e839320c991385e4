"""`kforge_parallel.testing.compare` on a model of torch alone, with a plan from outside."""

import foreign
import pytest
from cases import LAYOUTS, LIMIT_S

from kforge_parallel import ParallelConfig
from kforge_parallel.testing import compare
from kforge_testing import run_ranks


def compare_foreign(layout, model=foreign.Foreign, **options):
    return compare(
        ParallelConfig(**LAYOUTS[layout], **options.pop("parallel", {})),
        model,
        batch=foreign.batch(),
        loss=foreign.loss,
        norm=foreign.own_norm,
        plan=foreign.PLAN,
        run=run_ranks,
        timeout_s=LIMIT_S,
        **options,
    )


@pytest.mark.parametrize("layout", ["rep2-shard2", "tp2", "tp2-whole", "shard2-tp2", "rep2-shard2-tp2"])
def test_a_foreign_model_in_layouts(layout):
    compare_foreign(layout).check()


def test_a_foreign_model_with_microbatches_recomputation_and_clipping():
    parallel = {"recompute": "full", "reshard_after_forward": False}
    compare_foreign("shard2-tp2", microbatches=3, clip_norm=0.1, parallel=parallel).check()
