"""A run as a whole: what it goes on from, what it bears, and what it tells."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from kforge_data import ShardWriter
from kforge_metrics import read_events, read_log
from kforge_testing import run_ranks
from kforge_train import ConfigError, resolve_config
from kforge_train.build import guard_config
from kforge_train.saved import check_same_job

VOCAB = 32


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(1)
    for name, documents in (("train", 60), ("heldout", 6)):
        with ShardWriter(folder / name, vocab_size=VOCAB, eos_id=0, shard_tokens=2000) as writer:
            for _ in range(documents):
                writer.add([*(int(i) for i in rng.integers(1, VOCAB, 30)), 0], text_bytes=60)
    return folder


def job(tokens, run_dir, **overrides):
    fields = {
        "model.vocab_size": VOCAB,
        "model.dim": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "parallel.precision": "fp16",
        "parallel.device": "cpu",
        "data.train": str(tokens / "train"),
        "data.heldout": str(tokens / "heldout"),
        "data.row_tokens": 16,
        "data.global_rows": 4,
        "data.workers": 0,
        "metrics.every_steps": 1,
        "train.run_dir": str(run_dir),
        "train.steps": 4,
    }
    return resolve_config(None, fields | {k.replace("__", "."): v for k, v in overrides.items()}).config


def train(rank, world, config):
    from kforge_train import run

    return run(config)


def events(config, kind):
    return [event for event in read_events(Path(config.train.run_dir) / "events.jsonl") if event.kind == kind]


def test_precision_may_change_at_every_resume(tokens, tmp_path):
    for steps, precision in ((4, "fp16"), (6, "bf16"), (8, "fp16")):
        config = job(
            tokens,
            tmp_path / "run",
            train__steps=steps,
            parallel__precision=precision,
            optim__loss_scale_init=64.0,
            optim__loss_scale_growth_steps=2,
            optim__schedule="constant",
        )
        assert run_ranks(train, 1, config) == [0]
    scales = [event.values.get("loss_scale") for event in events(config, "step")]
    # Of each step, as it was taken: 64 twice, doubled; none in bf16; and anew.
    assert scales == [64, 64, 128, 128, None, None, 64, 64]


def test_skips_that_lower_the_loss_scale_do_not_end_a_run(tokens, tmp_path):
    config = job(
        tokens,
        tmp_path / "run",
        optim__loss_scale_init=2.0**24,
        resilience__max_skipped_in_a_row=2,
        model__init_std=1.0,
        train__steps=20,
    )
    assert run_ranks(train, 1, config) == [0]
    steps = [event.values for event in events(config, "step")]
    falling = [values["skipped"] for values in steps].index(0)
    assert falling > 2, "the limit was not put to the test"
    assert [values["loss_scale"] for values in steps[: falling + 1]] == [2.0 ** (24 - n) for n in range(falling + 1)]
    assert sum(values["skipped"] for values in steps[falling:]) < 3


def test_the_limit_of_skips_is_longer_where_each_lowers_the_loss_scale_only(tokens, tmp_path):
    def limit(**overrides):
        return guard_config(job(tokens, tmp_path, **overrides)).max_skipped_in_a_row

    assert limit() == 10 + 16
    assert limit(optim__loss_scale_init=1.0) == 10
    assert limit(optim__loss_scale_init=2.0**24, resilience__max_skipped_in_a_row=3) == 27
    assert limit(resilience__max_skipped_in_a_row=0) == 0  # no limit
    assert limit(parallel__precision="bf16") == 10


@pytest.mark.parametrize(
    ("world", "layout", "said"),
    [
        (1, {}, {}),
        (2, {}, {"dp_shard": 2}),
        (2, {"parallel__tp": 2, "parallel__sequence_parallel": False}, {"tp": 2, "sequence_parallel": False}),
    ],
)
def test_the_start_says_the_layout_first(tokens, tmp_path, world, layout, said):
    config = job(tokens, tmp_path / "run", parallel__precision="fp32", train__steps=1, **layout)
    assert run_ranks(train, world, config) == [0] * world
    (start,) = events(config, "start")
    assert start.values["layout"] == said
    assert "loss_scale" not in events(config, "step")[0].values
    first = read_log(config.train.run_dir)[0]
    assert re.match(r"(one process|dp_shard 2|tp 2) on cpu \(torchrun\); [\d,]+ parameters", first["message"])
    assert first["time"] <= start.time


@pytest.mark.parametrize(("field", "other"), [("parallel.storage", "split"), ("optim.moments", "bf16")])
def test_storage_that_changed_is_refused_with_what_to_type(tokens, tmp_path, field, other):
    now = job(tokens, tmp_path, parallel__precision="bf16")
    saved = job(tokens, tmp_path, parallel__precision="bf16", **{field.replace(".", "__"): other})
    for before, after, said in ((saved, now, other), (now, saved, "fp32")):
        with pytest.raises(ConfigError, match=rf"Go on with what it has, --{field} {said}, or start another"):
            check_same_job(json.loads(json.dumps(asdict(before))), after, 3)


def test_a_cool_down_that_would_jump_is_refused(tokens, tmp_path):
    def wsd(**values):
        return job(
            tokens, tmp_path, **{f"optim__{n}": v for n, v in {"schedule": "wsd", "warmup_steps": 0, **values}.items()}
        )

    flat = json.loads(json.dumps(asdict(wsd())))
    for start in (3, 5):  # from here, or later
        check_same_job(flat, wsd(decay_from=start, decay_steps=4), 3)
    cooling = wsd(decay_from=2, decay_steps=4)
    check_same_job(json.loads(json.dumps(asdict(cooling))), cooling, 3)
    with pytest.raises(ConfigError, match=r"optim\.decay_from = 2, but .* step 3 already.*--optim\.decay_from 3"):
        check_same_job(flat, cooling, 3)


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_the_norms_of_groups_make_up_the_whole(tokens, tmp_path, precision):
    config = job(tokens, tmp_path / "run", parallel__precision=precision, train__steps=3, optim__loss_scale_init=4.0)
    assert run_ranks(train, 2, config) == [0, 0]
    for event in events(config, "step"):
        norms = {name: value for name, value in event.values.items() if name.startswith("norm/")}
        assert norms.keys() == {"norm/matrices", "norm/embeddings", "norm/head", "norm/norms_and_biases"}
        assert min(norms.values()) > 0
        assert sum(value**2 for value in norms.values()) == pytest.approx(event.values["grad_norm"] ** 2, rel=1e-5)
