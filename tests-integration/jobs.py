"""Small jobs for the tests of this folder, and what they leave behind."""

import os
import signal
from pathlib import Path

import numpy as np

from kforge_data import ShardWriter
from kforge_metrics import read_events
from kforge_train.resolve import resolve_config

VOCAB = 61
DEVICE = os.environ.get("KFORGE_DEVICE", "cpu")
"""cuda: each rank has a GPU of its own (`nox -s gpu_multi`). Bits are compared, so the job is deterministic there."""
ON_DEVICE = {"cpu": {}, "cuda": {"parallel.device": "cuda", "parallel.precision": "fp32", "train.deterministic": True}}


def write_tokens(folder, documents, seed, vocab_size=VOCAB):
    """Token shards of documents in which each id mostly follows from the one before."""
    rng = np.random.default_rng(seed)
    with ShardWriter(folder, vocab_size=vocab_size, eos_id=0, shard_tokens=2000) as writer:
        for _ in range(documents):
            ids = [int(rng.integers(1, VOCAB))]
            for _ in range(int(rng.integers(0, 60))):
                ids.append(int(rng.integers(1, VOCAB)) if rng.random() < 0.2 else (ids[-1] * 7 + 3) % (VOCAB - 1) + 1)
            writer.add([*ids, 0], text_bytes=3 * len(ids))


def job(tokens, run_dir, **overrides):
    """A two-block model in float64, on a GPU in float32, that logs every step. `overrides` write two underscores
    for the dot."""
    fields = {
        "model.vocab_size": VOCAB,
        "model.dim": 16,
        "model.n_layers": 2,
        "model.n_heads": 4,
        "model.n_kv_heads": 2,
        "parallel.precision": "fp64",
        "parallel.device": "cpu",
        "data.train": str(Path(tokens) / "train"),
        "data.heldout": str(Path(tokens) / "heldout"),
        "data.row_tokens": 32,
        "data.global_rows": 8,
        "data.workers": 0,
        "optim.lr": 1e-2,
        "optim.warmup_steps": 2,
        "metrics.every_steps": 1,
        "metrics.console": False,
        "ckpt.every_steps": 0,
        "train.run_dir": str(run_dir),
        "train.steps": 6,
        "train.eval_rows": 16,
        **ON_DEVICE[DEVICE],
    }
    return resolve_config(None, fields | {k.replace("__", "."): v for k, v in overrides.items()}).config


def train(rank, world, config):
    """`kforge_train.run` on this rank: its exit code."""
    from kforge_train import run

    return run(config)


def train_and_die(rank, world, config, step, victim):
    """As `train`, but rank `victim` is killed outright after `step` steps."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Dies(Trainer):
        def step(self):
            if self.next_step == step and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step()

    with build(config) as parts:
        return Dies(parts).run()


def values(run_dir, name, kind="step"):
    """Step -> value of every event of a kind."""
    return {e.step: e.values[name] for e in read_events(Path(run_dir) / "events.jsonl") if e.kind == kind}
