"""Checkpoints in an object store, without faults: in memory, and in S3 as moto has it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stateful import Box
from torch import nn

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, RngState, commit, remote
from kforge_ckpt.cli import main
from kforge_ckpt.files import entries, place, write_file
from kforge_ckpt.remote import RemotePath
from kforge_testing.s3 import S3


def box(step: int, rows: int = 64) -> Box:
    """Everything in it says which step it is."""
    return Box(t=torch.full((rows, 8), float(step)), n=step, r=PerRank({"t": torch.full((4,), float(step))}))


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """A place that nobody used before."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    return f"s3://{request.getfixturevalue('s3').bucket}/run"


@pytest.mark.parametrize("options", [{}, {"mode": "async", "overlap": True}], ids=["sync", "async"])
def test_a_run_goes_on_from_a_url(url: str, options: dict[str, Any]) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(3)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        return net, optimizer, {"model": net, "optim": optimizer, "rng": RngState()}

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    net, optimizer, states = parts()
    train(net, optimizer, 3)
    ckpt = Checkpointer(url, **options)
    assert ckpt.restore(states) is None and ckpt.steps() == []
    assert ckpt.save(3, states, meta={"tokens": 72}) is True
    ckpt.close()
    expected = train(net, optimizer, 3)

    net, optimizer, states = parts()
    again = Checkpointer(url)
    assert again.restore(states, verify="full") == 3 and again.meta(3) == {"tokens": 72}
    assert train(net, optimizer, 3) == expected
    assert again.save(3, states) is False


def test_a_url_holds_the_files_of_a_folder(url: str, tmp_path: Path) -> None:
    """What is copied down by any tool is a checkpoint there."""
    for where in (url, str(tmp_path / "local")):
        ckpt = Checkpointer(where)
        ckpt.save(7, {"box": box(7)})
        ckpt.close()
    (name,) = (name for name in entries(place(url)) if name.startswith("step_"))
    assert name.startswith("step_00000007-") and len(name) == 22
    assert (place(url) / "latest").read_bytes() == f"{name}\n".encode()
    assert sorted(entries(place(url))) == ["latest", name]
    there = place(url) / name
    local = tmp_path / "local" / "step_00000007"
    assert sorted(entries(there)) == sorted(path.name for path in local.iterdir())
    down = tmp_path / "down" / name
    down.mkdir(parents=True)
    for file in entries(there):
        (down / file).write_bytes((there / file).read_bytes())
    found = box(0)
    assert Checkpointer(tmp_path / "down").restore({"box": found}, verify="full") == 7 and found.values["n"] == 7


def test_rules_of_retention_and_scores(url: str) -> None:
    ckpt = Checkpointer(url, keep_last=1, keep_every=4, keep_best=1)
    for step in range(1, 7):
        ckpt.save(step, {"box": box(step)}, temporary=step == 3)
        ckpt.score(step, loss=1.0 if step == 2 else 2.0)
    ckpt.close()
    assert ckpt.steps() == [2, 4, 6]
    names = entries(place(url))
    assert sorted(name.partition("-")[0] for name in names) == [
        *("latest", "scores.json", "step_00000002", "step_00000004", "step_00000006")
    ]


def test_readers_see_committed_ones_only_and_the_next_save_sweeps(url: str) -> None:
    root = place(url)
    ckpt = Checkpointer(url)
    ckpt.save(1, {"box": box(1)})
    ckpt.close()
    half = root / "step_00000002-1a2b3c4d"
    write_file(half / "tensors-00000.safetensors", [b"half"])
    other = root / "step_00000003"  # no name of ours
    write_file(other / "notes", [b"mine"])
    assert ckpt.steps() == [1] and ckpt.latest() == 1
    ckpt.save(4, {"box": box(4)})
    ckpt.close()
    assert half.name not in entries(root) and other.name in entries(root)
    assert ckpt.steps() == [1, 4]


def test_a_damaged_one_is_passed_over_and_put_by(url: str, caplog: pytest.LogCaptureFixture) -> None:
    ckpt = Checkpointer(url)
    for step in (1, 2):
        ckpt.save(step, {"box": box(step)})
    folder = commit.committed(place(url))[2]
    (folder / "state.json").unlink()
    found = box(0)
    assert ckpt.restore({"box": found}) == 1 and found.values["n"] == 1
    assert "trying the one before it" in caplog.text
    ckpt.save(2, {"box": box(2)})
    ckpt.save(3, {"box": box(3)})
    ckpt.close()
    assert ckpt.steps() == [1, 2, 3] and commit.committed(place(url))[2] != folder
    assert "put-by-damaged" in entries(folder)
    found = box(0)
    assert ckpt.restore({"box": found}, step=2, verify="full") == 2 and found.values["n"] == 2


