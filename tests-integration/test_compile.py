"""Compiled blocks in whole jobs: packed rows, experts, evaluation and a last short batch, and nothing compiled anew."""

from functools import partial

import pytest
from jobs import job, train, values

from kforge_testing import run_ranks

LENGTHS = {
    "data__phases": [{"step": step, "row_tokens": 32 + 8 * step} for step in range(1, 14)],
    "train__steps": 14,
}
"""Rows of two lengths until all is warm, and of twelve others after."""
KINDS = {
    "packed": {},
    "windows": {"model__window": 5, "model__window_pattern": "WF"},
    "lengths": LENGTHS,
    "experts": {**LENGTHS, "model__n_experts": 4, "model__moe_pattern": "DM"},
}


def warm_and_on(rank, world, config):
    """Train and evaluate until all has been there once, and on; (graphs then, graphs at the end, losses)."""
    import torch._dynamo

    import kforge_parallel.build as parallel
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    parallel.compile_blocks = partial(parallel.compile_blocks, backend="aot_eager")
    with build(config) as parts:
        trainer = Trainer(parts)
        names = [name for name, _ in parts.model.named_parameters()]
        for _ in range(2):
            trainer.step()
        trainer.evaluate()  # of 10 rows in microbatches of 4: the last has 2
        graphs = torch._dynamo.utils.counters["stats"]
        warm = graphs["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(config.train.steps - 2):
                trainer.step()
                trainer.evaluate()
        return warm, graphs["unique_graphs"], names


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_anew(tokens, tmp_path, kind):
    changes = {**KINDS[kind], "data__microbatch_rows": 4, "train__eval_rows": 10}
    config = job(tokens, tmp_path / "compiled", **changes, parallel__compile=True)
    ((warm, end, names),) = run_ranks(warm_and_on, 1, config, init=False, timeout_s=200)
    assert 0 < warm == end
    run_ranks(train, 1, job(tokens, tmp_path / "plain", **changes), init=False)
    assert values(tmp_path / "compiled", "loss") == pytest.approx(values(tmp_path / "plain", "loss"), rel=1e-12)
    assert names and not any("orig_mod" in name for name in names)
