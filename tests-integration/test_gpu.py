"""Whole jobs on a device: what only a device has, and the same losses as fp32 within what half precision costs."""

import pytest
from jobs import job, train, values

from kforge_testing import run_ranks

OPTIONS = {
    "split": {"parallel__precision": "bf16", "parallel__storage": "split"},
    "fp16": {"parallel__precision": "fp16"},
    "tf32": {"parallel__precision": "tf32"},
    "offload": {"parallel__precision": "bf16", "parallel__cpu_offload": True},
    "offload-muon": {"parallel__precision": "fp32", "parallel__cpu_offload": True, "optim__name": "muon"},
    "prefetch": {"parallel__precision": "bf16", "parallel__prefetch": 1},
}


@pytest.fixture(scope="module")
def reference(tokens, tmp_path_factory):
    made = {}

    def losses(optimizer):
        if optimizer not in made:
            folder = tmp_path_factory.mktemp("fp32")
            config = job(tokens, folder, **common(optimizer), parallel__precision="fp32")
            assert run_ranks(train, 1, config, init=False) == [0]
            made[optimizer] = values(folder, "loss")
        return made[optimizer]

    return losses


def common(optimizer="adamw"):
    sizes = {"model__vocab_size": 64, "model__dim": 64, "train__steps": 12, "ckpt__every_steps": 6}
    return {**sizes, "optim__name": optimizer, "parallel__device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_job_on_a_device(tokens, tmp_path, reference, name):
    optimizer = OPTIONS[name].get("optim__name", "adamw")
    config = job(tokens, tmp_path, **{**common(optimizer), **OPTIONS[name]})
    assert run_ranks(train, 1, config, init=False, timeout_s=180) == [0]
    got, expected = values(tmp_path, "loss"), reference(optimizer)
    assert list(got) == list(range(1, 13)) and got[12] < got[1] - 0.3
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-2), step
