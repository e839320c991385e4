import math
from functools import partial

import comparable
import pytest
import torch
from toy import Toy, fill

from kforge_parallel import ParallelConfig
from kforge_parallel.testing import FLOAT32, FLOAT64, Comparison, Limits, Trajectory, compare, differences
from kforge_testing import RankFailure, run_ranks

toy = partial(compare, model=Toy, batch=comparable.BATCH, loss=comparable.loss, run=run_ranks)


def test_a_right_layout_is_right_to_the_last_bits():
    result = compare(ParallelConfig(dp_shard=2), Toy, batch=comparable.BATCH, loss=comparable.loss).check()
    assert result.ok and not result.differing
    assert result.worst.keys() == {"loss", "norm", "gradients", "weights", "evaluation"}
    assert max(result.worst.values()) < 1e-12
    assert len(result.errors["gradients"]) == 3 * len(list(Toy().parameters()))
    table = str(result)
    assert table.startswith("dp_shard 2 against one plain process")
    assert all(kind in table for kind in result.worst)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": ParallelConfig()},
        {"layout": ParallelConfig(dp_replicate=2, dp_shard=2)},
        {"layout": ParallelConfig(dp_shard=2, recompute="full"), "microbatches": 2, "init": fill},
        {"layout": ParallelConfig(dp_shard=2), "clip_norm": 0.01, "optimizer": comparable.sgd, "steps": 2},
        {"layout": ParallelConfig(dp_shard=4), "model": comparable.tied},
        {"layout": ParallelConfig(dp_shard=2), "precision": "fp32"},
    ],
    ids=["one", "hsdp", "microbatches", "clip-sgd", "tied", "fp32"],
)
def test_options(options):
    result = toy(**options).check()
    assert len(result.errors["loss"]) == options.get("steps", 3)
    assert result.limits is (FLOAT32 if options.get("precision") == "fp32" else FLOAT64)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2}, {"sequence_parallel": False}], ids=str)
def test_a_split_model(layout):
    toy(ParallelConfig(tp=2, **layout), model=comparable.Split, loss=comparable.split_loss).check()


def test_a_plan_that_is_wrong_is_found_out_or_refused():
    split = partial(toy, model=comparable.Split, loss=comparable.split_loss)
    whole = {**comparable.Split.plan, "layers.*.0": "sequence", "layers.*.2": "sequence"}
    assert split(ParallelConfig(tp=2), plan=whole).ok  # nothing of the layers is split, which is allowed, and right
    alone = {**whole, "layers.*.0": "replicate"}
    assert split(ParallelConfig(tp=2, sequence_parallel=False), plan=alone).differing["gradients"]
    with pytest.raises(RankFailure, match="matches no module"):
        split(ParallelConfig(tp=2), plan={**whole, "layer.*.0": "colwise"})


def test_a_mean_over_local_tokens_is_found_out():
    result = toy(ParallelConfig(dp_shard=2), loss=comparable.mean_of_its_own)
    assert not result.ok
    assert toy(ParallelConfig(dp_shard=2), loss=comparable.mean_of_its_own, same_microbatches=True).ok
    with pytest.raises(AssertionError, match=r"(?s)not what one process.*gradients: .*layers\.0\.linear\.weight"):
        result.check()


def test_the_parameters_that_differ_are_named():
    with pytest.raises(RankFailure, match=r"the same numbers in its part of layers\.1\.gain"):
        toy(ParallelConfig(dp_shard=2), init=comparable.fill_by_rank, steps=1)
    missing = toy(ParallelConfig(dp_shard=2), model=comparable.Forgets, steps=1)
    assert missing.differing["gradients"] == ["layers.2.gain (step 1)"]
    assert missing.worst["gradients"] == math.inf


def test_a_process_that_fails_or_hangs_ends_the_comparison():
    with pytest.raises(RuntimeError, match=r"rank 0 of 1 failed:(?s:.*)out of cheese"):
        compare(ParallelConfig(dp_shard=2), comparable.Fails, batch=comparable.BATCH, loss=comparable.loss)
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 1 had not returned after 2 s"):
        compare(ParallelConfig(dp_shard=2), comparable.Waits, batch=comparable.BATCH, loss=comparable.loss, timeout_s=2)


def test_what_cannot_be_compared_is_said():
    with pytest.raises(ValueError, match=r"in place of lambdas"):
        compare(ParallelConfig(), lambda: Toy(), batch=comparable.BATCH, loss=comparable.loss)
    with pytest.raises(ValueError, match=r"cannot be cut into 8 microbatches"):
        toy(ParallelConfig(dp_shard=4), microbatches=2)
    with pytest.raises(ValueError, match=r"pp = 2, and loss\(model, …\) wants the whole model"):
        toy(ParallelConfig(pp=2))
    with pytest.raises(ValueError, match=r"precision = 'bf16' has no limits"):
        toy(ParallelConfig(), precision="bf16")


def test_errors_are_relative_and_nothing_missing_is_small():
    want = Trajectory([2.0], [1.0], [{"a": torch.tensor([1.0, -4.0])}], {"a": torch.zeros(2)}, 2.0)
    got = Trajectory([2.5], [1.0], [{"a": torch.tensor([1.0, -3.0])}], {"a": torch.zeros(2)}, math.nan)
    errors = differences(got, want)
    assert errors["loss"] == {"step 1": 0.25}
    assert errors["gradients"] == {"a (step 1)": 0.25}
    assert errors["weights"] == {"a": 0.0}
    assert errors["evaluation"] == {"at the end": math.inf}
    assert differences(got, want, "norm")["gradients"]["a (step 1)"] == pytest.approx(1 / math.sqrt(17))
    assert differences(Trajectory(evaluation=2.0), want)["gradients"] == {"a (step 1)": math.inf}
    assert differences(want, Trajectory(evaluation=2.0))["weights"] == {"a": math.inf}
    limits = Limits(loss=1, norm=1, gradients=1, weights=1)
    assert Comparison(ParallelConfig(), errors, limits).differing == {"evaluation": ["at the end"]}
