"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kforge_ckpt import Checkpointer
from kforge_ckpt.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ckpt = Checkpointer(tmp_path / "run")
    for step in (10, 20):
        net = torch.nn.Linear(30, 20)
        torch.nn.init.constant_(net.weight, float(step))
        torch.nn.init.zeros_(net.bias)
        ckpt.save(step, {"model": net}, meta={"tokens": step * 100}, temporary=step == 20)
    ckpt.score(10, loss=2.5)
    ckpt.close()
    return tmp_path / "run"


def test_ls_and_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "ranks", "saved", "notes"]
    assert first.split()[0] == "10" and first.endswith("loss 2.5") and second.endswith("temporary")
    assert main(["show", f"{run}@10"]) == 0
    out = capsys.readouterr().out
    assert "step       10, by 1 ranks" in out and "model      2 tensors, 620 elements, 2.5 kB" in out
    assert '"tokens": 1000' in out
    assert main(["show", str(run), "--tensors", "bias$"]) == 0
    assert capsys.readouterr().out == "model.bias  F32  [20]  in 1\n"


def test_verify_and_diff_say_by_their_code_whether_all_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--all", str(run)]) == 0
    assert capsys.readouterr().out.count("whole ") == 2
    assert main(["diff", f"{run}@10", f"{run}@10"]) == 0
    assert main(["diff", f"{run}@10", f"{run}@20"]) == 1
    out = capsys.readouterr().out
    assert "model.weight: by up to 10, 0.5 of the greatest" in out and "1 differences; 2 tensors are in both" in out
    path = run / "step_00000020" / "tensors-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["verify", str(run)]) == 1
    assert capsys.readouterr().out.startswith("DAMAGED  ")


def test_cp_rm_merge_and_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", f"{run}@10", str(tmp_path / "copy")]) == 0
    assert main(["merge", f"{run}@10", f"{run}@20", "--weights", "1", "3", "--out", str(tmp_path / "mean")]) == 0
    assert main(["export", str(tmp_path / "mean"), str(tmp_path / "folder"), "--dtype", "bfloat16"]) == 0
    assert "2 tensors, 1.2 kB" in capsys.readouterr().out
    read = load_file(tmp_path / "folder" / "model.safetensors")
    assert read["weight"].dtype == torch.bfloat16 and read["weight"].eq(17.5).all() and read["bias"].shape == (20,)
    assert main(["rm", str(run), "10"]) == 0
    assert Checkpointer(run).steps() == [20] and Checkpointer(tmp_path / "copy").steps() == [10]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "nowhere"], "holds no committed checkpoint"),
        (["show", "nowhere"], "holds no committed checkpoint"),
        (["verify", "--all", "{run}", "nowhere"], "nowhere holds no committed checkpoint to verify"),
        (["rm", "{run}", "10", "20"], "say --all"),
        (["export", "{run}", "{run}/out", "--dtype", "int8"], "'int8' is no floating-point dtype"),
        (["export", "{run}", "{run}/out", "--state", "optim"], "no state 'optim'; there are model"),
        (["export", "{run}", "{run}/out", "--max-file-gb", "0"], "must be above 0"),
        (["export", "{run}", "{run}/out", "--max-file-gb", "inf"], "must be above 0, and a number"),
        (["merge", "{run}@10", "--out", "{run}"], "two checkpoints at least"),
        (["cp", "{run}@10", "{run}"], "holds a checkpoint of step 10 already"),
    ],
)
def test_mistakes_are_one_line(run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(run=run) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kforge-ckpt {arguments[0]}: error: ") and words in error and error.count("\n") == 1


def test_a_pattern_that_is_none_is_a_mistake_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["show", str(run), "--tensors", "["])
    assert stopped.value.code == 2 and "'[' is no regular expression" in capsys.readouterr().err
    assert main(["show", str(run), "--tensors"]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from kforge_ckpt.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "merge" in done.stdout
