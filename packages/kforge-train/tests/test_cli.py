"""The `kforge` command: what it answers without torch, what it hands on, how it fails."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kforge_train import JobConfig
from kforge_train.cli import main
from kforge_train.cli.overrides import split_overrides
from kforge_train.errors import ConfigError
from kforge_train.resolve import load_config, resolve_config

WITHOUT_TORCH = """
import sys
from kforge_train.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
loaded = {"torch", "numpy"} & set(sys.modules)
sys.exit(f"imported {loaded}" if loaded else code)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command line handed to the modules that do the work."""
    seen: list[Any] = []

    def stand_in(name: str, function: str) -> None:
        module = types.ModuleType(f"kforge_train.{name}")

        def record(*args: Any, **kwargs: Any) -> int:
            seen.append((name, args, kwargs))
            return 75

        setattr(module, function, record)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(sys.modules["kforge_train"], name, module, raising=False)

    for name, function in [("trainer", "run"), ("evaluate", "main"), ("generate", "main"), ("quickstart", "main")]:
        stand_in(name, function)
    return seen


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "limit_s"),
    [
        (["--help"], 0.3),
        (["config"], 0.3),
        (["config", "llama3-8b", "--optim.lr", "1e-3"], 0.3),
        (["schedule", "llama3-8b"], 0.3),
        (["train", "--help"], 1.5),
        (["generate", "--help"], 0.3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_answers_without_torch_in_little_time(argv: list[str], limit_s: float) -> None:
    # Processor time: the wall clock of a machine that is busy with other tests says nothing of this command.
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *argv], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(took) <= limit_s, took


@pytest.mark.parametrize("words", ["train", "train --help all", "config", "schedule", "estimate", "quickstart"])
def test_help_fits_into_80_columns(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(words.split() if "--help" in words else [words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80 and not line.startswith("  --")] == []  # a flag is not cut


@pytest.mark.parametrize("argv", [["--optim.lr", "0.5", "tiny"], ["tiny", "--optim.lr=0.5"]], ids=" ".join)
def test_train_hands_on_the_resolved_job(argv: list[str], calls: list[Any]) -> None:
    assert main(["train", *argv]) == 75
    [(name, args, _)] = calls
    assert (name, args) == ("trainer", (resolve_config("tiny", {"optim.lr": 0.5}).config,))


def test_train_without_arguments_takes_the_defaults(calls: list[Any]) -> None:
    assert main(["train"]) == 75
    assert calls == [("trainer", (JobConfig(),), {})]


def test_eval_generate_and_quickstart_hand_on_their_arguments(calls: list[Any], run_dir: Path) -> None:
    assert main(["eval", str(run_dir), "--step", "20", "--data", "shards"]) == 75
    assert main(["generate", str(run_dir), "--prompt", "def ", "--top-k", "5", "--temperature", "0"]) == 75
    assert main(["quickstart", "--dir", "here", "--minutes", "30"]) == 75
    assert calls[0] == ("evaluate", (run_dir, 20, Path("shards")), {})
    name, args, values = calls[1]
    assert (name, args) == ("generate", (run_dir,))
    assert values == {
        "prompt": "def ",
        "max_new_tokens": 128,
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 1.0,
        "seed": 0,
        "step": None,
    }
    assert calls[2] == ("quickstart", (Path("here"), 30.0), {})


def test_config_prints_toml_that_is_the_same_job_with_origins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "llama3-8b", "--parallel.compile", "false", "--optim.betas", "[0.9,0.99]"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "job.toml").write_text(text, "utf-8")
    overrides = {"parallel.compile": False, "optim.betas": (0.9, 0.99)}
    assert load_config(tmp_path / "job.toml") == resolve_config("llama3-8b", overrides).config
    ends = {line.split(" = ")[0]: line.split("# ")[-1] for line in text.splitlines() if "  # " in line}
    assert ends["dim"] == "model preset llama3-8b" and ends["lr"] == "preset llama3-8b"
    assert ends["row_tokens"] == "preset llama3-1b"
    assert ends["betas"] == "command line" and ends["norm_eps"] == "default"


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "tiny", "--train.steps", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["train"]["steps"] == 3
    assert answer["origin"]["train.steps"] == "command line"


def test_schedule_prints_rates_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["tiny", "--optim.schedule", "wsd", "--optim.lr", "1", "--optim.warmup_steps=0", "--train.steps", "10"]
    tokens = ["--optim.warmup_tokens", "4097", "--data.row_tokens", "512", "--data.global_rows", "2"]
    assert main(["schedule", *job, *tokens, "--optim.weight_decay_phases", '[{"from": 0.5}]']) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["step", "learning", "rate", "weight", "decay"]
    assert [line.split()[:2] for line in lines][3:6] == [["3", "0.8"], ["4", "1"], ["5", "1"]]  # up in 5 steps
    assert {line.split()[2] for line in lines} == {"0.05"}
    growing = '[{"steps": 2, "rows": 1}, {"steps": 1, "rows": 3}]'  # 512, 512, 1536 tokens a step, then 1024
    for warmup, rates in ((2561, ["0.25", "0.5", "0.75", "1"]), (2560, ["0.3333", "0.6667", "1", "1"])):
        batch = [*tokens, f"--optim.warmup_tokens={warmup}", "--data.batch_phases", growing]
        assert main(["schedule", *job, *batch]) == 0
        lines = capsys.readouterr().out.splitlines()[1:5]
        assert [line.split()[1] for line in lines] == rates
        assert [line.split()[-1] for line in lines] == ["1", "1", "3", "2"]
    # 1,024 tokens a step, from step 2 on 2,048; the rate is halved from step 7 on.
    longer = ["--data.phases", '[{"step": 2, "row_tokens": 1024}]', "--model.max_seq_len=1024"]
    halved = ["--optim.lr_scales", '[{"step": 7, "scale": 0.5}]']
    assert main(["schedule", *job, *tokens, *longer, *halved]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split()[3:] == ["tokens", "of", "a", "row"]
    assert [line.split()[1] for line in lines][:4] == ["0.25", "0.5", "0.75", "1"]
    assert [line.split()[2] for line in lines] == ["512"] * 2 + ["1024"] * 8
    assert [line.split()[1] for line in lines][6:8] == ["1", "0.5"]
    assert main(["schedule", *job, "--train.steps=1000", *longer, *halved]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:5]] == ["0", "2", "7", "100"]
    assert main(["schedule", *job, "--train.steps=1000", "--data.batch_phases", growing]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:5]] == ["0", "2", "3", "100"]
    groups = '[{"name": "slow", "match": "^layers.0", "lr_scale": 0.5, "schedule": "constant"}]'
    assert main(["schedule", *job, "--optim.groups", groups, "--optim.momentum_phases", '[{"from": 0.9}]']) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    columns = ["step", "learning rate: slow.matrices, slow.norms_and_biases"]
    columns += ["learning rate: matrices, embeddings and 1 more", "momentum"]
    assert [name.strip() for name in first.split("  ") if name] == columns
    assert lines[5].split() == ["5", "0.5", "1", "0.9"]
    assert main(["schedule", *job, "--optim.groups", groups.replace("0", "77")]) == 2
    assert "fits no trainable parameter" in capsys.readouterr().err
    assert main(["schedule", *job, f"--out={tmp_path / 'rate.png'}"]) == 0
    assert (tmp_path / "rate.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'rate.png'}\n")
    assert main(["schedule", *job, "--out", str(tmp_path / "nowhere" / "rate.png")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "tiny", "--optim.lrr", "3"], "optim.lrr (command line): no such key; did you mean optim.lr?"),
        (["train", "--lr", "3"], "did you mean optim.lr?"),
        (["train", "tiny", "--model.dim", "wide"], "must be a whole number"),
        (["train", "tiny", "--model.dim", "65"], "model.dim = 65 is not a multiple of n_heads"),
        (["train", "tiny", "--model.preset", "lama3-8b"], "no model preset 'lama3-8b'; did you mean llama3-8b"),
        (["train", "nowhere.toml"], "neither a file nor a preset"),
        (["train", "--train.steps"], "--train.steps needs a value"),
        (["train", "--model.preset"], "--model.preset needs a value"),
        (["train", "tiny", "--optim.lrr"], "optim.lrr (command line): no such key; did you mean optim.lr?"),
        (["train", "tiny", "--ckpt"], "ckpt (command line): is a section; its keys are ckpt."),
        (["import", "/nowhere", "/nowhere-either"], "/nowhere is no folder of Hugging Face: it has no config.json"),
        (["generate", "/nowhere"], "is no run"),
        (
            ["schedule", "tiny", "--optim.warmup_steps", "21"],
            "optim.warmup_steps = 21 is longer than the run",
        ),
    ],
)
def test_what_cannot_be_used_is_told_once_without_a_traceback(argv: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "kforge_train", *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.startswith("kforge: error:")
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_faults_found_while_building_end_alike(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(config: JobConfig) -> int:
        raise ConfigError("data.train is empty")

    monkeypatch.setattr(sys.modules["kforge_train.trainer"], "run", refuse)
    assert main(["train", "tiny"]) == 2
    assert capsys.readouterr().err == "kforge: error: data.train is empty\n"


@pytest.mark.parametrize(("local_rank", "tells"), [("0", True), ("1", False)])
def test_one_process_of_a_host_tells(
    local_rank: str, tells: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr("kforge_train.cli.SILENT_S", 0.0)
    assert main(["train", "nowhere.toml"]) == 2
    assert bool(capsys.readouterr().err) is tells


def test_overrides_are_split_from_the_rest() -> None:
    argv = [
        "tiny",
        "--data.shuffle",
        "false",
        "--parallel.compile",
        "--optim.lr=3e-4",
        "--parallel.dp-shard",
        "-1",
        "--json",
        "x",
    ]
    overrides, rest = split_overrides(argv, ("--json",))
    assert overrides == [
        ("data.shuffle", "false"),
        ("parallel.compile", "true"),
        ("optim.lr", "3e-4"),
        ("parallel.dp_shard", "-1"),
    ]
    assert rest == ["tiny", "--json", "x"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "3"], "data.global_rows = 64 cannot be shared evenly by 3 data ranks"),
        (["--parallel.fp8", "rowwise", "--parallel.precision", "fp32"], "parallel.fp8 = rowwise gives bf16 on a GPU"),
        (["--gpus", "4", "--parallel.pp", "4"], "wants at least as many microbatches as its 4 stages"),
        (["--gpus", "4", "--parallel.cp", "4", "--data.row_tokens", "1020"], "data.row_tokens = 1020 cannot be split"),
        (["--optim.name", "lion", "--optim.moments", "bf16"], "optim.moments = bf16 is how AdamW keeps its moments"),
        (["--optim.name", "adamm"], "unknown optimizer 'adamm'"),
        (["--optim.name", "muon", "--optim.offload", "true"], "optim.offload: muon multiplies whole matrices"),
        (
            ["--parallel.compile", "--parallel.recompute", "selective", "--model.n_experts", "4"],
            "parallel.recompute = selective sees no operation inside of a compiled graph",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_estimate_refuses_what_training_does(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["estimate", "--model.preset", "llama3-1b", "--data.global_rows", "64"]
    assert main([*job, *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_estimate_counts_the_moments_of_the_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["estimate", "--model.preset", "llama3-1b", "--optim.name", "lion", "--optim.offload", "true"]
    assert main(job) == 0
    assert "  moments         0.00 MB" in capsys.readouterr().out


def test_estimate_prints_parts_and_decides_on_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["estimate", "--gpus", "8", "--model.preset", "llama3-8b", "--data.global_rows", "64"]
    job += ["--data.microbatch_rows", "1", "--parallel.compile"]
    assert main(job) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 0 of dp_shard 8: ") and "activations" in "\n".join(lines)
    assert main([*job, "--parallel.recompute", "auto", "--parallel.memory_gb", "70"]) == 0
    assert capsys.readouterr().out.startswith("recompute = ")
    assert main([*job, "--parallel.recompute", "auto", "--parallel.memory_gb", "20"]) == 2
    assert "no way of keeping activations fits into 92% of 20.00 GB" in capsys.readouterr().err
    assert main([*job, "--parallel.recompute", "auto", "--parallel.device", "cpu"]) == 2
    assert "set parallel.memory_gb" in " ".join(capsys.readouterr().err.split())
    few = ["--model.preset", "llama3-1b", "--parallel.tp", "8", "--parallel.pp", "4", "--data.global_rows", "1024"]
    assert main(["estimate", "--gpus", "1024", "--rank", "1023", *few, "--data.microbatch_rows", "1"]) == 0
    told = capsys.readouterr().out
    assert "rank 1023 of pp 4 × dp_shard 32 × tp 8 (pp 3, dp_shard 31, tp 7): " in told
    assert "  layers.15.attn.wo.weight" in told and "layers.0." not in told