def test_large_files_go_in_parts_and_come_in_ranges(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    monkeypatch.setattr(remote, "WINDOW_BYTES", 2**10)
    data = torch.randint(0, 255, (23 * 2**20 + 17,), dtype=torch.uint8).numpy().tobytes()
    path = place(url) / "big"
    record = write_file(path, [data[:100], data[100 : 9 * 2**20], memoryview(data)[9 * 2**20 :]])
    assert record.size == len(data) == entries(place(url))["big"]
    with path.open("rb") as file:
        assert file.read() == data
        file.seek(6 * 2**20)
        assert file.read(10) == data[6 * 2**20 : 6 * 2**20 + 10]
    exact = data[: 10 * 2**20]
    write_file(path, [exact])
    assert path.read_bytes() == exact
    write_file(path, [])
    assert path.read_bytes() == b""


def test_an_upload_left_by_an_error_is_not_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)

    def blocks() -> Any:
        yield bytes(6 * 2**20)
        raise OSError(28, "planted")

    with pytest.raises(OSError, match="planted"):
        write_file(place(url) / "a" / "big", blocks())
    assert entries(place(url) / "a") == {}


def test_the_command_line_takes_urls(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ckpt = Checkpointer(url, keep_last=9)
    for step in (1, 2, 3):
        ckpt.save(step, {"box": box(step)}, meta={"tokens": step})
    ckpt.close()

    def run(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        return capsys.readouterr().out

    assert [line.split()[0] for line in run("ls", url).splitlines()[1:]] == ["1", "2", "3"]
    assert '"tokens": 2' in run("show", f"{url}@2")
    assert "F32  [64, 8]" in run("show", url, "--tensors", "box.t")
    assert run("verify", "--all", url).count("whole ") == 3
    assert "box.t: by up to 1" in run("diff", f"{url}@1", f"{url}@2", code=1)
    run("cp", f"{url}@3", str(tmp_path / "down"))
    run("cp", str(tmp_path / "down"), f"{url}/copy")
    assert "0 differences" in run("diff", f"{url}@3", f"{url}/copy@3")
    run("rm", url, "1", "2")
    assert [line.split()[0] for line in run("ls", url).splitlines()[1:]] == ["3"]
    run("merge", f"{url}@3", f"{url}/copy", "--out", f"{url}/mean", "--state", "box", code=2)  # PerRank has no mean
    for step, value in ((1, 1.0), (2, 4.0)):
        Checkpointer(f"{url}/plain").save(step, {"model": Box(t=torch.full((3,), value))})
    run("merge", f"{url}/plain@1", f"{url}/plain@2", "--out", f"{url}/mean", "--weights", "2", "1")
    run("export", f"{url}/mean", str(tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors")["t"].tolist() == [2.0, 2.0, 2.0]
    folder = commit.committed(place(url))[3]
    (folder / "meta.json").write_bytes(b"{}" + bytes(50))
    assert "DAMAGED" in run("verify", url, code=1)


def test_paths_are_redacted_wherever_they_are_told() -> None:
    path = RemotePath("memory://user:password@host/run?token=secret")
    for text in (str(path), repr(path), str(path / "x"), str(path.parent)):
        assert "password" not in text and "user" not in text and "secret" not in text


def test_a_package_that_is_not_there_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=r"gs://bucket/run needs the package gcsfs: python -m pip install gcsfs"):
        Checkpointer("gs://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"needs the package fsspec: .*kforge-ckpt\[remote\]"):
        Checkpointer("s3://bucket/other")
    with pytest.raises(ValueError, match="'process' writes files of this host"):
        Checkpointer("memory://x", mode="async", writer="process")


def test_a_place_is_asked_where_its_endpoint_is_now(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where another place's was when that was first asked."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(CheckpointError, match="given up"):
            RemotePath(f"s3://{s3.bucket}/elsewhere").entries()
    assert RemotePath(f"s3://{s3.bucket}/here").entries() == {}
