"""What a user types: from text to a trained model, through the commands, on one process and under torchrun."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import values

from kforge_metrics import read_events

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KFORGE = [sys.executable, "-m", "kforge_train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def typed(*words, code=0):
    """Run a command; its output, after a look at the exit code."""
    done = subprocess.run([str(w) for w in words], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a tokenizer and token shards, made by the kforge-data command from text files."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "raw").mkdir()
    rng = random.Random(1)
    for i in range(60):
        lines = (f"def f{rng.randrange(9)}(x):\n    return x + {rng.randrange(9)}\n" for _ in range(20))
        (folder / "raw" / f"{i}.txt").write_text("".join(lines))
    data = [sys.executable, "-m", "kforge_data"]
    typed(*data, "train-tokenizer", folder / "raw", "--vocab-size", 300, "--out", folder / "tokenizer.json")
    typed(
        *(*data, "tokenize", folder / "raw", "--tokenizer", folder / "tokenizer.json"),
        *("--heldout", 0.1, "--out", folder / "tokens"),
    )
    typed(*data, "verify", folder / "tokens" / "train", folder / "tokens" / "heldout")
    return folder


def tiny(text, run_dir, *more):
    return [
        *("train", "tiny", "--train.run_dir", str(run_dir), "--metrics.every_steps", "1"),
        *("--data.train", str(text / "tokens" / "train"), "--data.heldout", str(text / "tokens" / "heldout")),
        *("--data.tokenizer", str(text / "tokenizer.json"), "--data.row_tokens", "64", *more),
    ]


def test_train_evaluate_generate_report(text, tmp_path):
    run = tmp_path / "a run"
    out = typed(*KFORGE, *tiny(text, run))
    assert "[20/20] loss" in out
    losses = values(run, "loss")
    assert list(losses) == list(range(1, 21))
    assert losses[1] == pytest.approx(8.32, abs=0.1)  # ln 4096: nothing is known yet
    assert losses[20] < losses[1] - 2
    (trained,) = values(run, "loss", "eval").values()
    said = typed(*KFORGE, "eval", run)
    assert f"step 20: {trained:.4f} nats/token" in said
    bits = float(re.search(r"([\d.]+) bits/byte", said)[1])
    assert bits < 8
    sample = typed(*KFORGE, "generate", run, "--prompt", "def f1", "--max-new-tokens", 8, "--temperature", 0)
    assert sample.startswith("def f1")
    assert sample == typed(*KFORGE, "generate", run, "--prompt", "def f1", "--max-new-tokens", 8, "--temperature", 0)

    from kforge_metrics import write_report

    page = write_report(run, title="a story", sample=sample).read_text()
    assert "a story" in page and page.count("data:image/") + page.count("<svg") >= 3

    again = typed(*KFORGE, *tiny(text, run))  # all steps are done: it says so by doing nothing
    assert "resumed from step 20" in again
    assert values(run, "loss") == losses


def test_torchrun_takes_the_same_preset_and_agrees_with_one_process(text, tmp_path):
    common = ["--parallel.precision", "fp64", "--train.steps", "4", "--optim.warmup_steps", "2"]
    typed(*KFORGE, *tiny(text, tmp_path / "one", *common))
    out = typed(*TORCHRUN, "-m", "kforge_train", *tiny(text, tmp_path / "two", *common))
    assert out.count("[4/4] loss") == 1  # rank 0 speaks
    one, two = values(tmp_path / "one", "loss"), values(tmp_path / "two", "loss")
    assert two == pytest.approx(one, rel=1e-12)
    assert values(tmp_path / "two", "loss", "eval") == pytest.approx(
        values(tmp_path / "one", "loss", "eval"), rel=1e-12
    )


def test_experts_are_trained_on_two_processes_and_used_on_one(text, tmp_path):
    more = ["--model.preset", "tiny-moe", "--parallel.ep", "2"]
    typed(*TORCHRUN, "-m", "kforge_train", *tiny(text, tmp_path, *more))
    losses, load = values(tmp_path, "loss"), values(tmp_path, "moe/0/load_max")
    assert losses[20] < losses[1] - 1.5 and all(1 <= greatest < 4 for greatest in load.values())
    (trained,) = values(tmp_path, "loss", "eval").values()
    assert f"step 20: {trained:.4f} nats/token" in typed(*KFORGE, "eval", tmp_path)
    words = ("generate", tmp_path, "--prompt", "def f1", "--max-new-tokens", 8, "--temperature", 0)
    assert typed(*KFORGE, *words).startswith("def f1")


def test_a_signal_to_the_launcher_ends_in_a_checkpoint(text, tmp_path):
    """torchrun passes SIGTERM on to every rank; each exits with the code that asks to be started again."""
    run = tmp_path / "run"
    command = [*TORCHRUN, "-m", "kforge_train", *tiny(text, run, "--train.steps", "1000")]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    for line in process.stdout:
        output.append(line)
        if re.search(r"\[ *5/1000\] loss", line):
            process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    step = max(values(run, "loss"))
    assert any(f"step {step} is saved" in line for line in output), "".join(output[-30:])
    assert (run / "checkpoints" / f"step_{step:08d}" / "COMMITTED").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "tiny", "--optim.lrr", "3"], r"optim\.lrr \(command line\): no such key; did you mean optim\.lr"),
        (["train", "tiny", "--train.steps", "many"], r'train\.steps = "many"'),
        (["train", "tiny", "--train.steps", "2"], r"optim\.warmup_steps = 10 is longer than the run of 2 steps"),
        (
            ["train", "tiny", "--optim.name", "sgd"],
            r"unknown optimizer 'sgd'; known are adamw, cautious_lion, lion, muon, schedule_free",
        ),
        (["train", "tiny"], r"data\.train is empty"),
        (["train", "tiny", "--data.train", "nowhere"], r"nowhere is not a folder of token shards"),
        (["train", "tinny"], r"did you mean tiny"),
        (["eval", "nowhere"], r"nowhere is no run"),
        (["quickstart", "--minutes", "0"], r"--minutes 0 must be above 0"),
    ],
)
def test_one_clear_error_and_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = typed(*KFORGE, *words, code=2)
    assert re.search(message, out), out
    assert "Traceback" not in out
    assert list(tmp_path.iterdir()) == []  # nothing was started, nothing is left


def test_help_and_config_do_without_torch_and_numpy():
    for words in (["--help"], ["config", "llama3-8b"], ["train", "--help"]):
        code = (
            "import sys; sys.argv[0] = 'kforge'\n"
            "from kforge_train.cli import main\n"
            "try: main()\nexcept SystemExit: pass\n"
            "assert not {'torch', 'numpy'} & set(sys.modules)"
        )
        typed(sys.executable, "-c", code, *words)


def test_a_run_keeps_the_job_it_ran(text, tmp_path):
    typed(*KFORGE, *tiny(text, tmp_path / "run", "--train.steps", "2", "--optim.warmup_steps", "0"))
    first = read_events(tmp_path / "run" / "events.jsonl")[0]
    assert first.kind == "start"
    printed = typed(*KFORGE, "config", tmp_path / "run" / "config.toml", "--json")
    assert '"steps": 2' in printed or '"value": 2' in printed
    assert first.values["config"]["train"]["steps"] == 2
    assert Path(first.values["config"]["data"]["train"]) == text / "tokens" / "train"
