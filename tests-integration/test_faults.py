"""Faults that once lost something: bad stretches, stops at a bad moment, resumes of another job, two jobs at once."""

import json
import os
import shutil
import signal

import pytest
from jobs import job, train, train_and_die, values, write_tokens

from kforge_ckpt import Checkpointer
from kforge_data import ShardWriter
from kforge_testing import RankFailure, run_ranks
from kforge_train import ConfigError, load_config


def bad_from(rank, world, config, first_bad):
    """Train; from a step on no loss is a number, on any rank."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        forward_backward = parts.engine.forward_backward

        def spoiled(window, scale):
            loss = forward_backward(window, scale)
            return loss * float("nan") if trainer.next_step >= first_bad else loss

        parts.engine.forward_backward = spoiled
        trainer = Trainer(parts)
        return trainer.run(), trainer.next_step, parts.checkpointer.steps()


def test_a_bad_stretch_pushes_no_good_checkpoint_out(tokens, tmp_path):
    config = job(tokens, tmp_path, train__steps=40, ckpt__every_steps=2, ckpt__keep_last=2)
    assert run_ranks(bad_from, 2, config, 6, init=False) == [(76, 17, [4, 6])] * 2


def test_a_run_that_ends_in_a_bad_stretch_is_no_success(tokens, tmp_path):
    config = job(tokens, tmp_path, train__steps=9, ckpt__every_steps=2)
    assert run_ranks(bad_from, 1, config, 6, init=False) == [(76, 9, [2, 4, 6])]
    (tmp_path / "again").mkdir()
    config = job(tokens, tmp_path / "again", train__steps=9, ckpt__every_steps=2)
    assert run_ranks(bad_from, 1, config, 8, init=False) == [(0, 9, [6, 8, 9])]  # one bad step is none


def stopped_while_evaluating(rank, world, config):
    """Rank 1 is asked to stop in the middle of an evaluation."""
    from kforge_train.build import build
    from kforge_train.engine import PlainEngine
    from kforge_train.trainer import Trainer

    nll_sums, seen = PlainEngine.nll_sums, []

    def counted(engine, batches):
        seen.extend(batches)
        if rank == 1 and len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return nll_sums(engine, batches)

    PlainEngine.nll_sums = counted
    with build(config) as parts:
        trainer = Trainer(parts)
        return trainer.run(), trainer.next_step, parts.checkpointer.steps(), len(seen)


def test_a_stop_during_an_evaluation_ends_it(tokens, tmp_path):
    config = job(
        tokens, tmp_path, train__steps=40, train__eval_every_steps=4, train__eval_rows=16, data__microbatch_rows=1
    )
    results = run_ranks(stopped_while_evaluating, 2, config, init=False)
    assert [result[:3] for result in results] == [(75, 4, [4])] * 2  # no step is made before it goes on
    assert {result[3] for result in results} == {2}  # of eight batches
    assert values(tmp_path, "loss", "eval") == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model__n_heads": 2, "model__head_dim": 8, "model__n_kv_heads": 1}, "model.n_heads was 4, now 2"),
        ({"model__rope_theta": 500.0}, "model.rope_theta was 10000.0, now 500.0"),
        ({"model__dim": 32}, "model.dim was 16, now 32"),
        ({"train__steps": 3}, "train.steps = 3, but the run is at step 6 already"),
        ({"optim__name": "muon"}, "exp_avg"),
    ],
    ids=str,
)
def test_another_job_does_not_go_on_and_leaves_the_run_as_it_was(tokens, tmp_path, change, words):
    assert run_ranks(train, 1, job(tokens, tmp_path)) == [0]
    before = (tmp_path / "config.toml").read_text()
    with pytest.raises(RankFailure) as failure:
        run_ranks(train, 1, job(tokens, tmp_path, **{"train__steps": 8, **change}))
    assert "ConfigError" in str(failure.value) and words in str(failure.value)
    assert (tmp_path / "config.toml").read_text() == before
    assert load_config(tmp_path / "config.toml").model == job(tokens, tmp_path).model


@pytest.mark.parametrize("world", [1, 2])
def test_log_lines_are_those_of_a_run_never_stopped(tokens, tmp_path, world):
    common = {"train__steps": 16, "ckpt__every_steps": 3, "metrics__every_steps": 4, "parallel__precision": "bf16"}
    run_ranks(train, world, job(tokens, tmp_path / "whole", **common), init=False)
    config = job(tokens, tmp_path / "killed", **common)
    for step in (7, 11):
        with pytest.raises(RankFailure):
            run_ranks(train_and_die, world, config, step, 0, init=False)
    assert run_ranks(train, world, config, init=False) == [0] * world
    for name in ("loss", "grad_norm", "lr", "tokens_total", "steps"):
        assert values(tmp_path / "killed", name) == values(tmp_path / "whole", name), name


def test_a_flipped_bit_is_found_by_full_verification(tokens, tmp_path):
    constant = {"ckpt__every_steps": 2, "optim__schedule": "constant"}
    assert run_ranks(train, 1, job(tokens, tmp_path, **constant)) == [0]
    path = tmp_path / "checkpoints" / "step_00000006" / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    longer = {**constant, "train__steps": 8}
    assert run_ranks(train, 1, job(tokens, tmp_path, ckpt__verify="full", **longer)) == [0]
    assert list(values(tmp_path, "checkpoint", "resume")) == [4]
    assert Checkpointer(tmp_path / "checkpoints").steps() == [4, 6, 8]
    undisturbed = job(tokens, tmp_path / "undisturbed", **longer)
    assert run_ranks(train, 1, undisturbed) == [0]
    assert values(tmp_path, "loss") == values(tmp_path / "undisturbed", "loss")


def test_two_jobs_do_not_share_a_folder(tokens, tmp_path):
    from kforge_train.lock import RunLock

    with RunLock(tmp_path, 0), pytest.raises(ConfigError, match=rf"is being trained in by process {os.getpid()} on"):
        RunLock(tmp_path, 0).__enter__()
    with RunLock(tmp_path, 0):
        pass  # let go of


def test_text_that_cannot_be_scored_is_refused_before_training(tmp_path):
    write_tokens(tmp_path / "good", documents=20, seed=1)
    with ShardWriter(tmp_path / "single", vocab_size=61) as writer:
        for i in range(30):
            writer.add([i])
    for section, train_on, held in (("data.train", "single", "good"), ("data.heldout", "good", "single")):
        config = job(
            tmp_path, tmp_path / "run", data__train=str(tmp_path / train_on), data__heldout=str(tmp_path / held)
        )
        with pytest.raises(RankFailure, match=rf"ConfigError: {section} = .* nothing to score"):
            run_ranks(train, 1, config)


def test_bits_per_byte_are_left_out_where_bytes_were_not_counted(tmp_path):
    for name in ("train", "heldout"):
        with ShardWriter(tmp_path / name, vocab_size=61) as writer:
            for i in range(20):
                writer.add([i, i + 1, i + 2])
    assert run_ranks(train, 1, job(tmp_path, tmp_path / "run", train__eval_rows=0)) == [0]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (evaluated,) = [event["values"] for event in events if event["kind"] == "eval"]
    assert evaluated["tokens"] == 40 and "bits_per_byte" not in evaluated


def test_a_moved_copy_is_evaluated_by_its_own_checkpoints(tokens, tmp_path):
    assert run_ranks(train, 1, job(tokens, tmp_path / "run")) == [0]
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "step_00000006")
    with pytest.raises(RankFailure, match=r"copy/checkpoints holds no committed checkpoint"):
        run_ranks(score, 1, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run_ranks(score, 1, tmp_path / "moved")[0]["step"] == 6
    assert Checkpointer(tmp_path / "moved" / "checkpoints").latest() == 6


def score(rank, world, run_dir):
    from kforge_train.evaluate import evaluate_run

    return evaluate_run(run_dir)
