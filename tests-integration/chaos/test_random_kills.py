"""A job killed at random moments, again and again, is the job that was never killed, bit for bit.

KFORGE_KILLS says how often (default 20; `nox -s chaos` 200). The seed in a test's name chooses victims and spans; the
moments themselves are of the clock, and another time others.
"""

import os
import random
import signal
import subprocess
import sys
import threading

import pytest
from jobs import job, train, values

from kforge_ckpt import Checkpointer, tools
from kforge_testing import RankFailure, run_ranks

KILLS = int(os.environ.get("KFORGE_KILLS", "20"))
SPAN_S = 0.3


def die_in(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def train_for(rank, world, config, victim, seconds):
    """Train, but rank `victim` is killed outright so many seconds after its first step."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Doomed(Trainer):
        def step(self):
            verdict = super().step()
            if rank == victim and self.next_step and not armed:
                armed.append(die_in(seconds))
            return verdict

    armed = []
    with build(config) as parts:
        return Doomed(parts).run()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "writer", "seed"), [(1, "thread", 1), (2, "thread", 2), (2, "process", 3)])
def test_a_job_killed_at_random_moments_is_the_one_never_killed(tokens, tmp_path, world, writer, seed):
    chance, kills, runs = random.Random(seed), -(-KILLS // 3), 0
    steps = max(60, 12 * kills)
    common = {"train__steps": steps, "ckpt__every_steps": 2, "ckpt__writer": writer, "optim__schedule": "constant"}
    assert run_ranks(train, world, job(tokens, tmp_path / "whole", **common), init=False) == [0] * world
    config = job(tokens, tmp_path / "killed", **common)
    killed = 0
    while killed < kills:
        # Once the job is near its end there is nothing left to kill: it must not get there by luck.
        runs += 1
        assert runs < 3 * kills + 10
        try:
            done = run_ranks(train_for, world, config, chance.randrange(world), chance.uniform(0, SPAN_S), init=False)
        except RankFailure:
            killed += 1
            newest = Checkpointer(tmp_path / "killed" / "checkpoints").latest()
            assert newest is None or newest % 2 == 0
        else:
            assert done == [0] * world
            break
    assert killed >= min(kills, 5), f"the job was done after {killed} kills; it must be longer"
    assert run_ranks(train, world, config, init=False) == [0] * world
    assert values(tmp_path / "killed", "loss") == values(tmp_path / "whole", "loss")
    one, other = (tools.open_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "killed"))
    assert one.contents.step == other.contents.step == steps
    assert [
        found.name for found in tools.differences(one, other) if found.name.split(".")[0] in ("model", "optim")
    ] == []


@pytest.mark.timeout(600)
def test_three_kills_of_processes_started_from_the_command_line(tokens, tmp_path):
    fields = {
        "model.vocab_size": 61, "model.dim": 16, "model.n_layers": 2, "model.n_heads": 4,
        "parallel.precision": "fp64", "parallel.device": "cpu", "data.row_tokens": 32, "data.global_rows": 8,
        "data.train": tokens / "train", "optim.lr": 1e-2, "metrics.every_steps": 1, "metrics.console": "false",
        "ckpt.every_steps": 2, "train.steps": 600,
    }  # fmt: skip
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]

    def start(folder):
        command = [sys.executable, "-m", "kforge_train", "train", *words, "--train.run_dir", str(folder)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    whole = start(tmp_path / "whole")
    output, _ = whole.communicate()
    assert whole.returncode == 0, output
    chance = random.Random(4)
    checkpoints = Checkpointer(tmp_path / "killed" / "checkpoints")
    for _ in range(3):
        before = checkpoints.latest() or 0
        process = start(tmp_path / "killed")
        while (checkpoints.latest() or 0) <= before + 10 * chance.random() and process.poll() is None:
            os.sched_yield()
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    last = start(tmp_path / "killed")
    output, _ = last.communicate()
    assert last.returncode == 0, output
    assert values(tmp_path / "killed", "loss") == values(tmp_path / "whole", "loss")
